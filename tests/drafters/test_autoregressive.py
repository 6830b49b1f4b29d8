"""Chains, dynamic and drawn trees from a drafter whose every logit is written down."""

import math

import numpy as np
import pytest
import torch

from spectrain.drafters.autoregressive import grow
from spectrain.drafters.drawn_trees import branching
from spectrain.proposal import Plan
from spectrain.testing import TableStepper


class Draws:
    """A sampler that draws the last possible id and notes its keys."""

    greedy = penalised = False

    def __init__(self):
        self.keys = []

    def draft_law(self, logits):
        return torch.softmax(logits.float(), -1)

    def draw(self, law, *, requests, root_positions, slots):
        self.keys += zip(requests, root_positions, slots, strict=True)
        return [int((row > 0).nonzero()[-1]) for row in law]


class Greedy(Draws):
    greedy = True

    def best(self, logits):
        return logits.argmax(-1)


def logs(*probabilities):
    return [math.log(p) for p in probabilities]


def paths(proposal):
    found = {}
    for node, (token, parent) in enumerate(zip(proposal.tokens.tolist(), proposal.parents, strict=True)):
        assert -1 <= parent < node
        found[node] = (*found.get(parent, ()), token)
    return list(found.values())


def test_a_greedy_chain_follows_the_arg_max_and_has_no_q():
    stepper = TableStepper({(): [0.0, 2.0, 1.0], (1,): [3.0, 0.0, 0.0], (1, 0): [0.0, 0.0, 5.0]})
    (one, two) = grow(stepper, [4, 6], Plan("chain", 3), Greedy())
    assert one.tokens.tolist() == two.tokens.tolist() == [1, 0, 2]
    assert one.parents == (-1, 0, 1) and one.q is None and one.ranked is None
    assert stepper.calls == [([4, 6], [-1, -1], [1, 1]), ([4, 6], [0, 0], [0, 0])]


def test_a_sampled_chain_returns_the_laws_it_was_drawn_from():
    stepper = TableStepper({(): logs(0.5, 0.5), (3,): logs(0.9, 0.1)}, kept_ids=[1, 3], vocab_size=5)
    sampler = Draws()
    (proposal,) = grow(stepper, [2], Plan("chain", 2), sampler)
    assert proposal.tokens.tolist() == [3, 3]
    torch.testing.assert_close(
        torch.stack(proposal.q), torch.tensor([[0, 0.5, 0, 0.5, 0], [0, 0.9, 0, 0.1, 0]])
    )
    assert sampler.keys == [(2, 12, 0), (2, 12, 1)]


def test_ranked_lists_the_likeliest_ids_where_the_drafter_was_asked():
    stepper = TableStepper({(): [0.0, 2.0, 1.0], (1,): [3.0, 1.0, 2.0]})
    (chain,) = grow(stepper, [0], Plan("chain", 2, ranked=2), Greedy())
    assert chain.ranked.tolist() == [[1, 2], [0, 2], [-1, -1]]
    (tree,) = grow(stepper, [0], Plan("tree", 2, nodes=3, top_k=1, ranked=2), Greedy())
    assert paths(tree) == [(1,), (1, 0)]
    assert tree.ranked.tolist() == [[1, 2], [0, 2], [-1, -1]]


def test_a_tree_keeps_the_likeliest_nodes():
    """Children of the root: 0 (0.6), 1 (0.3). Under 0: 1 (0.9), 2 (0.05); under 1: 0 (0.5), 2 (0.4). Of the
    six candidates 0 0.6, 01 0.54, 1 0.3, 10 0.15, 12 0.12, 02 0.03 the best four stay."""
    stepper = TableStepper({(): logs(0.6, 0.3, 0.1), (0,): logs(0.04, 0.9, 0.06), (1,): logs(0.5, 0.1, 0.4)})
    (tree,) = grow(stepper, [0], Plan("tree", 2, nodes=4, top_k=2), Draws())
    assert paths(tree) == [(0,), (1,), (0, 1), (1, 0)]
    assert tree.parents == (-1, -1, 0, 1) and tree.q is None
    assert stepper.calls == [([0, 0], [-1, -1], [0, 1])]


def test_only_the_likeliest_candidates_of_a_level_are_expanded():
    stepper = TableStepper({(): logs(0.6, 0.3, 0.1), (0,): logs(0.04, 0.9, 0.06), (1,): logs(0.5, 0.1, 0.4)})
    grow(stepper, [3, 5], Plan("tree", 3, nodes=9, top_k=2), Draws())
    # Level 2 expands 01 (parent 0, 0.54) and 10 (parent 1, 0.15).
    assert stepper.calls[1] == ([3, 3, 5, 5], [0, 1, 0, 1], [1, 0, 1, 0])


def test_ties_go_to_the_shallower_node_so_that_parents_stay():
    """A certain child has log q = 0 exactly and ties with its parent; with one node left the parent is
    taken."""
    certain = [0.0, -math.inf, -math.inf]
    stepper = TableStepper({(): logs(0.5, 0.25, 0.25), (0,): certain, (0, 0): certain, (0, 0, 0): certain})
    for nodes in range(1, 5):
        (tree,) = grow(stepper, [0], Plan("tree", 4, nodes=nodes, top_k=2), Draws())
        assert paths(tree) == [(0,) * n for n in range(1, nodes + 1)]


def test_random_trees_are_connected_with_distinct_siblings_and_equal_a_plain_search():
    generator = np.random.default_rng(0)
    for trial in range(20):
        V, depth, top_k, nodes = 6, 4, 3, int(generator.integers(1, 30))
        table = {(): generator.integers(0, 3, V).astype(np.float32).tolist()}
        for path in np.ndindex(*[V] * 2):
            table[path] = generator.integers(0, 3, V).astype(np.float32).tolist()
            table[path[:1]] = table[path]
        (tree,) = grow(TableStepper(table), [trial], Plan("tree", depth, nodes=nodes, top_k=top_k), Draws())
        found = paths(tree)
        assert len(set(found)) == len(found) == min(nodes, top_k + (depth - 1) * top_k**2)
        score = {path: sum(log_q(table, path[:i])[path[i]] for i in range(len(path))) for path in found}
        assert all(score[path] <= score[path[:-1]] + 1e-6 for path in found if len(path) > 1)
        pool = searched(table, depth, top_k)
        kept = sorted(score.values())
        np.testing.assert_allclose(kept, sorted(pool.values())[-len(kept) :], rtol=1e-5)


def log_q(table, path):
    logits = np.array(table.get(path, table[()]))
    return logits - np.log(np.exp(logits).sum())


def searched(table, depth, top_k):
    """Score of every candidate, by the definition, with the same ties: EAGLE-2 expansion without arrays."""
    frontier, pool = {(): 0.0}, {}
    for _ in range(depth):
        level = {}
        for path, score in frontier.items():
            logq = log_q(table, path)
            for token in torch.tensor(logq).float().topk(top_k).indices.tolist():
                level[(*path, token)] = score + logq[token]
        pool |= level
        best = sorted(level, key=lambda path: (-np.float32(level[path]).round(4), path[-1]))
        frontier = {path: level[path] for path in best[:top_k]}
    return pool


def test_the_shape_of_a_sampled_tree_is_the_one_that_keeps_most():
    """Kept: .6, its child .36, a second child .24, then .216, and .144 three times over."""
    assert branching(3, 4, 2) == ((0,), (1,), (0, 0), (0, 0, 0))
    assert branching(2, 4, 2) == ((0,), (1,), (0, 0), (0, 1))
    assert branching(1, 9, 3) == ((0,), (1,), (2,))
    assert branching(4, 4, 1) == ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))


def test_no_shape_of_the_same_size_keeps_more():
    def kept(shape):
        return sum(0.6 ** len(path) * 0.4 ** sum(path) for path in shape)

    def shapes(nodes):
        """Every shape of ranks below 2 and depth up to 3, as sets of rank paths."""
        if nodes == 0:
            return {frozenset()}
        found = set()
        for shape in shapes(nodes - 1):
            for path in [(), *shape]:
                for child in ((*path, 0), (*path, 1)):
                    whole = child[-1] == 0 or (*path, 0) in shape
                    if whole and len(child) <= 3 and child not in shape:
                        found.add(shape | {child})
        return found

    for nodes in range(1, 7):
        assert kept(branching(3, nodes, 2)) == pytest.approx(max(map(kept, shapes(nodes))))


def test_siblings_are_drawn_without_replacement_in_the_order_of_the_shape():
    """The sampler draws the last possible id, so siblings come in descending order."""
    stepper = TableStepper(
        {(): logs(0.2, 0.3, 0.5), (2,): logs(0.5, 0.25, 0.25)}, kept_ids=[1, 3, 4], vocab_size=6
    )
    sampler = Draws()
    (tree,) = grow(stepper, [2], Plan("tree", 2, nodes=4, top_k=2, sampled=True, ranked=2), sampler)
    assert paths(tree) == [(4,), (3,), (4, 4), (4, 3)]
    assert sampler.keys == [(2, 12, 0), (2, 12, 1), (2, 12, 2), (2, 12, 3)]
    assert stepper.calls == [([2], [-1], [4])]
    root = torch.tensor([0, 0.2, 0, 0.3, 0.5, 0])
    torch.testing.assert_close(torch.stack(tree.q[:2]), torch.stack([root, root]))
    assert tree.ranked.tolist() == [[4, 3], [4, 3], [-1, -1], [-1, -1], [-1, -1]]


def test_a_law_of_few_tokens_gives_fewer_siblings():
    """q of the root has one token, so the second child and what would hang below it are missing."""
    stepper = TableStepper({(): [-math.inf, 0.0, -math.inf], (1,): logs(0.5, 0.25, 0.25)})
    trees = grow(stepper, [0, 1], Plan("tree", 2, nodes=5, top_k=2, sampled=True), Draws())
    assert branching(2, 5, 2)[-1] == (1, 0)  # below the missing child
    for tree in trees:
        assert paths(tree) == [(1,), (1, 2), (1, 1)]
    assert stepper.calls == [([0, 1], [-1, -1], [1, 1])]


def test_a_deeper_sampled_tree_steps_each_node_from_its_parent():
    stepper = TableStepper({(): logs(0.2, 0.3, 0.5)})
    (tree,) = grow(stepper, [5], Plan("tree", 3, nodes=9, top_k=2, sampled=True), Draws())
    found = paths(tree)
    assert len(found) == 9 and len(set(found)) == 9
    stepped = [found[node] for node in range(9) if any(p == node for p in tree.parents)]
    assert sorted(stepper.nodes[5]) == sorted(stepped)


def test_a_small_vocabulary_limits_the_children():
    stepper = TableStepper({(): [0.0, 1.0]}, kept_ids=[7, 9], vocab_size=12)
    (tree,) = grow(stepper, [0], Plan("tree", 2, nodes=20, top_k=5, ranked=64), Draws())
    assert paths(tree) == [(9,), (7,), (9, 9), (9, 7), (7, 9), (7, 7)]
    assert tree.ranked[0].tolist() == [9, 7]


def test_logits_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="not finite"):
        grow(TableStepper({(): [0.0, math.nan]}), [0], Plan("tree", 2, nodes=3, top_k=2), Draws())

"""Static trees, budgets, and what holds for every tree that is grown."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrain.drafters.autoregressive import grow
from spectrain.proposal import Budget, Plan
from spectrain.testing import TableStepper


class Chosen:
    """The greedy sampler."""

    greedy, penalised = True, False

    def best(self, logits):
        return logits.argmax(-1)


def logs(*probabilities):
    return [math.log(p) for p in probabilities]


def paths(proposal):
    found = [()]
    for token, parent in zip(proposal.tokens.tolist(), proposal.parents, strict=True):
        found.append((*found[parent + 1], token))
    return found[1:]


# Under the root 0 (0.6), 1 (0.3), 2 (0.1); under 0: 1 (0.9), 2 (0.06), 0 (0.04); under 1: 0 (0.5), 2, 1.
TABLE = {(): logs(0.6, 0.3, 0.1), (0,): logs(0.04, 0.9, 0.06), (1,): logs(0.5, 0.1, 0.4)}


def test_a_static_tree_takes_its_ranks_and_steps_its_inner_nodes_only():
    stepper = TableStepper(TABLE)
    plan = Plan("static", 2, paths=((1, 1), (0,), (0, 0), (1,), (2,), (0, 2)), ranked=1)
    one, two = grow(stepper, [3, 5], plan, Chosen())
    assert paths(one) == paths(two) == [(0,), (1,), (2,), (0, 1), (0, 0), (1, 2)]
    assert one.parents == (-1, -1, -1, 0, 0, 1) and one.q is None
    assert one.ranked.tolist() == [[0], [1], [0], [-1], [-1], [-1], [-1]]
    assert stepper.calls == [([3, 3, 5, 5], [-1, -1, -1, -1], [0, 1, 0, 1])]


def test_a_static_tree_with_gaps_between_its_ranks_grows_three_deep():
    stepper = TableStepper(TABLE)
    (tree,) = grow(stepper, [0], Plan("static", 3, paths=((1,), (1, 0), (1, 0, 2))), Chosen())
    assert paths(tree) == [(1,), (1, 0), (1, 0, 2)]
    assert [call[1] for call in stepper.calls] == [[-1], [0]]


def test_a_static_tree_ends_at_the_plans_length():
    stepper = TableStepper(TABLE)
    (tree,) = grow(stepper, [0], Plan("static", 1, paths=((0,), (1,), (0, 0))), Chosen())
    assert paths(tree) == [(0,), (1,)] and not stepper.calls


def test_a_rank_beyond_the_draft_vocabulary_is_refused():
    with pytest.raises(ValueError, match="^plan.paths: rank 3: the drafter knows 3 ids"):
        grow(TableStepper(TABLE), [0], Plan("static", 1, paths=((0,), (3,))), Chosen())


def test_a_plan_with_paths_that_are_no_tree_cannot_be_made():
    with pytest.raises(ValueError, match=r"^plan.paths: path \[0, 1\] needs its parent \[0\]"):
        Plan("static", 2, paths=((0, 1),))


def priced(step, node, *, rates=(1.0,)):
    return Budget(root=1.0, step=step, node=node, rates=rates)


def test_a_budget_keeps_the_nodes_whose_survival_is_above_their_price():
    """Of 0 0.6, 01 0.54, 1 0.3, 10 0.15, 12 0.12, 2 0.1 those above 2 * 0.14 stay; the step is worth
    0.36 - 0.28 + 0 > 2 * 0.03."""
    plan = Plan("tree", 2, nodes=9, top_k=3, budget=priced(0.03, 0.14, rates=(2.0,)))
    stepper = TableStepper(TABLE)
    (tree,) = grow(stepper, [0], plan, Chosen())
    assert paths(tree) == [(0,), (1,), (0, 1)] and len(stepper.calls) == 1


def test_a_level_that_does_not_pay_for_its_step_is_not_grown():
    """A child as likely as its parent promises 0.6**2 and 0.3**2, 0.45 together; 0.1**2 is below the node's
    price."""
    for step, grown in ((0.4, True), (0.46, False)):
        stepper = TableStepper(TABLE)
        (tree,) = grow(stepper, [0], Plan("tree", 2, nodes=9, top_k=3, budget=priced(step, 0.02)), Chosen())
        assert bool(stepper.calls) == grown == (max(map(len, paths(tree))) == 2)


def test_each_request_pays_its_own_rate():
    plan = Plan("tree", 2, nodes=4, top_k=2, budget=priced(0.1, 0.1, rates=(1.0, 20.0, 4.0)), ranked=2)
    stepper = TableStepper(TABLE)
    cheap, dear, middle = grow(stepper, [4, 5, 6], plan, Chosen())
    assert paths(cheap) == [(0,), (1,), (0, 1), (1, 0)]
    assert paths(dear) == [] and dear.ranked.tolist() == [[0, 1]]
    assert paths(middle) == [(0,)] and middle.ranked.tolist() == [[0, 1], [-1, -1]]
    assert stepper.calls == [([4, 4], [-1, -1], [0, 1])]


def test_a_static_tree_is_thinned_by_its_budget():
    plan = Plan("static", 2, paths=((0,), (1,), (0, 0), (1, 0)), budget=priced(0.01, 0.2))
    (tree,) = grow(TableStepper(TABLE), [0], plan, Chosen())
    assert paths(tree) == [(0,), (1,), (0, 1)]


def test_a_greedy_chain_stops_before_the_step_or_before_the_token():
    table = {(): logs(0.8, 0.2), (0,): logs(0.5, 0.5), (0, 0): logs(0.9, 0.1)}
    for step, node, length, steps in (
        (0.1, 0.05, 3, 2),  # survivals 0.8, 0.4, 0.36
        (0.1, 0.5, 1, 1),  # the step promises 0.64 - 0.5, the token then has 0.4 only
        (0.6, 0.05, 1, 0),  # 0.64 - 0.05 is below the step's 0.6
        (0.0, 0.8, 0, 0),
    ):
        stepper = TableStepper(table)
        plan = Plan("chain", 3, budget=priced(step, node), ranked=1)
        (chain,) = grow(stepper, [0], plan, Chosen())
        assert (len(chain.parents), len(stepper.calls)) == (length, steps)
        asked = [row != [-1] for row in chain.ranked.tolist()]
        assert asked == [k <= steps for k in range(length + 1)]


def test_chains_of_one_batch_stop_each_by_itself():
    """The second request's rate is twenty times the first's."""
    table = {(): logs(0.8, 0.2), (0,): logs(0.7, 0.3)}
    stepper = TableStepper(table)
    plan = Plan("chain", 3, budget=priced(0.05, 0.05, rates=(1.0, 11.0)))
    long, short = grow(stepper, [2, 9], plan, Chosen())
    assert (long.tokens.tolist(), short.tokens.tolist()) == ([0, 0, 0], [0])
    assert stepper.calls == [([2], [-1], [0]), ([2], [0], [0])]


@st.composite
def tables(draw):
    """Logits with ties, impossible ids and certain children, of five ids three deep."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    coarse = draw(st.sampled_from((1.0, 4.0, 30.0)))

    def row():
        logits = (generator.integers(-2, 3, 5) * coarse).astype(np.float32)
        if generator.random() < 0.3:
            logits[generator.random(5) < 0.5] = -np.inf
        logits[generator.integers(5)] = 2 * coarse
        return logits.tolist()

    prefixes = [(), *((a,) for a in range(5)), *((a, b) for a in range(5) for b in range(5))]
    return {prefix: row() for prefix in prefixes}


PLANS = st.builds(
    lambda length, nodes, top_k: Plan("tree", length, nodes=nodes, top_k=top_k),
    st.integers(1, 4), st.integers(1, 30), st.integers(1, 5),
)  # fmt: skip


def scores(table, found):
    """Log-likelihood of each path, in float32 as it is grown."""
    total = {(): np.float32(0)}
    for path in found:
        logq = torch.tensor(table.get(path[:-1], table[()])).log_softmax(-1).clamp(max=0).numpy()
        total[path] = total[path[:-1]] + logq[path[-1]]
    return total


@settings(max_examples=80, deadline=None)
@given(tables(), PLANS)
def test_every_tree_is_connected_distinct_full_and_made_of_the_likeliest_candidates(table, plan):
    (tree,) = grow(TableStepper(table), [0], plan, Chosen())
    (every,) = grow(
        TableStepper(table), [0], Plan("tree", plan.length, nodes=999, top_k=plan.top_k), Chosen()
    )
    found, pool = paths(tree), paths(every)  # `paths` reads a parent before its child or fails
    assert len(set(found)) == len(found)
    assert len(pool) == plan.top_k + (plan.length - 1) * plan.top_k * min(plan.top_k, 5)
    assert len(found) == min(plan.nodes, len(pool)) and set(found) <= set(pool)
    assert all(len(path) == 1 or path[:-1] in found for path in found)
    score = scores(table, pool)
    left = [score[path] for path in set(pool) - set(found)]
    assert not left or min(score[path] for path in found) >= max(left) - 1e-5


@settings(max_examples=60, deadline=None)
@given(tables(), PLANS, st.sampled_from((0.0, 0.02, 0.2)), st.sampled_from((0.01, 0.1, 0.5)))
def test_a_budget_only_takes_nodes_away_and_every_kept_one_pays(table, plan, step, node):
    budget = priced(step, node)
    thrifty = Plan("tree", plan.length, nodes=plan.nodes, top_k=plan.top_k, budget=budget)
    (tree,) = grow(TableStepper(table), [0], thrifty, Chosen())
    (pool,) = grow(TableStepper(table), [0], Plan("tree", plan.length, nodes=999, top_k=plan.top_k), Chosen())
    found = paths(tree)
    assert set(found) <= set(paths(pool)) and len(found) <= plan.nodes
    assert all(len(path) == 1 or path[:-1] in found for path in found)
    score = scores(table, found)
    assert all(math.exp(score[path]) > node - 1e-6 for path in found)


@settings(max_examples=40, deadline=None)
@given(tables(), PLANS, st.booleans())
def test_a_tree_does_not_depend_on_the_other_requests_of_its_batch(table, plan, thrifty):
    rates = (1.0, 3.0, 0.2)
    plans = [plan] * 4
    if thrifty:
        plans = [
            Plan(
                "tree", plan.length, nodes=plan.nodes, top_k=plan.top_k, budget=priced(0.1, 0.05, rates=some)
            )
            for some in (rates, *((rate,) for rate in rates))
        ]
    together = grow(TableStepper(table), [0, 1, 2], plans[0], Chosen())
    alone = [grow(TableStepper(table), [r], plans[1 + r], Chosen())[0] for r in range(3)]
    assert [paths(tree) for tree in together] == [paths(tree) for tree in alone]

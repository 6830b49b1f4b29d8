"""Siblings drawn without replacement and their recursive rejection: exact by enumeration, the drafter too."""

import pytest
import torch

from spectrain.decode.exact import Process
from spectrain.decode.recursive import siblings
from spectrain.decode.sampling import DRAFT, Sampling, Streams
from spectrain.decode.verify import verify
from spectrain.drafters.autoregressive import grow
from spectrain.proposal import Plan, Proposal
from spectrain.testing import LawStepper


def drawn(process, length, nodes, top_k):
    plan = Plan("tree", length, nodes=nodes, top_k=top_k, sampled=True)

    def propose(streams, text):
        (proposal,) = grow(LawStepper(process.q, text), [0], plan, streams)
        return proposal

    return propose


@pytest.mark.parametrize(
    ("vocab", "length", "nodes", "top_k"),
    [(2, 1, 2, 2), (2, 4, 5, 2), (3, 1, 3, 3), (3, 2, 4, 2), (4, 1, 3, 3), (5, 1, 2, 2), (6, 1, 2, 2)],
)
def test_drawn_trees_are_verified_exactly(vocab, length, nodes, top_k):
    for seed in range(2):
        process = Process(seed, vocab)
        tree = drawn(process, length, nodes, top_k)
        assert process.distance(tree, "recursive", length=length + 1) <= 1e-12


def test_two_rounds_of_drawn_trees_are_exact():
    for seed in range(3):
        process = Process(seed, 2)
        assert process.distance(drawn(process, 2, 3, 2), "recursive", length=4, rounds=2) <= 1e-12


def test_drawn_trees_are_exact_for_target_only_too():
    process = Process(1, 3)
    assert process.distance(drawn(process, 2, 4, 2), "target_only", length=3) <= 1e-12


def test_one_drawn_child_is_rejection():
    for seed in range(4):
        process = Process(seed, 4)
        (one, other) = (
            [(text, verdict.path, chance) for text, verdict, chance in process.one_round(propose, law)]
            for propose, law in ((drawn(process, 2, 2, 1), "recursive"), (process.chain(2), "rejection"))
        )
        assert [row[:2] for row in one] == [row[:2] for row in other]
        assert [row[2] for row in one] == pytest.approx([row[2] for row in other], abs=1e-6)


def test_shares_and_what_is_left_of_a_worked_example():
    """p = .5 .3 .2, q = .2 .2 .6, siblings 2, 0: 1/3, then p_2 = .75 .25 0 against q_2 = .5 .5 0."""
    p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.2, 0.6]])
    ((first, second),), left = siblings(p, q, [[2, 0]])
    assert (first, second) == pytest.approx((1 / 3, 2 / 3), abs=1e-6)
    ((first, second),), left = siblings(p, q, [[2, 1]])
    assert (first, second) == pytest.approx((1 / 3, 2 / 3 / 2), abs=1e-6)
    assert left[0].tolist() == pytest.approx([1, 0, 0], abs=1e-6)


def test_siblings_that_hold_all_of_q_but_not_of_p_leave_the_rest():
    p, q = torch.tensor([[0.2, 0.2, 0.6]]), torch.tensor([[0.5, 0.5, 0.0]])
    (shares,), left = siblings(p, q, [[0, 1]])
    # 0 is kept with .4; p_2 = 0 0 1 has no 1.
    assert shares == pytest.approx([0.4, 0.0], abs=1e-6)
    assert left[0].tolist() == pytest.approx([0, 0, 1], abs=1e-6)


def test_more_siblings_never_lower_the_acceptance_of_a_level():
    for seed in range(6):
        process = Process(seed, 4)
        kept = []
        for k in (1, 2, 3):
            found = process.one_round(drawn(process, 1, k, k), "recursive")
            kept.append(sum(chance for _, verdict, chance in found if verdict.path))
            alpha = sum(chance * verdict.alphas[0] for _, verdict, chance in found)
            assert alpha == pytest.approx(kept[-1], abs=1e-12)
        assert kept[0] <= kept[1] + 1e-12 and kept[1] <= kept[2] + 1e-12


@pytest.mark.case("O-X05")
def test_chosen_siblings_with_the_law_of_drawn_ones_would_be_lossy():
    """What `plan.sampled` guards against: q's likeliest and another child, verified as if they were drawn."""
    process = Process(0, 3, p=[0.5, 0.3, 0.2], q=[0.2, 0.2, 0.6])
    chosen = Proposal(torch.tensor([2, 0]), (-1, -1), q=torch.tensor([[0.2, 0.2, 0.6]] * 2))
    assert process.distance(lambda streams, text: chosen, "recursive", length=1) > 0.1
    right = Proposal(chosen.tokens, chosen.parents)
    assert process.distance(lambda streams, text: right, "recursive", length=1) <= 1e-12


def test_a_shape_that_drops_drawn_siblings_by_their_value_would_be_lossy():
    process = Process(0, 3, p=[0.5, 0.3, 0.2], q=[0.2, 0.2, 0.6])

    def pruned(streams, text):
        tree = drawn(process, 1, 2, 2)(streams, text)
        kept = [i for i, token in enumerate(tree.tokens.tolist()) if token != 0]
        return Proposal(tree.tokens[kept], (-1,) * len(kept), q=[tree.q[i] for i in kept])

    assert process.distance(pruned, "recursive", length=1) > 0.01
    assert process.distance(pruned, "target_only", length=1) <= 1e-12


def test_at_temperature_0_the_siblings_are_the_likeliest_and_the_arg_max_is_followed():
    process = Process(0, 4, p=[0.1, 0.2, 0.3, 0.4], q=[0.3, 0.1, 0.35, 0.25])
    streams = Streams(Sampling(), [0])
    (tree,) = grow(LawStepper(process.q, ()), [0], Plan("tree", 2, nodes=8, top_k=3, sampled=True), streams)
    assert tree.q is None and tree.tokens[[i for i, p in enumerate(tree.parents) if p < 0]].tolist() == [
        2,
        0,
        3,
    ]
    (verdict,) = verify(
        [tree],
        lambda which, nodes: Sampling().law(torch.stack([process.p(())] * len(nodes))),
        law="recursive",
        streams=streams,
        requests=[0],
        root_positions=[0],
    )
    assert tree.tokens[list(verdict.path)].tolist() == [3] and verdict.bonus == 3


def test_a_sibling_that_its_law_cannot_draw_is_refused():
    tree = Proposal(torch.tensor([1, 0]), (-1, -1), q=torch.tensor([[0.0, 1.0, 0.0]] * 2))
    with pytest.raises(ValueError, match="draft token 0 has q=0.0: it was not drawn from this q"):
        Process(0, 3).verdict(tree, (), "recursive", Streams(Sampling(temperature=1.0), [0]))


def test_draws_are_keyed_by_their_place_in_the_shape():
    keys = []

    class Logged(Streams):
        def draw(self, law_MV, *, requests, root_positions, slots):
            keys.extend(zip(root_positions, slots, strict=True))
            return self.pick(law_MV, requests, root_positions, slots, DRAFT)

    process = Process(0, 6, q=[0.1, 0.2, 0.3, 0.2, 0.1, 0.1])
    drawn(process, 3, 9, 3)(Logged(Sampling(temperature=1.0, seed=1), [7]), (4, 4))
    assert sorted(keys) == [(2, place) for place in range(9)]

"""Block verification: exact by enumeration, never fewer accepted than by rejection, two rounds included."""

import pytest
import torch

from spectrain.decode.exact import Process
from spectrain.decode.plan import clamp
from spectrain.decode.sampling import Sampling, Streams
from spectrain.decode.verify import verify
from spectrain.proposal import Proposal


def accepted(process, propose, law):
    """Expected number of accepted draft tokens."""
    return sum(chance * len(verdict.path) for _, verdict, chance in process.one_round(propose, law))


@pytest.mark.parametrize(("vocab", "depth"), [(2, 1), (2, 4), (3, 3), (4, 2), (5, 2), (6, 1)])
def test_block_is_exact(vocab, depth):
    for seed in range(3):
        process = Process(seed, vocab)
        assert process.distance(process.chain(depth), "block", length=depth + 1) <= 1e-12


def test_two_rounds_of_block_are_exact_with_the_keys_of_the_real_streams():
    for seed in range(5):
        process = Process(seed, 2)
        assert process.distance(process.chain(2), "block", length=5, rounds=2) <= 1e-12
    process = Process(0, 3)
    assert process.distance(process.chain(2), "block", length=4, rounds=2) <= 1e-12


def test_keys_of_the_place_alone_make_block_lossy_and_leave_rejection_exact():
    """Whether slot 0 is kept depends on the number behind slot 1, which the next round would read again."""

    def place(root_position, slot, purpose):
        return root_position + slot, purpose

    process = Process(2, 2)
    assert process.distance(process.chain(2), "block", length=3, rounds=2, key=place) > 0.04
    assert process.distance(process.chain(2), "rejection", length=3, rounds=2, key=place) <= 1e-12


def test_the_two_letter_example_of_the_paper():
    """p = 1/3 2/3, q = 2/3 1/3, two draft tokens: 10/9 against 11/9 accepted (Sun et al. 2024, section 3)."""
    process = Process(0, 2, p=[1 / 3, 2 / 3], q=[2 / 3, 1 / 3])
    assert accepted(process, process.chain(2), "rejection") == pytest.approx(10 / 9, abs=1e-7)
    assert accepted(process, process.chain(2), "block") == pytest.approx(11 / 9, abs=1e-7)


@pytest.mark.parametrize(
    ("vocab", "depth", "seeds"), [(2, 3, 20), (3, 2, 20), (4, 2, 10), (6, 1, 6), (2, 4, 8)]
)
def test_block_never_accepts_fewer_than_rejection(vocab, depth, seeds):
    gains = []
    for seed in range(seeds):
        process = Process(seed, vocab)
        one, other = (accepted(process, process.chain(depth), law) for law in ("rejection", "block"))
        gains.append(other - one)
    assert min(gains) >= -1e-12
    assert (max(gains) > 0.01) == (depth > 1)  # with one slot the two are the same law


def test_block_is_exact_behind_the_cut_to_the_budget():
    for seed in range(4):
        process = Process(seed, 3)
        chain = process.chain(3)
        assert process.distance(lambda s, t, c=chain: clamp(c(s, t), 2), "block", length=4) <= 1e-12


def test_equal_laws_accept_the_whole_chain():
    process = Process(0, 3, p=[0.1, 0.2, 0.7], q=[0.1, 0.2, 0.7])
    assert accepted(process, process.chain(3), "block") == pytest.approx(3, abs=1e-12)


def test_disjoint_laws_accept_nothing_and_have_the_alpha_0():
    process = Process(0, 4, p=[0.5, 0.5, 0.0, 0.0], q=[0.0, 0.0, 0.5, 0.5])
    found = process.one_round(process.chain(3), "block")
    assert {verdict.path for _, verdict, _ in found} == {()}
    assert {verdict.alphas for _, verdict, _ in found} == {(0.0,)}


@pytest.mark.parametrize("q", [None, "one-hot"])
def test_at_temperature_0_block_keeps_the_tokens_that_are_the_arg_max(q):
    best = [3, 1, 0, 2]
    chains = [[3, 1, 0], [3, 1, 2], [0, 1, 0]]
    eye = torch.eye(4)
    proposals = [
        Proposal(torch.tensor(tokens), (-1, 0, 1), q=None if q is None else eye[tokens]) for tokens in chains
    ]
    verdicts = verify(
        proposals,
        lambda which, nodes: Sampling().law(eye[[best[node + 1] for node in nodes]]),
        law="block",
        streams=Streams(Sampling(), [0, 1, 2]),
        requests=[0, 1, 2],
        root_positions=[4, 9, 9],
    )
    assert [(verdict.path, verdict.bonus) for verdict in verdicts] == [((0, 1, 2), 2), ((0, 1), 0), ((), 3)]
    assert [verdict.alphas for verdict in verdicts] == [(1, 1, 1), (1, 1, 0), (0,)]


def test_chains_of_unequal_length_are_verified_together_as_alone():
    process = Process(0, 5)
    keys, lengths = [11, 22, 33, 44, 55], [3, 0, 1, 2, 3]
    sampling = Sampling(temperature=1.0, seed=3)
    alone = []
    proposals = []
    for key, length in zip(keys, lengths, strict=True):
        streams = Streams(sampling, [key])
        proposals.append(process.chain(length)(streams, ()))
        alone.append(process.verdict(proposals[-1], (), "block", streams))
    texts = [[(), *(tuple(p.tokens[: n + 1].tolist()) for n in range(len(p.tokens)))] for p in proposals]
    together = verify(
        proposals,
        lambda which, nodes: torch.stack(
            [process.p(texts[i][node + 1]) for i, node in zip(which, nodes, strict=True)]
        ),
        law="block",
        streams=Streams(sampling, keys),
        requests=range(5),
        root_positions=[0] * 5,
        at_once=3,
    )
    assert together == alone


def test_a_token_that_its_law_cannot_draw_is_refused():
    proposal = Proposal(torch.tensor([1]), (-1,), q=torch.tensor([[1.0, 0.0]]))
    with pytest.raises(ValueError, match="draft token 1 has q=0"):
        Process(0, 2).verdict(proposal, (), "block", Streams(Sampling(temperature=1.0), [0]))

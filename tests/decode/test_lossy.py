"""The laws that do not keep the target's law: what they accept, and that enumeration shows it."""

import math

import pytest
import torch

from spectrain.decode.exact import Process
from spectrain.decode.sampling import Sampling, Streams
from spectrain.decode.verify import lenient, verify
from spectrain.laws import LAWS, LOSSY_LAWS, Leniency
from spectrain.proposal import Proposal


def tree(*tokens, parents):
    return Proposal(torch.tensor(tokens), parents)


def test_lossy_laws_are_not_among_those_that_an_unlabelled_text_may_use():
    assert LOSSY_LAWS == ("typical", "thresholds")
    assert set(LAWS) - set(LOSSY_LAWS) == {"rejection", "block", "target_only", "recursive"}


def test_shares_of_the_two_thresholds():
    assert lenient([0.2, 0.3], Leniency()) == pytest.approx([0.2, 0.3])
    assert lenient([0.2, 0.3], Leniency(threshold_acc=0.5)) == pytest.approx([0.4, 0.6])
    assert lenient([0.2, 0.3], Leniency(threshold_acc=0.8)) == pytest.approx([0.25, 0.375])
    assert lenient([0.2, 0.3], Leniency(threshold_single=0.3)) == pytest.approx([0.2, 0.8])
    assert lenient([0.3, 0.2], Leniency(threshold_single=0.3)) == pytest.approx([1.0, 0.0])
    assert lenient([0.0, 0.4], Leniency(threshold_acc=0.5)) == pytest.approx([0.0, 0.8])


def test_a_child_of_probability_0_is_never_accepted():
    assert lenient([0.4, 0.0, 0.1], Leniency(threshold_acc=0.5))[1] == 0


def test_thresholds_below_1_are_lossy_by_exactly_what_they_add():
    """p = .5 .3 .2, child 1 with threshold_acc .6: kept with .5, else 5/7 to 2/7 between the others."""
    process = Process(0, 3, p=[0.5, 0.3, 0.2])
    emitted = [0.0] * 3
    for text, verdict, chance in process.one_round(
        lambda streams, text: tree(1, parents=(-1,)), "thresholds", leniency=Leniency(threshold_acc=0.6)
    ):
        emitted[text[0]] += chance
        assert verdict.alphas == pytest.approx((0.5,), abs=1e-6)
    assert emitted == pytest.approx([2.5 / 7, 0.5, 1 / 7], abs=1e-6)


@pytest.mark.parametrize(
    ("law", "leniency"),
    [
        ("typical", Leniency()),
        ("thresholds", Leniency(threshold_acc=0.5)),
        ("thresholds", Leniency(threshold_single=0.3)),
    ],
)
def test_enumeration_shows_that_the_lossy_laws_are_lossy(law, leniency):
    distances = []
    for seed in range(6):
        process = Process(seed, 4)
        distances.append(process.distance(process.chain(2), law, length=3, leniency=leniency))
        assert process.distance(process.chain(2), "target_only", length=3) <= 1e-12
    assert max(distances) > 0.1


def typical(process, proposal, **leniency):
    streams = Streams(Sampling(temperature=1.0, seed=5), [0])
    return process.verdict(proposal, (), "typical", streams, Leniency(**leniency))


def test_typical_accepts_above_the_smaller_of_epsilon_and_delta_exp_minus_entropy():
    """Uniform over 4: exp(-H) = 1/4, so the bar is .3 / 4 = .075 with the published values."""
    process = Process(0, 4, p=[0.25] * 4)
    child = tree(2, parents=(-1,))
    assert typical(process, child).path == (0,)
    assert typical(process, child, epsilon=1.0, delta=0.99).path == (0,)
    assert typical(process, child, epsilon=0.26, delta=1.0).path == ()
    peaked = Process(0, 3, p=[0.9, 0.08, 0.02])
    entropy = -sum(p * math.log(p) for p in (0.9, 0.08, 0.02))
    assert 0.08 < 0.09 < 0.3 * math.exp(-entropy)
    assert typical(peaked, tree(1, parents=(-1,))).path == ()
    assert typical(peaked, tree(1, parents=(-1,)), epsilon=0.07).path == (0,)


def test_typical_keeps_the_longest_path_and_the_likelier_of_equals():
    """Every token of p = .4 .35 .25 passes. Paths: 0; 2 1 of .0875; 1 0 of .14."""
    process = Process(0, 3, p=[0.4, 0.35, 0.25])
    proposal = tree(0, 2, 1, 1, 0, parents=(-1, -1, -1, 1, 2))
    found = typical(process, proposal)
    assert (found.path, found.alphas) == ((2, 4), (1.0, 1.0))
    refused = typical(process, tree(0, 2, parents=(-1, 0)), epsilon=0.3, delta=1.0)
    assert (refused.path, refused.alphas) == ((0,), (1.0, 0.0))


def test_typical_emits_what_it_accepts_whatever_its_probability():
    """A drafter that always says the token of probability .1 gets it every time."""
    process = Process(0, 3, p=[0.6, 0.3, 0.1])
    found = process.one_round(lambda streams, text: tree(2, parents=(-1,)), "typical")
    assert {text[0] for text, _, _ in found} == {2}
    assert process.distance(lambda s, t: tree(2, parents=(-1,)), "typical", length=1) == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("law", "leniency"), [("typical", Leniency()), ("thresholds", Leniency(threshold_acc=0.3))]
)
def test_at_temperature_0_the_lossy_laws_are_the_greedy_limit(law, leniency):
    best = {(): 3, (3,): 1, (3, 1): 0}
    proposal = tree(2, 3, 0, 1, 1, parents=(-1, -1, 1, 1, 0))
    texts = [(), (2,), (3,), (3, 0), (3, 1), (2, 1)]
    eye = torch.eye(4)
    (verdict,) = verify(
        [proposal],
        lambda which, nodes: Sampling().law(eye[[best.get(texts[node + 1], 0) for node in nodes]]),
        law=law,
        streams=Streams(Sampling(), [0]),
        requests=[0],
        root_positions=[4],
        leniency=leniency,
    )
    assert (verdict.path, verdict.bonus, verdict.alphas) == ((1, 3), 0, (1.0, 1.0))


def test_typical_requests_are_verified_together_as_alone():
    process = Process(0, 4)
    none = Proposal(torch.empty(0, dtype=torch.int64), ())
    trees = [tree(0, 1, 2, 3, parents=(-1, -1, 0, 1)), none, tree(3, 2, parents=(-1, 0))]
    texts = [[()] for _ in trees]
    for known, one in zip(texts, trees, strict=True):
        for token, parent in zip(one.tokens.tolist(), one.parents, strict=True):
            known.append((*known[parent + 1], token))
    streams = Streams(Sampling(temperature=1.0, seed=5), [4, 5, 6])
    found = verify(
        trees,
        lambda which, nodes: torch.stack(
            [process.p(texts[i][node + 1]) for i, node in zip(which, nodes, strict=True)]
        ),
        law="typical",
        streams=streams,
        requests=range(3),
        root_positions=[0] * 3,
        at_once=2,
    )
    alone = [
        process.verdict(one, (), "typical", Streams(Sampling(temperature=1.0, seed=5), [key]))
        for key, one in zip([4, 5, 6], trees, strict=True)
    ]
    assert found == alone

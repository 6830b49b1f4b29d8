"""The kernels' verdicts against those of decode/verify.py, with the same random numbers."""

import numpy as np
import pytest
import torch

from spectrain.decode import by_kernel
from spectrain.decode.sampling import Sampling, Streams
from spectrain.decode.verify import verify
from spectrain.kernels import verify_triton
from spectrain.proposal import Proposal

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # where the kernels run


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 32 ids, so that a small vocabulary has several."""
    monkeypatch.setattr(by_kernel, "KERNEL_DEVICES", (DEVICE.type,))
    monkeypatch.setitem(verify_triton.verify.__kwdefaults__, "block", 32)


V = 63
NOTHING = Proposal(torch.tensor([], dtype=torch.int64), ())


def tree(nodes):
    """Random, of the likely tokens 0 to 4; siblings different."""
    found = []
    while len(found) < nodes:
        node = int(torch.randint(-1, len(found), (1,))) if found else -1, int(torch.randint(5, (1,)))
        if node not in found:
            found.append(node)
    parents, tokens = zip(*found, strict=True)
    return Proposal(torch.tensor(tokens), parents)


def chain(length, logits_q, streams, request, root):
    """Drawn from the laws of logits_q [length, V], whose rows need not sum to 1."""
    q = streams.draft_law(logits_q) * 1.5
    slots = list(range(length))
    tokens = streams.draw(q, requests=[request] * length, root_positions=[root] * length, slots=slots)
    return Proposal(torch.tensor(tokens, dtype=torch.int64), tuple(range(-1, length - 1)), q=q)


def both(proposals, logits, law, sampling, root):
    """(verdicts of the kernels, verdicts of decode/verify.py)."""
    starts = np.cumsum([0] + [len(p.parents) + 1 for p in proposals])[:-1].tolist()
    laws = lambda which, nodes: sampling.law(  # noqa: E731
        logits[[starts[i] + node + 1 for i, node in zip(which, nodes, strict=True)]]
    )
    requests = list(range(len(proposals)))
    settings = {
        "law": law,
        "streams": Streams(sampling, [7 + r for r in requests]),
        "requests": requests,
        "root_positions": [root + 10 * r for r in requests],
    }
    assert by_kernel.covers(proposals, DEVICE, law=law, streams=settings["streams"])
    ours = by_kernel.verify_by_kernel(proposals, logits.to(DEVICE), starts, laws, **settings)
    return ours, verify(proposals, laws, **settings)


def assert_same(found):
    for a, b in zip(*found, strict=True):
        assert (a.path, a.bonus) == (b.path, b.bonus)
        assert a.alphas == pytest.approx(b.alphas, abs=1e-6)
        assert len(a.alphas) == len(b.alphas)


SAMPLINGS = pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.8),
        Sampling(temperature=1.0, top_k=4),
        Sampling(temperature=1.2, top_p=0.7),
        Sampling(temperature=0.6, top_k=9, top_p=0.9, min_p=0.05),
    ],
)


@SAMPLINGS
def test_trees_get_the_verdicts_of_the_walk_in_torch(sampling):
    """A tree, a lone root and a chosen chain; likely tokens, so that walks go deep."""
    proposals = [tree(6), NOTHING, Proposal(torch.tensor([1, 1, 2]), (-1, 0, 1))]
    logits = 2 * torch.randn(12, V)
    logits[:, :3] += 2
    assert_same(both(proposals, logits, "target_only", sampling, 5))


@SAMPLINGS
def test_drawn_chains_get_the_verdicts_of_the_walk_in_torch(sampling):
    logits, streams = 2 * torch.randn(8, V), Streams(sampling, [3, 4])
    proposals = [
        chain(3, logits[:3] + torch.randn(3, V), streams, 0, 5),
        NOTHING,
        chain(2, logits[5:7] + 0.3 * torch.randn(2, V), streams, 1, 5),
    ]
    assert_same(both(proposals, logits, "rejection", sampling, 5))


@pytest.mark.parametrize("law", ["target_only", "rejection"])
def test_many_requests_on_a_small_vocabulary_get_the_same_verdicts(law):
    """Twenty walks in one call, each with numbers of its own."""
    logits, streams = torch.randn(60, 5), Streams(Sampling(temperature=1.0), range(20))
    proposals = [chain(2, torch.randn(2, 5), streams, request, 5) for request in range(20)]
    assert_same(both(proposals, logits, law, Sampling(temperature=1.0), 5))


def test_where_p_is_q_everything_is_kept():
    logits = torch.randn(6, 40).bfloat16().float()
    proposals = [chain(5, logits[:5], Streams(Sampling(temperature=1.0), [3]), 0, 4)]
    (ours,), (expected,) = both(proposals, logits, "rejection", Sampling(temperature=1.0), 4)
    assert ours.path == expected.path == (0, 1, 2, 3, 4)
    assert ours.alphas == pytest.approx([1.0] * 5, abs=1e-6)


def test_children_that_hold_all_mass_are_never_refused():
    logits = torch.full((3, 20), -torch.inf)
    logits[:, [4, 9]] = torch.tensor([0.3, 1.0])
    proposal = Proposal(torch.tensor([4, 9]), (-1, -1))
    for round_ in range(4):
        (ours,), _ = both([proposal], logits, "target_only", Sampling(temperature=1.0), round_)
        assert len(ours.path) == 1 and ours.bonus in (4, 9)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error_where_they_are_reached(temperature):
    logits = torch.zeros(3, 20)
    logits[:2, 6] = 50.0
    logits[2, 1] = torch.nan
    reached, not_reached = (Proposal(torch.tensor([first, 6]), (-1, 0)) for first in (6, 5))
    sampling = Sampling(temperature=temperature)
    with np.errstate(invalid="ignore"):
        (ours,), _ = both([not_reached], logits, "target_only", sampling, 0)
        assert ours.path == () and ours.bonus == 6
        with pytest.raises(ValueError, match="not finite"):
            both([reached], logits, "target_only", sampling, 0)


def test_a_token_that_its_law_cannot_draw_is_an_error():
    q = torch.tensor([[0.5, 0.5, 0.0]])
    with pytest.raises(ValueError, match="draft token 2 has q=0.0"):
        both(
            [Proposal(torch.tensor([2]), (-1,), q=q)],
            torch.zeros(2, 3),
            "rejection",
            Sampling(temperature=1.0),
            0,
        )


def test_penalties_and_lossy_laws_are_not_for_the_kernels():
    proposal = Proposal(torch.tensor([2]), (-1,), q=torch.ones(1, 3))
    streams = Streams(Sampling(temperature=1.0), [0])
    known = {
        law: by_kernel.covers([proposal], DEVICE, law=law, streams=streams)
        for law in ("block", "rejection", "typical")
    }
    assert known == {"block": False, "rejection": True, "typical": False}
    assert not by_kernel.covers([proposal], torch.device("meta"), law="rejection", streams=streams)

"""For tests: chains of forced draft tokens, and the logits that training gives for them."""

from dataclasses import dataclass, field

import torch

from spectrain.proposal import Observation, Plan

V = 260


def text(length, seed):
    return torch.randint(0, V, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass
class Forced:
    """A sampler that drafts what it is told, request after request and slot after slot, and keeps the
    logits."""

    tokens: list[list[int]]
    logits: list[torch.Tensor] = field(default_factory=list)
    greedy: bool = False
    penalised: bool = False

    def draft_law(self, logits):
        self.logits.append(logits)
        return torch.softmax(logits, -1)

    def draw(self, law, *, requests, root_positions, slots):
        return [self.tokens[request][slots[0]] for request in requests]


def drafted(drafting, requests, tokens):
    """Logits over the kept ids, [slots, requests, W], of a chain whose draft tokens are `tokens` (by
    request)."""
    sampler = Forced(tokens)
    plan = Plan(shape="chain", length=len(next(iter(tokens.values()))))
    proposals = drafting.propose(requests, plan, sampler)
    assert [p.tokens.tolist() for p in proposals] == [tokens[r] for r in requests]
    by_slot = torch.cat(sampler.logits).unflatten(0, (plan.length, len(requests)))
    outside = torch.ones(V, dtype=torch.bool)
    outside[drafting.kept_ids] = False
    assert (by_slot[..., outside] == -torch.inf).all()
    return by_slot[..., drafting.kept_ids]


def observed(batch, request, first, last):
    """Rows first .. last - 1 of the batch, of a document that begins at its token 0."""
    rows = slice(first, last)
    return Observation(
        request, first, batch.tokens.ids[first + 1 : last + 1], batch.taps[rows], batch.final[rows]
    )


def trained_logits(drafter, batch):
    """(row, slot) -> logits of the unrolled training forward."""
    rows = drafter.rows(batch)
    logits = rows.state @ drafter.head_weight().T
    keys = zip(rows.index.row.tolist(), rows.index.slot.tolist(), strict=True)
    return dict(zip(keys, logits.detach(), strict=True))


def assert_slots(logits, trained, row, slots):
    """The first `slots` slots of a chain from a row; bound: 1e-5, times the largest logit where that is
    above 1."""
    for k in range(slots):
        bound = 1e-5 * max(1.0, trained[row, k].abs().max().item())
        torch.testing.assert_close(logits[k], trained[row, k], atol=bound, rtol=0)

"""EAGLE-3: the logits that are trained are those of the decode loop."""

from dataclasses import dataclass, field

import pytest
import torch

from spectrain.capture import capture_batch
from spectrain.proposal import Observation, Plan
from spectrain.testing import make_sample

V = 260
KEPT = torch.arange(0, V, 3)  # a reduced draft vocabulary


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
    for k in range(slots):
        torch.testing.assert_close(logits[k], trained[row, k], atol=1e-5, rtol=0)


@pytest.mark.case("O-T02")
@pytest.mark.parametrize(
    "settings",
    [{}, {"kept": torch.arange(V)}, {"fc_norm": True}],
    ids=["reduced vocabulary", "whole vocabulary", "fc_norm"],
)
def test_training_logits_equal_those_of_the_decode_loop_in_each_round(drafter_of, target, settings):
    """Round 1 from root x_6; two of its draft tokens are taken, the others rejected; round 2 from root x_9;
    then one after a rejection of all, from root x_10."""
    drafter = drafter_of(target, **settings)
    ids = text(20, 5)
    batch = capture_batch(target, [make_sample("a", ids, "." + "S" * 19)], drafter.taps)
    trained = trained_logits(drafter, batch)
    drafting = drafter.start(1, 40)
    drafting.observe([observed(batch, 0, 0, 6)])
    assert drafting.root_positions([0]) == [6]
    assert_slots(drafted(drafting, [0], {0: ids[7:11]})[:, 0], trained, row=5, slots=4)

    wrong = [ids[7], ids[8], (ids[9] + 1) % V, 3]
    assert_slots(
        drafted(drafting, [0], {0: wrong})[:, 0], trained, row=5, slots=3
    )  # slot 3 follows a wrong token
    drafting.observe([observed(batch, 0, 6, 9)])
    assert drafting.root_positions([0]) == [9]
    assert_slots(drafted(drafting, [0], {0: [7, *ids[11:14]]})[:, 0], trained, row=8, slots=1)
    drafting.observe([observed(batch, 0, 9, 10)])
    assert_slots(drafted(drafting, [0], {0: ids[11:15]})[:, 0], trained, row=9, slots=4)


def test_training_logits_equal_those_of_a_decode_loop_with_several_requests(drafter_of, target):
    """Requests 2 and 0 of three, at roots x_4 and x_7; then request 2 alone goes on, then begins anew."""
    drafter = drafter_of(target)
    texts = {0: text(16, 6), 2: text(12, 7)}
    batches, trained = {}, {}
    for r, ids in texts.items():
        batches[r] = capture_batch(
            target, [make_sample(f"s{r}", ids, "." + "S" * (len(ids) - 1))], drafter.taps
        )
        trained[r] = trained_logits(drafter, batches[r])
    drafting = drafter.start(3, 40)
    drafting.observe([observed(batches[2], 2, 0, 4), observed(batches[0], 0, 0, 7)])
    logits = drafted(drafting, [2, 0], {2: texts[2][5:9], 0: texts[0][8:12]})
    assert_slots(logits[:, 0], trained[2], row=3, slots=4)
    assert_slots(logits[:, 1], trained[0], row=6, slots=4)
    drafting.observe([observed(batches[2], 2, 4, 6)])
    assert_slots(drafted(drafting, [2], {2: texts[2][7:11]})[:, 0], trained[2], row=5, slots=4)
    drafting.observe([observed(batches[0], 2, 0, 3)])
    logits = drafted(drafting, [0, 2], {0: texts[0][8:12], 2: texts[0][4:8]})
    assert_slots(logits[:, 0], trained[0], row=6, slots=4)
    assert_slots(logits[:, 1], trained[0], row=2, slots=4)


def test_a_step_from_a_sibling_reads_its_own_path_only(drafter_of, target):
    """Two children of the root, then a child of each: the logits are those of the two chains."""
    drafter = drafter_of(target)
    ids = text(12, 8)
    batch = capture_batch(target, [make_sample("a", ids, "." + "S" * 11)], drafter.taps)
    chains = {}
    for first in (ids[6], 9):
        drafting = drafter.start(1, 40)
        drafting.observe([observed(batch, 0, 0, 5)])
        chains[first] = drafted(drafting, [0], {0: [first, ids[7], 0]})[:, 0]
    drafting = drafter.start(1, 40)
    drafting.observe([observed(batch, 0, 0, 5)])
    drafting.states = torch.cat((drafting.states, torch.zeros(1, 4, 32)), 1)
    level = drafting.step([0, 0], [-1, -1], torch.tensor([ids[6], 9]))
    torch.testing.assert_close(level, torch.stack([chains[ids[6]][1], chains[9][1]]), atol=1e-5, rtol=0)
    level = drafting.step([0, 0], [0, 1], torch.tensor([ids[7], ids[7]]))
    torch.testing.assert_close(level, torch.stack([chains[ids[6]][2], chains[9][2]]), atol=1e-5, rtol=0)


def test_every_call_of_the_layer_is_counted(drafter_of, llama):
    drafter = drafter_of(llama)
    batch = capture_batch(llama, [make_sample("a", text(9, 1), "." * 9)], drafter.taps)
    drafting = drafter.start(1, 20)
    assert drafting.steps == 0
    drafting.observe([observed(batch, 0, 0, 5)])
    drafted(drafting, [0], {0: [1, 2, 3, 4]})
    assert drafting.steps == 1 + 3

"""What every drafter family promises, each found in conf/drafter/: the proposals of one drafter at work."""

from dataclasses import dataclass, field

import pytest
import torch

from spectrain import checkpoint
from spectrain.capture import capture_batch
from spectrain.config import TrainConfig
from spectrain.decode.engine import generate
from spectrain.decode.sampling import Sampling
from spectrain.optim import build_optimizer, trainable
from spectrain.proposal import Observation, Plan
from spectrain.testing import make_sample
from spectrain.testing_contract import (
    FAMILIES,
    TARGET,
    TRAINED,
    V,
    head_of,
    new_drafter,
    reach,
    text,
)

of_every_family = pytest.mark.parametrize("family", FAMILIES)
of_every_trained_family = pytest.mark.parametrize("family", TRAINED)


@dataclass
class Forced:
    """A sampler that drafts the tokens it is told, by request and slot, or else the likeliest; keeps the
    laws."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logits: list[torch.Tensor] = field(default_factory=list)
    greedy: bool = False
    penalised: bool = False

    def draft_law(self, logits):
        self.logits.append(logits)
        return torch.softmax(logits, -1)

    def draw(self, law, *, requests, root_positions, slots):
        likeliest = law.argmax(-1).tolist()
        return [
            self.tokens[request][slot] if request in self.tokens else token
            for request, slot, token in zip(requests, slots, likeliest, strict=True)
        ]


def observed(batch, request, first, last):
    """Rows first .. last - 1 of a batch of one document."""
    rows, ids = slice(first, last), batch.tokens.ids
    next_ids, states = ids[first + 1 : last + 1], (batch.taps[rows], batch.final[rows])
    return Observation(request, first, next_ids, *states, first_id=int(ids[first]))


def batch_of(drafter, ids):
    return capture_batch(TARGET, [make_sample("a", ids, "." + "S" * (len(ids) - 1))], drafter.taps)


@of_every_trained_family
def test_training_logits_equal_those_of_the_decode_loop(family):
    """Round 1 from root x_6, whose draft goes wrong in slot 1; round 2 from root x_8; round 3 from x_9, where
    nothing was accepted."""
    drafter, ids = new_drafter(family, TARGET), text(24, 5)
    batch, length = batch_of(drafter, ids), reach(drafter)
    with torch.no_grad():
        rows = drafter.rows(batch)
        logits = [
            head_of(drafter, k) @ state for k, state in zip(rows.index.slot.tolist(), rows.state, strict=True)
        ]
    trained = dict(
        zip(zip(rows.index.row.tolist(), rows.index.slot.tolist(), strict=True), logits, strict=True)
    )
    drafting = drafter.start(1, 40)
    for first, root, right in ((0, 6, 1), (6, 8, length), (8, 9, length)):
        drafting.observe([observed(batch, 0, first, root)])
        wrong = [(token + 1) % V for token in ids[root + 1 + right : root + 1 + length]]
        forced = Forced({0: ids[root + 1 : root + 1 + right] + wrong})
        (proposal,) = drafting.propose([0], Plan("chain", length), forced)
        assert proposal.tokens.tolist() == forced.tokens[0] and len(forced.logits) == length
        for k in range(min(length, right + 1)):
            found = forced.logits[k][0]
            torch.testing.assert_close(found[drafter.kept_ids], trained[root - 1, k], atol=1e-5, rtol=0)
            assert (found > -torch.inf).sum() == len(drafter.kept_ids)


def assert_same_proposals(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist() and one.parents == other.parents
        assert (one.q is None) == (other.q is None)
        if one.q is not None:
            torch.testing.assert_close(
                torch.stack(list(one.q)), torch.stack(list(other.q)), atol=1e-5, rtol=0
            )


def repeating(seed):
    """A text that says everything twice, so that a look-up finds something."""
    return text(10, seed) * 2


@of_every_family
def test_proposals_after_a_rejection_equal_those_of_a_fresh_start_on_the_accepted_text(family):
    drafter = new_drafter(family, TARGET)
    batch, plan = batch_of(drafter, repeating(7)), Plan("chain", reach(drafter))
    drafting, fresh = drafter.start(1, 40), drafter.start(1, 40)
    drafting.observe([observed(batch, 0, 0, 11)])
    drafting.propose([0], plan, Forced())
    drafting.observe([observed(batch, 0, 11, 12)])  # all rejected
    drafting.propose([0], plan, Forced())
    drafting.observe([observed(batch, 0, 12, 14)])  # one accepted
    fresh.observe([observed(batch, 0, 0, 14)])
    assert_same_proposals(*(each.propose([0], plan, Forced()) for each in (drafting, fresh)))


@of_every_trained_family
def test_trees_after_a_rejection_equal_those_of_a_fresh_start(family):
    drafter = new_drafter(family, TARGET)
    batch = batch_of(drafter, repeating(7))
    plan = Plan("tree", min(2, reach(drafter)), nodes=6, top_k=3)
    drafting, fresh = drafter.start(1, 40), drafter.start(1, 40)
    drafting.observe([observed(batch, 0, 0, 11)])
    drafting.propose([0], plan, Forced())
    drafting.observe([observed(batch, 0, 11, 13)])
    fresh.observe([observed(batch, 0, 0, 13)])
    assert_same_proposals(*(each.propose([0], plan, Forced()) for each in (drafting, fresh)))


@of_every_family
def test_a_proposal_does_not_depend_on_the_other_requests_or_their_order(family):
    drafter = new_drafter(family, TARGET)
    batches, plan = [batch_of(drafter, repeating(seed)) for seed in (7, 8, 9)], Plan("chain", reach(drafter))
    roots = (11, 14, 12)
    drafting = drafter.start(3, 40)
    drafting.observe([observed(batches[r], r, 0, roots[r]) for r in (2, 0, 1)])
    together = dict(zip((1, 2, 0), drafting.propose([1, 2, 0], plan, Forced()), strict=True))
    for r in range(3):
        alone = drafter.start(1, 40)
        alone.observe([observed(batches[r], 0, 0, roots[r])])
        assert_same_proposals([together[r]], alone.propose([0], plan, Forced()))


@of_every_family
def test_a_place_that_is_given_to_a_new_request_forgets_the_old_one(family):
    drafter, plan = new_drafter(family, TARGET), Plan("chain", 1)
    old, new = (batch_of(drafter, repeating(seed)) for seed in (7, 8))
    drafting, fresh = drafter.start(1, 40), drafter.start(1, 40)
    drafting.observe([observed(old, 0, 0, 14)])
    drafting.propose([0], plan, Forced())
    for each in (drafting, fresh):
        each.observe([observed(new, 0, 0, 11)])
    assert_same_proposals(*(each.propose([0], plan, Forced()) for each in (drafting, fresh)))


@of_every_family
def test_greedy_text_with_the_drafter_is_the_targets_own(family):
    drafter = new_drafter(family, TARGET)
    prompts = [repeating(7), text(5, 8)]
    call = {"sampling": Sampling(), "max_new_tokens": 16, "stop_ids": [], "batch_size": 2}
    plain, _ = generate(TARGET, prompts, **call)
    fast, _ = generate(TARGET, prompts, **call, drafter=drafter, plan=Plan("chain", reach(drafter)))
    assert [each.ids for each in fast] == [each.ids for each in plain]


@of_every_trained_family
def test_a_loaded_checkpoint_is_the_drafter_bit_for_bit(family, tmp_path):
    drafter = new_drafter(family, TARGET)
    state = {"step": 1, "tau": None}
    optimizer = build_optimizer(drafter, TrainConfig())
    folder = checkpoint.save(tmp_path, drafter, optimizer, state, target=TARGET.fingerprint(), keep=1)
    loaded = checkpoint.load_drafter(folder, TARGET)
    assert (loaded.config, loaded.taps) == (drafter.config, drafter.taps)
    assert torch.equal(loaded.kept_ids, drafter.kept_ids)
    before, after = trainable(drafter), trainable(loaded)
    assert before.keys() == after.keys()
    assert all(torch.equal(parameter, after[name]) for name, parameter in before.items())
    logits = []
    for each in (drafter, loaded):
        drafting, forced = each.start(1, 40), Forced()
        drafting.observe([observed(batch_of(each, text(12, 3)), 0, 0, 8)])
        drafting.propose([0], Plan("chain", reach(each)), forced)
        logits.append(torch.cat(forced.logits))
    assert torch.equal(*logits)

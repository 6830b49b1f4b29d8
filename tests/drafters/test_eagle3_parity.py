"""EAGLE-3: the logits that are trained are those of the decode loop."""

import pytest
import torch

from spectrain.capture import capture_batch
from spectrain.testing import make_sample
from spectrain.testing_chains import assert_slots, drafted, observed, text, trained_logits

V = 260


@pytest.mark.case("O-T02")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kept": torch.arange(V)},
        {"fc_norm": True},
        {"norm_output": True},
        {"norm_before_residual": True},
        {"width": 64},
    ],
    ids=["reduced vocabulary", "whole vocabulary", "fc_norm", "norm_output", "norm_before_residual", "wider"],
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

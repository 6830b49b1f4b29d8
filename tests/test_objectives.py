"""What each term counts, what a row weighs, and that a step's loss does not depend on how it is cut."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from spectrain.capture import capture_batch
from spectrain.config import TERMS, ObjectiveConfig
from spectrain.data.packing import pack
from spectrain.drafters.eagle3 import Config, build
from spectrain.features import FeatureBatch
from spectrain.kernels.linear_divergence import TERMS as DIVERGENCES
from spectrain.objectives import Objective, RowIndex, Rows, label_probability, pace
from spectrain.target import Target
from spectrain.testing import make_sample, random_samples, tiny_llama

V = 260
KEPT = torch.arange(0, V, 3)


def stand_ins(kept, vocab):
    """A drafter and a target with a head of `vocab` identity rows, as far as an objective looks at them."""
    target = SimpleNamespace(
        head=SimpleNamespace(weight=torch.eye(vocab), bias=None),
        vocab_size=vocab,
        adjust=lambda logits: logits,
    )
    return SimpleNamespace(kept_ids=torch.tensor(kept)), target


def features(ids, logits):
    """Tokens `ids` with the target's logits [T, V] as final states."""
    logits = torch.tensor(logits)
    tokens = pack([make_sample("a", ids, "S" * len(ids))])
    return FeatureBatch(tokens, (0,), logits[:, None], logits, logits.logsumexp(-1), logits.argmax(-1))


def index_of(rows, slots):
    row, slot = torch.tensor(rows, dtype=torch.long).reshape(-1, 2).unbind(1)
    return RowIndex(row=row, slot=slot, source=row + 1 + slot, slots=slots)


# losses that can be added up by hand: kept ids 0 and 1, label 0, logits 0 and z cost log(1 + e^z)


HEAD = torch.tensor([[0.0], [1.0]])


def costing(losses):
    """Rows [R, 1] whose cross-entropy is `losses`, and a head."""
    z = torch.tensor([[math.log(math.expm1(loss))] for loss in losses])
    return z.requires_grad_(), HEAD.clone().requires_grad_()


def ce_of(losses, *, counts=None, slots=None, rows=None, **settings):
    """Result, z and head of one batch of rows with those cross-entropies, one per token, all in slot 0 if not
    given."""
    drafter, target = stand_ins([0, 1], 3)
    batch = features([0] * (len(losses) + 3), [[0.0, 0.0, 0.0]] * (len(losses) + 3))
    slots = slots or [0] * len(losses)
    rows = rows or [0] * len(losses)
    index = index_of([*zip(rows, slots, strict=True)], max(slots, default=0) + 1)
    drafter.index = lambda tokens: index
    objective = Objective(ObjectiveConfig(terms={"ce": 1.0}, **settings), drafter, target)
    z, head = costing(losses)
    counts = objective.count(index, batch) if counts is None else torch.tensor([counts], dtype=torch.float64)
    return objective.loss(Rows(index, z), batch, head, counts), z, head


@pytest.mark.case("O-T04")
def test_a_step_in_two_batches_is_the_step_in_one():
    whole, z, head = ce_of([1.0, 1.0, 1.0, 5.0])
    whole.loss.backward()
    assert whole.loss.item() == pytest.approx(2.0, abs=1e-6)
    parts = [ce_of([1.0, 1.0, 1.0], counts=[4.0]), ce_of([5.0], counts=[4.0])]
    assert sum(result.loss.item() for result, _, _ in parts) == pytest.approx(2.0, abs=1e-6)
    for result, _, _ in parts:
        result.loss.backward()
    torch.testing.assert_close(parts[0][2].grad + parts[1][2].grad, head.grad, atol=1e-6, rtol=0)
    torch.testing.assert_close(torch.cat([part[1].grad for part in parts]), z.grad, atol=1e-6, rtol=0)


@pytest.mark.case("O-T04")
@pytest.mark.parametrize("dpace", [0.0, 0.5])
def test_micro_batches_of_a_real_drafter_add_up_to_one_batch(dpace):
    target = Target(tiny_llama())
    drafter = build(Config(unroll=3), target, KEPT)
    config = ObjectiveConfig(terms={"kl": 1.0, "ce": 0.5, "tv": 0.2}, dpace=dpace)
    objective = Objective(config, drafter, target)
    samples = random_samples(3)

    def run(groups):
        batches = [capture_batch(target, group, drafter.taps) for group in groups]
        indices = [drafter.index(batch.tokens) for batch in batches]
        counts = sum(objective.count(index, batch) for index, batch in zip(indices, batches, strict=True))
        drafter.zero_grad()
        loss = 0.0
        for batch in batches:
            result = objective.loss(drafter.rows(batch), batch, drafter.head_weight(), counts)
            result.loss.backward()
            loss += result.loss.item()
        return loss, [p.grad.clone() for p in drafter.parameters()]

    (one, whole), (three, parts) = run([samples]), run([[sample] for sample in samples])
    assert three == pytest.approx(one, rel=1e-6)
    for a, b in zip(whole, parts, strict=True):
        assert (a - b).abs().max() <= 1e-6 * max(1.0, a.abs().max().item())


@pytest.mark.case("O-T03")
def test_no_rows_cost_nothing_and_have_gradients_of_zero():
    result, z, head = ce_of([], counts=[0.0])
    result.loss.backward()
    assert result.loss.item() == 0.0
    assert head.grad.tolist() == [[0.0], [0.0]]
    assert all(value.tolist() == [0.0] for value in result.stats.values())


@pytest.mark.case("O-T03")
def test_nothing_supervised_gives_a_real_drafter_no_gradient():
    target = Target(tiny_llama())
    drafter = build(Config(unroll=3), target, KEPT)
    objective = Objective(ObjectiveConfig(), drafter, target)
    batch = capture_batch(target, [make_sample("a", list(range(9)), "." * 9)], drafter.taps)
    counts = objective.count(drafter.index(batch.tokens), batch)
    assert counts.tolist() == [[0.0, 0.0, 0.0]]
    result = objective.loss(drafter.rows(batch), batch, drafter.head_weight(), counts)
    result.loss.backward()
    assert result.loss.item() == 0.0
    assert all(p.grad is None or p.grad.abs().max() == 0 for p in drafter.parameters())


@pytest.mark.case("O-T03")
@pytest.mark.parametrize(("marks", "expected"), [("101", 4.0), ("111", float("nan"))])
def test_a_nan_counts_only_where_it_is_supervised(marks, expected):
    """Losses 2, NaN and 6: the second row's states, the target's and the drafter's, are NaN."""
    drafter, target = stand_ins([0, 1], 3)
    logits = [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [float("nan")] * 3, [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    batch = features([0] * 5, logits)
    rows = [i for i, mark in enumerate(marks) if mark == "1"]
    index = index_of([[i, 0] for i in rows], 1)
    objective = Objective(ObjectiveConfig(terms={"ce": 1.0}), drafter, target)
    z, head = costing([[2.0, 4.0, 6.0][i] for i in rows])
    if marks == "111":
        z = z.detach().index_fill(0, torch.tensor([1]), float("nan")).requires_grad_()
    result = objective.loss(Rows(index, z), batch, head, objective.count(index, batch))
    assert result.loss.item() == pytest.approx(expected, nan_ok=True)


# weights


def test_slot_k_weighs_the_decay_to_the_k_over_its_own_count():
    result, _, _ = ce_of([1.0, 3.0, 2.0], slots=[0, 0, 1], slot_decay=0.5)
    assert result.loss.item() == pytest.approx((1 + 3) / 2 + 0.5 * 2 / 1, abs=1e-6)
    assert result.stats["loss"].tolist() == pytest.approx([2.0, 1.0], abs=1e-6)
    assert result.stats["count"].tolist() == [2.0, 1.0]


def test_a_slot_is_divided_by_the_count_of_the_whole_step():
    result, _, _ = ce_of([1.0, 3.0, 2.0], slots=[0, 0, 1], counts=[8.0, 4.0], slot_decay=0.5)
    assert result.loss.item() == pytest.approx(4 / 8 + 0.5 * 2 / 4, abs=1e-6)


def test_the_weight_of_a_term_scales_its_share():
    """Uniform laws over all four ids: tv is 0, ce is log 4."""
    drafter, target = stand_ins([0, 1, 2, 3], 4)
    batch = features([0] * 4, [[0.0] * 4] * 4)
    index = index_of([[0, 0], [1, 0]], 1)
    config = ObjectiveConfig(terms={"ce": 0.5, "tv": 7.0, "kl": 3.0})
    objective = Objective(config, drafter, target)
    rows = Rows(index, torch.zeros(2, 4))
    result = objective.loss(rows, batch, torch.eye(4), objective.count(index, batch))
    assert result.loss.item() == pytest.approx(0.5 * math.log(4), abs=1e-6)
    assert result.stats["alpha"].tolist() == pytest.approx([2.0], abs=1e-6)  # a sum over two rows


# D-PACE


def test_dpace_weighs_a_slot_by_what_its_acceptance_adds():
    """Smoothed by half, q = 1/2, 1/4 are 3/4, 5/8: reached 3/4 and 15/32 of the time. Two roots, so both
    slots are divided by two."""
    result, z, _ = ce_of([math.log(2), math.log(4), math.log(4)], rows=[0, 0, 1], slots=[0, 1, 0], dpace=0.5)
    first, second, alone = (3 / 4 + 15 / 32) * math.log(2), 15 / 32 * math.log(4), 5 / 8 * math.log(4)
    assert result.stats["loss"].tolist() == pytest.approx([(first + alone) / 2, second / 2], abs=1e-6)
    result.loss.backward()  # d ce / dz = sigmoid(z) = 1 - q, the weights being constants
    expected = [(3 / 4 + 15 / 32) / 2 / 2, 15 / 32 * 3 / 4 / 2, 5 / 8 * 3 / 4 / 2]
    assert z.grad[:, 0].tolist() == pytest.approx(expected, abs=1e-6)


def test_without_smoothing_the_weight_is_the_gradient_of_the_expected_length():
    log_q = torch.tensor([-0.1, -0.7, -2.0, -0.4], dtype=torch.float64, requires_grad=True)
    log_q.cumsum(0).exp().sum().backward()
    index = index_of([[5, 0], [5, 1], [5, 2], [5, 3]], 4)
    torch.testing.assert_close(pace(index, log_q.detach().exp(), 0.0), log_q.grad)


def test_a_label_that_is_not_kept_has_probability_zero_and_each_slot_its_own_head():
    heads = (torch.tensor([[0.0], [0.0]]), torch.tensor([[0.0], [math.log(3)]]))
    state, slot, label = torch.ones(4, 1), torch.tensor([0, 1, 1, 0]), torch.tensor([1, 1, 0, -1])
    for chunk in (1, 9):
        found = label_probability(state, heads, slot, label, chunk)
        assert found.tolist() == pytest.approx([0.5, 0.75, 0.25, 0.0])


def test_the_probability_of_a_label_is_not_rounded_under_autocast():
    state, head = torch.full((1, 1), 20.06), torch.tensor([[0.0], [1.0]])
    with torch.autocast("cpu", torch.bfloat16):
        slot = label = torch.zeros(1, dtype=torch.int64)
        found = label_probability(state, head, slot, label, 1).item()
    assert found == pytest.approx(1 / (1 + math.exp(20.06)), rel=1e-4)


def test_dpace_is_refused_for_a_single_slot():
    drafter, target = stand_ins([0, 1], 3)
    drafter.index, drafter.config = lambda tokens: index_of([], 1), SimpleNamespace(family="name")
    with pytest.raises(ValueError, match=r"objective\.dpace=0\.5: drafter name learns one slot"):
        Objective(ObjectiveConfig(dpace=0.5), drafter, target)


# what each term counts


@pytest.mark.case("O-V03")
def test_the_choice_must_be_kept_for_kl_the_label_for_ce_and_nothing_for_tv():
    """Kept ids 0, 1, 2 of 4. Target's choices at tokens 1 to 4: 3, 0, 3, 0; labels: 3, 3, 1, 1."""
    a, b = [2.0, 1.0, 0.0, 3.0], [3.0, 1.0, 0.0, 2.0]
    drafter, target = stand_ins([0, 1, 2], 4)
    batch = features([0, 0, 3, 3, 1, 1], [b, a, b, a, b, b])
    index = index_of([[0, 0], [1, 0], [2, 0], [3, 0], [0, 1]], 2)
    terms = ("ce", "kl", "reverse_kl", "jsd", "tv", "lk_alpha", "lk_lambda")
    objective = Objective(ObjectiveConfig(terms=dict.fromkeys(terms, 1.0)), drafter, target)
    counts = dict(zip(terms, objective.count(index, batch).tolist(), strict=True))
    assert counts["ce"] == [2.0, 0.0]
    assert counts["kl"] == counts["reverse_kl"] == counts["jsd"] == [2.0, 1.0]
    assert counts["tv"] == counts["lk_alpha"] == counts["lk_lambda"] == [4.0, 1.0]


@pytest.mark.case("O-V03")
def test_a_choice_that_is_not_kept_is_masked_from_kl_and_counts_as_a_miss():
    """Positions A and B; the drafter says what the target says on the kept ids."""
    a, b = [2.0, 1.0, 0.0, 3.0], [3.0, 1.0, 0.0, 2.0]
    drafter, target = stand_ins([0, 1, 2], 4)
    batch = features([0] * 4, [b, a, b, b])
    index = index_of([[0, 0], [1, 0]], 1)
    objective = Objective(ObjectiveConfig(terms={"kl": 1.0}), drafter, target)
    counts = objective.count(index, batch)
    assert counts.tolist() == [[1.0]]
    assert counts.item() / len(index.row) == 0.5  # coverage by arg-max
    state = torch.tensor([a[:3], [0.0, 0.0, 0.0]]).requires_grad_()
    result = objective.loss(Rows(index, state), batch, torch.eye(3), counts)
    result.loss.backward()
    law = torch.tensor([0.843795, 0.114195, 0.042010])
    assert result.loss.item() == pytest.approx((law * (3 * law).log()).sum().item(), abs=1e-5)
    torch.testing.assert_close(state.grad, torch.stack((torch.zeros(3), 1 / 3 - law)), atol=1e-6, rtol=0)
    assert result.stats["agree"].tolist() == [1.0]  # B alone: uniform logits choose id 0
    assert result.stats["count"].tolist() == [2.0]
    uniform = 1 / 3 + 0.114195 * 0.763117 + 0.042010 * 0.763117
    assert result.stats["alpha"].tolist() == pytest.approx([0.356086 + uniform], abs=1e-5)


def test_a_label_that_is_not_kept_costs_nothing():
    drafter, target = stand_ins([0, 1], 3)
    batch = features([0, 0, 0, 2], [[0.0] * 3] * 4)
    index = index_of([[0, 0], [1, 0]], 1)
    objective = Objective(ObjectiveConfig(terms={"ce": 1.0}), drafter, target)
    z, head = costing([2.0, 5.0])
    result = objective.loss(Rows(index, z), batch, head, objective.count(index, batch))
    result.loss.backward()
    assert result.loss.item() == pytest.approx(2.0, abs=1e-6)
    assert z.grad[1].tolist() == [0.0]


def test_the_loss_reads_the_targets_adjusted_logits():
    """A soft cap of the target: its law at the kept ids is that of the capped logits."""
    drafter, target = stand_ins([0, 1, 2, 3], 4)
    target.adjust = lambda logits: torch.tanh(logits)
    raw = torch.tensor([4.0, -3.0, 0.5, 0.0])
    capped = raw.tanh()
    batch = features([0] * 3, [raw.tolist()] * 3)
    batch = FeatureBatch(
        batch.tokens,
        (0,),
        batch.taps,
        batch.final,
        capped.logsumexp(-1).expand(3),
        capped.argmax(-1).expand(3),
    )
    index = index_of([[0, 0]], 1)
    objective = Objective(ObjectiveConfig(terms={"kl": 1.0}), drafter, target)
    result = objective.loss(Rows(index, capped[None]), batch, torch.eye(4), objective.count(index, batch))
    assert abs(result.loss.item()) < 1e-6
    assert result.stats["alpha"].item() == pytest.approx(1.0, abs=1e-6)


def test_the_teacher_has_the_bias_of_the_targets_head():
    """The head's bias (Phi) is in the log-sum-exp of the capture, so it must be in the law at kept ids."""
    drafter, target = stand_ins([0, 2], 3)
    target.head.bias = torch.tensor([1.0, 0.0, -2.0])
    raw = torch.tensor([0.5, 0.0, 0.25])
    logits = raw + target.head.bias
    batch = features([0] * 3, [raw.tolist()] * 3)
    batch = replace(batch, lse=logits.logsumexp(-1).expand(3), argmax=logits.argmax(-1).expand(3))
    index = index_of([[0, 0]], 1)
    objective = Objective(ObjectiveConfig(terms={"kl": 1.0}), drafter, target)
    rows = Rows(index, logits[[0, 2]][None])
    result = objective.loss(rows, batch, torch.eye(2), objective.count(index, batch))
    assert abs(result.loss.item()) < 1e-6
    mass = logits.softmax(-1)[[0, 2]].sum().item()
    assert result.stats["alpha"].item() == pytest.approx(mass, abs=1e-6)


@pytest.mark.parametrize("chunk", [1, 3, 0])
def test_the_chunk_changes_no_number(chunk):
    target = Target(tiny_llama())
    drafter = build(Config(unroll=3), target, KEPT)
    batch = capture_batch(target, random_samples(2), drafter.taps)
    rows = drafter.rows(batch)

    def loss(size):
        objective = Objective(ObjectiveConfig(terms={"kl": 1.0}, chunk=size), drafter, target)
        return objective.loss(
            rows, batch, drafter.head_weight(), objective.count(rows.index, batch)
        ).loss.item()

    assert loss(chunk) == pytest.approx(loss(1000), rel=1e-6)


def test_the_terms_are_those_of_the_fused_op_and_the_regression():
    assert (*DIVERGENCES, "smooth_l1") == TERMS

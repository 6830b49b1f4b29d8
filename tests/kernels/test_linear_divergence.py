"""Every divergence, its statistics and its gradients against a dense float64 reference written from the
formulas; torch's form, and Triton's on a GPU or, without one, in the interpreter."""

import math
from types import SimpleNamespace

import pytest
import torch

from spectrain.kernels import linear_divergence as module
from spectrain.kernels import linear_divergence_triton
from spectrain.kernels.linear_divergence import TERMS, Teacher, form, linear_divergence
from spectrain.kernels.linear_divergence_triton import LinearDivergence

V, D, DT = 53, 12, 20  # the target's vocabulary, the drafter's and the target's width
DECAY = 1.7
ON_GPU = torch.cuda.is_available()


@pytest.fixture
def triton(monkeypatch):
    """Triton's form with blocks of 16 ids, on tensors of the GPU if there is one."""
    monkeypatch.setattr(module, "form", lambda device: LinearDivergence)
    monkeypatch.setattr(linear_divergence_triton, "BLOCK", 16)
    with torch.device("cuda" if ON_GPU else "cpu"):
        yield


@pytest.fixture(params=["torch", "triton"])
def each_form(request):
    if request.param == "triton":
        request.getfixturevalue("triton")


def problem(rows, *, vocab=V, kept=23, targets=None, slots=7, seed=0):
    """Random states, heads and rows in float64; several rows may share a (target row, slot)."""
    draw = torch.Generator(torch.get_default_device()).manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    targets = targets or max(1, rows // 11)
    kept_ids = torch.randperm(vocab, generator=draw)[:kept].sort().values
    full_head, target_state = normal(vocab, DT), normal(targets, DT)
    logits = target_state @ full_head.T
    position = torch.full((vocab,), -1)
    position[kept_ids] = torch.arange(kept)
    return SimpleNamespace(
        z=normal(rows, D),
        head=normal(kept, D),
        source=torch.randint(targets, (rows,), generator=draw),
        slot=torch.randint(slots, (rows,), generator=draw),
        label=torch.randint(kept, (rows,), generator=draw),
        weights={term: torch.rand(rows, generator=draw, dtype=torch.float64) for term in TERMS},
        log_p=torch.log_softmax(logits, -1)[:, kept_ids],
        top1=position[logits.argmax(-1)],
        teacher=Teacher(target_state, logits.logsumexp(-1), full_head[kept_ids]),
    )


def dense(p, terms, z, head):
    """Loss of each row, alpha and agreement, with every law written out in full. head: [W, D], or one per
    slot."""
    rows = [z[r] @ (head if head.ndim == 2 else head[k]).T for r, k in enumerate(p.slot.tolist())]
    log_q = torch.log_softmax(torch.stack(rows), -1)
    q, log_p = log_q.exp(), p.log_p[p.source]
    mass = log_p.exp().sum(-1, keepdim=True)
    log_r = log_p - mass.log()  # the target's law renormalised on the kept ids
    alpha = torch.minimum(log_p.exp(), q).sum(-1)
    kl = (log_r.exp() * (log_r - log_q)).sum(-1)
    share = torch.exp(-DECAY * alpha.detach())
    log_m = torch.log((q + log_r.exp()) / 2)
    value = {
        "ce": -log_q.gather(1, p.label[:, None])[:, 0],
        "kl": kl,
        "reverse_kl": (q * (log_q - log_r)).sum(-1),
        "jsd": (q * (log_q - log_m) + log_r.exp() * (log_r - log_m)).sum(-1) / 2,
        "tv": 1 - alpha,
        "lk_alpha": -alpha.log(),
        "lk_lambda": share * kl + (1 - share) * (1 - alpha),
        "topk": -(log_p.exp() * log_q).gather(1, log_p.topk(10).indices).sum(-1),
    }
    loss = sum(p.weights[term] * value[term] for term in terms)
    return loss, alpha.detach(), log_q.argmax(-1) == p.top1[p.source]


def fused(p, terms, z, head, *, dtype=torch.float32, chunk=64):
    teacher = Teacher(*(t.to(dtype) for t in (p.teacher.state, p.teacher.lse, p.teacher.head)))
    return linear_divergence(
        z,
        head,
        teacher,
        p.source,
        p.slot,
        {term: p.weights[term].to(dtype) for term in terms},
        label_R=p.label if "ce" in terms else None,
        top1_M=p.top1,
        lambda_decay=DECAY,
        chunk=chunk,
    )


def leaves(p, dtype):
    return p.z.to(dtype).requires_grad_(), p.head.to(dtype).requires_grad_()


def assert_equal_to_dense(p, terms, *, chunk=64, bound=2e-5, forward_bound=None):
    z, head = leaves(p, torch.float64)
    rows, alpha, agree = dense(p, terms, z, head)
    expected = torch.autograd.grad(rows.sum(), (z, head))
    z, head = leaves(p, torch.float32)
    loss, stats = fused(p, terms, z, head, chunk=chunk)
    close(loss, rows.sum().detach(), forward_bound or bound)
    close(stats["loss"], rows.detach(), forward_bound or bound)
    close(stats["alpha"], alpha, forward_bound or bound)
    assert stats["agree"].tolist() == agree.float().tolist()
    for ours, theirs in zip(torch.autograd.grad(loss, (z, head)), expected, strict=True):
        close(ours, theirs, bound)


def close(ours, expected, bound):
    """Equal up to `bound` of the largest expected entry (of 1 if that is smaller)."""
    worst = (ours.double() - expected).abs().max().item()
    assert worst <= bound * max(1.0, expected.abs().max().item()), worst


@pytest.mark.parametrize("rows", [1, 63, 1000])
@pytest.mark.parametrize("terms", [(term,) for term in TERMS] + [TERMS], ids="+".join)
def test_loss_statistics_and_gradients_equal_the_dense_formulas(rows, terms):
    assert_equal_to_dense(problem(rows), terms)


@pytest.mark.parametrize("chunk", [2, 64])
@pytest.mark.parametrize("terms", [(term,) for term in TERMS] + [TERMS], ids="+".join)
def test_each_slot_may_have_a_head_of_its_own(terms, chunk):
    assert_equal_to_dense_with_heads_apart(problem(90, slots=3), terms, chunk)


@pytest.mark.usefixtures("triton")
def test_each_slot_may_have_a_head_of_its_own_in_the_kernel():
    assert_equal_to_dense_with_heads_apart(problem(12, slots=3, targets=4), TERMS, 2)


def assert_equal_to_dense_with_heads_apart(p, terms, chunk):
    draw = torch.Generator(torch.get_default_device()).manual_seed(1)
    heads = torch.randn(3, *p.head.shape, generator=draw, dtype=torch.float64, requires_grad=True)
    z = p.z.requires_grad_()
    rows, alpha, agree = dense(p, terms, z, heads)
    expected = torch.autograd.grad(rows.sum(), (z, heads))
    own = [head.detach().requires_grad_() for head in heads]
    loss, stats = fused(p, terms, z, own, dtype=torch.float64, chunk=chunk)
    dz, *dheads = torch.autograd.grad(loss, (z, *own))
    assert stats["agree"].tolist() == agree.double().tolist()
    for ours, theirs in (
        (loss, rows.sum()), (stats["alpha"], alpha), (dz, expected[0]), (torch.stack(dheads), expected[1])
    ):  # fmt: skip
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("chunk", [1, 7, 90, 4096])
def test_a_chunk_size_that_does_not_divide_the_target_rows_changes_nothing(chunk):
    assert_equal_to_dense(problem(500), TERMS, chunk=chunk)


def test_many_rows_may_share_target_row_and_slot():
    p = problem(200, targets=3, slots=2)
    assert len({*zip(p.source.tolist(), p.slot.tolist(), strict=True)}) == 6
    assert_equal_to_dense(p, TERMS, chunk=2)


def test_a_chunk_of_target_rows_without_drafter_rows_is_passed_over():
    p = problem(90, targets=40)
    p.source = torch.where(p.source < 20, p.source % 10, p.source)
    assert_equal_to_dense(p, TERMS, chunk=10)


def test_all_ids_kept_leaves_no_mass_outside():
    p = problem(63, kept=V)
    assert p.log_p.exp().sum(-1).allclose(torch.ones(1, dtype=torch.float64))
    assert_equal_to_dense(p, TERMS)


def test_a_row_of_weight_zero_contributes_nothing():
    p = problem(100)
    counted = torch.arange(100) % 3 > 0
    for weight in p.weights.values():
        weight[~counted] = 0.0
    p.label[~counted] = -1  # a label that is not kept
    z, head = leaves(p, torch.float32)
    loss, stats = fused(p, TERMS, z, head)
    loss.backward()
    assert stats["loss"][~counted].tolist() == [0.0] * 34
    assert z.grad[~counted].abs().max() == 0
    some = problem(100)
    some.z, some.source, some.slot, some.label = (t[counted] for t in (p.z, p.source, p.slot, p.label))
    some.weights = {term: weight[counted] for term, weight in p.weights.items()}
    few_z, few_head = leaves(some, torch.float32)
    few, _ = fused(some, TERMS, few_z, few_head)
    few.backward()
    torch.testing.assert_close(loss, few)
    torch.testing.assert_close(z.grad[counted], few_z.grad)
    torch.testing.assert_close(head.grad, few_head.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("each_form")
def test_a_row_whose_target_gives_no_mass_to_the_kept_ids_spoils_no_other():
    p = problem(8, targets=2)
    p.source = torch.arange(8) % 2
    p.teacher.lse[1] += 300  # p underflows to 0 on every kept id
    for term in ("ce", "kl", "reverse_kl", "jsd", "lk_lambda"):
        p.weights[term][p.source == 1] = 0.0
    z, head = leaves(p, torch.float32)
    loss, stats = fused(p, TERMS, z, head)
    loss.backward()
    assert stats["alpha"][p.source == 1].tolist() == [0.0] * 4
    assert all(t.isfinite().all() for t in (loss, z.grad, head.grad))
    torch.testing.assert_close(
        stats["loss"][1::2], (p.weights["tv"] + p.weights["lk_alpha"] * 18.420681)[1::2].float()
    )


def test_the_gradient_scales_with_the_one_from_above():
    p = problem(63)
    grads = []
    for scale in (1.0, -2.5):
        z, head = leaves(p, torch.float32)
        (scale * fused(p, TERMS, z, head)[0]).backward()
        grads.append((scale, z.grad, head.grad))
    for once, scaled in zip(grads[0][1:], grads[1][1:], strict=True):
        torch.testing.assert_close(scaled, -2.5 * once)


def test_a_frozen_head_gets_no_gradient_and_changes_no_other():
    p = problem(63)
    z, head = leaves(p, torch.float32)
    fused(p, TERMS, z, head)[0].backward()
    other, frozen = leaves(p, torch.float32)
    fused(p, TERMS, other, frozen.detach())[0].backward()
    assert torch.equal(z.grad, other.grad)


@pytest.mark.case("O-S05")
@pytest.mark.parametrize(
    "term", ["ce", "kl", "reverse_kl", "jsd", "tv", "lk_alpha", "topk"]
)  # lk_lambda's w has no gradient
def test_the_gradient_equals_finite_differences_in_float64(term):
    p = problem(9, kept=11, slots=3, targets=4)

    def loss(z, head):
        return fused(p, (term,), z, head, dtype=torch.float64, chunk=3)[0]

    assert torch.autograd.gradcheck(loss, leaves(p, torch.float64))


def test_a_gpu_takes_the_kernel():
    assert form(torch.device("cuda")) is LinearDivergence
    assert form(torch.device("cpu")) is not LinearDivergence


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("rows", [1, 63])
def test_the_kernel_with_all_terms_equals_the_dense_formulas(rows):
    assert_equal_to_dense(problem(rows), TERMS, chunk=2)


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("term", TERMS)
def test_the_kernel_equals_the_dense_formula_of_each_term(term):
    assert_equal_to_dense(problem(5), (term,))


@pytest.mark.usefixtures("triton")
def test_the_kernel_goes_over_a_thousand_ids_in_blocks(monkeypatch):
    monkeypatch.setattr(linear_divergence_triton, "BLOCK", 256)
    assert_equal_to_dense(problem(3, vocab=1300, kept=1000), TERMS)


@pytest.mark.usefixtures("triton")
def test_under_autocast_the_factors_are_bfloat16_and_the_sums_float32():
    """Against the dense formulas on rounded inputs: products of bfloat16 are exact in float32, so only the
    gradient of the logits is rounded again, by 2^-9."""
    p = problem(21, targets=5)
    for owner, name in ((p, "z"), (p, "head"), (p.teacher, "state"), (p.teacher, "head")):
        object.__setattr__(owner, name, getattr(owner, name).bfloat16().double())
    logits = p.teacher.state @ p.teacher.head.T
    p.log_p = logits - p.teacher.lse[:, None]
    with torch.autocast("cuda" if ON_GPU else "cpu", torch.bfloat16):
        assert_equal_to_dense(p, TERMS, bound=1e-2, forward_bound=2e-5)


@pytest.mark.usefixtures("triton")
@pytest.mark.case("O-S05")
def test_the_kernels_gradient_equals_finite_differences_in_float64():
    p = problem(3, kept=19, slots=2, targets=2)
    terms = ("ce", "kl", "reverse_kl", "jsd", "tv", "lk_alpha")

    def loss(z, head):
        return fused(p, terms, z, head, dtype=torch.float64, chunk=1)[0]

    assert torch.autograd.gradcheck(loss, leaves(p, torch.float64), fast_mode=True)


@pytest.mark.usefixtures("triton")
def test_the_kernels_frozen_head_gets_no_gradient():
    p = problem(4)
    z, head = leaves(p, torch.float32)
    loss = fused(p, ("kl",), z, head.detach())[0]
    loss.backward()
    expected = torch.autograd.grad(fused(p, ("kl",), z, head)[0], z)[0]
    assert torch.equal(z.grad, expected)


def two_rows(logits, draft):
    """Target logits [2, 4] and drafter logits on the kept ids 0, 1, 2; every head is the identity."""
    logits = torch.tensor(logits)
    teacher = Teacher(logits, logits.logsumexp(-1), torch.eye(4)[:3])
    rest = {"teacher": teacher, "source_R": torch.arange(2), "slot_R": torch.zeros(2).long()}
    return torch.tensor(draft).requires_grad_(), {"head_WD": torch.eye(3), **rest}


A, B = [2.0, 1.0, 0.0, 3.0], [3.0, 1.0, 0.0, 2.0]  # the arg-max of A is not kept
TOP1 = [-1, 0]
ONLY_B = [0.0, 1.0]  # A is masked from the loss


@pytest.mark.case("O-V03")
@pytest.mark.usefixtures("each_form")
def test_the_best_drafter_reaches_the_kept_mass_as_its_alpha_and_misses_where_the_choice_is_not_kept():
    z, rest = two_rows([A, B], [A[:3], B[:3]])
    loss, stats = linear_divergence(
        z, weights={"kl": torch.tensor(ONLY_B)}, top1_M=torch.tensor(TOP1), **rest
    )
    torch.testing.assert_close(stats["alpha"], torch.tensor([0.356086, 0.763117]), atol=1e-6, rtol=0)
    assert stats["agree"].tolist() == [0.0, 1.0]
    assert abs(loss.item()) < 1e-6


@pytest.mark.case("O-V03")
@pytest.mark.usefixtures("each_form")
def test_the_loss_reads_the_law_renormalised_on_the_kept_ids():
    z, rest = two_rows([A, B], [[0.0] * 3] * 2)  # q uniform
    loss, _ = linear_divergence(z, weights={"kl": torch.tensor(ONLY_B)}, top1_M=torch.tensor(TOP1), **rest)
    loss.backward()
    law = torch.tensor([0.843795, 0.114195, 0.042010])
    torch.testing.assert_close(1 / 3 - z.grad[1], law, atol=1e-6, rtol=0)
    assert z.grad[0].tolist() == [0.0, 0.0, 0.0]
    torch.testing.assert_close(loss.detach(), (law * (3 * law).log()).sum(), atol=1e-5, rtol=0)


@pytest.mark.usefixtures("each_form")
@pytest.mark.parametrize("low", [-150.0, -torch.inf])
@pytest.mark.parametrize(
    ("term", "expected"),
    [
        ("kl", math.log(3 / 2)),
        ("tv", 1 / 3),
        ("jsd", math.log(0.8) / 3 + math.log(2) / 6 + math.log(1.2) / 2),
        ("lk_alpha", math.log(3 / 2)),
        ("reverse_kl", 2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3 / 1e-30)),  # p is taken for 1e-30
    ],
)
def test_an_id_of_probability_zero_gives_a_finite_loss_and_gradient(term, expected, low):
    z, rest = two_rows([A, B], [[0.0] * 3] * 2)
    third = torch.tensor([2])
    rest["teacher"] = Teacher(
        state=torch.eye(2),
        lse=torch.full((2,), math.log(2)),
        head=torch.zeros(3, 2),
        adjust=lambda logits: logits.index_fill_(1, third, low),
    )
    loss, stats = linear_divergence(z, weights={term: torch.tensor([1.0, 0.0])}, **rest)
    loss.backward()
    assert loss.item() == pytest.approx(expected, abs=1e-5)
    torch.testing.assert_close(stats["alpha"], torch.full((2,), 2 / 3))
    assert z.grad.isfinite().all()

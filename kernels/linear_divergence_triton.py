"""`linear_divergence.py` on a GPU: matrix products by torch, all between them in one Triton kernel.

Per chunk of target rows: logits x = W z and log p; the kernel `divergence_rows` makes, for each drafter row,
lse, alpha, agreement and loss and puts the gradient of the loss with respect to x where x was:
    g = (ce + kl) q - kl p/P - ce [label] + tv (q B - q [q < p]) + rkl q (G - sum q G) + jsd q (J - sum q J)
        + topk (q sum_top p - p [top])
with B = sum q [q < p], G = log q - log p/P, J = log(q/m) / 2, and the terms' names for their coefficients;
then dz = g W and dW += g^T z. Slots are told from one another only where each has a head of its own.

Under autocast the factors of all products (z, heads, target state, g) have its dtype; x, log p and all sums
have the dtype of z, float32 in training. Extra memory: one chunk of x, of log p and, where narrower, of g.
Legend: R rows, M target rows, D drafter state, W kept ids, m rows of a chunk, n target rows of a chunk.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from spectrain.kernels.aot import Launch
from spectrain.kernels.linear_divergence import TERMS, TOP, _LinearDivergence

NONE = tl.constexpr(-1e30)  # a logit that is not there
SMALLEST = tl.constexpr(1e-30)
LOG_SMALLEST = tl.constexpr(-69.07755278982137)
SMALLEST_ALPHA = tl.constexpr(1e-8)
TOP_PADDED = triton.next_power_of_2(TOP)
BLOCK, WARPS = 2048, 8  # ids that a program holds at a time: 8 for each thread


class LinearDivergence(torch.autograd.Function):
    """As the CPU's."""

    @staticmethod
    def forward(ctx, z_RD, args, *heads):
        plan, teacher, weights, labels, top1, decay, stats = args
        kind, sums = z_RD.device.type, z_RD.dtype
        factor = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else sums
        wide, teacher_head = [head.to(factor) for head in heads], teacher.head.to(factor)
        dz = torch.empty_like(z_RD)
        wanted = ctx.needs_input_grad[2:]
        dheads = [torch.zeros_like(h) if wants else None for h, wants in zip(heads, wanted, strict=True)]
        blocks = [block for block in plan.blocks if block[2]]
        rows = max(slots[-1][2] - slots[0][1] for _, _, slots in blocks)
        height = max(last - first for first, last, _ in blocks)
        logits, log_law = (z_RD.new_empty(count, len(heads[0])) for count in (rows, height))
        gradient = logits if factor == sums else torch.empty_like(logits, dtype=factor)
        row = _RowKernel(weights, labels, top1, decay, stats)
        for first, last, slots in blocks:
            log_p = _product(teacher.state[first:last].to(factor), teacher_head.t(), log_law[: last - first])
            row.law(teacher.log_law(log_p, first, last), first)
            parts = [(0, slots)] if len(heads) == 1 else [(part[0], (part,)) for part in slots]
            for number, part in parts:
                begin, end = part[0][1], part[-1][2]
                here, head = plan.order[begin:end], wide[number]
                z, g = z_RD[here].to(factor), gradient[: end - begin]
                row(_product(z, head.t(), logits[: end - begin]), g, here, plan.local[begin:end])
                dz[here] = _product(g, head, torch.empty_like(z, dtype=sums))
                if dheads[number] is not None:
                    _add_product(g.t(), z, dheads[number])
        ctx.save_for_backward(dz, *dheads)
        return stats["loss"].sum()

    backward = staticmethod(_LinearDivergence.backward)


def _product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out = a b, summed in the dtype of `out`."""
    if a.dtype == out.dtype:
        return torch.mm(a, b, out=out)
    if a.device.type == "cpu":  # the interpreter's
        return torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)
    return torch.mm(a, b, out.dtype, out=out)


def _add_product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """out += a b, summed in the dtype of `out`."""
    if a.dtype == out.dtype or a.device.type == "cpu":
        out.addmm_(a.to(out.dtype), b.to(out.dtype))
    else:
        torch.addmm(out, a, b, out.dtype, out=out)


class _RowKernel:
    """The kernel with what is the same for all chunks; `weights` [terms, R] in the order of TERMS."""

    def __init__(self, weights, labels, top1, decay, stats):
        self.stats, self.decay = [stats[name] for name in ("alpha", "agree", "loss")], decay
        zero = torch.zeros_like(stats["loss"])
        self.weights = torch.stack([weights.get(term, zero) for term in TERMS])
        self.flags = {"CE": "ce" in weights, "REVERSE_KL": "reverse_kl" in weights, "JSD": "jsd" in weights}
        self.flags |= {"AGREE": top1 is not None, "TOP": TOP_PADDED if "topk" in weights else 0}
        self.labels, self.top1 = labels, top1

    def law(self, log_p: torch.Tensor, first: int) -> None:
        """Go on to the target rows from `first` on."""
        self.log_p, self.first = log_p, first
        self.top = log_p.topk(min(TOP, log_p.shape[1])).indices if self.flags["TOP"] else None

    def __call__(self, x, g, order, local) -> None:
        (m, W), dtype = x.shape, str(x.dtype).removeprefix("torch.")
        labels, top1, top = (order if t is None else t for t in (self.labels, self.top1, self.top))  # unread
        divergence_rows[(m,)](
            x, g, self.log_p, order, local, labels, top1, top, self.weights, *self.stats,
            W, self.weights.shape[1], self.first, top.shape[-1], self.decay, **self.flags,
            SUM=getattr(tl, dtype), BLOCK=min(BLOCK, triton.next_power_of_2(W)), num_warps=WARPS,
        )  # fmt: skip


@triton.jit
def divergence_rows(
    x_ptr, g_ptr, log_p_ptr, order_ptr, local_ptr, label_ptr, top1_ptr, top_ptr, weight_ptr,
    alpha_ptr, agree_ptr, loss_ptr, W, R, first, count, decay,
    CE: tl.constexpr, REVERSE_KL: tl.constexpr, JSD: tl.constexpr, AGREE: tl.constexpr, TOP: tl.constexpr,
    SUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Statistics and the gradient of the logits of one row, in three passes over its ids; g may be x. SUM is
    the dtype of x, log p and all sums."""
    i = tl.program_id(0).to(tl.int64)
    r = tl.load(order_ptr + i)
    source = tl.load(local_ptr + i)
    x_ptr += i * W
    g_ptr += i * W
    log_p_ptr += (source - first) * W
    ids = tl.arange(0, BLOCK)

    tops = tl.full([BLOCK], NONE, SUM)
    totals = tl.zeros([BLOCK], SUM)
    masses = tl.zeros([BLOCK], SUM)
    for start in range(0, W, BLOCK):
        inside = start + ids < W
        x = tl.load(x_ptr + start + ids, mask=inside, other=NONE)
        new_tops = tl.maximum(tops, x)
        totals = totals * tl.exp(tops - new_tops) + tl.exp(x - new_tops)
        tops = new_tops
        masses += tl.exp(tl.load(log_p_ptr + start + ids, mask=inside, other=NONE))
    top = tl.max(tops, 0)
    lse = top + tl.log(tl.sum(totals * tl.exp(tops - top), 0))
    mass = tl.maximum(tl.sum(masses, 0), SMALLEST)
    agree = 0.0
    if AGREE:
        wanted = tl.load(top1_ptr + source)
        found = tl.load(x_ptr + tl.maximum(wanted, 0))
        agree = tl.where((wanted >= 0) & (found >= top), 1.0, 0.0)
    tl.store(agree_ptr + r, agree)

    alphas = tl.zeros([BLOCK], SUM)
    belows = tl.zeros([BLOCK], SUM)
    kls = tl.zeros([BLOCK], SUM)
    reverses = tl.zeros([BLOCK], SUM)
    inners = tl.zeros([BLOCK], SUM)
    jsds = tl.zeros([BLOCK], SUM)
    for start in range(0, W, BLOCK):
        inside = start + ids < W
        log_q = tl.load(x_ptr + start + ids, mask=inside, other=NONE) - lse
        log_p = tl.load(log_p_ptr + start + ids, mask=inside, other=NONE)
        q, p = tl.exp(log_q), tl.exp(log_p)
        alphas += tl.minimum(p, q)
        belows += tl.where(q < p, q, 0.0)
        kls += p * (tl.maximum(log_p, NONE) - log_q)
        if REVERSE_KL:
            reverses += q * (tl.maximum(log_q, LOG_SMALLEST) - tl.maximum(log_p, LOG_SMALLEST))
        if JSD:
            log_m = tl.log(tl.maximum((q + p / mass) / 2, SMALLEST))
            inners += q * (tl.maximum(log_q, LOG_SMALLEST) - log_m)
            jsds += p * (tl.maximum(log_p - tl.log(mass), LOG_SMALLEST) - log_m)
    alpha, below = tl.sum(alphas, 0), tl.sum(belows, 0)
    kl = tl.sum(kls, 0) / mass - tl.log(mass)
    reverse = tl.sum(reverses, 0) + tl.log(mass)
    inner = tl.sum(inners, 0) / 2
    jsd = inner + tl.sum(jsds, 0) / mass / 2
    tl.store(alpha_ptr + r, alpha)

    weight_ptr += r
    ce_w, kl_w, reverse_w = tl.load(weight_ptr), tl.load(weight_ptr + R), tl.load(weight_ptr + 2 * R)
    jsd_w, tv_w, lk_w = tl.load(weight_ptr + 3 * R), tl.load(weight_ptr + 4 * R), tl.load(weight_ptr + 5 * R)
    mixed_w = tl.load(weight_ptr + 6 * R)
    floor = tl.maximum(alpha, SMALLEST_ALPHA)
    share = tl.exp(-decay * alpha)
    loss = kl_w * kl + tv_w * (1 - alpha) - lk_w * tl.log(floor)
    loss += mixed_w * (share * kl + (1 - share) * (1 - alpha))
    kl_w += mixed_w * share
    tv_w += lk_w / floor + mixed_w * (1 - share)
    if REVERSE_KL:
        loss += reverse_w * reverse
    if JSD:
        loss += jsd_w * jsd
    label = -1
    if CE:
        label = tl.maximum(tl.load(label_ptr + r), 0)
        loss += ce_w * (lse - tl.load(x_ptr + label))
    softmax_w = kl_w + ce_w + tv_w * below
    if TOP:
        chosen = tl.arange(0, TOP) < count
        top_ids = tl.load(top_ptr + (source - first) * count + tl.arange(0, TOP), mask=chosen, other=0)
        top_p = tl.exp(tl.load(log_p_ptr + top_ids, mask=chosen, other=NONE))
        top_w = tl.load(weight_ptr + 7 * R)
        loss += top_w * tl.sum(top_p * (lse - tl.load(x_ptr + top_ids)), 0)
        softmax_w += top_w * tl.sum(top_p, 0)
    tl.store(loss_ptr + r, loss)

    tl.debug_barrier()  # every thread has read the logits that one thread of the next pass overwrites
    for start in range(0, W, BLOCK):
        inside = start + ids < W
        log_q = tl.load(x_ptr + start + ids, mask=inside, other=NONE) - lse
        log_p = tl.load(log_p_ptr + start + ids, mask=inside, other=NONE)
        q, p = tl.exp(log_q), tl.exp(log_p)
        g = softmax_w * q - tl.where(q < p, tv_w * q, 0.0) - kl_w / mass * p
        if REVERSE_KL:
            log_r = tl.maximum(log_p, LOG_SMALLEST) - tl.log(mass)
            g += reverse_w * q * (tl.maximum(log_q, LOG_SMALLEST) - log_r - reverse)
        if JSD:
            log_m = tl.log(tl.maximum((q + p / mass) / 2, SMALLEST))
            g += jsd_w * q * ((tl.maximum(log_q, LOG_SMALLEST) - log_m) / 2 - inner)
        if CE:
            g -= tl.where(start + ids == label, ce_w, 0.0)
        tl.store(g_ptr + start + ids, g.to(g_ptr.dtype.element_ty), mask=inside)
    if TOP:
        tl.debug_barrier()  # the gradient of the row is written
        g = tl.load(g_ptr + top_ids, mask=chosen, other=0.0).to(SUM) - top_w * top_p
        tl.store(g_ptr + top_ids, g.to(g_ptr.dtype.element_ty), mask=chosen)


def launches() -> Iterator[Launch]:
    """The commonest and the fullest set of terms, with gradients in place and in bfloat16."""
    kinds = dict.fromkeys(("order", "local", "label", "top1", "top"), "i64")
    for label, full, gradient in (("kl, in place", False, "fp32"), ("all terms, bf16", True, "bf16")):
        signature = {f"{name}_ptr": "*fp32" for name in ("x", "log_p", "weight", "alpha", "agree", "loss")}
        signature |= {f"{name}_ptr": f"*{kind}" for name, kind in kinds.items()}
        signature |= {"g_ptr": f"*{gradient}", "W": "i32:16", "decay": "fp32"}
        signature |= dict.fromkeys(("R", "first", "count"), "i32")
        constants: dict[str, Any] = dict.fromkeys(("CE", "REVERSE_KL", "JSD"), full)
        constants |= {"AGREE": True, "TOP": TOP_PADDED * full, "SUM": tl.float32, "BLOCK": BLOCK}
        yield Launch(divergence_rows, label, signature, constants, WARPS, 1)

"""Divergence between a drafter's and the target's law straight from states and heads, with its gradients.

    x_r = W z_r                       drafter logits over the W kept ids,  q = softmax(x)
    p   = exp(W_target s + b - lse)   the target's law over its whole vocabulary, at the kept ids; P = sum p
    kl  = sum p/P (log p/P - log q)   reverse_kl = sum q (log q - log p/P)   ce = -log q(label)
    jsd = sum (q log q/m + p/P log (p/P)/m) / 2,  m = (q + p/P) / 2
    alpha = sum min(p, q)             tv = 1 - alpha      lk_alpha = -log alpha
    lk_lambda = w kl + (1 - w) tv,    w = exp(-decay * alpha), w without gradient
    topk = -sum p log q over the TOP likeliest kept ids of p

Several rows share one target row (the slots of an unroll): its law is computed once per chunk and never
stored for more than a chunk, so the extra memory is independent of rows x vocabulary. Rows are handled slot
by slot inside a chunk of target rows; W is one for all, or each slot has its own (parallel heads). What needs
every logit of a row is done for a few rows at a time, which stay in the cache meanwhile. A term's weight is
multiplied on the narrow sides of the products where it can be; so is all of topk but the softmax.
All is done in the forward. On a GPU `linear_divergence_triton.py` does the same with one kernel between the
products.
Sums have the dtype of z, float32 in training. Knows no family.
Sources: Leviathan et al. 2023 (alpha); lk_alpha and lk_lambda: arXiv 2602.23881; topk: HASS, Zhang et al.
2024, section 3.1, with its 10 ids.
Legend: R rows, M target rows, D drafter state, W kept ids, n target rows of a chunk.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

TERMS = ("ce", "kl", "reverse_kl", "jsd", "tv", "lk_alpha", "lk_lambda", "topk")
TOP = 10
SMALLEST_ALPHA = 1e-8  # keeps 1 / alpha of lk_alpha finite
SMALLEST = 1e-30  # of a probability under a logarithm
WIDE = {
    "tv",
    "lk_alpha",
    "lk_lambda",
    "reverse_kl",
    "jsd",
}  # their gradient is more than a multiple of q - p/P
KL = {"kl", "lk_lambda"}  # terms with a kl in them
CACHED = 2**17  # logits handled at a time on CPU: half a MiB, and as much of p and of p/P


@dataclass(frozen=True)
class Teacher:
    """The target's side. state [M, Dt] after the final norm; lse [M] over the full vocabulary; head [W, Dt],
    the target's head rows at the kept ids; adjust: the target's own scaling and soft cap of raw logits; bias
    [W]: the head's, where it has one."""

    state: torch.Tensor
    lse: torch.Tensor
    head: torch.Tensor
    adjust: Callable[[torch.Tensor], torch.Tensor] | None = None
    bias: torch.Tensor | None = None

    def logits(self, first: int, last: int, out: torch.Tensor) -> torch.Tensor:
        """log p at the kept ids for target rows first .. last - 1, [n, W], written to `out`."""
        torch.mm(self.state[first:last].to(out.dtype), self.head.t(), out=out)
        return self.log_law(out, first, last)

    def log_law(self, logits: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """log p from the head's products [n, W], in place."""
        out = logits if self.bias is None else logits.add_(self.bias)
        out = out if self.adjust is None else self.adjust(out)
        return out.sub_(self.lse[first:last, None])


@dataclass(frozen=True)
class Plan:
    """Rows in the order of work. order [R]: slot-major within chunks of target rows; blocks: for each chunk
    (first target row, last, [(slot, start, stop) into `order`]); local [R]: target row of each ordered
    row."""

    order: torch.Tensor
    local: torch.Tensor
    blocks: tuple


def plan_rows(source_R: torch.Tensor, slot_R: torch.Tensor, num_sources: int, chunk: int) -> Plan:
    """Order rows by (chunk of target rows, slot, target row). source_R: index of each row's target row, 0 ..
    M - 1."""
    num_slots = int(slot_R.max()) + 1
    group = torch.div(source_R, chunk, rounding_mode="floor") * num_slots + slot_R
    order = torch.argsort(group * num_sources + source_R)
    counts = torch.bincount(group, minlength=-(-num_sources // chunk) * num_slots).tolist()
    blocks, start = [], 0
    for block in range(-(-num_sources // chunk)):
        slots = []
        for slot in range(num_slots):
            count = counts[block * num_slots + slot]
            if count:
                slots.append((slot, start, start + count))
            start += count
        blocks.append((block * chunk, min((block + 1) * chunk, num_sources), tuple(slots)))
    return Plan(order, source_R[order], tuple(blocks))


def linear_divergence(
    z_RD: torch.Tensor,
    head_WD: torch.Tensor | Sequence[torch.Tensor],
    teacher: Teacher,
    source_R: torch.Tensor,
    slot_R: torch.Tensor,
    weights: dict[str, torch.Tensor],
    *,
    label_R: torch.Tensor | None = None,
    top1_M: torch.Tensor | None = None,
    lambda_decay: float = 1.0,
    chunk: int = 64,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Weighted sum of divergences over rows, with statistics per row.

    z_RD float32, or float64 where the heads are; head_WD: of all rows, or a sequence whose k-th is slot k's;
    source_R index into the teacher's M rows; weights: term -> [R] (0 = not counted), already divided by
    counts; label_R: index into the kept ids, -1 where the label is not kept (then its ce weight must be 0);
    top1_M: index of the target's arg-max in the kept ids, -1 where not kept.
    Returns the scalar loss and {"alpha", "agree", "loss"}, [R] without gradient (loss: the row's share).
    """
    assert set(weights) <= set(TERMS), f"terms {sorted(weights)}"
    heads = (head_WD,) if isinstance(head_WD, torch.Tensor) else tuple(head_WD)
    targets = len(teacher.state)
    plan = plan_rows(source_R, slot_R, targets, -(-targets // -(-targets // chunk)))  # chunks of equal height
    stats = {name: torch.empty_like(source_R, dtype=z_RD.dtype) for name in ("alpha", "agree", "loss")}
    args = (plan, teacher, weights, label_R, top1_M, lambda_decay, stats)
    return form(z_RD.device).apply(z_RD, args, *heads), stats


def form(device: torch.device) -> type[torch.autograd.Function]:
    """What computes it on a device."""
    if device.type == "cuda":
        from spectrain.kernels.linear_divergence_triton import LinearDivergence

        return LinearDivergence
    return _LinearDivergence


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z_RD, args, *heads):
        plan, teacher, weights, labels, top1, decay, stats = args
        dz = torch.empty_like(z_RD)
        wanted = ctx.needs_input_grad[2:]
        dheads = [
            torch.zeros_like(head) if wants else None for head, wants in zip(heads, wanted, strict=True)
        ]
        blocks = [block for block in plan.blocks if block[2]]
        rows = max(slots[-1][2] - slots[0][1] for _, _, slots in blocks)
        height = max(last - first for first, last, _ in blocks)
        most = max(stop - start for _, _, slots in blocks for _, start, stop in slots)
        few = max(1, CACHED // len(heads[0]))
        scratch = _Scratch(
            *(z_RD.new_empty(n, len(heads[0])) for n in (rows, height, height, few, few, most))
        )
        for first, last, slots in blocks:
            law = _TeacherRows(teacher, first, last, scratch, set(weights))
            # rows of one head together
            parts = [(0, slots)] if len(heads) == 1 else [(part[0], (part,)) for part in slots]
            for number, part in parts:
                begin, end = part[0][1], part[-1][2]
                here = plan.order[begin:end]
                chunk = _Chunk(
                    z=z_RD[here],
                    head=heads[number],
                    teacher=law,
                    local=plan.local[begin:end] - first,
                    slots=tuple((start - begin, stop - begin) for _, start, stop in part),
                    weights={term: w[here] for term, w in weights.items()},
                    label=None if labels is None else labels[here].clamp(min=0),
                    scratch=scratch,
                )
                chunk.softmax(None if top1 is None else top1[first:last])
                stats["agree"][here], stats["alpha"][here] = chunk.agree, chunk.alpha
                stats["loss"][here], dz[here] = chunk.loss_and_gradient(decay, dheads[number])
        ctx.save_for_backward(dz, *dheads)
        return stats["loss"].sum()

    @staticmethod
    def backward(ctx, grad):
        dz, *dheads = ctx.saved_tensors
        if grad != 1:  # a copy of all would be the highest memory of a step
            dz, dheads = dz * grad, [None if dhead is None else dhead * grad for dhead in dheads]
        return dz, None, *dheads


@dataclass(frozen=True)
class _Scratch:
    """Memory of all chunks, [rows, W]: logits of a chunk's rows; p and p/P of its target rows; p and p/P of a
    few rows; p of a slot's rows. What no term needs is never touched, so that it takes no memory."""

    x: torch.Tensor
    p: torch.Tensor
    r: torch.Tensor
    few_p: torch.Tensor
    few_r: torch.Tensor
    slot_p: torch.Tensor


class _TeacherRows:
    """The target's law on the n target rows of a chunk: p [n, W], mass P [n]; if a term needs them, r = p/P
    [n, W] with its negative entropy sum r log r [n], the TOP likeliest kept ids [n, k] and their p."""

    def __init__(self, teacher: Teacher, first: int, last: int, scratch: _Scratch, terms: set[str]):
        self.p = teacher.logits(first, last, scratch.p[: last - first])
        if KL & terms:
            self.r = log_p = scratch.r[: last - first].copy_(self.p)
        self.p.exp_()
        self.mass = self.p.sum(-1).clamp(min=SMALLEST)
        if KL & terms:
            plogp = log_p.mul_(self.p).nan_to_num_(nan=0.0).sum(-1)
            self.negative_entropy = plogp / self.mass - self.mass.log()
            torch.div(self.p, self.mass[:, None], out=self.r)
        if "topk" in terms:
            self.top_p, self.top_ids = self.p.topk(min(TOP, self.p.shape[1]))


@dataclass
class _Chunk:
    """Rows of one chunk that share a head. z [m, D]; local [m] target row of each; slots: row ranges with one
    slot each. x holds the logits, then q, then what multiplies the head for the gradient: q - p/P with kl
    alone, else what `_wide` leaves, else q."""

    z: torch.Tensor
    head: torch.Tensor
    teacher: _TeacherRows
    local: torch.Tensor
    slots: tuple[tuple[int, int], ...]
    weights: dict[str, torch.Tensor]
    label: torch.Tensor | None
    scratch: _Scratch

    def softmax(self, top1_n: torch.Tensor | None) -> None:
        """x; of each row [m] log-sum-exp, sum r x (with a kl), label logit, agreement, sum min(p, q): the
        equal 1 - |q - p| / 2 loses its digits where alpha is small."""
        self.x = torch.mm(self.z, self.head.t(), out=self.scratch.x[: len(self.z)])
        top, largest, self.cross, self.alpha = self.z.new_empty(4, len(self.z))
        self.places = self.local.tolist()
        self.seams = (self.local.diff() != 1).nonzero()[:, 0].tolist()
        if self.label is not None:
            self.label_logit = self.x.gather(1, self.label[:, None])[:, 0]
        if top1_n is not None:
            wanted = top1_n[self.local]
            found = self.x.gather(1, wanted.clamp(min=0)[:, None])[:, 0]
        step = len(self.scratch.few_p)
        for start in range(0, len(self.x), step):
            rows = slice(start, min(start + step, len(self.x)))
            x, both = self.x[rows], self.scratch.few_p[: rows.stop - start]
            torch.amax(x, -1, out=top[rows])
            r = self._of_rows(self.teacher.r, rows, self.scratch.few_r) if KL & set(self.weights) else None
            if r is not None:
                torch.linalg.vecdot(x, r, out=self.cross[rows])
            torch.ops.aten._softmax.out(x, -1, False, out=x)
            torch.amax(x, -1, out=largest[rows])
            torch.minimum(x, self._of_rows(self.teacher.p, rows, both), out=both)
            torch.sum(both, -1, out=self.alpha[rows])
            if r is not None and len(self.weights) == 1 and "kl" in self.weights:
                x.sub_(r)
        self.lse = top - largest.log_()
        self.agree = torch.zeros_like(top)
        if top1_n is not None:
            self.agree = ((found == top) & (wanted >= 0)).to(top.dtype)

    def _of_rows(self, law: torch.Tensor, rows: slice, buffer: torch.Tensor) -> torch.Tensor:
        """p or p/P of rows, without a copy where their target rows follow one another."""
        if bisect_left(self.seams, rows.start) == bisect_left(self.seams, rows.stop - 1):
            return law[self.places[rows.start] : self.places[rows.stop - 1] + 1]
        return torch.index_select(law, 0, self.local[rows], out=buffer[: rows.stop - rows.start])

    def loss_and_gradient(
        self, decay: float, dhead: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weighted loss of each row [m] and its gradient dz [m, D]; adds to dhead."""
        kl_w, tv_w, loss = self._coefficients(decay)
        ce_w = self.weights.get("ce")
        softmax_w = sum((w for w in (kl_w, ce_w) if w is not None), torch.zeros_like(self.alpha))
        if "topk" in self.weights:
            softmax_w = softmax_w + self.weights["topk"] * self.teacher.top_p.sum(-1)[self.local]
        wide = bool(WIDE & set(self.weights)) or (kl_w is not None and len(self.weights) > 1)
        if wide:
            loss = loss + self._wide(softmax_w, kl_w, tv_w)
        dz = self.x @ self.head
        if not wide:
            dz *= softmax_w[:, None]
        if dhead is not None:
            dhead.addmm_(self.x.t(), self.z if wide else self.z * softmax_w[:, None])
        if ce_w is not None and self.label is not None:
            loss = loss + ce_w * (self.lse - self.label_logit)
            dz -= self.head[self.label] * ce_w[:, None]
            if dhead is not None:
                dhead.index_add_(0, self.label, self.z * ce_w[:, None], alpha=-1)
        if "topk" in self.weights:
            loss = loss + self._top(dz, dhead)
        return loss, dz

    def _top(self, dz: torch.Tensor, dhead: torch.Tensor | None) -> torch.Tensor:
        """topk's loss [m], and the part of its gradients that is not the softmax's, added to dz and dhead."""
        t, weight = self.teacher, self.weights["topk"]
        top_row = (self.head[t.top_ids] * t.top_p[..., None]).sum(1)
        dz -= top_row[self.local] * weight[:, None]
        if dhead is not None:
            summed = torch.zeros_like(top_row).index_add_(0, self.local, self.z * weight[:, None])
            parts = t.top_p[..., None] * summed[:, None]
            dhead.index_add_(0, t.top_ids.flatten(), parts.flatten(0, 1), alpha=-1)
        return weight * (t.top_p.sum(-1)[self.local] * self.lse - (top_row[self.local] * self.z).sum(-1))

    def _coefficients(self, decay: float) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
        """Coefficients [m] of the kl and the tv gradient (None where no term needs them), and the loss of
        their terms."""
        weights, alpha = self.weights, self.alpha
        zero = torch.zeros_like(alpha)
        kl_w, tv_w, loss = None, None, zero
        if KL & set(weights):
            kl = self.teacher.negative_entropy[self.local] + self.lse - self.cross
        if "kl" in weights:
            kl_w, loss = weights["kl"], weights["kl"] * kl
        if "tv" in weights:
            tv_w, loss = weights["tv"], loss + weights["tv"] * (1 - alpha)
        if "lk_alpha" in weights:
            floor = alpha.clamp(min=SMALLEST_ALPHA)
            tv_w = (zero if tv_w is None else tv_w) + weights["lk_alpha"] / floor
            loss = loss - weights["lk_alpha"] * floor.log()
        if "lk_lambda" in weights:
            share = alpha.mul(-decay).exp()
            kl_w = (zero if kl_w is None else kl_w) + weights["lk_lambda"] * share
            tv_w = (zero if tv_w is None else tv_w) + weights["lk_lambda"] * (1 - share)
            loss = loss + weights["lk_lambda"] * (share * kl + (1 - share) * (1 - alpha))
        return kl_w, tv_w, loss

    def _wide(
        self, softmax_w: torch.Tensor, kl_w: torch.Tensor | None, tv_w: torch.Tensor | None
    ) -> torch.Tensor:
        """x <- softmax_w q - kl_w p/P + tv_w d(1 - alpha)/dx + the gradients of reverse_kl and jsd, row by
        row; returns the loss of those two [m].

        d alpha / dx_v = q_v ([q_v < p_v] - sum_u q_u [q_u < p_u]);
        d reverse_kl / dx_v = q_v (g_v - sum_u q_u g_u), g = log q - log p/P;
        d jsd / dx_v likewise with g = log(q/m) / 2.
        """
        loss = torch.zeros_like(self.lse)
        for start, stop in self.slots:
            q, p = self.x[start:stop], self._of_rows(self.teacher.p, slice(start, stop), self.scratch.slot_p)
            scale, extra = softmax_w[start:stop], None
            if "reverse_kl" in self.weights:
                weight = self.weights["reverse_kl"][start:stop]
                mass = self.teacher.mass[self.local[start:stop]]
                g = q.clamp(min=SMALLEST).log() - p.clamp(min=SMALLEST).log() + mass.log()[:, None]
                value = (q * g).sum(-1)
                extra = (g - value[:, None]) * q * weight[:, None]
                loss[start:stop] = weight * value
            if "jsd" in self.weights:
                weight = self.weights["jsd"][start:stop]
                r = p / self.teacher.mass[self.local[start:stop], None]
                log_m = ((q + r) / 2).clamp_(min=SMALLEST).log_()
                g = (q.clamp(min=SMALLEST).log() - log_m) / 2
                value = (q * g).sum(-1)
                added = (g - value[:, None]) * q * weight[:, None]
                extra = added if extra is None else extra + added
                value += (r * (r.clamp(min=SMALLEST).log() - log_m)).sum(-1) / 2
                loss[start:stop] += weight * value
            if tv_w is not None:
                below = torch.lt(q, p).to(q.dtype).mul_(q)
                scale = scale + tv_w[start:stop] * below.sum(-1)
                q.mul_(scale[:, None]).sub_(below.mul_(tv_w[start:stop, None]))
            else:
                q.mul_(scale[:, None])
            if kl_w is not None:
                r = torch.index_select(
                    self.teacher.r, 0, self.local[start:stop], out=self.scratch.slot_p[: stop - start]
                )
                q.sub_(r.mul_(kl_w[start:stop, None]))
            if extra is not None:
                q.add_(extra)
        return loss

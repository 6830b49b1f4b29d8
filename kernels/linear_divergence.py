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
by slot inside a chunk of target rows; W is one for all, or each slot has its own (parallel heads). What can
be done on the narrow sides of the products is done there:
with c = sum_v (p_v / P) W_v, one row per target row,
    sum_v (p_v / P) x_v = c z      d kl / dz = sum_v q_v W_v - c      d kl / dW = q z^T - (p / P) z^T
so that kl alone needs no pass over rows x vocabulary besides softmax and alpha; topk is done in the same way.
All is done in the forward. On a GPU `linear_divergence_triton.py` does the same with one kernel between the
products.
Sums have the dtype of z, float32 in training. Knows no family.
Sources: Leviathan et al. 2023 (alpha); lk_alpha and lk_lambda: arXiv 2602.23881; topk: HASS, Zhang et al.
2024, section 3.1, with its 10 ids.
Legend: R rows, M target rows, D drafter state, W kept ids, n target rows of a chunk.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

TERMS = ("ce", "kl", "reverse_kl", "jsd", "tv", "lk_alpha", "lk_lambda", "topk")
TOP = 10
SMALLEST_ALPHA = 1e-8  # keeps 1 / alpha of lk_alpha finite
SMALLEST = 1e-30  # of a probability under a logarithm
MEAN_ROW = frozenset({"kl", "lk_lambda"})  # terms that need the mean row of the head
OVERLAP_CELLS = 2**18  # of rows x kept ids whose overlap is taken at a time: 1 MiB, which stays in the cache


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
        few = max(1, OVERLAP_CELLS // len(heads[0]))
        buffers = [z_RD.new_empty(n, len(heads[0])) for n in (rows, height, most, few)]
        for first, last, slots in blocks:
            law = _TeacherRows(teacher, first, last, buffers[1], set(weights))
            # rows of one head together
            parts = [(0, slots)] if len(heads) == 1 else [(part[0], (part,)) for part in slots]
            for number, part in parts:
                begin, end = part[0][1], part[-1][2]
                here = plan.order[begin:end]
                chunk = _Chunk(
                    z=z_RD[here],
                    head=heads[number],
                    teacher=law,
                    mean_row=law.mean_row(heads[number]) if MEAN_ROW & set(weights) else None,
                    local=plan.local[begin:end] - first,
                    slots=tuple((start - begin, stop - begin) for _, start, stop in part),
                    weights={term: w[here] for term, w in weights.items()},
                    label=None if labels is None else labels[here].clamp(min=0),
                    buffers=buffers,
                )
                chunk.softmax()
                stats["agree"][here] = 0.0 if top1 is None else chunk.agreement(top1[first:last])
                stats["alpha"][here] = alpha = chunk.overlap()
                stats["loss"][here], dz[here] = chunk.loss_and_gradient(alpha, decay, dheads[number])
        ctx.save_for_backward(dz, *dheads)
        return stats["loss"].sum()

    @staticmethod
    def backward(ctx, grad):
        dz, *dheads = ctx.saved_tensors
        if grad != 1:  # a copy of all would be the highest memory of a step
            dz, dheads = dz * grad, [None if dhead is None else dhead * grad for dhead in dheads]
        return dz, None, *dheads


class _TeacherRows:
    """The target's law on the n target rows of a chunk: p [n, W], mass P [n]; if a term needs them, negative
    entropy sum p/P log p/P [n], the TOP likeliest kept ids [n, k] and their p."""

    def __init__(self, teacher: Teacher, first: int, last: int, buffer: torch.Tensor, terms: set[str]):
        log_p = teacher.logits(first, last, buffer[: last - first])
        self.p = p = log_p.exp() if MEAN_ROW & terms else log_p.exp_()
        self.mass = p.sum(-1).clamp(min=SMALLEST)
        if MEAN_ROW & terms:
            self.negative_entropy = log_p.mul_(p).nan_to_num_(nan=0.0).sum(-1) / self.mass - self.mass.log()
        if "topk" in terms:
            self.top_p, self.top_ids = p.topk(min(TOP, p.shape[1]))

    def mean_row(self, head_WD: torch.Tensor) -> torch.Tensor:
        """c [n, D], the mean row of a head."""
        return (self.p @ head_WD).div_(self.mass[:, None])


@dataclass
class _Chunk:
    """Rows of one chunk that share a head. z [m, D]; mean_row [n, D]: c, where a term needs it; local [m]
    target row of each; slots: row ranges with one slot each; buffers: scratch of [rows, W]. x holds the
    logits, then q, then what multiplies the head for the gradient."""

    z: torch.Tensor
    head: torch.Tensor
    teacher: _TeacherRows
    mean_row: torch.Tensor | None
    local: torch.Tensor
    slots: tuple[tuple[int, int], ...]
    weights: dict[str, torch.Tensor]
    label: torch.Tensor | None
    buffers: list[torch.Tensor]

    def softmax(self) -> None:
        """Fill x with q; keep log-sum-exp, the largest q and the label's logit."""
        self.x = x = torch.mm(self.z, self.head.t(), out=self.buffers[0][: len(self.z)])
        top = x.amax(-1)
        if self.label is not None:
            self.label_logit = x.gather(1, self.label[:, None])[:, 0]
        torch.ops.aten._softmax.out(x, -1, False, out=x)
        self.largest = x.amax(-1)
        self.lse = top - torch.log(self.largest)

    def agreement(self, top1_n: torch.Tensor) -> torch.Tensor:
        """1 where the target's arg-max has the largest q, 0 elsewhere and where it is not kept (-1)."""
        wanted = top1_n[self.local]
        found = self.x.gather(1, wanted.clamp(min=0)[:, None])[:, 0]
        return ((found == self.largest) & (wanted >= 0)).to(self.x.dtype)

    def law(self, start: int, stop: int, buffer: torch.Tensor) -> torch.Tensor:
        """p of rows start .. stop - 1, without a copy where their target rows follow one another."""
        local = self.local[start:stop]
        first, count = int(local[0]), stop - start
        if torch.equal(local, torch.arange(first, first + count, device=local.device)):
            return self.teacher.p[first : first + count]
        return torch.index_select(self.teacher.p, 0, local, out=buffer[:count])

    def overlap(self) -> torch.Tensor:
        """sum min(p, q) of each row; the equal 1 - |q - p| / 2 loses its digits where alpha is small."""
        alpha, buffer = torch.empty_like(self.lse), self.buffers[3]
        for begin, end in self.slots:
            for start in range(begin, end, len(buffer)):
                stop = min(start + len(buffer), end)
                both = buffer[: stop - start]
                torch.minimum(self.x[start:stop], self.law(start, stop, buffer), out=both)
                torch.sum(both, -1, out=alpha[start:stop])
        return alpha

    def loss_and_gradient(
        self, alpha: torch.Tensor, decay: float, dhead: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weighted loss of each row [m] and its gradient dz [m, D]; adds to dhead."""
        kl_w, tv_w, loss = self._coefficients(alpha, decay)
        ce_w = self.weights.get("ce")
        softmax_w = sum((w for w in (kl_w, ce_w) if w is not None), torch.zeros_like(alpha))
        if "topk" in self.weights:
            softmax_w = softmax_w + self.weights["topk"] * self.teacher.top_p.sum(-1)[self.local]
        wide = tv_w is not None or bool({"reverse_kl", "jsd"} & set(self.weights))
        if wide:
            loss = loss + self._wide(softmax_w, tv_w)
        dz = self.x @ self.head
        if not wide:
            dz *= softmax_w[:, None]
        if dhead is not None:
            dhead.addmm_(self.x.t(), self.z if wide else self.z * softmax_w[:, None])
        if self.mean_row is not None:
            dz -= self.mean_row[self.local] * kl_w[:, None]
        if self.mean_row is not None and dhead is not None:
            kl_z = self.z * (kl_w / self.teacher.mass[self.local])[:, None]
            summed = torch.zeros_like(self.mean_row).index_add_(0, self.local, kl_z)
            dhead.addmm_(self.teacher.p.t(), summed, alpha=-1)
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

    def _coefficients(
        self, alpha: torch.Tensor, decay: float
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
        """Coefficients [m] of the kl and the tv gradient (None where no term needs them), and the loss of
        their terms."""
        weights, local = self.weights, self.local
        zero = torch.zeros_like(alpha)
        kl_w, tv_w, loss = None, None, zero
        if self.mean_row is not None:
            kl = self.teacher.negative_entropy[local] + self.lse - (self.mean_row[local] * self.z).sum(-1)
            kl_w = zero
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
            kl_w = kl_w + weights["lk_lambda"] * share
            tv_w = (zero if tv_w is None else tv_w) + weights["lk_lambda"] * (1 - share)
            loss = loss + weights["lk_lambda"] * (share * kl + (1 - share) * (1 - alpha))
        return kl_w, tv_w, loss

    def _wide(self, softmax_w: torch.Tensor, tv_w: torch.Tensor | None) -> torch.Tensor:
        """x <- softmax_w q + tv_w d(1 - alpha)/dx + the gradients of reverse_kl and jsd, row by row; returns
        the loss of those two [m].

        d alpha / dx_v = q_v ([q_v < p_v] - sum_u q_u [q_u < p_u]);
        d reverse_kl / dx_v = q_v (g_v - sum_u q_u g_u), g = log q - log p/P;
        d jsd / dx_v likewise with g = log(q/m) / 2.
        """
        loss = torch.zeros_like(self.lse)
        for start, stop in self.slots:
            q, p = self.x[start:stop], self.law(start, stop, self.buffers[2])
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
            if extra is not None:
                q.add_(extra)
        return loss

"""Divergence between a drafter's and the target's law straight from states and heads, gradients formed in the forward.

    x_r = W z_r                       drafter logits over the W kept ids,  q = softmax(x)
    p   = exp(W_target s - lse)       the target's law over its full vocabulary, read at the kept ids; P = sum p <= 1
    kl  = sum p/P (log p/P - log q)   reverse_kl = sum q (log q - log p/P)   ce = -log q(label)
    alpha = sum min(p, q)             tv = 1 - alpha      lk_alpha = -log alpha
    lk_lambda = w kl + (1 - w) tv,    w = exp(-decay * alpha), w without gradient

Several rows share one target row (the slots of an unroll): its law is computed once per chunk and never stored for more than
a chunk, so the extra memory is independent of rows x vocabulary. Rows are handled slot by slot inside a chunk of target rows.
Only a gradient scale per row enters the large matrices; row weights are applied to the narrow sides of the products.
Reductions are float32. Knows no family. Sources: Leviathan et al. 2023 (alpha), LK losses as in reference drafters' repositories.
Legend: R rows, M target rows, D drafter state, W kept ids, n target rows of a chunk.
"""

from dataclasses import dataclass

import torch

TERMS = ("ce", "kl", "reverse_kl", "tv", "lk_alpha", "lk_lambda")
SMALLEST_ALPHA = 1e-8


@dataclass(frozen=True)
class Teacher:
    """The target's side. state [M, Dt] after the final norm; lse [M] over the full vocabulary; head [W, Dt], the target's
    head rows at the kept ids; adjust: the target's own scaling and soft cap of raw logits."""

    state: torch.Tensor
    lse: torch.Tensor
    head: torch.Tensor
    adjust: object = None

    def logits(self, first: int, last: int, out: torch.Tensor) -> torch.Tensor:
        """log p at the kept ids for target rows first .. last - 1, float32 [n, W], written to `out`."""
        out = torch.mm(self.state[first:last].float(), self.head.t(), out=out)
        out = out if self.adjust is None else self.adjust(out)
        return out.sub_(self.lse[first:last, None])


@dataclass(frozen=True)
class Plan:
    """Rows in the order of work. order [R]: slot-major within chunks of target rows; blocks: for each chunk
    (first target row, last, [(slot, start, stop) into `order`]); local [R]: target row of each ordered row."""

    order: torch.Tensor
    local: torch.Tensor
    blocks: tuple


def plan_rows(source_R: torch.Tensor, slot_R: torch.Tensor, num_sources: int, chunk: int) -> Plan:
    """Order rows by (chunk of target rows, slot, target row). source_R: index of each row's target row, 0 .. M - 1."""
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
    head_WD: torch.Tensor,
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

    z_RD float32; source_R index into the teacher's M rows; weights: term -> [R] (0 = not counted), already divided by
    counts; label_R: index into the kept ids, -1 where the label is not kept (then its ce weight must be 0);
    top1_M: index of the target's arg-max in the kept ids, -1 where not kept.
    Returns the scalar loss and {"alpha", "agree", "loss"}, float32 [R] without gradient (loss: the row's share).
    """
    assert set(weights) <= set(TERMS), f"terms {sorted(weights)}"
    plan = plan_rows(source_R, slot_R, len(teacher.state), chunk)
    order = plan.order
    stats = {name: torch.empty(len(order)) for name in ("alpha", "agree", "loss")}
    ordered = {term: w[order] for term, w in weights.items()}
    labels = None if label_R is None else label_R[order]
    args = (plan, teacher, ordered, labels, top1_M, lambda_decay, stats)
    loss = _LinearDivergence.apply(z_RD[order], head_WD, args)
    unsorted = {name: torch.empty_like(value).index_copy_(0, order, value) for name, value in stats.items()}
    return loss, unsorted


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z_RD, head_WD, args):
        plan, teacher, weights, labels, top1, decay, stats = args
        dz = torch.empty_like(z_RD)
        dhead = torch.zeros_like(head_WD) if ctx.needs_input_grad[1] else None
        rows = max(slots[-1][2] - slots[0][1] for _, _, slots in plan.blocks if slots)
        height = max(last - first for first, last, _ in plan.blocks)
        x_buffer = z_RD.new_empty(rows, len(head_WD))
        p_buffer = z_RD.new_empty(height, len(head_WD))
        most = max(stop - start for _, _, slots in plan.blocks for _, start, stop in slots)
        scratch = z_RD.new_empty(most, len(head_WD))
        for first, last, slots in plan.blocks:
            if not slots:
                continue
            p = teacher.logits(first, last, p_buffer[: last - first])
            mass = p.exp_().sum(-1)
            begin, end = slots[0][1], slots[-1][2]
            z = z_RD[begin:end]
            x_all = torch.mm(z, head_WD.t(), out=x_buffer[: end - begin])
            for _, start, stop in slots:
                local = plan.local[start:stop] - first
                whole = len(local) == last - first and bool((local == torch.arange(len(local), device=local.device)).all())
                part = {term: w[start:stop] for term, w in weights.items()}
                chunk = _Chunk(
                    x=x_all[start - begin : stop - begin],
                    p=p if whole else torch.index_select(p, 0, local, out=scratch[: stop - start]),
                    mass=mass[local],
                    label=None if labels is None else labels[start:stop],
                    top1=None if top1 is None else top1[first:last][local],
                )
                stats["loss"][start:stop] = chunk.run(part, decay)
                stats["alpha"][start:stop], stats["agree"][start:stop] = chunk.alpha, chunk.agree
            torch.mm(x_all, head_WD, out=dz[begin:end])
            if dhead is not None:
                dhead.addmm_(x_all.t(), z)
        ctx.save_for_backward(dz, dhead)
        return stats["loss"].sum()

    @staticmethod
    def backward(ctx, grad):
        dz, dhead = ctx.saved_tensors
        return dz * grad, None if dhead is None else dhead * grad, None


@dataclass
class _Chunk:
    """Rows of one slot over one chunk: x [m, W] logits in, d(weighted loss)/dx out; p [m, W], mass [m] = P."""

    x: torch.Tensor
    p: torch.Tensor
    mass: torch.Tensor
    label: torch.Tensor | None
    top1: torch.Tensor | None
    alpha: torch.Tensor | None = None
    agree: torch.Tensor | None = None

    def run(self, weights: dict[str, torch.Tensor], decay: float) -> torch.Tensor:
        """Weighted loss of each row [m]; replaces x by its gradient and sets alpha and agree."""
        x, p, mass = self.x, self.p, self.mass
        top, best = x.max(-1)
        self.agree = torch.zeros_like(top) if self.top1 is None else (best == self.top1).float()
        needs_kl = bool({"kl", "lk_lambda"} & set(weights))
        # sum p/P x, before x turns into q; a batched product reads both once
        cross = torch.bmm(p[:, None], x[:, :, None]).flatten() / mass if needs_kl else None
        label_logit = None if "ce" not in weights else x.gather(1, self.label.clamp(min=0)[:, None])[:, 0]
        log_norm = self._softmax(x, top, best)
        q = x
        gap = torch.sub(q, p)
        self.alpha = (0.5 * (mass + 1 - torch.linalg.vector_norm(gap, ord=1, dim=-1))).clamp_(min=0)
        kl_w, tv_w, loss = self._mix(weights, decay, cross, log_norm)
        if "ce" in weights:
            loss = loss + weights["ce"] * (log_norm - label_logit)
        extra = self._reverse_kl(q, weights["reverse_kl"]) if "reverse_kl" in weights else None
        self._gradient(q, gap, kl_w, tv_w, weights.get("ce"))
        if extra is not None:
            x.add_(extra[0])
            loss = loss + extra[1]
        return loss

    @staticmethod
    def _softmax(x, top, best):
        """Turn x into softmax(x) in place; returns the log-sum-exp [m]."""
        torch.ops.aten._softmax.out(x, -1, False, out=x)
        return top - torch.log(x.gather(1, best[:, None])[:, 0])

    def _mix(self, weights, decay, cross, log_norm):
        """Coefficients of the kl and the tv gradient, and the loss of the terms made of them."""
        zero = torch.zeros_like(self.alpha)
        kl_w, tv_w = weights.get("kl", zero), weights.get("tv", zero)
        loss = tv_w * (1 - self.alpha)
        if "lk_alpha" in weights:
            alpha = self.alpha.clamp(min=SMALLEST_ALPHA)
            loss = loss - weights["lk_alpha"] * alpha.log()
            tv_w = tv_w + weights["lk_alpha"] / alpha
        if cross is not None:
            # sum p/P log(p/P), with 0 log 0 = 0
            entropy = torch.special.xlogy(self.p, self.p).sum(-1) / self.mass - self.mass.log()
            kl = entropy + log_norm - cross
            if "lk_lambda" in weights:
                share = torch.exp(-decay * self.alpha)
                kl_w = kl_w + weights["lk_lambda"] * share
                tv_w = tv_w + weights["lk_lambda"] * (1 - share)
                loss = loss + weights["lk_lambda"] * (share * kl + (1 - share) * (1 - self.alpha))
            if "kl" in weights:
                loss = loss + weights["kl"] * kl
        return kl_w, tv_w, loss

    def _gradient(self, q, gap, kl_w, tv_w, ce_w):
        """x <- kl_w (q - p/P) + tv_w d(1 - alpha)/dx + ce_w (q - onehot).

        d alpha / dx_v = q_v ([q_v < p_v] - sum_u q_u [q_u < p_u]).
        """
        if bool((tv_w != 0).any()):
            below = (gap < 0).float().mul_(q)
            inner = below.sum(-1)
            scale = kl_w + tv_w * inner if ce_w is None else kl_w + tv_w * inner + ce_w
            q.mul_(scale[:, None]).sub_(below.mul_(tv_w[:, None]))
        else:
            q.mul_((kl_w if ce_w is None else kl_w + ce_w)[:, None])
        if bool((kl_w != 0).any()):
            q.addcmul_(self.p, (-kl_w / self.mass)[:, None])
        if ce_w is not None:
            q.scatter_add_(1, self.label.clamp(min=0)[:, None], -ce_w[:, None])

    def _reverse_kl(self, q, weight):
        """(gradient [m, W], weighted loss [m]) of sum q (log q - log p/P); d/dx = q (g - sum q g), g = log q - log p/P."""
        g = q.clamp(min=1e-30).log() - self.p.clamp(min=1e-30).log() + self.mass.log()[:, None]
        value = (q * g).sum(-1)
        return (g - value[:, None]) * q * weight[:, None], weight * value

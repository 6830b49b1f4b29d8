"""Attention of a training-time-test unroll: causal over step 0, plus the row's own key of each later step.

At step k, the query of row i sees the step-0 keys 0 .. i of its document and its own column's keys of steps 1 .. k
(EAGLE-3, section 3.1 "training-time test"). Drawn for 4 rows, k = 2; columns: step 0, step 1, step 2:
    1000 1000 1000
    1100 0100 0100
    1110 0010 0010
    1111 0001 0001
No S x S and no S x kS tensor exists: queries come in runs of consecutive rows, a run's keys split into those before it (all
seen) and its own square (causal), and the parts are merged with the diagonal terms by their log-sum-exp. The backward of a
part needs only the merged output and log-sum-exp, so it is exact. Accumulation is float32.
Legend: H query heads, G key/value heads, N queries, S step-0 keys, K head dim, n later steps.
"""

from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Run:
    """Queries first .. first + count - 1 (rows of the query tensor) at step-0 rows row .. row + count - 1 of a document
    that begins at step-0 row `begin`."""

    first: int
    count: int
    row: int
    begin: int


def ttt_attention(
    q_HNK: torch.Tensor,
    k_GSK: torch.Tensor,
    v_GSK: torch.Tensor,
    own_k_nGNK: torch.Tensor | None,
    own_v_nGNK: torch.Tensor | None,
    runs: tuple[Run, ...],
    scale: float,
) -> torch.Tensor:
    """Output [H, N, K] for N queries; own_*: keys and values of the same rows at steps 1 .. n (None at step 0)."""
    assert sum(run.count for run in runs) == q_HNK.shape[1], "runs must cover the queries"
    if q_HNK.device.type == "cpu":
        return _TTTAttention.apply(q_HNK, k_GSK, v_GSK, own_k_nGNK, own_v_nGNK, runs, scale)
    return reference(q_HNK, k_GSK, v_GSK, own_k_nGNK, own_v_nGNK, runs, scale)


def reference(q_HNK, k_GSK, v_GSK, own_k_nGNK, own_v_nGNK, runs, scale):
    """The same in plain torch with a dense mask per run; every device, any dtype."""
    group = q_HNK.shape[0] // k_GSK.shape[0]
    k, v = (t.repeat_interleave(group, 0) for t in (k_GSK, v_GSK))
    outs = []
    for run in runs:
        q = q_HNK[:, run.first : run.first + run.count]
        last = run.row + run.count
        scores = q @ k[:, run.begin : last].transpose(1, 2) * scale
        rows = torch.arange(run.row, last, device=q.device)[:, None]
        scores = scores.masked_fill(torch.arange(run.begin, last, device=q.device) > rows, float("-inf"))
        values = v[:, run.begin : last]
        if own_k_nGNK is None:
            outs.append(torch.softmax(scores, -1) @ values)
            continue
        own_k, own_v = (
            t[:, :, run.first : run.first + run.count].repeat_interleave(group, 1) for t in (own_k_nGNK, own_v_nGNK)
        )
        own = torch.einsum("hik,nhik->hin", q, own_k) * scale
        weights = torch.softmax(torch.cat((scores, own), -1), -1)
        base = weights[..., : scores.shape[-1]] @ values
        outs.append(base + torch.einsum("hin,nhik->hik", weights[..., scores.shape[-1] :], own_v))
    return torch.cat(outs, 1)


def _flash(*args, **kwargs):
    with _float32_products():
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*args, **kwargs)


def _flash_backward(*args, **kwargs):
    with _float32_products():
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*args, **kwargs)


@contextmanager
def _float32_products():
    """Under bfloat16 products, torch's fused attention on CPU is 10 times slower in float32 (6.6 against 0.7 ms for 9 heads of
    140 x 140 x 64, Xeon with AMX, torch 2.13, 2026-11-29), so they are switched off around it."""
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _parts(run: Run):
    """(key slice, causal) of a run: everything before it, then its own square."""
    if run.row > run.begin:
        yield slice(run.begin, run.row), False
    yield slice(run.row, run.row + run.count), True


class _TTTAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, own_k, own_v, runs, scale):
        H, N, K = q.shape
        group = H // k.shape[0]
        k_H, v_H = (t.repeat_interleave(group, 0) for t in (k, v))
        own_s = None if own_k is None else _own_scores(q, own_k, scale)  # [H, N, n]
        out = torch.empty_like(q)
        lse = q.new_empty(H, N)
        for run in runs:
            here = slice(run.first, run.first + run.count)
            pieces = [
                _flash(q[None, :, here], k_H[None, :, keys], v_H[None, :, keys], 0.0, causal, scale=scale)
                for keys, causal in _parts(run)
            ]
            logs = [piece_lse[0] for _, piece_lse in pieces]
            if own_s is not None:
                logs.append(torch.logsumexp(own_s[:, here], -1))
            total = logs[0] if len(logs) == 1 else torch.logsumexp(torch.stack(logs), 0)
            merged = sum(o[0] * (log - total).exp()[..., None] for (o, _), log in zip(pieces, logs, strict=False))
            out[:, here], lse[:, here] = merged, total
        if own_s is not None:
            weights = (own_s - lse[..., None]).exp()
            out += _own_mix(weights, own_v)
        ctx.save_for_backward(q, k, v, own_k, own_v, out, lse)
        ctx.runs, ctx.scale = runs, scale
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, own_k, own_v, out, lse = ctx.saved_tensors
        runs, scale = ctx.runs, ctx.scale
        H, N, K = q.shape
        G = k.shape[0]
        group = H // G
        grad = grad.contiguous()
        k_H, v_H = (t.repeat_interleave(group, 0) for t in (k, v))
        dq = torch.zeros_like(q)
        dk_H, dv_H = torch.zeros_like(k_H), torch.zeros_like(v_H)
        for run in runs:
            here = slice(run.first, run.first + run.count)
            # the kernel's backward reads the log-sum-exp in the layout that its forward returns: heads innermost
            log = lse[None, :, here].transpose(1, 2).contiguous().transpose(1, 2)
            for keys, causal in _parts(run):
                dq_part, dk_part, dv_part = _flash_backward(
                    grad[None, :, here], q[None, :, here], k_H[None, :, keys], v_H[None, :, keys],
                    out[None, :, here], log, 0.0, causal, scale=scale,
                )  # fmt: skip
                dq[:, here] += dq_part[0]
                dk_H[:, keys] += dk_part[0]
                dv_H[:, keys] += dv_part[0]
        dk, dv = (t.view(G, group, -1, K).sum(1) for t in (dk_H, dv_H))
        if own_k is None:
            return dq, dk, dv, None, None, None, None
        weights = (_own_scores(q, own_k, scale) - lse[..., None]).exp()
        n = own_k.shape[0]
        by_group = (G, group, N)
        g, o, qg, w = grad.view(*by_group, K), out.view(*by_group, K), q.view(*by_group, K), weights.view(*by_group, n)
        d_scores = torch.einsum("ghik,ngik->ghin", g, own_v) - (g * o).sum(-1, keepdim=True)
        d_scores = d_scores * w * scale
        dq += torch.einsum("ghin,ngik->ghik", d_scores, own_k).reshape(H, N, K)
        d_own_k = torch.einsum("ghin,ghik->ngik", d_scores, qg)
        d_own_v = torch.einsum("ghin,ghik->ngik", w, g)
        return dq, dk, dv, d_own_k, d_own_v, None, None


def _own_scores(q_HNK, own_k_nGNK, scale):
    """[H, N, n]: each query against its own row's keys."""
    n, G, N, K = own_k_nGNK.shape
    q = q_HNK.view(G, -1, N, K)
    return torch.einsum("ghik,ngik->ghin", q, own_k_nGNK).mul_(scale).reshape(q_HNK.shape[0], N, n)


def _own_mix(weights_HNn, own_v_nGNK):
    """[H, N, K]: own values weighted."""
    n, G, N, K = own_v_nGNK.shape
    return torch.einsum("ghin,ngik->ghik", weights_HNn.view(G, -1, N, n), own_v_nGNK).reshape(-1, N, K)

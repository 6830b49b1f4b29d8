"""Attention of a training-time-test unroll: causal over step 0, plus the row's own key of each later step.

At step k, the query of row i sees the step-0 keys 0 .. i of its document and its own column's keys of steps
1 .. k (EAGLE-3, section 3.1 "training-time test"). Drawn for 4 rows, k = 2; columns: step 0, step 1, step 2:
    1000 1000 1000
    1100 0100 0100
    1110 0010 0010
    1111 0001 0001
No S x S and no S x kS tensor exists: queries come in runs of consecutive rows, a run's keys split into those
before it (all seen) and its own square (causal), and the parts are merged with the diagonal terms by their
log-sum-exp. The backward of a part needs only the merged output and log-sum-exp, so it is exact. Accumulation
is float32. On a GPU `ttt_attention_triton.py` does it in one pass per block of queries.
Legend: H query heads, G key/value heads, N queries, S step-0 keys, K head dim, n later steps.
"""

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Run:
    """Queries first .. first + count - 1 (rows of the query tensor) at step-0 rows row .. row + count - 1 of
    a document that begins at step-0 row `begin`."""

    first: int
    count: int
    row: int
    begin: int


@dataclass(frozen=True)
class Own:
    """What the rows of one later step offer to themselves: keys and values [G, M, K], and for each query the
    place of its row among the M, int64 [N]."""

    keys: torch.Tensor
    values: torch.Tensor
    places: torch.Tensor


def ttt_attention(
    q_HNK: torch.Tensor,
    k_GSK: torch.Tensor,
    v_GSK: torch.Tensor,
    own: Sequence[Own],
    runs: Sequence[Run],
    scale: float,
) -> torch.Tensor:
    """Output [H, N, K] for N queries; own: steps 1 .. n, of which the last is the queries' own. runs: in the
    order of their rows."""
    assert sum(run.count for run in runs) == q_HNK.shape[1], "runs must cover the queries"
    places = [o.places for o in own]
    tensors = [t for o in own for t in (o.keys, o.values)]
    return form(q_HNK.device).apply(runs, scale, places, q_HNK, k_GSK, v_GSK, *tensors)


def form(device: torch.device) -> type[torch.autograd.Function]:
    """What computes it on a device."""
    if device.type == "cuda":
        from spectrain.kernels.ttt_attention_triton import TTTAttention

        return TTTAttention
    return _TTTAttention


def reference(q_HNK, k_GSK, v_GSK, own, runs, scale):
    """The same in plain torch with a dense mask per run, for the tests."""
    group = q_HNK.shape[0] // k_GSK.shape[0]
    k, v = (t.repeat_interleave(group, 0) for t in (k_GSK, v_GSK))
    outs = []
    for run in runs:
        here = slice(run.first, run.first + run.count)
        keys = slice(run.begin, run.row + run.count)
        rows = torch.arange(run.row, run.row + run.count, device=k.device)[:, None]
        scores = [q_HNK[:, here] @ k[:, keys].transpose(1, 2) * scale]
        scores[0] = scores[0].masked_fill(
            torch.arange(keys.start, keys.stop, device=k.device) > rows, -torch.inf
        )
        own_v = []
        for step in own:
            own_k, step_v = (
                t[:, step.places[here]].repeat_interleave(group, 0) for t in (step.keys, step.values)
            )
            scores.append((q_HNK[:, here] * own_k).sum(-1, keepdim=True) * scale)
            own_v.append(step_v)
        first, *rest = torch.softmax(torch.cat(scores, -1), -1).split(
            [keys.stop - keys.start] + [1] * len(own), -1
        )
        outs.append(first @ v[:, keys] + sum(w * step_v for w, step_v in zip(rest, own_v, strict=True)))
    return torch.cat(outs, 1)


def _flash(*args, **kwargs):
    with _float32_products():
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*args, **kwargs)


def _flash_backward(*args, **kwargs):
    with _float32_products():
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*args, **kwargs)


@contextmanager
def _float32_products():
    """Under bfloat16 products, torch's fused attention on CPU is 10 times slower in float32 (6.6 against 0.7
    ms for 9 heads of 140 x 140 x 64, Xeon with AMX, torch 2.13, 2026-11-29), so they are switched off around
    it."""
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
    """Keeps its inputs, output and log-sum-exp; keys are repeated and stacked for the length of a call."""

    @staticmethod
    def forward(ctx, runs, scale, places, q, k, v, *own):
        H, N, K = q.shape
        group = H // k.shape[0]
        k_H, v_H = (t.repeat_interleave(group, 0) for t in (k, v))
        own_s = _own_scores(q, _stacked(own[::2], places), scale) if own else None
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
            merged = sum(
                o[0] * (log - total).exp()[..., None] for (o, _), log in zip(pieces, logs, strict=False)
            )
            out[:, here], lse[:, here] = merged, total
        if own_s is not None:
            out += _own_mix((own_s - lse[..., None]).exp(), _stacked(own[1::2], places))
        ctx.save_for_backward(q, k, v, out, lse, *own)
        ctx.runs, ctx.scale, ctx.places = runs, scale, places
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse, *own = ctx.saved_tensors
        H, _, K = q.shape
        G = k.shape[0]
        grad = grad.contiguous()
        k_H, v_H = (t.repeat_interleave(H // G, 0) for t in (k, v))
        dq, dk_H, dv_H = torch.zeros_like(q), torch.zeros_like(k_H), torch.zeros_like(v_H)
        for run in ctx.runs:
            here = slice(run.first, run.first + run.count)
            # the kernel's backward reads the log-sum-exp as its forward lays it out: heads innermost
            log = lse[None, :, here].transpose(1, 2).contiguous().transpose(1, 2)
            for keys, causal in _parts(run):
                dq_part, dk_part, dv_part = _flash_backward(
                    grad[None, :, here], q[None, :, here], k_H[None, :, keys], v_H[None, :, keys],
                    out[None, :, here], log, 0.0, causal, scale=ctx.scale,
                )  # fmt: skip
                dq[:, here] += dq_part[0]
                dk_H[:, keys] += dk_part[0]
                dv_H[:, keys] += dv_part[0]
        dk, dv = (t.view(G, H // G, -1, K).sum(1) for t in (dk_H, dv_H))
        d_own = _own_backward(grad, q, out, lse, own, ctx.places, ctx.scale, dq) if own else ()
        return None, None, None, dq, dk, dv, *d_own


def _own_backward(grad, q, out, lse, own, places, scale, dq) -> list[torch.Tensor]:
    """Gradients of the own keys and values, in the order of `own`; adds to dq."""
    keys, values = _stacked(own[::2], places), _stacked(own[1::2], places)
    G = keys.shape[1]
    weights = (_own_scores(q, keys, scale) - lse[..., None]).exp()
    g, o, q, w = (t.view(G, -1, *t.shape[1:]) for t in (grad, out, q, weights))
    d_scores = torch.einsum("ghik,ngik->ghin", g, values) - (g * o).sum(-1, keepdim=True)
    d_scores *= w * scale
    dq += torch.einsum("ghin,ngik->ghik", d_scores, keys).flatten(0, 1)
    d_keys = torch.einsum("ghin,ghik->ngik", d_scores, q)
    d_values = torch.einsum("ghin,ghik->ngik", w, g)
    found = []
    for i, place in enumerate(places):
        for tensor, rows in ((own[2 * i], d_keys[i]), (own[2 * i + 1], d_values[i])):
            found.append(torch.zeros_like(tensor).index_copy_(1, place, rows))
    return found


def _stacked(tensors_GMK, places) -> torch.Tensor:
    """[n, G, N, K]: the rows of each step that the queries read."""
    return torch.stack([t.index_select(1, place) for t, place in zip(tensors_GMK, places, strict=True)])


def _own_scores(q_HNK, own_k_nGNK, scale):
    """[H, N, n]: each query against its own row's keys."""
    n, G, N, K = own_k_nGNK.shape
    q = q_HNK.view(G, -1, N, K)
    return torch.einsum("ghik,ngik->ghin", q, own_k_nGNK).mul_(scale).reshape(q_HNK.shape[0], N, n)


def _own_mix(weights_HNn, own_v_nGNK):
    """[H, N, K]: own values weighted."""
    n, G, N, K = own_v_nGNK.shape
    return torch.einsum("ghin,ngik->ghik", weights_HNn.view(G, -1, N, n), own_v_nGNK).reshape(-1, N, K)

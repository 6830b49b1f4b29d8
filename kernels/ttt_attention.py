"""Attention of a training-time-test unroll: causal over step 0, plus the row's own key of each later step.

At step k, the query of row i sees the step-0 keys 0 .. i of its document and its own column's keys of steps
1 .. k (EAGLE-3, section 3.1 "training-time test"). Drawn for 4 rows, k = 2; columns: step 0, step 1, step 2:
    1000 1000 1000
    1100 0100 0100
    1110 0010 0010
    1111 0001 0001
No S x S and no S x kS tensor exists: queries come in runs of consecutive rows, a run is done in blocks of
BLOCK queries, whose scores and their own rows' share one softmax. The backward forms a block's scores again
and needs the output and the log-sum-exp alone. Sums have the dtype of the inputs, float32 in training. On a
GPU `ttt_attention_triton.py` does it in one pass per block of queries.
Legend: H query heads, G key/value heads, N queries, S step-0 keys, K head dim, n later steps.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

# Queries of a block, and the most scores of a block on CPU unless one key/value head has more. Half or twice
# of either is within 5% (Xeon, 2 MiB of L2; docs/log.md, 2026-11-30).
BLOCK = 64
CACHED = 2**19


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
    place of its row among the M, int64 [N], rising."""

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


@contextmanager
def _float32_products():
    """Under bfloat16 products a block's are slower than in float32 (forward and backward of 9 heads on 2,000
    tokens in 40 documents: 53 against 34 ms, Xeon with AMX, torch 2.13, 2026-11-30): they are off here."""
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _blocks(runs: Sequence[Run], H: int, G: int) -> Iterator[tuple[slice, slice, slice]]:
    """(key/value heads, queries, keys) of each block; its last query sees all its keys."""
    for run in runs:
        for start in range(0, run.count, BLOCK):
            stop = min(start + BLOCK, run.count)
            queries = slice(run.first + start, run.first + stop)
            keys = slice(run.begin, run.row + stop)
            scores = H // G * (stop - start) * (keys.stop - keys.start)
            heads = max(1, CACHED // scores)
            for head in range(0, G, heads):
                yield slice(head, head + heads), queries, keys


def _scores(q, k, heads: slice, queries: slice, keys: slice) -> torch.Tensor:
    """[heads, H/G, queries, keys] of q [G, H/G, N, K], scaled before, and k [G, S, K], -inf above the
    diagonal that ends in the last corner."""
    q = q[heads, :, queries]
    scores = torch.bmm(q.flatten(1, 2), k[heads, keys].transpose(1, 2)).unflatten(1, q.shape[1:3])
    n = q.shape[2]
    scores[..., -n:] += torch.full((n, n), -torch.inf, dtype=q.dtype).triu_(1)
    return scores


class _TTTAttention(torch.autograd.Function):
    """Keeps its inputs, output and log-sum-exp. A name's 4 says that heads are [G, H/G]."""

    @staticmethod
    @_float32_products()
    def forward(ctx, runs, scale, places, q, k, v, *own):
        assert q.dtype in (torch.float32, torch.float64), q.dtype
        H, G = len(q), len(k)
        keys_own, values_own = _taken(own[::2], places), _taken(own[1::2], places)
        q4 = (q * scale).unflatten(0, (G, -1))
        own4 = _own_scores(q4, keys_own)
        out, lse = torch.empty_like(q), torch.empty_like(q[..., 0])
        out4, lse4 = (t.unflatten(0, (G, -1)) for t in (out, lse))
        for heads, queries, keys in _blocks(runs, H, G):
            p = _scores(q4, k, heads, queries, keys)
            own_p = own4[heads, :, queries]
            top = p.amax(-1, keepdim=True)
            if own:
                top = torch.maximum(top, own_p.amax(-1, keepdim=True))
            total = p.sub_(top).exp_().sum(-1, keepdim=True) + (own_p - top).exp_().sum(-1, keepdim=True)
            mixed = torch.bmm(p.flatten(1, 2), v[heads, keys]).unflatten(1, p.shape[1:3])
            torch.div(mixed, total, out=out4[heads, :, queries])
            lse4[heads, :, queries] = (top + total.log_())[..., 0]
        weights4 = own4.sub_(lse4[..., None]).exp_()
        for i, value in enumerate(values_own):
            out4.addcmul_(weights4[..., i, None], value[:, None])
        ctx.save_for_backward(q, k, v, out, lse, *own)
        ctx.runs, ctx.scale, ctx.places = runs, scale, places
        return out

    @staticmethod
    @_float32_products()
    def backward(ctx, grad):
        q, k, v, out, lse, *own = ctx.saved_tensors
        H, G = len(q), len(k)
        delta = torch.linalg.vecdot(grad, out)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        q4, grad4, dq4, lse4, delta4 = (
            t.unflatten(0, (G, -1)) for t in (q * ctx.scale, grad, dq, lse, delta)
        )
        for heads, queries, keys in _blocks(ctx.runs, H, G):
            p = _scores(q4, k, heads, queries, keys).sub_(lse4[heads, :, queries, None]).exp_()
            here = grad4[heads, :, queries].flatten(1, 2)
            dv[heads, keys] += torch.bmm(p.flatten(1, 2).transpose(1, 2), here)
            d = torch.bmm(here, v[heads, keys].transpose(1, 2)).view_as(p)
            d = d.sub_(delta4[heads, :, queries, None]).mul_(p).flatten(1, 2)
            dq4[heads, :, queries] = torch.bmm(d, k[heads, keys]).unflatten(1, p.shape[1:3])
            dk[heads, keys] += torch.bmm(d.transpose(1, 2), q4[heads, :, queries].flatten(1, 2))
        d_own = _own_backward(grad4, q4, lse4, delta4, own, ctx.places, dq4)
        return None, None, None, dq.mul_(ctx.scale), dk, dv, *d_own


def _taken(tensors_GMK: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """[G, N, K] of each: the rows that the queries read, a view where they are the first N."""
    return [
        t[:, : len(place)] if _first(place) else t.index_select(1, place)
        for t, place in zip(tensors_GMK, places, strict=True)
    ]


def _first(place: torch.Tensor) -> bool:
    """Whether rising places are 0, 1, .."""
    return not len(place) or int(place[-1]) == len(place) - 1


def _own_scores(q4, keys: Sequence[torch.Tensor]) -> torch.Tensor:
    """[G, H/G, N, n]: each query, scaled before, against its own row's key of each of the n steps."""
    return torch.stack([torch.linalg.vecdot(q4, key[:, None]) for key in keys], -1) if keys else q4[..., :0]


def _own_backward(grad4, q4, lse4, delta4, own, places, dq4) -> list[torch.Tensor]:
    """Gradients of the own keys and values, in the order of `own`; adds to dq4, which is not yet scaled."""
    keys, values = _taken(own[::2], places), _taken(own[1::2], places)
    weights4 = (_own_scores(q4, keys) - lse4[..., None]).exp_()
    found = []
    for i, (key, value, place) in enumerate(zip(keys, values, places, strict=True)):
        weight = weights4[..., i]
        d_score = torch.linalg.vecdot(grad4, value[:, None]).sub_(delta4).mul_(weight)
        dq4.addcmul_(d_score[..., None], key[:, None])
        for tensor, above, read in ((own[2 * i], d_score, q4), (own[2 * i + 1], weight, grad4)):
            each = above[..., None] * read
            found.append(_put_back(each[:, 0] if each.shape[1] == 1 else each.sum(1), place, tensor))
    return found


def _put_back(gradient_GNK, place, like_GMK) -> torch.Tensor:
    """[G, M, K]: gradients of the rows that were read, zeros elsewhere."""
    if _first(place) and len(place) == like_GMK.shape[1]:
        return gradient_GNK
    return torch.zeros_like(like_GMK).index_copy_(1, place, gradient_GNK)

"""`tree_attention` on a GPU: parts of the keys, then their merge; `tree_attention.py` holds the formula.

The committed keys are cut into `splits` parts of equal length, one program each; the nodes of the tree are
one part more. The query heads of a key/value head are rows of the same program, so its keys are read once.
Factors of products have the dtype of the inputs, sums are float32.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from spectrain.kernels.aot import Launch
from spectrain.kernels.tree_attention import Form, TreeRows

MERGED = 16  # rows of a program that merges parts
MOST_SPLITS = 16


def launch(q_HTK, keys_RSGK, values_RSGK, rows: TreeRows, form: Form, *, splits: int) -> torch.Tensor:
    """See `tree_attention`; `splits` changes speed and rounding alone."""
    H, T, K = q_HTK.shape
    _, S, G, _ = keys_RSGK.shape
    assert keys_RSGK.is_contiguous() and values_RSGK.is_contiguous(), (
        "a cache's slots lie one after the other"
    )
    R, M, W = rows.bits.shape
    q = q_HTK if q_HTK.stride(2) == 1 else q_HTK.contiguous()
    tile, block, warps, stages = tiles(rows.most * H // G, K, keys_RSGK.element_size())
    wide = max(16, triton.next_power_of_2(K))  # a product takes 16 or more
    parts = torch.empty(splits + 1, H, T, K, dtype=torch.float32, device=q.device)
    logs = torch.empty(splits + 1, H, T, dtype=torch.float32, device=q.device)
    columns = slice_of(wide, q.element_size())
    attend_part[(R, G * (wide // columns) * triton.cdiv(rows.most * H // G, tile), splits + 1)](
        q, keys_RSGK, values_RSGK,
        rows.requests, rows.starts, rows.counts, rows.lengths, rows.nodes, rows.depths, rows.bits,
        parts, logs, q.stride(0), q.stride(1), T, S, G, M, W, form.scale, form.softcap or 0.0,
        GROUP=H // G, K=K, WIDE=wide, SLICE=columns, TILE=tile, BLOCK=block, TAIL=min(32, block),
        WINDOW=form.window or 0, CAPPED=form.softcap is not None, UPCAST=q.device.type == "cpu",
        PRECISION=_precision(q.dtype) if q.is_cuda else "ieee", num_warps=warps, num_stages=stages,
    )  # fmt: skip
    out = torch.empty(H, T, K, dtype=q.dtype, device=q.device)
    sinks = logs if form.sinks is None else form.sinks
    merge_parts[(triton.cdiv(H * T, MERGED),)](
        parts, logs, sinks, out, H * T, T, splits + 1,
        K=K, WIDE=wide, ROWS=MERGED, SINKS=form.sinks is not None,
    )  # fmt: skip
    return out


def splits_of(q_HTK: torch.Tensor, keys_RSGK: torch.Tensor, rows: TreeRows, processors: int) -> int:
    """Parts of the committed keys that give each processor two programs, from shapes alone."""
    S, G = keys_RSGK.shape[1:3]
    tile, block, _, _ = tiles(rows.most * q_HTK.shape[0] // G, keys_RSGK.shape[3], keys_RSGK.element_size())
    programs = len(rows.requests) * G * triton.cdiv(rows.most * q_HTK.shape[0] // G, tile)
    return max(1, min(triton.cdiv(2 * processors, programs), triton.cdiv(S, block), MOST_SPLITS))


def tiles(queries: int, head_dim: int, element_size: int) -> tuple[int, int, int, int]:
    """Rows and keys of a block, warps and pipeline stages: without spills on sm_90 (docs/kernels.md), not yet
    measured."""
    if element_size == 4:
        return 16, 32, 4, 2
    rows = min(64, max(16, triton.next_power_of_2(queries)))
    return rows, 64 if head_dim <= 128 else 32, 4, 2


def slice_of(wide: int, element_size: int) -> int:
    """Columns of the output of a program: all, unless the three parts of wide float32 factors (`_precision`)
    would fill the registers."""
    return 32 if element_size == 4 and wide > 64 else wide


def _precision(dtype: torch.dtype) -> str:
    """float32 factors as three bfloat16 each: as exact as float32 sums, and no loop of scalar products that
    spills its registers."""
    return "bf16x6" if dtype == torch.float32 else "ieee"


def launches() -> Iterator[Launch]:
    """For `spectrain.kernels.aot`: head dims and row tiles plain, and all forms at once."""
    for K in (64, 80, 128, 256):
        for queries in (16, 64):
            yield _launch("bf16", K, queries, window=0, capped=False)
    for K in (64, 128, 256):
        yield _launch("fp32", K, 16, window=0, capped=False)
    yield _launch("bf16", 128, 64, window=1024, capped=True)
    integers = dict.fromkeys(("num_rows", "T", "num_parts"), "i32")
    for K in (64, 128, 256):
        signature = {"parts": "*fp32", "logs": "*fp32", "sinks": "*bf16", "out": "*bf16", **integers}
        constants = {"K": K, "WIDE": K, "ROWS": MERGED, "SINKS": True}
        yield Launch(merge_parts, f"bf16, head dim {K}", signature, constants, num_warps=4, num_stages=3)


def _launch(kind: str, K: int, queries: int, *, window: int, capped: bool) -> Launch:
    size = 2 if kind == "bf16" else 4
    tile, block, warps, stages = tiles(queries, K, size)
    signature = {
        **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), f"*{kind}"),
        **dict.fromkeys(("requests", "starts", "counts", "lengths", "nodes", "depths", "bits"), "*i32"),
        **dict.fromkeys(("parts", "logs"), "*fp32"),
        **dict.fromkeys(("q_head", "q_row"), "i32:16"),
        **dict.fromkeys(("T", "S", "G", "M", "W"), "i32"),
        **dict.fromkeys(("scale", "softcap"), "fp32"),
    }
    constants = {
        "GROUP": 4, "K": K, "WIDE": triton.next_power_of_2(K),
        "SLICE": slice_of(triton.next_power_of_2(K), size), "TILE": tile, "BLOCK": block,
        "TAIL": min(32, block), "WINDOW": window, "CAPPED": capped, "UPCAST": False,
        "PRECISION": _precision(torch.float32 if kind == "fp32" else torch.bfloat16),
    }  # fmt: skip
    forms = ", window, soft cap" if window else ""
    label = f"{kind}, head dim {K}, {tile} x {block}{forms}"
    return Launch(attend_part, label, signature, constants, warps, stages)


@triton.jit
def attend_part(
    q_ptr, k_ptr, v_ptr, requests, starts, counts, lengths, nodes, depths, bits, parts, logs,
    q_head, q_row, T, S, G, M, W, scale, softcap,
    GROUP: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr, SLICE: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, TAIL: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """TILE rows of one request and key/value head, SLICE columns of the output, over one part of the keys,
    the last part being the tree."""
    r, split, last = tl.program_id(0), tl.program_id(2), tl.num_programs(2) - 1
    g, tile = tl.program_id(1) % G, tl.program_id(1) // (G * (WIDE // SLICE))
    row = tile * TILE + tl.arange(0, TILE)
    count, length, num_nodes = tl.load(counts + r), tl.load(lengths + r), tl.load(nodes + r)
    i, head = row // GROUP, (g * GROUP + row % GROUP).to(tl.int64)
    real = i < count
    token = (tl.load(starts + r) + i).to(tl.int64)
    node = r.to(tl.int64) * M + num_nodes - count + i
    place = length + tl.load(depths + node, mask=real, other=0)
    dim = tl.program_id(1) // G % (WIDE // SLICE) * SLICE + tl.arange(0, SLICE)
    q_ptr += head * q_head + token * q_row
    q = _rows(q_ptr, tl.arange(0, SLICE), real, K, UPCAST)
    first = (tl.load(requests + r).to(tl.int64) * S * G + g) * K  # slot 0 of this head
    k_ptr += first
    v_ptr += first
    top = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    acc = tl.zeros((TILE, SLICE), tl.float32)
    if split < last:
        low = 0
        if WINDOW > 0:
            low = tl.maximum(length - WINDOW + 1, 0)
        share = tl.cdiv(tl.cdiv(length - low, last), BLOCK) * BLOCK
        begin = low + split * share
        end = tl.minimum(begin + share, length)
        whole = begin + tl.maximum(end - begin, 0) // BLOCK * BLOCK
        cut = begin
        if WINDOW > 0:
            # from here on every row sees every key
            edge = tl.max(tl.where(real, place, 0), 0) - WINDOW + 1
            cut += tl.cdiv(tl.minimum(tl.maximum(edge - begin, 0), whole - begin), BLOCK) * BLOCK
            for start in range(begin, cut, BLOCK):
                slot = start + tl.arange(0, BLOCK)
                seen = place[:, None] - slot[None, :] < WINDOW
                top, total, acc = _block(
                    q, q_ptr, real, k_ptr, v_ptr, dim, slot, slot < length, seen,
                    top, total, acc, G, scale, softcap, K, WIDE, SLICE, True, CAPPED, UPCAST, PRECISION,
                )  # fmt: skip
        for start in range(cut, whole, BLOCK):
            slot = start + tl.arange(0, BLOCK)
            top, total, acc = _block(
                q, q_ptr, real, k_ptr, v_ptr, dim, slot, slot, slot, top, total, acc, G, scale, softcap,
                K, WIDE, SLICE, False, CAPPED, UPCAST, PRECISION,
            )  # fmt: skip
        if whole < end:
            slot = whole + tl.arange(0, BLOCK)
            seen = (slot < end)[None, :] & real[:, None]
            if WINDOW > 0:
                seen = seen & (place[:, None] - slot[None, :] < WINDOW)
            top, total, acc = _block(
                q, q_ptr, real, k_ptr, v_ptr, dim, slot, slot < end, seen, top, total, acc, G, scale, softcap,
                K, WIDE, SLICE, True, CAPPED, UPCAST, PRECISION,
            )  # fmt: skip
    else:
        for start in range(0, num_nodes, TAIL):
            other = start + tl.arange(0, TAIL)
            packed = tl.load(bits + node * W + start // 32, mask=real, other=0)
            seen = ((packed[:, None] >> (other % 32)[None, :]) & 1) == 1
            if WINDOW > 0:
                depth = tl.load(depths + r.to(tl.int64) * M + other, mask=other < num_nodes, other=0)
                seen = seen & (place[:, None] - length - depth[None, :] < WINDOW)
            top, total, acc = _block(
                q, q_ptr, real, k_ptr, v_ptr, dim, length + other, other < num_nodes, seen,
                top, total, acc, G, scale, softcap, K, WIDE, SLICE, True, CAPPED, UPCAST, PRECISION,
            )  # fmt: skip
    out = (split * (G * GROUP) + head) * T + token
    some = total > 0
    tl.store(logs + out, tl.where(some, top + tl.log(tl.where(some, total, 1.0)), float("-inf")), mask=real)
    acc = acc / tl.where(some, total, 1.0)[:, None]
    tl.store(parts + out[:, None] * K + dim[None, :], acc, mask=real[:, None] & (dim < K)[None, :])


@triton.jit
def _rows(ptr, dim, there, K: tl.constexpr, UPCAST: tl.constexpr):
    """Columns `dim` of the rows at the pointers `ptr`, 0 where not there. Triton's interpreter keeps bfloat16
    as integers and would multiply these: it gets float32."""
    rows = tl.load(ptr[:, None] + dim[None, :], mask=there[:, None] & (dim < K)[None, :], other=0.0)
    return rows.to(tl.float32) if UPCAST else rows


@triton.jit
def _keys(ptr, dim, there, K: tl.constexpr, WHOLE: tl.constexpr, UPCAST: tl.constexpr):
    """The same, without a mask if WHOLE: all are there and no column is beyond K."""
    if WHOLE:
        rows = tl.load(ptr[:, None] + dim[None, :])
        rows = rows.to(tl.float32) if UPCAST else rows
    else:
        rows = _rows(ptr, dim, there, K, UPCAST)
    return rows


@triton.jit
def _block(
    q, q_ptr, real, k_ptr, v_ptr, dim, slot, written, seen, top, total, acc, G, scale, softcap,
    K: tl.constexpr, WIDE: tl.constexpr, SLICE: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Running maximum, sum and columns `dim` of the output after one block of keys; without MASKED all are
    written and seen."""
    WHOLE: tl.constexpr = not MASKED and WIDE == K
    there = written if MASKED else slot >= 0
    at = slot.to(tl.int64) * G * K
    first = tl.arange(0, SLICE)
    k = _keys(k_ptr + at, first, there, K, WHOLE, UPCAST)
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    for i in tl.static_range(1, WIDE // SLICE):
        q_i = _rows(q_ptr, i * SLICE + first, real, K, UPCAST)
        k = _keys(k_ptr + at, i * SLICE + first, there, K, WHOLE, UPCAST)
        score = tl.dot(q_i, tl.trans(k), score, input_precision=PRECISION)
    v = _keys(v_ptr + at, dim, there, K, WHOLE, UPCAST)
    score = score * scale
    if CAPPED:
        # tanh(x) = 2 sigmoid(2 x) - 1
        score = softcap * (2 * tl.sigmoid(2 * score / softcap) - 1)
    if MASKED:
        score = tl.where(seen, score, float("-inf"))
    higher = tl.maximum(top, tl.max(score, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp(score - base[:, None])
    shrink = tl.exp(top - base)
    total = total * shrink + tl.sum(weight, 1)
    acc = acc * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
    return higher, total, acc


@triton.jit
def merge_parts(
    parts, logs, sinks, out, num_rows, T, num_parts,
    K: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """ROWS rows, heads outermost: sum of the parts, each with weight e^(log-sum-exp)."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    real, dim = row < num_rows, tl.arange(0, WIDE)
    there = real[:, None] & (dim < K)[None, :]
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    for part in range(0, num_parts):
        top = tl.maximum(top, tl.load(logs + part * num_rows + row, mask=real, other=float("-inf")))
    total = tl.zeros((ROWS,), tl.float32)
    if SINKS:
        sink = tl.load(sinks + row // T, mask=real, other=0.0).to(tl.float32)
        top = tl.maximum(top, sink)
        total += tl.exp(sink - top)
    base = tl.where(top == float("-inf"), 0.0, top)
    acc = tl.zeros((ROWS, WIDE), tl.float32)
    for part in range(0, num_parts):
        at = part * num_rows + row
        weight = tl.exp(tl.load(logs + at, mask=real, other=float("-inf")) - base)
        total += weight
        acc += weight[:, None] * tl.load(parts + at[:, None] * K + dim[None, :], mask=there, other=0.0)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + row[:, None] * K + dim[None, :], acc.to(out.dtype.element_ty), mask=there)

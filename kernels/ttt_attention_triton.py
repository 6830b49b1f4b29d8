"""The unroll's attention on a GPU: Triton forward and backward of `ttt_attention.py` (formula, example).

A program of the forward goes over the own keys of its block of queries, one for each later step, then over
the block's keys of step 0, with a running maximum and sum. With P = exp(S - lse), D_i = sum_k dO_ik O_ik and
dS = P (dO V^T - D),
    dQ = scale dS K        dK = scale dS^T Q        dV = P^T dO
dQ and the own keys' gradients by blocks of queries, dK and dV by blocks of keys; a program takes all query
heads of its key/value head where it sums over them, so nothing is added atomically and a result is the same
each time. Each step's own keys and values are tensors of their own, so kernels get a table of addresses.
Sums are float32 (float64 inputs: float64), factors of the products have the dtype of the inputs, float32 ones
TensorFloat-32 unless torch.get_float32_matmul_precision() is "highest".
Source: Dao 2023 (FlashAttention-2), section 3.
Legend: H query heads, G key/value heads, N queries, S step-0 keys, K head dim, n later steps.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from spectrain.kernels.aot import Launch

# Of the table of later steps: the places' address; address, head stride and row stride of keys, values and
# the gradients of both.
COLUMNS = tl.constexpr(13)
LOG2_E = tl.constexpr(1.4426950408889634)


class TTTAttention(torch.autograd.Function):
    """As the CPU's; runs must come in the order of their rows."""

    @staticmethod
    def forward(ctx, runs, scale, places, q, k, v, *own):
        q, k, v, *own = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v, *own))
        assert len({t.dtype for t in (q, k, v, *own)}) == 1, [t.dtype for t in (q, k, v, *own)]
        starts = [n for t in own for n in (t.data_ptr(), *(s * t.element_size() for s in t.stride()[:2]))]
        assert all(start % 16 == 0 for start in starts), "own keys and values: rows begin at 16 bytes"
        layout = _layout(runs, k.shape[1], q.device)
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        table = _table(own, places, q.device)
        H, N, _ = q.shape
        _forward[lambda meta: (triton.cdiv(N, meta["BLOCK_M"]), H)](
            q, k, v, out, lse, layout[0], layout[1], table, len(places), N, scale, H // len(k),
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *out.stride()[:2], **_constants(q),
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, lse, *layout, *places, *own)
        ctx.scale, ctx.steps = scale, len(places)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse, *rest = ctx.saved_tensors
        (rows, begins, firsts, lasts), places, own = rest[:4], rest[4 : 4 + ctx.steps], rest[4 + ctx.steps :]
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        d_own = [torch.zeros_like(t) for t in own]
        delta = torch.empty_like(lse)
        table = _table(own, places, q.device, d_own)
        (H, N, _), (G, S, _) = q.shape, k.shape
        constants = _constants(q)
        q_side = (*q.stride()[:2], *grad.stride()[:2])
        kv_side = (*k.stride()[:2], *v.stride()[:2])
        _query_gradient[lambda meta: (triton.cdiv(N, meta["BLOCK_M"]), H)](
            q, k, v, out, grad, lse, delta, dq, rows, begins, table, ctx.steps, N, ctx.scale, H // G,
            *q_side, *kv_side, *out.stride()[:2], *dq.stride()[:2], **constants,
        )  # fmt: skip
        _key_gradient[lambda meta: (triton.cdiv(S, meta["BLOCK_N"]), G)](
            q, k, v, grad, lse, delta, dk, dv, rows, begins, firsts, lasts, N, S, ctx.scale, H // G,
            *q_side, *kv_side, *dk.stride()[:2], *dv.stride()[:2], **constants,
        )  # fmt: skip
        if ctx.steps:
            own_gradient[(triton.cdiv(N, OWN_ROWS), G, ctx.steps)](
                q, grad, lse, delta, table, N, ctx.scale, H // G, *q_side,
                K=constants["K"], BLOCK_K=constants["BLOCK_K"], SUM=constants["SUM"], BLOCK_M=OWN_ROWS,
                num_warps=8, num_stages=1,
            )  # fmt: skip
        return None, None, None, dq, dk, dv, *d_own


def _layout(runs, num_keys: int, device) -> tuple[torch.Tensor, ...]:
    """int32: each query's row and document begin [N]; each key's first query at or after it and the end of
    those whose document begins at or before it [S]."""
    rows = torch.cat([torch.arange(run.row, run.row + run.count) for run in runs])
    counts = torch.tensor([run.count for run in runs])
    begins = torch.tensor([run.begin for run in runs]).repeat_interleave(counts)
    assert bool((rows[1:] > rows[:-1]).all()), "runs must come in the order of their rows"
    keys = torch.arange(num_keys)
    ends = (torch.searchsorted(rows, keys), torch.searchsorted(begins, keys, right=True))
    sizes = [len(rows), len(rows), num_keys, num_keys]
    return torch.cat((rows, begins, *ends)).int().to(device).split(sizes)


def _table(own, places, device, d_own=None) -> torch.Tensor:
    """int64 [n, COLUMNS]."""
    pairs = [(*own[i : i + 2], *(d_own or own)[i : i + 2]) for i in range(0, len(own), 2)]
    lines = [
        [place.data_ptr(), *(number for t in four for number in (t.data_ptr(), *t.stride()[:2]))]
        for place, four in zip(places, pairs, strict=True)
    ]
    return torch.tensor(lines, dtype=torch.int64, device=device)


def _constants(q: torch.Tensor) -> dict:
    dtype = getattr(tl, str(q.dtype).removeprefix("torch."))
    sums = tl.float64 if dtype is tl.float64 else tl.float32
    return {
        "K": q.shape[-1],
        "BLOCK_K": max(16, triton.next_power_of_2(q.shape[-1])),
        # the interpreter cannot compute with bfloat16
        "FACTOR": sums if triton.knobs.runtime.interpret else dtype,
        "SUM": sums,
        "PRECISION": "tf32" if _products(q.dtype) == "tf32" else "ieee",
    }


def _products(dtype: torch.dtype) -> str:
    """The kind of product: bf16 (any dtype of two bytes), tf32 or ieee."""
    exact = dtype == torch.float64 or torch.get_float32_matmul_precision() == "highest"
    return "bf16" if dtype.itemsize == 2 else "ieee" if exact else "tf32"


@triton.jit
def block_of(ptr, places, stride, seen, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Rows `places` [B] of a tensor with K columns, [B, BLOCK_K], 0 where not `seen`."""
    cols = tl.arange(0, BLOCK_K)
    at = ptr + places.to(tl.int64)[:, None] * stride + cols[None, :]
    return tl.load(at, mask=seen[:, None] & (cols < K)[None, :], other=0.0)


@triton.jit
def write_block(ptr, block, places, stride, seen, K: tl.constexpr, BLOCK_K: tl.constexpr):
    cols = tl.arange(0, BLOCK_K)
    at = ptr + places.to(tl.int64)[:, None] * stride + cols[None, :]
    tl.store(at, block.to(ptr.dtype.element_ty), mask=seen[:, None] & (cols < K)[None, :])


@triton.jit
def own_addresses(line_ptr, which: tl.constexpr, like_ptr, g, m, seen, BLOCK_K: tl.constexpr):
    """Addresses [B, BLOCK_K] of what queries m read in head g of the step of a line of the table: keys (0),
    values (1), or their gradients (2, 3)."""
    places = tl.load(tl.load(line_ptr).to(tl.pointer_type(tl.int64)) + m, mask=seen, other=0)
    entry_ptr = line_ptr + 1 + 3 * which
    base = tl.load(entry_ptr).to(like_ptr.dtype) + g * tl.load(entry_ptr + 1)
    at = base + (places * tl.load(entry_ptr + 2))[:, None] + tl.arange(0, BLOCK_K)[None, :]
    return tl.multiple_of(at, (1, 16))


@triton.jit
def own_block(line_ptr, which: tl.constexpr, like_ptr, g, m, seen, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """The own keys (0) or values (1) of queries m, [B, BLOCK_K]."""
    inside = seen[:, None] & (tl.arange(0, BLOCK_K) < K)[None, :]
    at = own_addresses(line_ptr, which, like_ptr, g, m, seen, BLOCK_K)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def ttt_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, row_ptr, begin_ptr, table_ptr, steps, N, scale, group,
    q_h, q_n, k_g, k_n, v_g, v_n, o_h, o_n,
    K: tl.constexpr, BLOCK_K: tl.constexpr, FACTOR: tl.constexpr, SUM: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of one block of queries of one head; SUM is the dtype of all sums."""
    h = tl.program_id(1).to(tl.int64)
    g = h // group
    # the last blocks see most keys: they come first
    m = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M + tl.arange(0, BLOCK_M)
    here = m < N
    row = tl.load(row_ptr + m, mask=here, other=-1)
    begin = tl.load(begin_ptr + m, mask=here, other=2147483647)
    low, high = tl.min(begin, 0), tl.max(row, 0) + 1
    q = block_of(q_ptr + h * q_h, m, q_n, here, K, BLOCK_K).to(FACTOR)
    scale2 = scale * LOG2_E
    top = tl.full([BLOCK_M], -1e30, SUM)
    total = tl.zeros([BLOCK_M], SUM)
    mixed = tl.zeros([BLOCK_M, BLOCK_K], SUM)
    # before the keys of step 0: after them, q would stay in registers through their loop
    for step in range(steps):
        line = table_ptr + step * COLUMNS
        own_k = own_block(line, 0, k_ptr, g, m, here, K, BLOCK_K).to(SUM)
        s = tl.sum(q.to(SUM) * own_k, 1) * scale2
        new_top = tl.maximum(top, s)
        p = tl.exp2(s - new_top)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + p
        own_v = own_block(line, 1, v_ptr, g, m, here, K, BLOCK_K).to(SUM)
        mixed = mixed * shrink[:, None] + own_v * p[:, None]
        top = new_top
    for start in range(low, high, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        k = block_of(k_ptr + g * k_g, n, k_n, n < high, K, BLOCK_K).to(FACTOR)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=SUM) * scale2
        s = tl.where((n[None, :] >= begin[:, None]) & (n[None, :] <= row[:, None]), s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        v = block_of(v_ptr + g * v_g, n, v_n, n < high, K, BLOCK_K).to(FACTOR)
        mixed = mixed * shrink[:, None]
        mixed = tl.dot(p.to(FACTOR), v, mixed, input_precision=PRECISION, out_dtype=SUM)
        top = new_top
    total = tl.where(here, total, 1.0)
    write_block(out_ptr + h * o_h, mixed / total[:, None], m, o_n, here, K, BLOCK_K)
    tl.store(lse_ptr + h * N + m, (top + tl.log2(total)) / LOG2_E, mask=here)


@triton.jit
def ttt_query_gradient(
    q_ptr, k_ptr, v_ptr, out_ptr, grad_ptr, lse_ptr, delta_ptr, dq_ptr, row_ptr, begin_ptr, table_ptr,
    steps, N, scale, group, q_h, q_n, d_h, d_n, k_g, k_n, v_g, v_n, o_h, o_n, dq_h, dq_n,
    K: tl.constexpr, BLOCK_K: tl.constexpr, FACTOR: tl.constexpr, SUM: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dQ and D of one block of queries of one head; SUM is the dtype of all sums."""
    h = tl.program_id(1).to(tl.int64)
    g = h // group
    m = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M + tl.arange(0, BLOCK_M)
    here = m < N
    row = tl.load(row_ptr + m, mask=here, other=-1)
    begin = tl.load(begin_ptr + m, mask=here, other=2147483647)
    low, high = tl.min(begin, 0), tl.max(row, 0) + 1
    q = block_of(q_ptr + h * q_h, m, q_n, here, K, BLOCK_K).to(FACTOR)
    grad = block_of(grad_ptr + h * d_h, m, d_n, here, K, BLOCK_K).to(FACTOR)
    out = block_of(out_ptr + h * o_h, m, o_n, here, K, BLOCK_K).to(SUM)
    delta = tl.sum(grad.to(SUM) * out, 1)
    tl.store(delta_ptr + h * N + m, delta, mask=here)
    lse2 = tl.load(lse_ptr + h * N + m, mask=here, other=0.0) * LOG2_E
    scale2 = scale * LOG2_E
    dq = tl.zeros([BLOCK_M, BLOCK_K], SUM)
    for step in range(steps):
        line = table_ptr + step * COLUMNS
        own_k = own_block(line, 0, k_ptr, g, m, here, K, BLOCK_K).to(SUM)
        own_v = own_block(line, 1, v_ptr, g, m, here, K, BLOCK_K).to(SUM)
        p = tl.exp2(tl.sum(q.to(SUM) * own_k, 1) * scale2 - lse2)
        ds = p * (tl.sum(grad.to(SUM) * own_v, 1) - delta)
        dq += ds[:, None] * own_k
    for start in range(low, high, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        k = block_of(k_ptr + g * k_g, n, k_n, n < high, K, BLOCK_K).to(FACTOR)
        v = block_of(v_ptr + g * v_g, n, v_n, n < high, K, BLOCK_K).to(FACTOR)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=SUM) * scale2
        s = tl.where((n[None, :] >= begin[:, None]) & (n[None, :] <= row[:, None]), s, float("-inf"))
        p = tl.exp2(s - lse2[:, None])
        dp = tl.dot(grad, tl.trans(v), input_precision=PRECISION, out_dtype=SUM)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(FACTOR), k, dq, input_precision=PRECISION, out_dtype=SUM)
    write_block(dq_ptr + h * dq_h, dq * scale, m, dq_n, here, K, BLOCK_K)


@triton.jit
def ttt_key_gradient(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    row_ptr, begin_ptr, first_ptr, last_ptr, N, S, scale, group,
    q_h, q_n, d_h, d_n, k_g, k_n, v_g, v_n, dk_g, dk_n, dv_g, dv_n,
    K: tl.constexpr, BLOCK_K: tl.constexpr, FACTOR: tl.constexpr, SUM: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of step-0 keys of one key/value head; SUM is the dtype of all sums."""
    g = tl.program_id(1).to(tl.int64)
    begin_n = tl.program_id(0) * BLOCK_N
    n = begin_n + tl.arange(0, BLOCK_N)
    inside = n < S
    k = block_of(k_ptr + g * k_g, n, k_n, inside, K, BLOCK_K).to(FACTOR)
    v = block_of(v_ptr + g * v_g, n, v_n, inside, K, BLOCK_K).to(FACTOR)
    first = tl.load(first_ptr + begin_n)
    last = tl.load(last_ptr + tl.minimum(begin_n + BLOCK_N, S) - 1)
    scale2 = scale * LOG2_E
    dk = tl.zeros([BLOCK_N, BLOCK_K], SUM)
    dv = tl.zeros([BLOCK_N, BLOCK_K], SUM)
    for h in range(g * group, (g + 1) * group):
        for start in range(first, last, BLOCK_M):
            m = start + tl.arange(0, BLOCK_M)
            here = m < last
            row = tl.load(row_ptr + m, mask=here, other=-1)
            begin = tl.load(begin_ptr + m, mask=here, other=2147483647)
            q = block_of(q_ptr + h * q_h, m, q_n, here, K, BLOCK_K).to(FACTOR)
            lse2 = tl.load(lse_ptr + h * N + m, mask=here, other=0.0) * LOG2_E
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION, out_dtype=SUM) * scale2
            s = tl.where((n[:, None] >= begin[None, :]) & (n[:, None] <= row[None, :]), s, float("-inf"))
            p = tl.exp2(s - lse2[None, :])
            grad = block_of(grad_ptr + h * d_h, m, d_n, here, K, BLOCK_K).to(FACTOR)
            dv = tl.dot(p.to(FACTOR), grad, dv, input_precision=PRECISION, out_dtype=SUM)
            dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION, out_dtype=SUM)
            delta = tl.load(delta_ptr + h * N + m, mask=here, other=0.0)
            ds = p * (dp - delta[None, :])
            dk = tl.dot(ds.to(FACTOR), q, dk, input_precision=PRECISION, out_dtype=SUM)
    write_block(dk_ptr + g * dk_g, dk * scale, n, dk_n, inside, K, BLOCK_K)
    write_block(dv_ptr + g * dv_g, dv, n, dv_n, inside, K, BLOCK_K)


@triton.jit
def own_gradient(
    q_ptr, grad_ptr, lse_ptr, delta_ptr, table_ptr, N, scale, group, q_h, q_n, d_h, d_n,
    K: tl.constexpr, BLOCK_K: tl.constexpr, SUM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Gradients of one step's own keys and values of one block of queries and one key/value head; SUM is the
    dtype of all sums. Rows that no query reads are left as they are."""
    g = tl.program_id(1).to(tl.int64)
    line = table_ptr + tl.program_id(2) * COLUMNS
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    here = m < N
    key = own_block(line, 0, q_ptr, g, m, here, K, BLOCK_K).to(SUM)
    value = own_block(line, 1, q_ptr, g, m, here, K, BLOCK_K).to(SUM)
    dk = tl.zeros([BLOCK_M, BLOCK_K], SUM)
    dv = tl.zeros([BLOCK_M, BLOCK_K], SUM)
    for h in range(g * group, (g + 1) * group):
        q = block_of(q_ptr + h * q_h, m, q_n, here, K, BLOCK_K).to(SUM)
        grad = block_of(grad_ptr + h * d_h, m, d_n, here, K, BLOCK_K).to(SUM)
        lse = tl.load(lse_ptr + h * N + m, mask=here, other=0.0)
        delta = tl.load(delta_ptr + h * N + m, mask=here, other=0.0)
        p = tl.exp2((tl.sum(q * key, 1) * scale - lse) * LOG2_E)
        ds = p * (tl.sum(grad * value, 1) - delta) * scale
        dk += ds[:, None] * q
        dv += p[:, None] * grad
    inside = here[:, None] & (tl.arange(0, BLOCK_K) < K)[None, :]
    dtype = q_ptr.dtype.element_ty
    tl.store(own_addresses(line, 2, q_ptr, g, m, here, BLOCK_K), dk.to(dtype), mask=inside)
    tl.store(own_addresses(line, 3, q_ptr, g, m, here, BLOCK_K), dv.to(dtype), mask=inside)


OWN_ROWS = 16  # queries of a program of own_gradient

# (BLOCK_M, BLOCK_N, warps, stages) by kind of product and largest head dim; the device times them and takes
# the fastest. None was measured on a GPU yet; larger ones spill on sm_90, as do all exact ones above 128.
TILES: dict[str, dict[str, dict[int, tuple]]] = {
    "ttt_forward": {
        "bf16": {128: ((128, 64, 8, 3), (64, 64, 4, 2)), 256: ((64, 64, 8, 2),)},
        "tf32": {256: ((32, 32, 8, 1),)},
        "ieee": {128: ((16, 16, 8, 1),)},
    },
    "ttt_query_gradient": {
        "bf16": {128: ((64, 64, 8, 2), (64, 32, 8, 2)), 256: ((32, 64, 8, 1),)},
        "tf32": {256: ((16, 32, 8, 1),)},
        "ieee": {128: ((16, 16, 8, 1),)},
    },
    "ttt_key_gradient": {
        "bf16": {128: ((32, 128, 8, 2), (32, 64, 8, 2)), 256: ((32, 32, 8, 1),)},
        "tf32": {256: ((16, 32, 8, 1),)},
        "ieee": {128: ((16, 16, 8, 1),)},
    },
}


def _tuned(kernel):
    """The kernel with the tiles of its inputs' head dim and kind of product, timed once for each of them."""
    sizes = TILES[kernel.fn.__name__]

    def config(rows, keys, warps, stages):
        return triton.Config({"BLOCK_M": rows, "BLOCK_N": keys}, num_warps=warps, num_stages=stages)

    def chosen(configs, arguments, **constants):
        if triton.knobs.runtime.interpret:
            return [config(32, 32, 1, 1)]
        dtype, head_dim = arguments["q_ptr"].dtype, constants["K"]
        for largest, tiles in sizes[_products(dtype)].items():
            if head_dim <= largest:
                return [config(*tile) for tile in tiles]
        raise ValueError(
            f"attention of head dim {head_dim} in {dtype}: expected at most 256, in float32 128 unless "
            "torch.set_float32_matmul_precision is 'high'; or set train.dtype=bfloat16"
        )

    tiles = sorted({tile for size in sizes.values() for some in size.values() for tile in some})
    keys, prune = ["K", "group", "PRECISION"], {"early_config_prune": chosen}
    return triton.autotune([config(*tile) for tile in tiles], keys, prune_configs_by=prune)(kernel)


_forward = _tuned(ttt_forward)
_query_gradient = _tuned(ttt_query_gradient)
_key_gradient = _tuned(ttt_key_gradient)


def launches() -> Iterator[Launch]:
    """Every tile with the largest head dim it serves; second choices with 80, whose rows are masked."""
    for kernel in (ttt_forward, ttt_query_gradient, ttt_key_gradient):
        for products, sizes in TILES[kernel.fn.__name__].items():
            for largest, tiles in sizes.items():
                for i, tile in enumerate(tiles):
                    yield _launch(kernel, products, 80 if i else largest, tile)
    yield _launch(own_gradient, "ieee", 256, (OWN_ROWS, 1, 8, 1))


def _launch(kernel, products: str, K: int, tile: tuple[int, int, int, int]) -> Launch:
    rows, keys, warps, stages = tile
    kind, factor = ("bf16", tl.bfloat16) if products == "bf16" else ("fp32", tl.float32)
    constants = {"K": K, "BLOCK_K": triton.next_power_of_2(K), "FACTOR": factor, "SUM": tl.float32}
    constants |= {"PRECISION": products.replace("bf16", "ieee"), "BLOCK_M": rows, "BLOCK_N": keys}
    kinds = dict.fromkeys(("steps", "N", "S", "group"), "i32")
    kinds |= dict.fromkeys(("row_ptr", "begin_ptr", "first_ptr", "last_ptr"), "*i32")
    kinds |= {"scale": "fp32", "lse_ptr": "*fp32", "delta_ptr": "*fp32", "table_ptr": "*i64"}
    signature = {
        name: kinds.get(name, f"*{kind}" if name.endswith("_ptr") else "i32:16")  # an input or a stride
        for name in kernel.arg_names
        if name not in constants
    }
    used = {name: value for name, value in constants.items() if name in kernel.arg_names}
    return Launch(kernel, f"{products}, head dim {K}, {rows} x {keys}", signature, used, warps, stages)

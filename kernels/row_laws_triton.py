"""The laws of rows of logits, without a sort and without a law [M, V] in memory.

    s = logit / T        p = e^(s - top) / mass where s > bar, or s = bar and id <= edge, else 0

Two kernels. `block_statistics`: maximum, sum and arg-max of each block of each row. `row_limits`: per row top
and mass, and by the filters bar and edge, found 4 bits at a time: the largest s at or above which enough
entries (top-k), or enough of their mass (top-p), lie. What equals the k-th is kept; where s ties at the edge
of top-p the lowest ids are. These are the laws of decode/sampling.py, its torch form, but for the rounding of
sums: float32 in blocks, float64 over blocks. Legend: M rows, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from spectrain.kernels.aot import Launch

BLOCK = 4096  # ids of a block
SEARCHED = 1024  # ids of a block of the search, which compares each with 16 pivots


@dataclass(frozen=True)
class Filters:
    """temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 keep all."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def row_laws(logits: torch.Tensor, filters: Filters, *, block: int = BLOCK) -> tuple[torch.Tensor, ...]:
    """top float32, mass float64, bar float32, edge int32, best int32, each [M], of logits [M, V] with entries
    of a row side by side."""
    M, V = logits.shape

    def make(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    blocks, temperature = triton.cdiv(V, block), filters.temperature or 1.0
    parts = tuple(make(t, M, blocks) for t in (torch.float32, torch.float32, torch.int32))
    block_statistics[(M, blocks)](logits, logits.stride(0), *parts, V, blocks, temperature, BLOCK=block)
    found = tuple(make(t, M) for t in (torch.float32, torch.float64, torch.float32, torch.int32, torch.int32))
    filtered = filters.temperature > 0
    row_limits[(M,)](
        logits, logits.stride(0), *parts, *found, V, blocks, temperature,
        filters.top_k, filters.top_p, filters.min_p, BLOCK=min(SEARCHED, block),
        BLOCKS=triton.next_power_of_2(blocks), TOP_K=filtered and 0 < filters.top_k < V,
        TOP_P=filtered and filters.top_p < 1, MIN_P=filtered and filters.min_p > 0, num_warps=8,
    )  # fmt: skip
    return found


def launches() -> Iterator[Launch]:
    """For `spectrain.kernels.aot`: bfloat16 logits, a vocabulary of 128k."""
    row = {"logits": "*bf16", "stride": "i64"}
    parts = {"tops": "*fp32", "sums": "*fp32", "bests": "*i32"}
    block = {"V": "i32:16", "blocks": "i32", "temperature": "fp32"}
    found = {
        "top_ptr": "*fp32", "mass_ptr": "*fp64", "bar_ptr": "*fp32", "edge_ptr": "*i32", "best_ptr": "*i32"
    }  # fmt: skip
    yield Launch(block_statistics, f"{BLOCK} ids", row | parts | block, {"BLOCK": BLOCK}, 4, 3)
    limits = row | parts | found | block | {"top_k": "i32", "top_p": "fp32", "min_p": "fp32"}
    for filtered in (False, True):
        on = dict.fromkeys(("TOP_K", "TOP_P", "MIN_P"), filtered)
        label = "top-k, top-p and min-p" if filtered else "no filter"
        yield Launch(row_limits, label, limits, {"BLOCK": SEARCHED, "BLOCKS": 32} | on, 8, 3)


@triton.jit
def scores(logits, ids, there, temperature):
    """s of some ids of a row, -inf where not there; zeros have one sign, so that keys tie where s does."""
    s = tl.load(logits + ids, mask=there, other=float("-inf")).to(tl.float32) / temperature
    return tl.where(s == 0, 0.0, s)


@triton.jit
def probability(s, ids, top, mass, bar, edge):
    kept = (s > bar) | ((s == bar) & (ids <= edge))
    return tl.where(kept, tl.exp(s - top), 0.0).to(tl.float64) / mass


@triton.jit
def block_statistics(logits, stride, tops, sums, bests, V, blocks, temperature, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    s = scores(logits + row * stride, ids, ids < V, temperature)
    top = tl.max(s, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    at = row * blocks + block
    tl.store(tops + at, top)
    tl.store(sums + at, tl.sum(tl.exp(s - base), 0))
    tl.store(bests + at, tl.min(tl.where(s == top, ids, V), 0))


@triton.jit
def row_limits(
    logits, stride, tops, sums, bests, top_ptr, mass_ptr, bar_ptr, edge_ptr, best_ptr,
    V, blocks, temperature, top_k, top_p, min_p,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr,
):  # fmt: skip
    """One program per row. A NaN or +inf among the logits makes the mass NaN, nothing but -inf makes it 0."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCKS)
    at = row * blocks + part
    theirs = tl.load(tops + at, mask=part < blocks, other=float("-inf"))
    top = tl.max(theirs, 0)
    scaled = tl.load(sums + at, mask=part < blocks, other=0.0) * tl.exp(theirs - top)
    mass = tl.sum(tl.where(theirs == float("-inf"), 0.0, scaled).to(tl.float64), 0)
    best = tl.min(tl.where(theirs == top, tl.load(bests + at, mask=part < blocks, other=0), V), 0)
    bar = tl.full((), float("-inf"), tl.float32)
    edge = tl.zeros((), tl.int32) + V
    logits += row * stride
    if TOP_K:
        bar = _search(logits, V, temperature, top, bar, top_k * 1.0, True, BLOCK)
    if TOP_P:
        wanted = top_p * _mass(logits, V, temperature, top, bar, edge, BLOCK)
        found = _search(logits, V, temperature, top, bar, wanted.to(tl.float32), False, BLOCK)
        if found > bar:
            above = _mass(logits, V, temperature, top, found, edge * 0 - 1, BLOCK)
            ties = tl.ceil((wanted - above) / tl.exp(found - top)).to(tl.int32)
            edge = _tie(logits, V, temperature, found, tl.maximum(ties, 1), BLOCK)
            bar = found
    if MIN_P:
        least = top + tl.log(min_p)
        edge = tl.where(least > bar, V, edge)
        bar = tl.maximum(bar, least)
    if TOP_K or TOP_P or MIN_P:
        # comparisons pass over NaN, which the whole row's mass holds
        mass = _mass(logits, V, temperature, top, bar, edge, BLOCK) + mass * 0
    tl.store(top_ptr + row, top)
    tl.store(mass_ptr + row, mass)
    tl.store(bar_ptr + row, bar)
    tl.store(edge_ptr + row, edge)
    tl.store(best_ptr + row, best)


@triton.jit
def _search(logits, V, temperature, top, floor, enough, COUNTED: tl.constexpr, BLOCK: tl.constexpr):
    """The largest s at or above which the entries weigh `enough`: 1 each if COUNTED, else e^(s - top) from
    `floor` on. A float's bits, the lower 31 flipped if negative, are an integer of the same order."""
    digit = tl.arange(0, 16).to(tl.int64)
    low = tl.full((), -2147483648, tl.int64)
    for place in range(0, 8):
        pivot = low + (digit << (28 - 4 * place))
        weight = tl.zeros((16,), tl.float32)
        for start in range(0, V, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            s = scores(logits, ids, ids < V, temperature)
            bits = s.to(tl.int32, bitcast=True)
            key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
            if COUNTED:
                each = tl.where(ids < V, 1.0, 0.0)
            else:
                each = tl.where((ids < V) & (s >= floor), tl.exp(s - top), 0.0)
            weight += tl.sum(tl.where(key[:, None] >= pivot[None, :], each[:, None], 0.0), 0)
        chosen = tl.sum(((digit > 0) & (weight >= enough)).to(tl.int64), 0)
        low += chosen << (28 - 4 * place)
    key = low.to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _mass(logits, V, temperature, top, bar, edge, BLOCK: tl.constexpr):
    """Sum of e^(s - top) over what bar and edge keep, float64."""
    total = tl.zeros((), tl.float64)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        s = scores(logits, ids, ids < V, temperature)
        kept = (s > bar) | ((s == bar) & (ids <= edge))
        total += tl.sum(tl.where(kept, tl.exp(s - top), 0.0), 0).to(tl.float64)
    return total


@triton.jit
def _tie(logits, V, temperature, bar, wanted, BLOCK: tl.constexpr):
    """Id of the wanted-th entry (from 1) with s = bar, or V."""
    edge = tl.zeros((), tl.int32) + V
    before = tl.zeros((), tl.int32)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        ties = ((scores(logits, ids, ids < V, temperature) == bar) & (ids < V)).to(tl.int32)
        here = (ties == 1) & (before + tl.cumsum(ties, 0) == wanted)
        edge = tl.minimum(edge, tl.min(tl.where(here, ids, V), 0))
        before += tl.sum(ties, 0)
    return edge

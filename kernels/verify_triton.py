"""`verify` on a GPU: no law [rows, V] is formed, and nothing is read on the host.

`row_laws` first. `walk_trees`, one program a request, knows the chance of every node at once and then goes
down level by level; for law rejection `overlaps` sums min(p, q) before it. `residual_masses` and `draw_bonus`
touch one row per request: sums by blocks of the law that is left, then an id of the block that the uniform
falls in. Coins and draws are float64.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from spectrain.kernels.aot import Launch
from spectrain.kernels.row_laws_triton import BLOCK, Filters, probability, row_laws, scores
from spectrain.kernels.verify import Drawn, Outcome, Trees


def verify(
    logits_MV: torch.Tensor,
    trees: Trees,
    uniforms_BD3: torch.Tensor,
    filters: Filters,
    drawn: Drawn | None = None,
    *,
    block: int = BLOCK,
) -> Outcome:
    """The verdict of each tree. uniforms: float64 coin, residual draw and bonus draw of each depth, D beyond
    the deepest node; drawn: law rejection on chains, None: law target_only."""
    M, V = logits_MV.shape
    (B, N), D = trees.parents.shape, uniforms_BD3.shape[1]
    logits = logits_MV if logits_MV.stride(1) == 1 else logits_MV.contiguous()
    greedy, blocks = filters.temperature == 0, triton.cdiv(V, block)
    if greedy:
        drawn = None  # a one-hot p accepts its arg-max alone, whatever q is
    row = {"V": V, "temperature": filters.temperature or 1.0}
    laws = row_laws(logits, filters, block=block)
    q = q_starts = sums = shared = laws[0]
    if drawn is not None:
        q, q_starts = drawn.q.contiguous(), drawn.starts
        parts = uniforms_BD3.new_empty(2, B, N, blocks)
        overlaps[(B, N, blocks)](
            logits, logits.stride(0), *laws, trees.starts, trees.counts, trees.parents,
            q, q_starts, parts[0], parts[1], N, **row, BLOCK=block, num_warps=8,
        )  # fmt: skip
        shared, sums = parts.sum(-1)
    accepted, bonus, refused, status = torch.empty(4, B, dtype=torch.int32, device=logits.device)
    path = torch.full((B, D), -1, dtype=torch.int32, device=logits.device)
    alphas = torch.zeros_like(uniforms_BD3[..., 0])
    out = Outcome(path, accepted, bonus, refused, status, alphas)
    lists = (trees.starts, trees.counts, trees.parents, trees.tokens)
    walk_trees[(B,)](
        logits, logits.stride(0), *laws, *lists, q, q_starts, sums, shared, uniforms_BD3,
        out.path, out.accepted, out.bonus, out.refused, out.alphas, out.status, N, D, **row,
        WIDE=max(2, triton.next_power_of_2(N)), GREEDY=greedy, DRAWN=drawn is not None,
    )  # fmt: skip
    if not greedy:
        masses = uniforms_BD3.new_empty(B, 2, blocks)
        rest = (
            logits, logits.stride(0), *laws, *lists, q, q_starts, sums, out.path, out.accepted, out.refused
        )  # fmt: skip
        residual_masses[(B, blocks)](
            *rest, masses, N, D, **row, BLOCK=block, DRAWN=drawn is not None, num_warps=8
        )
        draw_bonus[(B,)](
            *rest, masses, uniforms_BD3, out.bonus, blocks, N, D, **row,
            BLOCK=block, BLOCKS=triton.next_power_of_2(blocks), DRAWN=drawn is not None,
            num_warps=8,
        )  # fmt: skip
    return out


@triton.jit
def overlaps(
    logits, stride, tops, masses, bars, edges, bests, starts, counts, parents, q, q_starts, shared, sums,
    N, V, temperature, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block's part of sum min(p, q) and of sum q, for each node's q and its parent's p; p is normalised, q
    is taken as it is."""
    b, node, block = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    real = node < tl.load(counts + b)
    row = tl.load(starts + b).to(tl.int64) + tl.load(parents + b * N + node, mask=real, other=-1) + 1
    ids = block * BLOCK + tl.arange(0, BLOCK)
    there = ids < tl.where(real, V, 0)
    s = scores(logits + row * stride, ids, there, temperature)
    p = probability(
        s, ids, tl.load(tops + row), tl.load(masses + row), tl.load(bars + row), tl.load(edges + row)
    )
    x = tl.load(q + (tl.load(q_starts + b).to(tl.int64) + node) * V + ids, mask=there, other=0.0).to(
        tl.float64
    )
    at = (b * N + node) * tl.num_programs(2) + block
    tl.store(shared + at, tl.sum(tl.minimum(p, x), 0))
    tl.store(sums + at, tl.sum(x, 0))


@triton.jit
def walk_trees(
    logits, stride, tops, masses, bars, edges, bests, starts, counts, parents, tokens,
    q, q_starts, sums, shared, uniforms, path, accepted, bonus, refused, alphas, status,
    N, D, V, temperature, WIDE: tl.constexpr, GREEDY: tl.constexpr, DRAWN: tl.constexpr,
):  # fmt: skip
    """One program per request: the chance of every node given its parent at once, then level by level."""
    b = tl.program_id(0).to(tl.int64)
    start, node = tl.load(starts + b).to(tl.int64), tl.arange(0, WIDE)
    real = node < tl.load(counts + b)
    parent = tl.load(parents + b * N + node, mask=real, other=-2)
    token = tl.load(tokens + b * N + node, mask=real, other=0).to(tl.int64)
    row = start + tl.maximum(parent, -1) + 1
    if GREEDY:
        chance = tl.where(token == tl.load(bests + row), 1.0, 0.0).to(tl.float64)
    else:
        s = scores(logits + row * stride, token, real, temperature)
        chance = probability(
            s, token, tl.load(tops + row), tl.load(masses + row), tl.load(bars + row), tl.load(edges + row)
        )
    alpha = chance
    fault = node < 0
    if DRAWN:
        x = tl.load(q + (tl.load(q_starts + b).to(tl.int64) + node) * V + token, mask=real, other=1.0)
        x = x.to(tl.float64) / tl.load(sums + b * N + node, mask=real, other=1.0)
        fault = real & ((x > 0) == 0)
        chance = tl.minimum(chance / tl.where(fault, 1.0, x), 1.0)
        alpha = tl.load(shared + b * N + node, mask=real, other=0.0)
    at, depth, state, refusal, going = -1, 0, 0, 0, 1
    while going == 1:
        mass = tl.load(masses + start + at + 1)
        finite = (mass > 0) & (mass < float("inf"))
        mine = real & (parent == at)
        offered = tl.max(mine.to(tl.int32), 0)
        bound = tl.cumsum(tl.where(mine, chance, 0.0), 0)
        total = tl.sum(tl.where(mine, chance, 0.0), 0)
        # a smaller rest beside the children's share is rounding: they hold all of it
        total += tl.where(1.0 - total > 1e-13, 1.0 - total, 0.0)
        coin = tl.load(uniforms + (b * D + depth) * 3)
        taken = tl.min(tl.where(mine & (bound > coin * total), node, WIDE), 0)
        state = tl.where(tl.max((mine & fault).to(tl.int32), 0) == 1, 2, tl.where(finite, 0, 1))
        going = tl.where((state == 0) & (taken < WIDE), 1, 0)
        refusal = tl.where(state == 0, offered - going, 0)
        reached = (state == 0) & (offered == 1)
        tl.store(alphas + b * D + depth, tl.minimum(tl.sum(tl.where(mine, alpha, 0.0), 0), 1.0), mask=reached)
        tl.store(path + b * D + depth, taken, mask=going == 1)
        at = tl.where(going == 1, taken, at)
        depth += going
    tl.store(accepted + b, depth)
    tl.store(refused + b, refusal)
    tl.store(status + b, state)
    tl.store(bonus + b, tl.load(bests + start + at + 1))


@triton.jit
def _left(
    logits, stride, tops, masses, bars, edges, starts, counts, parents, tokens, q, q_starts, sums,
    path, accepted, refused, b, ids, N, D, V, temperature, DRAWN: tl.constexpr,
):  # fmt: skip
    """p at the last accepted node, and what is left of it where its children were refused, float64."""
    depth, refusal = tl.load(accepted + b), tl.load(refused + b) == 1
    at = tl.load(path + b * D + depth - 1, mask=depth > 0, other=-1)
    row = tl.load(starts + b).to(tl.int64) + at + 1
    s = scores(logits + row * stride, ids, ids < V, temperature)
    p = probability(
        s, ids, tl.load(tops + row), tl.load(masses + row), tl.load(bars + row), tl.load(edges + row)
    )
    rest = p
    if DRAWN:
        there = ids < tl.where(refusal, V, 0)
        x = tl.load(q + (tl.load(q_starts + b).to(tl.int64) + at + 1) * V + ids, mask=there, other=0.0)
        rest = tl.maximum(p - x.to(tl.float64) / tl.load(sums + b * N + at + 1, mask=refusal, other=1.0), 0.0)
    else:
        for node in range(0, tl.load(counts + b)):
            child = refusal & (tl.load(parents + b * N + node) == at)
            rest = tl.where(ids == tl.where(child, tl.load(tokens + b * N + node), -1), 0.0, rest)
    return p, rest


@triton.jit
def residual_masses(
    logits, stride, tops, masses, bars, edges, bests, starts, counts, parents, tokens, q, q_starts, sums,
    path, accepted, refused, found, N, D, V, temperature, BLOCK: tl.constexpr, DRAWN: tl.constexpr,
):  # fmt: skip
    """found [B, 2, blocks]: sums of what is left and of p."""
    b, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p, rest = _left(
        logits, stride, tops, masses, bars, edges, starts, counts, parents, tokens, q, q_starts, sums,
        path, accepted, refused, b, block * BLOCK + tl.arange(0, BLOCK), N, D, V, temperature, DRAWN,
    )  # fmt: skip
    at = found + b * 2 * tl.num_programs(1) + block
    tl.store(at, tl.sum(rest, 0))
    tl.store(at + tl.num_programs(1), tl.sum(p, 0))


@triton.jit
def draw_bonus(
    logits, stride, tops, masses, bars, edges, bests, starts, counts, parents, tokens, q, q_starts, sums,
    path, accepted, refused, found, uniforms, bonus, blocks, N, D, V, temperature,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, DRAWN: tl.constexpr,
):  # fmt: skip
    """The first id at which the cumulative mass exceeds uniform * total; where nothing is left the refusal
    was rounding, and p is drawn from."""
    b, part = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    rest = tl.load(found + b * 2 * blocks + part, mask=part < blocks, other=0.0)
    whole = tl.load(found + (b * 2 + 1) * blocks + part, mask=part < blocks, other=0.0)
    empty = tl.sum(rest, 0) <= 0
    weight = tl.where(empty, whole, rest)
    purpose = tl.where(tl.load(refused + b) == 1, 1, 2)
    uniform = tl.load(uniforms + (b * D + tl.load(accepted + b)) * 3 + purpose)
    wanted = uniform * tl.sum(weight, 0)
    last = tl.max(tl.where(weight > 0, part, 0), 0)
    block = tl.minimum(tl.min(tl.where(tl.cumsum(weight, 0) > wanted, part, BLOCKS), 0), last)
    wanted -= tl.sum(tl.where(part < block, weight, 0.0), 0)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    p, left = _left(
        logits, stride, tops, masses, bars, edges, starts, counts, parents, tokens, q, q_starts, sums,
        path, accepted, refused, b, ids, N, D, V, temperature, DRAWN,
    )  # fmt: skip
    law = tl.where(empty, p, left)
    # rounding of the two sums may leave the wanted mass a hair above the block's own
    last = tl.max(tl.where(law > 0, ids, 0), 0)
    inside = (tl.cumsum(law, 0) > wanted) & (law > 0)
    tl.store(bonus + b, tl.minimum(tl.min(tl.where(inside, ids, V), 0), last))


def launches() -> Iterator[Launch]:
    """For `spectrain.kernels.aot`: bfloat16 logits, a vocabulary of 128k, trees of up to 64 nodes."""
    row = {"logits": "*bf16", "stride": "i64"}
    laws = {"tops": "*fp32", "masses": "*fp64", "bars": "*fp32", "edges": "*i32", "bests": "*i32"}
    trees = dict.fromkeys(("starts", "counts", "parents", "tokens"), "*i32")
    drawn = {"q": "*fp32", "q_starts": "*i32"}
    ends = {"path": "*i32", "accepted": "*i32", "refused": "*i32"}
    sizes = {"N": "i32", "D": "i32", "V": "i32:16", "temperature": "fp32"}
    pairs = {
        "starts": "*i32",
        "counts": "*i32",
        "parents": "*i32",
        **drawn,
        "shared": "*fp64",
        "sums": "*fp64",
    }
    signature = row | laws | pairs | {"N": "i32", "V": "i32:16", "temperature": "fp32"}
    yield Launch(overlaps, f"{BLOCK} ids", signature, {"BLOCK": BLOCK}, 8, 3)
    walk = {"sums": "*fp64", "shared": "*fp64", "uniforms": "*fp64", "path": "*i32", "accepted": "*i32"}
    walk |= {"bonus": "*i32", "refused": "*i32", "alphas": "*fp64", "status": "*i32"}
    for label, greedy, q in (
        ("greedy", True, False),
        ("target_only", False, False),
        ("rejection", False, True),
    ):
        constants = {"WIDE": 64, "GREEDY": greedy, "DRAWN": q}
        yield Launch(walk_trees, label, row | laws | trees | drawn | walk | sizes, constants, 4, 3)
        if not greedy:
            rest = row | laws | trees | drawn | {"sums": "*fp64"} | ends | {"found": "*fp64"}
            constants = {"BLOCK": BLOCK, "DRAWN": q}
            yield Launch(residual_masses, label, rest | sizes, constants, 8, 3)
            signature = rest | {"uniforms": "*fp64", "bonus": "*i32", "blocks": "i32"} | sizes
            yield Launch(draw_bonus, label, signature, constants | {"BLOCKS": 32}, 8, 3)

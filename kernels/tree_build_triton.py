"""`tree_build` on a GPU: one program per request and block of nodes; nothing is read on the host."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from spectrain.kernels.aot import Launch
from spectrain.kernels.tree_build import Tree, shapes

ROWS, COLS = 32, 128


def launch(parents_BN: torch.Tensor, counts_B: torch.Tensor, lengths_B: torch.Tensor) -> Tree:
    """See `tree_build`."""
    B, N = parents_BN.shape
    tree = Tree(
        *(torch.empty(shape, dtype=torch.int32, device=parents_BN.device) for shape, _ in shapes(B, N))
    )
    words = triton.next_power_of_2(tree.bits.shape[2])
    build_trees[(B, triton.cdiv(N + 1, ROWS))](
        parents_BN.contiguous(), counts_B, lengths_B,
        tree.depths, tree.positions, tree.bits, tree.first_child, tree.next_sibling,
        N, tree.bits.shape[2], ROWS=ROWS, COLS=COLS, WORDS=words,
    )  # fmt: skip
    return tree


def launches() -> Iterator[Launch]:
    """For `spectrain.kernels.aot`."""
    pointers = ("parents", "counts", "lengths", "depths", "positions", "bits", "first_child", "next_sibling")
    for words in (1, 4):
        signature = {**dict.fromkeys(pointers, "*i32"), "N": "i32", "W": "i32"}
        constants = {"ROWS": ROWS, "COLS": COLS, "WORDS": words}
        yield Launch(build_trees, f"{32 * words} nodes", signature, constants, num_warps=4, num_stages=3)


@triton.jit
def build_trees(
    parents, counts, lengths, depths, positions, bits, first_child, next_sibling,
    N, W, ROWS: tl.constexpr, COLS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """One program per request and ROWS nodes, the root being node -1."""
    b = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1) * ROWS + tl.arange(0, ROWS) - 1
    word = tl.arange(0, WORDS)
    count = tl.load(counts + b)
    length = tl.load(lengths + b)
    own = parents + b * N
    real = (node >= 0) & (node < count)
    parent = tl.load(own + node, mask=real, other=-2)

    # all rows climb to the root together
    at = tl.where(real, node, -1)
    depth = tl.zeros((ROWS,), tl.int32)
    seen = tl.zeros((ROWS, WORDS), tl.int32)
    while tl.max(at, 0) >= 0:
        climbs = at >= 0
        here = climbs[:, None] & ((at // 32)[:, None] == word[None, :])
        seen |= tl.where(here, (1 << (at % 32))[:, None], 0)
        at = tl.load(own + at, mask=climbs, other=-1)
        depth += (at >= 0).to(tl.int32)

    child = tl.zeros((ROWS,), tl.int32) + N
    sibling = tl.zeros((ROWS,), tl.int32) + N
    for start in range(0, N, COLS):
        other = start + tl.arange(0, COLS)
        theirs = tl.load(own + other, mask=other < count, other=-3)
        born = theirs[None, :] == node[:, None]
        child = tl.minimum(child, tl.min(tl.where(born, other[None, :], N), 1))
        later = (theirs[None, :] == parent[:, None]) & (other[None, :] > node[:, None])
        sibling = tl.minimum(sibling, tl.min(tl.where(later, other[None, :], N), 1))

    stored = (node >= 0) & (node < N)
    at_node = b * N + node
    tl.store(depths + at_node, depth, mask=stored)
    tl.store(positions + at_node, tl.where(real, length + depth, 0), mask=stored)
    tl.store(next_sibling + at_node, tl.where(sibling < N, sibling, -1), mask=stored)
    tl.store(first_child + at_node + b + 1, tl.where(child < N, child, -1), mask=node < N)
    spread = (at_node * W)[:, None] + word[None, :]
    tl.store(bits + spread, seen, mask=stored[:, None] & (word < W)[None, :])

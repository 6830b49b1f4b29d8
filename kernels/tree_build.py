"""What verification needs of token trees, from the parents of their nodes.

    depth_i = 0 for a child of the root, else depth of parent_i + 1       position_i = length + depth_i
    bit j of row i: node j is i or an ancestor of i; 32 nodes a word, node j is bit j % 32 of word j // 32
    first_child: the lowest child of the root, then of each node; next_sibling_i: the next child of parent_i

Parents (-1, 0, 0, 2), node 0 rightmost in the bits:
    depth 0 1 1 2   bits 0001 0011 0101 1101   first_child (root first) 0 1 -1 3 -1   next_sibling -1 2 -1 -1
The text is a tree too, a chain, so one form serves chains, trees and parts of them. Exact: integers alone.
Legend: B requests, N places for nodes (request b has counts[b] of them), W = N / 32 words, rounded up.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tree:
    """Int32: depths, positions, next_sibling [B, N], bits [B, N, W], first_child [B, N + 1]. Places without a
    node hold depth 0, no bit, and -1 for links; -1 is also "none"."""

    depths: torch.Tensor
    positions: torch.Tensor
    bits: torch.Tensor
    first_child: torch.Tensor
    next_sibling: torch.Tensor


def tree_build(parents_BN: torch.Tensor, counts_B: torch.Tensor, lengths_B: torch.Tensor) -> Tree:
    """parents_BN int32, -1 for a child of the root, else an earlier node; counts_B int32: nodes; lengths_B
    int32: committed tokens before them."""
    if parents_BN.device.type == "cpu":
        return reference(parents_BN, counts_B, lengths_B)
    from spectrain.kernels.tree_build_triton import launch

    return launch(parents_BN, counts_B, lengths_B)


def reference(parents_BN: torch.Tensor, counts_B: torch.Tensor, lengths_B: torch.Tensor) -> Tree:
    """The same node by node."""
    B, N = parents_BN.shape
    tree = Tree(*(parents_BN.new_full(shape, fill) for shape, fill in shapes(B, N)))
    for b, (parents, count) in enumerate(zip(parents_BN.tolist(), counts_B.tolist(), strict=True)):
        newest: dict[int, int] = {}
        for i, parent in enumerate(parents[:count]):
            if parent >= 0:
                tree.depths[b, i] = tree.depths[b, parent] + 1
                tree.bits[b, i] = tree.bits[b, parent]
            tree.bits[b, i, i // 32] |= 1 << i % 32 if i % 32 < 31 else -(1 << 31)
            if parent in newest:
                tree.next_sibling[b, newest[parent]] = i
            else:
                tree.first_child[b, parent + 1] = i
            newest[parent] = i
        tree.positions[b, :count] = tree.depths[b, :count] + lengths_B[b]
    return tree


def shapes(B: int, N: int) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Shape and value of places without a node, in the order of `Tree`."""
    return ((B, N), 0), ((B, N), 0), ((B, N, -(-N // 32)), 0), ((B, N + 1), -1), ((B, N), -1)

"""Static trees: rank paths, and the best tree for measured accuracies (Medusa, Cai et al. 2024, 2.3.3).

A path (r_1, .., r_d) is the node reached by taking the drafter's r_1-th likeliest token (from 0) at depth 1,
then its r_2-th likeliest at depth 2, and on. A tree is a set of paths that holds the parent of each. Nodes
are numbered by depth, then by path, so that a parent comes before its children:

    paths    (0,)  (1,)  (0, 0)  (0, 2)  (1, 0)
    parents   -1    -1      0       0       1

Any drafter that ranks tokens by depth can grow it: node i carries the token of rank paths[i][-1] below
parents[i]. Where ranks do not depend on the parent (parallel heads) that is rank paths[i][-1] of head
len(paths[i]) - 1. Knows no model and no tensor.
"""

import heapq
from collections.abc import Sequence
from fractions import Fraction

Paths = tuple[tuple[int, ...], ...]


def check_paths(key: str, paths: Sequence[Sequence[int]]) -> Paths:
    """The paths in node order.

    Raises ValueError naming `key` for no path at all, an empty one, a rank that is no number from 0, the same
    path twice, or a path whose parent is missing.
    """
    if not paths:
        raise ValueError(f"{key}=[]: expected at least one path of ranks, such as [0]")
    found = set()
    for path in paths:
        if not path or any(type(rank) is not int or rank < 0 for rank in path):
            raise ValueError(f"{key}: path {list(path)}: expected one rank from 0 on for each depth")
        if tuple(path) in found:
            raise ValueError(f"{key}: path {list(path)} stands there twice; expected different paths")
        found.add(tuple(path))
    ordered = tuple(sorted(found, key=lambda path: (len(path), path)))
    for path in ordered:
        if len(path) > 1 and path[:-1] not in found:
            raise ValueError(f"{key}: path {list(path)} needs its parent {list(path[:-1])} in the tree")
    return ordered


def parents_of(paths: Paths) -> tuple[int, ...]:
    """The parent of each node of `check_paths`, -1 for children of the root."""
    number = {(): -1, **{path: node for node, path in enumerate(paths)}}
    return tuple(number[path[:-1]] for path in paths)


def expected_accepted(paths: Sequence[Sequence[int]], accuracies: Sequence[Sequence[float]]) -> float:
    """Expected draft tokens accepted per round, tau - 1: the sum over nodes of the product of accuracies.

    accuracies[d][r]: probability that the target's choice at depth d + 1 has rank r there, whatever the ranks
    above it (the model's one assumption).
    """
    total = 0.0
    for path in paths:
        value = 1.0
        for row, rank in zip(accuracies, path, strict=False):
            value *= row[rank]
        total += value
    return total


def best_paths(accuracies: Sequence[Sequence[float | Fraction]], nodes: int) -> Paths:
    """The tree of `nodes` nodes with the largest `expected_accepted`, in node order.

    A child's product is never above its parent's, so the `nodes` largest products of all paths are a tree,
    and no other tree has a larger sum; ties go to the shallower path, then to the lower ranks. Raises
    ValueError for accuracies that are no probabilities of exclusive ranks, or for fewer paths than `nodes`.
    """
    for depth, row in enumerate(accuracies):
        if not all(0 <= a <= 1 for a in row) or sum(row) > 1 + 1e-9:
            raise ValueError(
                f"accuracies[{depth}]={list(row)}: expected probabilities of exclusive ranks, from 0 to 1 "
                "and 1 at most in sum (not cumulative top-k accuracies)"
            )
    if nodes < 1:
        raise ValueError(f"nodes={nodes}: expected at least 1")
    # (-product, depth, path); a popped node's children join, so the heap always holds the best outside.
    rim: list[tuple[float | Fraction, int, tuple[int, ...]]] = []
    for rank, a in enumerate(accuracies[0] if accuracies else ()):
        rim.append((-a, 1, (rank,)))
    heapq.heapify(rim)
    found: list[tuple[int, ...]] = []
    while len(found) < nodes:
        if not rim:
            raise ValueError(f"nodes={nodes}: the accuracies' ranks and depths make {len(found)} paths only")
        value, depth, path = heapq.heappop(rim)
        found.append(path)
        for rank, a in enumerate(accuracies[depth] if depth < len(accuracies) else ()):
            heapq.heappush(rim, (value * a, depth + 1, (*path, rank)))
    return check_paths("paths", found)

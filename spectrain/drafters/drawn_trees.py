"""Trees whose siblings are drawn one after the other from q without replacement (Jeon et al. 2024, recursive
speculative decoding), or are q's likeliest where sampling is greedy, which is the limit.

Their shape, `branching`, looks at no drawn token, as the law `recursive` needs. Knows no network and no
verification.

Legend: M nodes of one step, W ids that the drafter knows, V target vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache

import numpy as np
import torch

from spectrain.drafters.stepper import Stepper, likeliest_ids, scattered
from spectrain.kernels.likeliest import in_cache
from spectrain.proposal import Plan, Proposal, Sampler
from spectrain.trees import Paths, best_paths, parents_of

# If .4 to .8 of the drawn siblings are kept in truth, the shape for .6 keeps at least 91% of what the best
# shape does (24 nodes 5 deep and 60 nodes 8 deep, by the model of `branching`).
KEPT = Fraction(3, 5)  # exact, so that equal chances tie


@cache
def branching(length: int, nodes: int, top_k: int) -> Paths:
    """The shape of a sampled tree, as paths of ranks among siblings in node order (`spectrain.trees`).

    If every drawn sibling is kept with probability KEPT once the earlier ones are refused, a node's chance is
    KEPT * (1 - KEPT) ** rank times its parent's; the `nodes` likeliest ones are the tree of that size of
    which most is kept. Ties go to the shallower node, then to the lower ranks.

        length 2, nodes 4, top_k 2: a child .6, its child .36, a second child .24, a second grandchild .144
        ((0,), (1,), (0, 0), (0, 1)); a child of the second child ties with the last one
    """
    chances = [KEPT * (1 - KEPT) ** rank for rank in range(top_k)]
    return best_paths([chances] * length, min(nodes, sum(top_k**depth for depth in range(1, length + 1))))


def draw_trees(stepper: Stepper, requests: Sequence[int], plan: Plan, sampler: Sampler) -> list[Proposal]:
    children: dict[int, list[int]] = {}
    depth = {-1: 0}
    for place, parent in enumerate(parents_of(branching(plan.length, plan.nodes, plan.top_k))):
        children.setdefault(parent, []).append(place)
        depth[place] = depth[parent] + 1
    positions = stepper.root_positions(requests)
    trees = [_Drawn(request, position) for request, position in zip(requests, positions, strict=True)]
    for level in range(max(depth.values())):
        inner = [place for place in sorted(children) if depth[place] == level]
        asked = [(tree, place) for tree in trees for place in inner if place in tree.node]
        if not level:
            logits = stepper.root_logits(requests)
        elif asked:
            nodes = [tree.node[place] for tree, place in asked]
            parents = [tree.arrival[tree.parents[n]] for n, (tree, _) in zip(nodes, asked, strict=True)]
            for n, (tree, _) in zip(nodes, asked, strict=True):
                tree.arrival[n] = len(tree.arrival) - 1
            tokens = torch.tensor([tree.tokens[n] for n, (tree, _) in zip(nodes, asked, strict=True)])
            logits = stepper.step([tree.request for tree, _ in asked], parents, tokens.to(logits.device))
        else:
            break
        if sampler.penalised:
            paths = [tree.path(place) for tree, place in asked]
            logits = sampler.penalise(logits, [tree.request for tree, _ in asked], paths, stepper.kept_ids)
        if plan.ranked:
            for (tree, place), ids in zip(asked, likeliest_ids(stepper, logits, plan.ranked)[0], strict=True):
                tree.ranked[tree.node[place]] = ids
        first = 0
        for part in in_cache(logits):
            _add_siblings(stepper, part, asked[first : first + len(part)], children, sampler)
            first += len(part)
    return [tree.proposal(plan.ranked) for tree in trees]


@dataclass
class _Drawn:
    """A sampled tree as it grows. node: number of each place of the shape that was filled, -1 for the root;
    arrival: of each node that was stepped; ranked: ids [M] by node."""

    request: int
    root_position: int
    node: dict[int, int] = field(default_factory=lambda: {-1: -1})
    arrival: dict[int, int] = field(default_factory=lambda: {-1: -1})
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    q: list[torch.Tensor] = field(default_factory=list)
    ranked: dict[int, np.ndarray] = field(default_factory=dict)

    def path(self, place: int) -> list[int]:
        """Tokens from the root's child down to the node at a place of the shape."""
        node, found = self.node[place], []
        while node >= 0:
            found.append(self.tokens[node])
            node = self.parents[node]
        return found[::-1]

    def proposal(self, ranked: int) -> Proposal:
        unknown = np.full(len(self.ranked[-1]) if ranked else 0, -1)
        rows = [self.ranked.get(node, unknown) for node in range(-1, len(self.tokens))]
        return Proposal(
            tokens=torch.tensor(self.tokens),
            parents=tuple(self.parents),
            q=self.q or None,
            ranked=torch.from_numpy(np.stack(rows)) if ranked else None,
        )


def _add_siblings(
    stepper: Stepper,
    logits_MW: torch.Tensor,
    asked: list[tuple[_Drawn, int]],
    children: dict[int, list[int]],
    sampler: Sampler,
) -> None:
    """Give each place of `asked` the children that the shape has there, in the order of their draws; fewer
    where q has no more tokens."""
    counts = [len(children[place]) for _, place in asked]
    if sampler.greedy:
        ids = likeliest_ids(stepper, logits_MW, max(counts))[0].tolist()
        for (tree, place), row in zip(asked, ids, strict=True):
            for child, token in zip(children[place], row, strict=False):
                _add(tree, place, child, token)
        return
    q_MV = sampler.draft_law(scattered(stepper, logits_MW))
    left_MV = q_MV.clone()
    for rank in range(max(counts)):
        more = (left_MV.sum(-1) > 0).tolist()
        rows = [m for m, count in enumerate(counts) if count > rank and more[m]]
        if not rows:
            break
        trees = [asked[m][0] for m in rows]
        places = [children[asked[m][1]][rank] for m in rows]
        drawn = sampler.draw(
            left_MV[rows],
            requests=[tree.request for tree in trees],
            root_positions=[tree.root_position for tree in trees],
            slots=places,
        )
        left_MV[rows, drawn] = 0
        for m, tree, child, token in zip(rows, trees, places, drawn, strict=True):
            _add(tree, asked[m][1], child, token)
            tree.q.append(q_MV[m])


def _add(tree: _Drawn, place: int, child: int, token: int) -> None:
    tree.node[child] = len(tree.tokens)
    tree.parents.append(tree.node[place])
    tree.tokens.append(token)

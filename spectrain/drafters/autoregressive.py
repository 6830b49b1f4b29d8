"""Grow a proposal token after token: a chain, or a dynamic tree (EAGLE-2, Li et al. 2024, section 4).

For any drafter that gives logits at the root and can step from any node. A chain is drawn from the draft law
q, or chosen by arg-max where sampling is greedy. A tree is chosen unless plan.sampled: at each level the
`top_k` likeliest candidates are expanded with `top_k` children each, then the `nodes` likeliest of all
candidates are kept. The likelihood of a node is the sum of log q at temperature 1 along its path, in float32;
ties go to the shallower node, then to the lower id, so that a kept node's parent is always kept. Penalties of
the sampler count along each node's path, before anything else.

The siblings of a sampled tree are drawn one after the other from q without replacement (Jeon et al. 2024,
recursive speculative decoding), or are q's likeliest where sampling is greedy, which is the limit. Its shape,
`branching`, looks at no drawn token, as the law `recursive` needs. Knows no network and no verification.

Root with log q(a) = -0.1, log q(b) = -3; a's children c -0.2, d -2. With top_k 2, length 2, nodes 3 the tree
is a, d, c less b: the sums are a -0.1, c -0.3, d -2.1, b -3.

Legend: R requests, M nodes of one step, W ids that the drafter knows, V target vocabulary, F expanded nodes
of a level.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush
from typing import Protocol

import numpy as np
import torch

from spectrain.kernels.likeliest import in_cache, likeliest
from spectrain.proposal import Plan, Proposal, Sampler

# If .4 to .8 of the drawn siblings are kept in truth, the shape for .6 keeps at least 91% of what the best
# shape does (24 nodes 5 deep and 60 nodes 8 deep, by the model of `branching`).
KEPT = 0.6


class Stepper(Protocol):
    """What a family gives: logits at roots and a step from known nodes.

    kept_ids: int64 [W], the target ids of the logits' columns, ascending; vocab_size: V.
    """

    kept_ids: torch.Tensor
    vocab_size: int

    def root_positions(self, requests: Sequence[int]) -> list[int]:
        """Position n of the newest committed token x_n of each request."""

    def root_logits(self, requests: Sequence[int]) -> torch.Tensor:
        """Logits [R, W] of the token after each root."""

    def step(self, requests: Sequence[int], parents: Sequence[int], tokens: torch.Tensor) -> torch.Tensor:
        """Run M new nodes and return the logits [M, W] of the token after each.

        The nodes of one request are neighbours. parents: -1 for a child of the root, else the number of an
        earlier node of that request in order of arrival. tokens: int64 [M], target ids.
        """


def grow(stepper: Stepper, requests: Sequence[int], plan: Plan, sampler: Sampler) -> list[Proposal]:
    """One proposal per request by `plan`; the network runs at most plan.length - 1 steps."""
    if plan.shape == "chain":
        return _chains(stepper, requests, plan, sampler)
    return (_drawn_trees if plan.sampled else _trees)(stepper, requests, plan, sampler)


@cache
def branching(length: int, nodes: int, top_k: int) -> tuple[tuple[int, int], ...]:
    """The shape of a sampled tree: (parent, rank among its siblings) of each node, level after level.

    If every drawn sibling is kept with probability KEPT once the earlier ones are refused, a node's chance is
    KEPT * (1 - KEPT) ** rank times its parent's; the `nodes` likeliest ones are the tree of that size of
    which most is kept. Ties go to the shallower node, then to the lower ranks.

        length 2, nodes 4, top_k 2: a child .6, its child .36, a second child .24, a second grandchild .144
        ((-1, 0), (-1, 1), (0, 0), (0, 1)); a child of the second child ties with the last one
    """

    def entry(*ranks: int) -> tuple[float, int, tuple[int, ...]]:
        return -(KEPT ** len(ranks)) * (1 - KEPT) ** sum(ranks), len(ranks), ranks

    found: list[tuple[int, ...]] = []
    front = [entry(0)]
    while front and len(found) < nodes:
        _, depth, ranks = heappop(front)
        found.append(ranks)
        if ranks[-1] + 1 < top_k:
            heappush(front, entry(*ranks[:-1], ranks[-1] + 1))
        if depth < length:
            heappush(front, entry(*ranks, 0))
    found.sort(key=lambda ranks: (len(ranks), ranks))
    number = {(): -1, **{ranks: i for i, ranks in enumerate(found)}}
    return tuple((number[ranks[:-1]], ranks[-1]) for ranks in found)


def _chains(stepper: Stepper, requests: Sequence[int], plan: Plan, sampler: Sampler) -> list[Proposal]:
    R = len(requests)
    roots = [] if sampler.greedy else stepper.root_positions(requests)
    logits = stepper.root_logits(requests)
    tokens: list[list[int]] = []  # one list per slot
    laws: list[list[torch.Tensor]] = [[] for _ in requests]
    ranked = []
    for slot in range(plan.length):
        if slot:
            newest = torch.tensor(tokens[-1], device=logits.device)
            logits = stepper.step(requests, [slot - 2] * R, newest)
        if sampler.penalised:
            drafted = [[column[r] for column in tokens] for r in range(R)]
            logits = sampler.penalise(logits, requests, drafted, stepper.kept_ids)
        if plan.ranked:
            ranked.append(_likeliest(stepper, logits, plan.ranked)[0])
        if sampler.greedy:
            tokens.append(stepper.kept_ids[sampler.best(logits)].tolist())
            continue
        tokens.append([])
        for part in in_cache(logits):
            some = slice(len(tokens[-1]), len(tokens[-1]) + len(part))
            law = sampler.draft_law(_scattered(stepper, part))
            keys = {"requests": requests[some], "root_positions": roots[some], "slots": [slot] * len(part)}
            tokens[-1] += sampler.draw(law, **keys)
            for request, row in zip(laws[some], law, strict=True):
                request.append(row)
    if plan.ranked:
        ranked.append(np.full_like(ranked[0], -1))
    parents = tuple(range(-1, plan.length - 1))
    return [
        Proposal(
            tokens=torch.tensor([column[r] for column in tokens]),
            parents=parents,
            q=laws[r] or None,
            ranked=torch.from_numpy(np.stack([rows[r] for rows in ranked])) if plan.ranked else None,
        )
        for r in range(R)
    ]


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


def _drawn_trees(stepper: Stepper, requests: Sequence[int], plan: Plan, sampler: Sampler) -> list[Proposal]:
    children: dict[int, list[int]] = {}
    depth = {-1: 0}
    for place, (parent, _) in enumerate(branching(plan.length, plan.nodes, plan.top_k)):
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
            for (tree, place), ids in zip(asked, _likeliest(stepper, logits, plan.ranked)[0], strict=True):
                tree.ranked[tree.node[place]] = ids
        first = 0
        for part in in_cache(logits):
            _add_siblings(stepper, part, asked[first : first + len(part)], children, sampler)
            first += len(part)
    return [tree.proposal(plan.ranked) for tree in trees]


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
        ids = _likeliest(stepper, logits_MW, max(counts))[0].tolist()
        for (tree, place), row in zip(asked, ids, strict=True):
            for child, token in zip(children[place], row, strict=False):
                _add(tree, place, child, token)
        return
    q_MV = sampler.draft_law(_scattered(stepper, logits_MW))
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


@dataclass
class _Pool:
    """All candidates of R trees, level after level; [R, C] each.

    score: log-likelihood of the path; parent: number of the parent in the pool, -1 for the root; arrival:
    number of the candidate among the expanded nodes of its tree, -1 if it was not expanded.
    """

    token: np.ndarray
    score: np.ndarray
    parent: np.ndarray
    depth: np.ndarray
    arrival: np.ndarray

    def extend(self, token: np.ndarray, score: np.ndarray, parent: np.ndarray, depth: int) -> None:
        self.token = np.concatenate((self.token, token), 1)
        self.score = np.concatenate((self.score, score), 1)
        self.parent = np.concatenate((self.parent, parent), 1)
        self.depth = np.concatenate((self.depth, np.full_like(token, depth)), 1)
        self.arrival = np.concatenate((self.arrival, np.full_like(token, -1)), 1)

    def path(self, tree: int, candidate: int) -> list[int]:
        """Tokens from the root's child down to a candidate."""
        found: list[int] = []
        while candidate >= 0:
            found.append(int(self.token[tree, candidate]))
            candidate = int(self.parent[tree, candidate])
        return found[::-1]

    def best(self, begin: int, count: int) -> np.ndarray:
        """Numbers [R, F] of the likeliest candidates from `begin` on; ties: shallower, then lower id."""
        keys = (self.token[:, begin:], self.depth[:, begin:], -self.score[:, begin:])
        return begin + np.lexsort(keys, axis=-1)[:, :count]


def _trees(stepper: Stepper, requests: Sequence[int], plan: Plan, sampler: Sampler) -> list[Proposal]:
    R, K = len(requests), min(plan.top_k, len(stepper.kept_ids))
    none = np.empty((R, 0), np.int64)
    pool = _Pool(none, none.astype(np.float32), none, none, none)
    logits = stepper.root_logits(requests)
    if sampler.penalised:
        logits = sampler.penalise(logits, requests, [[] for _ in requests], stepper.kept_ids)
    ids, logq = _likeliest(stepper, logits, max(K, plan.ranked))
    ranked = [ids[:, None]]
    pool.extend(ids[:, :K], logq[:, :K], np.full((R, K), -1), 1)
    begin, arrivals = 0, 0
    for depth in range(2, plan.length + 1):
        expanded = pool.best(begin, K)
        F = expanded.shape[1]
        parents = np.take_along_axis(pool.parent, expanded, 1)
        # A root's child has parent -1; index -1 then reads some arrival, which `where` drops.
        parents = np.where(parents < 0, -1, np.take_along_axis(pool.arrival, parents, 1))
        np.put_along_axis(pool.arrival, expanded, arrivals + np.arange(F)[None], 1)
        arrivals += F
        tokens = torch.from_numpy(np.take_along_axis(pool.token, expanded, 1).ravel())
        flat = [request for request in requests for _ in range(F)]
        logits = stepper.step(flat, parents.ravel().tolist(), tokens.to(logits.device))
        if sampler.penalised:
            drafted = [pool.path(r, int(node)) for r, nodes in enumerate(expanded) for node in nodes]
            logits = sampler.penalise(logits, flat, drafted, stepper.kept_ids)
        ids, logq = _likeliest(stepper, logits, max(K, plan.ranked))
        ranked.append(ids.reshape(R, F, -1))
        scores = np.take_along_axis(pool.score, expanded, 1)[..., None] + logq.reshape(R, F, -1)[..., :K]
        begin = pool.token.shape[1]
        children, parents = ranked[-1][..., :K].reshape(R, -1), np.repeat(expanded, K, 1)
        pool.extend(children, scores.reshape(R, -1), parents, depth)
    kept = np.sort(pool.best(0, plan.nodes), 1)
    rows = np.concatenate(ranked, 1)[..., : plan.ranked]
    return [_proposal(pool, r, kept[r], rows[r] if plan.ranked else None) for r in range(R)]


def _proposal(pool: _Pool, r: int, kept: np.ndarray, ranked: np.ndarray | None) -> Proposal:
    """Tree r of the pool with the candidates `kept`. ranked [1 + arrivals, M]: the root's row, then the
    expanded nodes'."""
    number = {-1: -1, **{int(candidate): node for node, candidate in enumerate(kept)}}
    if ranked is not None:
        arrival = pool.arrival[r, kept]
        unknown = np.full_like(ranked[:1], -1)
        ranked = np.concatenate((ranked, unknown))[[0, *np.where(arrival < 0, -1, arrival + 1)]]
    return Proposal(
        tokens=torch.from_numpy(pool.token[r, kept]),
        parents=tuple(number[parent] for parent in pool.parent[r, kept].tolist()),
        ranked=None if ranked is None else torch.from_numpy(ranked),
    )


def _likeliest(stepper: Stepper, logits_MW: torch.Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The likeliest target ids of each row, at most `count`, and their log-probability in float32."""
    columns, logq = likeliest(logits_MW, min(count, logits_MW.shape[1]))
    return stepper.kept_ids[columns].cpu().numpy(), logq.cpu().numpy()


def _scattered(stepper: Stepper, logits_MW: torch.Tensor) -> torch.Tensor:
    """The logits over the target vocabulary, -inf outside the kept ids."""
    M, W = logits_MW.shape
    if stepper.vocab_size == W:
        return logits_MW
    scattered = logits_MW.new_full((M, stepper.vocab_size), float("-inf"))
    return scattered.index_copy_(1, stepper.kept_ids, logits_MW)

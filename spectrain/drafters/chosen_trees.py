"""Trees of chosen tokens: dynamic (EAGLE-2, Li et al. 2024, section 4) and static (Medusa, Cai et al. 2024,
section 2.3.3).

Dynamic: at each level the `top_k` likeliest candidates are expanded with `top_k` children each, then the
`nodes` likeliest of all candidates are kept. Static: the nodes are the plan's rank paths. The likelihood of a
node is the sum of log q at temperature 1 along its path, in float32; ties go to the shallower node, then to
the lower id, so that a kept node's parent is always kept. With a budget a level is grown and a node kept only
where it pays (`proposal.Budget`). Knows no network and no verification.

EAGLE-2's published settings count otherwise: its total_token holds the root (60 is `nodes` 59), its depth is
the levels below the first (5 is `length` 6).

Root with log q(a) = -0.1, log q(b) = -3; a's children c -0.2, d -2. With top_k 2, length 2, nodes 3 the tree
is a, d, c less b: the sums are a -0.1, c -0.3, d -2.1, b -3.

Legend: R requests, F expanded nodes of a level, C candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from spectrain.drafters.stepper import Stepper, likeliest_ids
from spectrain.proposal import Plan, Proposal, Sampler


def grow_trees(stepper: Stepper, requests: Sequence[int], plan: Plan, sampler: Sampler) -> list[Proposal]:
    """One tree per request by `plan`, dynamic or static; q plays no part but to choose, the sampler none but
    to penalise."""
    shape, budget = _Shape(plan, len(stepper.kept_ids)), plan.budget
    proposals: dict[int, Proposal] = {}
    live = list(
        range(len(requests))
    )  # indices of the requests whose trees still grow; pool and ranked follow
    none = np.empty((len(live), 0), np.int64)
    pool = _Pool(none, none.astype(np.float32), none, none, none)
    logits = stepper.root_logits(requests)
    if sampler.penalised:
        logits = sampler.penalise(logits, requests, [[] for _ in requests], stepper.kept_ids)
    ids, logq = likeliest_ids(stepper, logits, max(shape.ranks, plan.ranked))
    ranked = ids[:, None]
    ranks = [path[0] for path in shape.paths if len(path) == 1] if shape.static else list(range(shape.ranks))
    pool.extend(ids[:, ranks], logq[:, ranks], np.full((len(live), len(ranks)), -1), 1)
    begin, depth = 0, 1

    def finish(trees: Sequence[int]) -> None:
        for r in trees:
            rows = ranked[r, :, : plan.ranked] if plan.ranked else None
            proposals[live[r]] = _proposal(pool, r, shape.kept(pool, r, live[r]), rows)

    while depth < plan.length:
        depth += 1
        expanded, of, ranks = shape.level(depth, pool, begin)
        if not ranks:
            break
        if budget is not None:
            survivals = np.exp(np.take_along_axis(pool.score, expanded, 1)).tolist()
            go = [r for r, found in enumerate(survivals) if budget.steps_on(live[r], found, depth - 1)]
            finish([r for r in range(len(live)) if r not in go])
            pool, ranked, expanded, live = pool.select(go), ranked[go], expanded[go], [live[r] for r in go]
            if not live:
                break
        count = max(shape.ranks, plan.ranked)
        ids, logq = _expand(stepper, [requests[i] for i in live], pool, expanded, count, sampler)
        ranked = np.concatenate((ranked, ids), 1)
        scores = np.take_along_axis(pool.score, expanded, 1)[:, of] + logq[:, of, ranks]
        begin = pool.token.shape[1]
        pool.extend(ids[:, of, ranks], scores, expanded[:, of], depth)
    finish(range(len(live)))
    return [proposals[i] for i in range(len(requests))]


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

    def select(self, rows: list[int]) -> "_Pool":
        """The trees `rows` only."""
        return _Pool(**{name: values[rows] for name, values in vars(self).items()})


class _Shape:
    """Which candidates a plan expands, which of their ranks become children, and which it keeps.

    level(..): expanded [R, F], numbers in the pool, and for each child of the next level the index of its
    parent among the F and its rank there, in the pool's order.
    """

    def __init__(self, plan: Plan, num_ids: int):
        self.plan = plan
        self.static = plan.shape == "static"
        self.paths = [path for path in plan.paths if len(path) <= plan.length]
        widest = max((path[-1] for path in self.paths), default=0)
        if widest >= num_ids:
            raise ValueError(f"plan.paths: rank {widest}: the drafter knows {num_ids} ids, expected less")
        self.ranks = widest + 1 if self.static else min(plan.top_k, num_ids)

    def level(self, depth: int, pool: _Pool, begin: int) -> tuple[np.ndarray, list[int], list[int]]:
        if not self.static:
            K = self.ranks
            expanded = pool.best(begin, K)
            F = expanded.shape[1]
            return expanded, [f for f in range(F) for _ in range(K)], list(range(K)) * F
        children = [path for path in self.paths if len(path) == depth]
        inner = sorted({path[:-1] for path in children})
        number = {path: i for i, path in enumerate(self.paths)}
        expanded = np.array([[number[path] for path in inner]] * len(pool.token))
        return expanded, [inner.index(path[:-1]) for path in children], [path[-1] for path in children]

    def kept(self, pool: _Pool, r: int, row: int) -> np.ndarray:
        """Numbers of the candidates of tree r of the pool that are drafted, ascending; row: its request's
        index."""
        chosen = pool.select([r]).best(0, pool.token.shape[1] if self.static else self.plan.nodes)[0]
        if (budget := self.plan.budget) is not None:
            survivals = np.exp(pool.score[r, chosen]).tolist()
            # Survivals fall along the order, so what pays is its head and connected.
            chosen = chosen[: sum(budget.keeps(row, s) for s in survivals)]
        return np.sort(chosen)


def _expand(
    stepper: Stepper, requests: list[int], pool: _Pool, expanded: np.ndarray, count: int, sampler: Sampler
) -> tuple[np.ndarray, np.ndarray]:
    """Run the candidates `expanded` [R, F] of the pool; likeliest ids and log q [R, F, count] below them."""
    R, F = expanded.shape
    parents = np.take_along_axis(pool.parent, expanded, 1)
    # A root's child has parent -1; index -1 then reads some arrival, which `where` drops.
    parents = np.where(parents < 0, -1, np.take_along_axis(pool.arrival, parents, 1))
    arrivals = int(pool.arrival.max()) + 1
    np.put_along_axis(pool.arrival, expanded, arrivals + np.arange(F)[None], 1)
    tokens = torch.from_numpy(np.take_along_axis(pool.token, expanded, 1).ravel())
    flat = [request for request in requests for _ in range(F)]
    logits = stepper.step(flat, parents.ravel().tolist(), tokens.to(stepper.kept_ids.device))
    if sampler.penalised:
        paths = [pool.path(r, int(node)) for r, nodes in enumerate(expanded) for node in nodes]
        logits = sampler.penalise(logits, flat, paths, stepper.kept_ids)
    ids, logq = likeliest_ids(stepper, logits, count)
    return ids.reshape(R, F, -1), logq.reshape(R, F, -1)


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

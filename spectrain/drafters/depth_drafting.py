"""Decoding with a block for each depth (`spectrain.proposal.Drafting`): block k predicts k + 2 tokens ahead.

When token x_p becomes known, committed or drafted, block k can run on row p - 1 - k: its input, block k - 1's
output on that row, came with token x_{p-1}. So each node of a tree runs the blocks from its depth on, each on
one row, from its parent's outputs, and each block has a cache of its own that holds row t at slot t. A node
at depth d, the root at 0, predicts its successor with block d. Prompt a b, root c, draft d e, three blocks:
    b: block 0 row 0
    c: block 0 row 1 (predicts d), block 1 row 0
    d: block 1 row 1 (predicts e), block 2 row 0
    e: block 2 row 1 (predicts what follows)
Knows no family. Legend: R requests, N rows, D state, K blocks, W kept ids.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from spectrain.cache import KVCache
from spectrain.drafters.autoregressive import grow
from spectrain.drafters.feature_drafting import Advance
from spectrain.proposal import Observation, Plan, Proposal, Sampler


class DepthDrafter(Protocol):
    """What a family gives; blocks: K networks."""

    kept_ids: torch.Tensor
    vocab_size: int
    blocks: nn.ModuleList

    def entry(self, taps_NLD: torch.Tensor, final_ND: torch.Tensor) -> torch.Tensor:
        """The state [N, D] that block 0 reads."""

    def stepping(self, k: int, capacity: int) -> Advance:
        """Block k at positions below `capacity`."""

    def logits(self, state_ND: torch.Tensor, k: int) -> torch.Tensor:
        """Logits [N, W] of block k's states."""


class _Request:
    """outputs: of the blocks behind the root and behind each node, {k: state [D]}; depths: of the same;
    places[k]: number of each node in block k's cache."""

    def __init__(self, K: int):
        self.outputs: list[dict[int, torch.Tensor]] = [{}]
        self.depths = [0]
        self.places: list[dict[int, int]] = [{} for _ in range(K)]

    def forget_nodes(self) -> None:
        del self.outputs[1:], self.depths[1:]
        for place in self.places:
            place.clear()


class DepthDrafting:
    """The drafter at work on several requests."""

    def __init__(self, drafter: DepthDrafter, num_requests: int, capacity: int):
        K = len(drafter.blocks)
        self.drafter = drafter
        self.kept_ids, self.vocab_size = drafter.kept_ids, drafter.vocab_size
        self.advance = [drafter.stepping(k, capacity) for k in range(K)]
        self.caches = [KVCache(num_requests, capacity) for _ in range(K)]
        self.requests = [_Request(K) for _ in range(num_requests)]
        self.steps = 0

    @torch.no_grad()
    def observe(self, observations: Sequence[Observation]) -> None:
        for o in observations:
            if o.start == 0:
                self.requests[o.request] = _Request(len(self.caches))
                for cache in self.caches:
                    cache.truncate(o.request, 0)
            committed = self.caches[0].committed[o.request]
            assert committed == o.start, f"request {o.request}: row {o.start} follows {committed} rows"
        inputs = {o.request: self.drafter.entry(o.taps, o.final) for o in observations}
        for k, cache in enumerate(self.caches):
            here = [o for o in observations if len(inputs[o.request])]
            if not here:
                break
            counts = [len(inputs[o.request]) for o in here]
            requests = [o.request for o in here]
            ids = torch.cat([o.next_ids[-count:] for o, count in zip(here, counts, strict=True)])
            layout = cache.extend(requests, counts)
            new = self._run(k, torch.cat([inputs[request] for request in requests]), ids, layout)
            cache.commit_all(requests, [range(count) for count in counts])
            for request, out in zip(requests, new.split(counts), strict=True):
                # the next block reads each of these one token later
                before = self.requests[request].outputs[0]
                earlier = [before[k][None]] if k in before else []
                inputs[request] = torch.cat((*earlier, out[:-1]))
                before[k] = out[-1]

    @torch.no_grad()
    def propose(self, requests: Sequence[int], plan: Plan, sampler: Sampler) -> list[Proposal]:
        if plan.length > len(self.caches):
            raise ValueError(
                f"eval.runs: length={plan.length}: the drafter has {len(self.caches)} blocks and drafts no "
                "further (drafter.blocks)"
            )
        proposals = grow(self, requests, plan, sampler)
        for cache in self.caches:
            cache.commit_all(requests, [()] * len(requests))
        for request in requests:
            self.requests[request].forget_nodes()
        return proposals

    def root_positions(self, requests: Sequence[int]) -> list[int]:
        return [self.caches[0].committed[request] for request in requests]

    def root_logits(self, requests: Sequence[int]) -> torch.Tensor:
        return self.drafter.logits(torch.stack([self.requests[r].outputs[0][0] for r in requests]), 0)

    def step(self, requests: Sequence[int], parents: Sequence[int], tokens: torch.Tensor) -> torch.Tensor:
        nodes = []
        for request, parent in zip(requests, parents, strict=True):
            state = self.requests[request]
            state.outputs.append({})
            state.depths.append(state.depths[parent + 1] + 1)
            nodes.append(len(state.outputs) - 1)
        for k in range(1, len(self.caches)):
            self._step_block(k, requests, parents, nodes, tokens)
        found = [self.requests[r] for r in requests]
        (depth,) = {state.depths[node] for state, node in zip(found, nodes, strict=True)}  # a level at a time
        states = [state.outputs[node][depth] for state, node in zip(found, nodes, strict=True)]
        return self.drafter.logits(torch.stack(states), depth)

    def _step_block(self, k, requests, parents, nodes, tokens) -> None:
        """Run block k on the new nodes whose row it has not passed: those of depth k at most, with the block
        before run on their parent."""
        here = [
            i
            for i, (request, parent) in enumerate(zip(requests, parents, strict=True))
            if k - 1 in self.requests[request].outputs[parent + 1]
        ]
        if not here:
            return
        owners = [self.requests[requests[i]] for i in here]
        inputs = [state.outputs[parents[i] + 1][k - 1] for i, state in zip(here, owners, strict=True)]
        before = [state.places[k].get(parents[i] + 1, -1) for i, state in zip(here, owners, strict=True)]
        layout = self.caches[k].grow([requests[i] for i in here], before)
        new = self._run(k, torch.stack(inputs), tokens[here], layout)
        for i, state, out in zip(here, owners, new, strict=True):
            state.places[k][nodes[i]] = len(state.places[k])
            state.outputs[nodes[i]][k] = out

    def _run(self, k, state_ND, ids_N, layout) -> torch.Tensor:
        self.steps += 1
        return self.advance[k](state_ND, ids_N, layout)

"""Decoding with a drafter that carries a state from token to token (`spectrain.proposal.Drafting`).

Row t of a request pairs what the family makes of the target's states at token t with the token x_{t+1}; it
lies at slot t of the cache. A draft token is one more row, whose state is the output of its parent's row.
Knows no family. Legend: R requests, N rows of a call, D state, W kept ids, L taps.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from spectrain.cache import CacheLayout, KVCache
from spectrain.drafters.autoregressive import grow
from spectrain.graphs import Graphs, Tensors, run
from spectrain.proposal import Observation, Plan, Proposal, Sampler

# (states [N, D], ids [N], layout) -> states [N, D]
Advance = Callable[[torch.Tensor, torch.Tensor, CacheLayout], torch.Tensor]


class FeatureDrafter(Protocol):
    """What a family gives. kept_ids: int64 [W]; vocab_size: V of the target."""

    kept_ids: torch.Tensor
    vocab_size: int

    def entry(self, taps_NLD: torch.Tensor, final_ND: torch.Tensor) -> torch.Tensor:
        """The state [N, D] that the rows of committed tokens start from."""

    def advancing(self, capacity: int) -> Advance:
        """One step of the network at positions below `capacity`."""

    def logits(self, state_ND: torch.Tensor) -> torch.Tensor:
        """Logits [N, W] of the token after each row."""


class FeatureDrafting:
    """The drafter at work on several requests.

    `states` [R, 1 + nodes, D]: the state of the newest row, which predicts the root's successor, then those
    of the nodes stepped since, in order of arrival.
    """

    def __init__(self, drafter: FeatureDrafter, num_requests: int, capacity: int):
        self.drafter = drafter
        self.kept_ids, self.vocab_size = drafter.kept_ids, drafter.vocab_size
        self.cache = KVCache(num_requests, capacity)
        self.advance = drafter.advancing(capacity)
        self.states = torch.zeros(num_requests, 1, 0)
        self.steps = 0
        self.graphs: Graphs | None = None

    @torch.no_grad()
    def observe(self, observations: Sequence[Observation]) -> None:
        requests = [o.request for o in observations]
        counts = [len(o.next_ids) for o in observations]
        for o in observations:
            if o.start == 0:
                self.cache.truncate(o.request, 0)
            committed = self.cache.committed[o.request]
            assert committed == o.start, f"request {o.request}: row {o.start} follows {committed} rows"
        entered = self.drafter.entry(
            torch.cat([o.taps for o in observations]), torch.cat([o.final for o in observations])
        )
        ids, nodes = torch.cat([o.next_ids for o in observations]), self.cache.behind(requests, counts)
        self.steps += 1
        (new,) = run(self.graphs, self.cache, *nodes, self._states, entered, ids)
        self.cache.commit_all(requests, [range(count) for count in counts])
        if not self.states.shape[2]:
            self.states = new.new_zeros(len(self.states), 1, new.shape[1])
        last = torch.tensor(counts).cumsum(0) - 1
        self.states[requests, 0] = new[last]

    @torch.no_grad()
    def propose(self, requests: Sequence[int], plan: Plan, sampler: Sampler) -> list[Proposal]:
        nodes = 1 + plan.room
        if self.states.shape[1] < nodes:
            grown = self.states.new_zeros(self.states.shape[0], nodes, self.states.shape[2])
            grown[:, :1] = self.states[:, :1]
            self.states = grown
        proposals = grow(self, requests, plan, sampler)
        self.cache.commit_all(requests, [()] * len(requests))
        return proposals

    def root_positions(self, requests: Sequence[int]) -> list[int]:
        return [self.cache.committed[request] for request in requests]

    def root_logits(self, requests: Sequence[int]) -> torch.Tensor:
        return self.drafter.logits(self.states[requests, 0])

    def step(self, requests: Sequence[int], parents: Sequence[int], tokens: torch.Tensor) -> torch.Tensor:
        seen = {request: len(self.cache.pending[request]) for request in requests}
        before = self.states[requests, [parent + 1 for parent in parents]]
        self.steps += 1
        new, logits = run(self.graphs, self.cache, requests, parents, self._states_and_logits, before, tokens)
        arrivals = []
        for request in requests:
            seen[request] += 1
            arrivals.append(seen[request])
        self.states[requests, arrivals] = new
        return logits

    def _states(self, layout, state_ND: torch.Tensor, ids_N: torch.Tensor) -> Tensors:
        return (self.advance(state_ND, ids_N, layout),)

    def _states_and_logits(self, layout, state_ND: torch.Tensor, ids_N: torch.Tensor) -> Tensors:
        new = self.advance(state_ND, ids_N, layout)
        return new, self.drafter.logits(new)

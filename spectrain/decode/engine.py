"""Batched decoding, plain and speculative, by one loop: propose, verify, cut, commit.

A plain step is a round without draft tokens, so the baseline runs the same code. Requests that finish leave the batch and the
next prompt takes the free place. One counter per request, the committed tokens of the target's cache, gives every position:
the root lies at `committed`, a draft token at depth d at `committed + d`. Knows no family: drafters come as
`spectrain.proposal.Drafter`.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from spectrain.cache import KVCache
from spectrain.config import at_least, choose
from spectrain.decode.generation import Generation, Round, Timing
from spectrain.decode.sampling import Sampling, Streams
from spectrain.decode.verify import LAWS, check_proposal, verify
from spectrain.proposal import Drafter, Observation, Plan, Proposal, Verdict
from spectrain.target import Target

EMPTY = Proposal(tokens=torch.empty(0, dtype=torch.int64), parents=())
PREFILL_TOKENS = 4096  # most prompt tokens in one call; bounds the memory of a prefill, not its speed


@dataclass
class _Request:
    """One request at its place in the batch. budget: tokens it may emit."""

    index: int
    prompt: list[int]
    budget: int
    ids: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    orders: list[torch.Tensor | None] = field(default_factory=list)


@dataclass
class _Clock:
    prefill_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    steps: int = 0
    draft_steps: int = 0

    def timing(self) -> Timing:
        return Timing(self.prefill_s, self.decode_s, self.draft_s, self.verify_s, self.steps, self.draft_steps)


def generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: Sampling,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    batch_size: int,
    drafter: Drafter | None = None,
    plan: Plan | None = None,
    law: str = "target_only",
    request_keys: Sequence[int] | None = None,
    record_orders: bool = False,
) -> tuple[list[Generation], list[Timing]]:
    """Decode every prompt, `batch_size` at a time; plain decoding without a drafter.

    request_keys: a stable number per prompt for its random numbers, by default its index. The texts come in the order of the
    prompts. A Timing covers the requests from one empty batch to the next: one per prompt at batch_size 1, else one in all.
    Raises ValueError for settings that do not fit together, an empty prompt, one that fills the target's context, or logits that
    are not finite.
    """
    keys = range(len(prompts)) if request_keys is None else request_keys
    _check_settings(target, prompts, keys, max_new_tokens, batch_size, drafter, plan, law)
    with torch.no_grad():
        return _Engine(
            target, prompts, sampling, max_new_tokens, frozenset(stop_ids), batch_size, drafter, plan, law, keys, record_orders
        ).run()


def cut(block: Sequence[int], stop_ids: frozenset[int], budget: int) -> tuple[list[int], str | None]:
    """What of a verified block reaches the text, and the finish reason if it ends it.

    Cut at the first stop token (included), then at the budget; a stop inside the budget wins. With stop 2, [7, 8, 2, 9] gives
    [7, 8, 2] "stop" at budget 3 and [7, 8] "length" at budget 2.
    """
    for i, token in enumerate(block[:budget]):
        if token in stop_ids:
            return list(block[: i + 1]), "stop"
    return list(block[:budget]), "length" if len(block) >= budget else None


def depths(parents: Sequence[int]) -> list[int]:
    """Depth of each node; a child of the root has depth 1. Parents (-1, 0, 0, 2) give 1, 2, 2, 3."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


def clamp(proposal: Proposal, depth: int) -> Proposal:
    """The proposal without the nodes deeper than `depth`; the cut depends on no draft token, so every law stays lossless."""
    levels = depths(proposal.parents)
    if max(levels, default=0) <= depth:
        return proposal
    kept = [node for node, d in enumerate(levels) if d <= depth]
    number = {-1: -1, **{node: i for i, node in enumerate(kept)}}
    return Proposal(
        tokens=proposal.tokens[kept],
        parents=tuple(number[proposal.parents[node]] for node in kept),
        q=None if proposal.q is None else proposal.q[kept],
        ranked=None if proposal.ranked is None else proposal.ranked[[0, *(node + 1 for node in kept)]],
    )


class _Engine:
    """One call of `generate`: places 0 .. B - 1, each free or holding a request."""

    def __init__(
        self, target, prompts, sampling, max_new_tokens, stop_ids, batch_size, drafter, plan, law, keys, record_orders
    ):
        self.target, self.sampling, self.stop_ids = target, sampling, stop_ids
        self.drafter, self.plan, self.law, self.keys, self.record_orders = drafter, plan, law, keys, record_orders
        limit = _context(target)
        self.waiting = [
            _Request(i, list(prompt), min(max_new_tokens, limit - len(prompt))) for i, prompt in enumerate(prompts)
        ][::-1]
        self.places: list[_Request | None] = [None] * min(batch_size, len(prompts))
        nodes = 0 if plan is None else max(plan.length, plan.nodes, plan.top_k * plan.length)
        capacity = max((len(r.prompt) + r.budget for r in self.waiting), default=0) + nodes + 1
        self.cache = KVCache(len(self.places), capacity)
        self.streams = Streams(sampling, [0] * len(self.places))
        self.taps = () if drafter is None else drafter.taps
        self.drafting = None if drafter is None or not prompts else drafter.start(len(self.places), capacity)
        self.done: dict[int, Generation] = {}
        self.clock = _Clock()

    def run(self) -> tuple[list[Generation], list[Timing]]:
        timings = []
        while self.waiting:
            self.clock = _Clock()
            while self.waiting or any(self.places):
                began = self._now()
                while self.waiting and not all(self.places):
                    self._prefill()
                prefilled = self._now()
                if any(self.places):
                    self._round()
                self.clock.prefill_s += prefilled - began
                self.clock.decode_s += self._now() - prefilled
                if not any(self.places):
                    break
            timings.append(self.clock.timing())
        return [self.done[i] for i in range(len(self.done))], timings

    def _now(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

    def _prefill(self) -> None:
        """Fill free places with waiting prompts, run them in one call and choose each one's first token."""
        taken: list[int] = []
        num_tokens = 0
        for place, request in enumerate(self.places):
            if request is not None or not self.waiting:
                continue
            num_tokens += len(self.waiting[-1].prompt)
            if taken and num_tokens > PREFILL_TOKENS:
                break
            self.places[place] = self.waiting.pop()
            self.streams.keys[place] = self.keys[self.places[place].index]
            self.cache.truncate(place, 0)
            taken.append(place)
        observations = self._step(taken, [self.places[place].prompt for place in taken], [EMPTY] * len(taken))
        if self.drafting is not None and observations:
            self.drafting.observe(observations)

    def _round(self) -> None:
        """One verification of every request in the batch."""
        active = [place for place, request in enumerate(self.places) if request is not None]
        draft_steps = 0 if self.drafting is None else self.drafting.steps
        began = self._now()
        proposals = self._propose(active)
        drafted = self._now()
        observations = self._step(active, [self.places[place].ids[-1:] for place in active], proposals)
        verified = self._now()
        if self.drafting is not None:
            if observations:
                self.drafting.observe(observations)
            self.clock.draft_s += drafted - began + self._now() - verified
            self.clock.draft_steps += self.drafting.steps - draft_steps
        self.clock.steps += 1
        self.clock.verify_s += verified - drafted

    def _propose(self, active: list[int]) -> list[Proposal]:
        """A checked proposal per request, empty where the budget has room for the bonus token alone."""
        found = dict.fromkeys(active, EMPTY)
        rooms = {place: self.places[place].budget - len(self.places[place].ids) - 1 for place in active}
        asked = [place for place in active if rooms[place] > 0]
        if self.drafting is not None and asked:
            plan = replace(self.plan, length=min(self.plan.length, max(rooms[place] for place in asked)))
            for place, proposal in zip(asked, self.drafting.propose(asked, plan, self.streams), strict=True):
                found[place] = clamp(proposal, rooms[place])
                check_proposal(found[place], self.target.vocab_size, self.law)
        return list(found.values())

    def _step(self, places: list[int], texts: list[list[int]], proposals: list[Proposal]) -> list[Observation]:
        """One target call on new text (its last token is the root) and draft tokens; verify, cut, commit.

        Returns an observation for each request that goes on.
        """
        roots = [self.cache.committed[place] + len(text) - 1 for place, text in zip(places, texts, strict=True)]
        parents, flat, first = [], [], []
        for text, proposal in zip(texts, proposals, strict=True):
            parents.append([*range(-1, len(text) - 1), *(len(text) + parent for parent in proposal.parents)])
            first.append(len(flat) + len(text) - 1)
            flat += [*text, *proposal.tokens.tolist()]
        layout = self.cache.grow(places, parents)
        ids = torch.tensor(flat, device=self.target.device)
        states = self.target.states(ids, layout.positions.to(ids.device), layout, taps=self.taps)
        judged = [row + i for row, proposal in zip(first, proposals, strict=True) for i in range(len(proposal.parents) + 1)]
        row_of = {row: i for i, row in enumerate(judged)}
        logits = self.target.logits(states.final if len(judged) == len(flat) else states.final[judged])

        def laws(which: Sequence[int], nodes: Sequence[int]) -> torch.Tensor:
            rows = [row_of[first[i] + node + 1] for i, node in zip(which, nodes, strict=True)]
            return self._law(logits if rows == list(range(len(logits))) else logits[rows], [places[i] for i in which])

        keys = {"law": self.law, "streams": self.streams, "requests": places, "root_positions": roots}
        verdicts = verify(proposals, laws, **keys)
        paths, observations = [], []
        for i, (place, text, verdict) in enumerate(zip(places, texts, verdicts, strict=True)):
            kept, goes_on = self._emit(place, proposals[i], verdict)
            path = [*range(len(text)), *(len(text) + node for node in verdict.path)][: len(text) - 1 + len(kept)]
            paths.append(path)
            if goes_on and self.drafting is not None:
                rows = [first[i] - len(text) + 1 + node for node in path]
                next_ids = torch.tensor([*text[1:], *kept], device=ids.device)
                start = self.cache.committed[place]
                observations.append(Observation(place, start, next_ids, states.taps[rows], states.final[rows]))
        self.cache.commit_all(places, paths)
        return observations

    def _law(self, logits: torch.Tensor, places: list[int]) -> torch.Tensor:
        """p at the rows of `logits`, one per request at `places`; an error names the prompt."""
        try:
            return self.sampling.law(logits)
        except ValueError as error:
            at = next(place for place, row in zip(places, logits.float().amax(-1), strict=True) if not row.isfinite())
            request = self.places[at]
            raise ValueError(f"prompt {request.index}, {len(request.ids)} tokens on: the target's {error}") from error

    def _emit(self, place: int, proposal: Proposal, verdict: Verdict) -> tuple[list[int], bool]:
        """Add what survives the cut to the request's text and counters; returns it, and whether the request goes on."""
        request = self.places[place]
        block = [*proposal.tokens[list(verdict.path)].tolist(), verdict.bonus]
        kept, reason = cut(block, self.stop_ids, request.budget - len(request.ids))
        if self.drafting is not None and request.ids:
            counters = {"drafted": len(proposal.parents), "depth": max(depths(proposal.parents), default=0)}
            counters |= {"accepted": len(verdict.path), "emitted": len(kept), "bonus_cut": len(kept) < len(block)}
            request.rounds.append(Round(alphas=verdict.alphas, **counters))
        if self.record_orders:
            rows = [0, *(node + 1 for node in verdict.path)][: len(kept)]
            request.orders += [_order(proposal.ranked, row) for row in rows]
        request.ids += kept
        if reason is not None:
            self.places[place] = None
            self.done[request.index] = Generation(
                tuple(request.prompt), tuple(request.ids), reason, tuple(request.rounds), tuple(request.orders)
            )
        return kept, reason is None


def _order(ranked: torch.Tensor | None, row: int) -> torch.Tensor | None:
    """The drafter's likeliest tokens at `row` of the proposal, or None where it was not asked."""
    return None if ranked is None or ranked[row, 0] < 0 else ranked[row]


def _context(target: Target) -> int:
    """Most tokens of prompt and text together."""
    limit = getattr(target.config, "max_position_embeddings", None)  # a foreign config; absent where positions are unbounded
    return sys.maxsize if limit is None else limit


def _check_settings(target, prompts, keys, max_new_tokens, batch_size, drafter, plan, law) -> None:
    choose("law", law, LAWS)
    at_least("max_new_tokens", max_new_tokens, 1)
    at_least("batch_size", batch_size, 1)
    if (drafter is None) != (plan is None):
        raise ValueError(f"drafter={drafter!r:.60} with plan={plan}: give both, or neither for plain decoding")
    if plan is not None:
        choose("plan.shape", plan.shape, ("chain", "tree"))
        at_least("plan.length", plan.length, 1)
        if plan.shape == "tree":
            at_least("plan.nodes", plan.nodes, 1)
            at_least("plan.top_k", plan.top_k, 1)
            if law == "rejection":
                raise ValueError("law=rejection with plan.shape=tree: a tree needs law=target_only")
    if len(keys) != len(prompts) or len(set(keys)) != len(keys):
        raise ValueError(f"request_keys: expected {len(prompts)} different numbers, one per prompt, got {list(keys)}")
    for i, prompt in enumerate(prompts):
        if not 0 < len(prompt) < _context(target):
            raise ValueError(
                f"prompt {i}: {len(prompt)} tokens, expected 1 to {_context(target) - 1} (the target's context less one)"
            )

"""Batched decoding, plain and speculative, by one loop: propose, verify, cut, commit.

A plain step is a round without draft tokens, so the baseline runs the same code. Requests that finish leave
the batch and the next prompt takes the free place. One counter per request, the committed tokens of the
target's cache, gives every position: the root lies at `committed`, a draft token of depth d at `committed +
d`. Knows no family: drafters come as `spectrain.proposal.Drafter`.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from spectrain.config import LAWS, LOSSY_LAWS, Leniency, above_zero, at_least, check_law, choose
from spectrain.decode.generation import Generation, Round, Timing
from spectrain.decode.sampling import Sampling, Streams
from spectrain.decode.verify import DEFAULT, check_proposal, verify
from spectrain.kernels.likeliest import CACHED
from spectrain.proposal import Budget, Drafter, Observation, Plan, Proposal, Verdict
from spectrain.recurrent import target_cache
from spectrain.target import Target

EMPTY = Proposal(tokens=torch.empty(0, dtype=torch.int64), parents=())
RANKED = 64  # ids per place that the orders record
PREFILL_TOKENS = 4096  # most prompt tokens in one call: bounds a prefill's memory, not its speed


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
    leniency: Leniency = DEFAULT,
    request_keys: Sequence[int] | None = None,
    record_orders: bool = False,
) -> tuple[list[Generation], list[Timing]]:
    """Decode every prompt, `batch_size` at a time; plain decoding without a drafter.

    leniency: of the lossy laws, whose texts say lossless=False. request_keys: a stable number per prompt for
    its random numbers, by default its index. The texts come in
    the order of the prompts. A Timing reaches from one empty batch to the next; at batch_size 1 that is one
    per prompt. Raises ValueError for settings that do not fit together, an empty prompt, one that fills the
    target's context, and logits that are not finite.
    """
    keys = list(range(len(prompts)) if request_keys is None else request_keys)
    choose("law", law, LAWS)
    leniency.check(law, "leniency")
    at_least("max_new_tokens", max_new_tokens, 1)
    at_least("batch_size", batch_size, 1)
    if len(keys) != len(prompts) or len(set(keys)) != len(keys):
        raise ValueError(f"request_keys={keys}: expected {len(prompts)} different numbers, one per prompt")
    if (drafter is None) != (plan is None):
        raise ValueError(f"plan={plan} and a drafter go together; plain decoding has neither")
    if plan is not None:
        check_plan(plan, law)
        if target.recurrent and plan.shape != "chain":
            raise ValueError(
                f"plan.shape={plan.shape!r}: the target has recurrent layers, whose state follows one path: "
                "expected chain"
            )
    limit = context_length(target)
    waiting = []
    for i, prompt in enumerate(prompts):
        if not 0 < len(prompt) < limit:
            raise ValueError(f"prompt {i}: {len(prompt)} tokens, expected 1 to {limit - 1} (context - 1)")
        waiting.append(_Request(i, keys[i], list(prompt), min(max_new_tokens, limit - len(prompt))))
    if not waiting:
        return [], []
    engine = _Engine(target, sampling, frozenset(stop_ids), law, leniency, record_orders)
    with torch.no_grad():
        return engine.run(waiting, batch_size, drafter, plan)


def check_plan(plan: Plan, law: str) -> None:
    """Raise ValueError for a plan that is malformed or does not go with `law`."""
    choose("plan.shape", plan.shape, ("chain", "tree", "static"))
    check_law("law", law, plan.shape)
    at_least("plan.length", plan.length, 1)
    if plan.budget is not None:
        above_zero("plan.budget.root", plan.budget.root)
        at_least("plan.budget.step", plan.budget.step, 0)
        at_least("plan.budget.node", plan.budget.node, 0)
    if plan.shape == "tree":
        at_least("plan.nodes", plan.nodes, 1)
        at_least("plan.top_k", plan.top_k, 1)
    if law == "recursive" and not plan.sampled:
        raise ValueError("law=recursive with plan.sampled=False: expected siblings drawn without replacement")
    if plan.sampled and (plan.shape != "tree" or plan.budget is not None):
        raise ValueError(
            f"plan.sampled=True with plan.shape={plan.shape}, plan.budget={plan.budget}: expected False; "
            "only a tree without a budget has drawn siblings"
        )


def context_length(target: Target) -> int:
    """Most tokens of prompt and text together."""
    # A foreign config: absent where positions are unbounded.
    limit = getattr(target.config, "max_position_embeddings", None)
    return sys.maxsize if limit is None else limit


def cut(block: Sequence[int], stop_ids: frozenset[int], budget: int) -> tuple[list[int], str | None]:
    """What of a verified block reaches the text, and the finish reason if it ends it.

    Cut at the first stop token (included), then at the budget; a stop inside the budget wins. With stop 2,
    [7, 8, 2, 9] gives [7, 8, 2] "stop" at budget 3 and [7, 8] "length" at budget 2.
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
    """The proposal without nodes deeper than `depth`; lossless, since the cut looks at no draft token."""
    levels = depths(proposal.parents)
    if max(levels, default=0) <= depth:
        return proposal
    kept = [node for node, level in enumerate(levels) if level <= depth]
    number = {-1: -1, **{node: i for i, node in enumerate(kept)}}
    return Proposal(
        tokens=proposal.tokens[kept],
        parents=tuple(number[proposal.parents[node]] for node in kept),
        q=None if proposal.q is None else [proposal.q[node] for node in kept],
        ranked=None if proposal.ranked is None else proposal.ranked[[0, *(node + 1 for node in kept)]],
    )


@dataclass
class _Request:
    """One request; key: its random numbers', budget: tokens it may emit; steps, nodes: drafted so far."""

    index: int
    key: int
    prompt: list[int]
    budget: int
    ids: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    orders: list[torch.Tensor | None] = field(default_factory=list)
    steps: int = 0
    nodes: int = 0

    def rate(self, price: Budget) -> float:
        """Tokens per plain step that its rounds earn at `price`: its own, so that no other request of the
        batch has a say in its text."""
        return price.rate(
            tokens=len(self.ids) - 1, rounds=len(self.rounds), steps=self.steps, nodes=self.nodes
        )

    @property
    def room(self) -> int:
        """Longest draft path: the token after it needs a place too."""
        return self.budget - len(self.ids) - 1


@dataclass
class _Clock:
    """The fields of `Timing`, growing."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    steps: int = 0
    draft_steps: int = 0


class _Engine:
    """Places 0 .. B - 1 of the batch, each free or holding a request."""

    def __init__(
        self,
        target: Target,
        sampling: Sampling,
        stop_ids: frozenset[int],
        law: str,
        leniency: Leniency,
        record_orders: bool,
    ):
        self.target, self.sampling, self.stop_ids = target, sampling, stop_ids
        self.law, self.leniency, self.record_orders = law, leniency, record_orders

    def run(
        self, waiting: list[_Request], batch_size: int, drafter: Drafter | None, plan: Plan | None
    ) -> tuple[list[Generation], list[Timing]]:
        B = min(batch_size, len(waiting))
        room = 0 if plan is None else plan.room
        capacity = max(len(request.prompt) + request.budget for request in waiting) + room + 1
        self.cache = target_cache(self.target, B, capacity)
        self.streams = Streams(self.sampling, [0] * B)
        self.drafting = None if drafter is None else drafter.start(B, capacity)
        self.taps = () if drafter is None else drafter.taps
        self.free = list(range(B))
        self.places: dict[int, _Request] = {}
        self.done: dict[int, Generation] = {}
        queue, timings = waiting[::-1], []
        while queue:
            self.clock = _Clock()
            while queue or self.places:
                began = self._now()
                while queue and self.free:
                    self._prefill(queue)
                prefilled = self._now()
                self.clock.prefill_s += prefilled - began
                if not self.places:
                    break
                self._round(plan)
                self.clock.decode_s += self._now() - prefilled
                if not self.places:
                    break
            timings.append(Timing(**vars(self.clock)))
        return [self.done[i] for i in range(len(waiting))], timings

    def _now(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

    def _prefill(self, queue: list[_Request]) -> None:
        """Fill free places from the end of `queue`: one call on the prompts gives their first tokens."""
        taken: list[int] = []
        num_tokens = 0
        while queue and self.free and (not taken or num_tokens + len(queue[-1].prompt) <= PREFILL_TOKENS):
            place, request = self.free.pop(0), queue.pop()
            num_tokens += len(request.prompt)
            self.places[place] = request
            self.streams.keys[place] = request.key
            self.cache.truncate(place, 0)
            taken.append(place)
        observations = self._step(taken, [self.places[place].prompt for place in taken], [EMPTY] * len(taken))
        if self.drafting is not None and observations:
            self.drafting.observe(observations)

    def _round(self, plan: Plan | None) -> None:
        """One verification of every request in the batch."""
        active = sorted(self.places)
        began, steps = self._now(), 0 if self.drafting is None else self.drafting.steps
        proposals = [EMPTY] * len(active) if plan is None else self._propose(active, plan)
        drafted = self._now()
        observations = self._step(active, [self.places[place].ids[-1:] for place in active], proposals)
        verified = self._now()
        self.clock.steps += 1
        self.clock.verify_s += verified - drafted
        if self.drafting is not None:
            if observations:
                self.drafting.observe(observations)
            self.clock.draft_s += drafted - began + self._now() - verified
            self.clock.draft_steps += self.drafting.steps - steps

    def _propose(self, active: list[int], plan: Plan) -> list[Proposal]:
        """A checked proposal per request, empty where the budget has room for one token only."""
        assert self.drafting is not None
        found = dict.fromkeys(active, EMPTY)
        rooms = {place: self.places[place].room for place in active if self.places[place].room > 0}
        if rooms:
            ranked = RANKED if self.record_orders else 0
            # A tree's shape may not depend on the rooms of other requests; a chain's prefix does not anyway,
            # nor do a static tree's upper levels.
            longest = plan.length if plan.shape == "tree" else min(plan.length, max(rooms.values()))
            plan = replace(plan, length=longest, ranked=ranked)
            if plan.budget is not None:
                rates = tuple(self.places[place].rate(plan.budget) for place in rooms)
                plan = replace(plan, budget=replace(plan.budget, rates=rates))
            proposals = self.drafting.propose(list(rooms), plan, self.streams)
            for (place, room), proposal in zip(rooms.items(), proposals, strict=True):
                found[place] = clamp(proposal, room)
                check_proposal(found[place], self.target.vocab_size, self.law)
        return list(found.values())

    def _step(
        self, places: list[int], texts: list[list[int]], proposals: list[Proposal]
    ) -> list[Observation]:
        """One target call on new text, whose last token is the root, and draft tokens; verify, cut, commit.

        Returns an observation for each request that goes on.
        """
        device = self.target.device
        roots, starts, bases = [], [], []
        requests: list[int] = []
        parents: list[int] = []
        flat: list[int] = []
        judged: list[int] = []
        for place, text, proposal in zip(places, texts, proposals, strict=True):
            requests += [place] * (len(text) + len(proposal.parents))
            parents += [*range(-1, len(text) - 1), *(len(text) + parent for parent in proposal.parents)]
            roots.append(self.cache.committed[place] + len(text) - 1)
            starts.append(len(flat))
            flat += [*text, *proposal.tokens.tolist()]
            bases.append(len(judged))
            judged += range(starts[-1] + len(text) - 1, len(flat))
        layout = self.cache.grow(requests, parents)
        ids = torch.tensor(flat, device=device)
        states = self.target.states(ids, layout.positions.to(device), layout, taps=self.taps)
        if unkept := self.target.attention_layers - self.cache.layers.keys():
            raise ValueError(
                f"target: its layers {sorted(unkept)} kept no keys and values: their attention does not go "
                "through transformers' attention interface or does not tell its layer"
            )
        logits = self.target.logits(states.final if len(judged) == len(flat) else states.final[judged])

        def laws(which: Sequence[int], nodes: Sequence[int]) -> torch.Tensor:
            rows = [bases[i] + node + 1 for i, node in zip(which, nodes, strict=True)]
            return self._law(logits if len(rows) == len(logits) else logits[rows], [places[i] for i in which])

        # Some requests at a time, so that their laws stay in a CPU's cache.
        at_once = max(1, CACHED // self.target.vocab_size) if device.type == "cpu" else len(places)
        verdicts = verify(
            proposals,
            laws,
            law=self.law,
            streams=self.streams,
            requests=places,
            root_positions=roots,
            leniency=self.leniency,
            at_once=at_once,
        )
        paths, observations = [], []
        for i, (place, text, verdict) in enumerate(zip(places, texts, verdicts, strict=True)):
            kept = self._emit(place, proposals[i], verdict)
            path = [*range(len(text)), *(len(text) + node for node in verdict.path)]
            paths.append(path[: len(text) - 1 + len(kept)])
            if self.drafting is not None and place in self.places:
                rows = [starts[i] + node for node in path]
                next_ids = torch.tensor([*text[1:], *kept], device=device)
                taps, final = states.taps[rows], states.final[rows]
                observations.append(Observation(place, self.cache.committed[place], next_ids, taps, final))
        self.cache.commit_all(places, paths)
        return observations

    def _law(self, logits: torch.Tensor, places: list[int]) -> torch.Tensor:
        """p at the rows of `logits`, one per request at `places`; an error names the prompt."""
        try:
            return self.sampling.law(logits)
        except ValueError as error:
            tops = logits.float().amax(-1).tolist()
            at = next(place for place, top in zip(places, tops, strict=True) if not abs(top) < float("inf"))
            where = f"prompt {self.places[at].index} after {len(self.places[at].ids)} tokens"
            raise ValueError(f"{where}: target {error}") from error

    def _emit(self, place: int, proposal: Proposal, verdict: Verdict) -> list[int]:
        """Add what survives the cut to text and counters; a request that ends leaves its place."""
        request = self.places[place]
        block = [*proposal.tokens[list(verdict.path)].tolist(), verdict.bonus]
        kept, reason = cut(block, self.stop_ids, request.budget - len(request.ids))
        if self.drafting is not None and request.ids:
            depth = max(depths(proposal.parents), default=0)
            request.steps += max(0, depth - 1)
            request.nodes += len(proposal.parents)
            request.rounds.append(
                Round(
                    drafted=len(proposal.parents),
                    depth=depth,
                    accepted=len(verdict.path),
                    emitted=len(kept),
                    alphas=verdict.alphas,
                    bonus_cut=len(kept) < len(block),
                )
            )
        if self.record_orders:
            rows = [0, *(node + 1 for node in verdict.path)][: len(kept)]
            request.orders += [_order(proposal.ranked, row) for row in rows]
        request.ids += kept
        if reason is not None:
            self.free.append(place)
            del self.places[place]
            self.done[request.index] = Generation(
                prompt_ids=tuple(request.prompt),
                ids=tuple(request.ids),
                finish_reason=reason,
                rounds=tuple(request.rounds),
                orders=tuple(request.orders),
                lossless=self.drafting is None or self.sampling.greedy or self.law not in LOSSY_LAWS,
            )
        return kept


def _order(ranked: torch.Tensor | None, row: int) -> torch.Tensor | None:
    """The drafter's likeliest tokens at a row of `ranked`, or None where it was not asked."""
    return None if ranked is None or ranked[row, 0] < 0 else ranked[row]

"""Batched decoding, plain and speculative, by one loop: propose, verify, cut, commit.

A plain step is a round without draft tokens, so the baseline runs the same code. Requests that finish leave
the batch and the next prompt takes the free place. One counter per request, the committed tokens of the
target's cache, gives every position: the root lies at `committed`, a draft token of depth d at `committed +
d`. Knows no family: drafters come as `spectrain.proposal.Drafter`.
"""

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from spectrain.checks import at_least, choose
from spectrain.decode.by_kernel import covers, verify_by_kernel
from spectrain.decode.generation import Event, Generation, Round, Timing
from spectrain.decode.penalties import History
from spectrain.decode.plan import check_plan, clamp, depths
from spectrain.decode.sampling import Sampling, Streams
from spectrain.decode.stops import StopStrings, Tail, cut
from spectrain.decode.target_call import TargetCall
from spectrain.decode.verify import DEFAULT, check_proposal, verify
from spectrain.decode.walk import Laws
from spectrain.graphs import Graphs, Replaying, cuda_graphs
from spectrain.kernels.likeliest import CACHED
from spectrain.laws import LAWS, LOSSY_LAWS, Leniency
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
    stop_strings: Sequence[str] = (),
    record_orders: bool = False,
    record_events: bool = False,
    graphs: bool = False,
) -> tuple[list[Generation], list[Timing]]:
    """Decode every prompt, `batch_size` at a time; plain decoding without a drafter.

    leniency: of the lossy laws, whose texts say lossless=False. request_keys: a stable number per prompt for
    its random numbers, by default its index. stop_strings: see `decode/stops.py`. The texts come in the order
    of the prompts. A Timing reaches from one empty batch to the next; at batch_size 1 that is one per prompt.
    graphs: replay the calls of each round as CUDA graphs (`spectrain/graphs.py`), captured anew for each call
    of this function; capturing is in no Timing.
    Raises ValueError for settings that do not fit together, an empty prompt, one that fills the target's
    context, logits that are not finite, and graphs without a CUDA device or with recurrent layers.
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
        check_plan(plan, law, recurrent=target.recurrent)
    limit = context_length(target)
    stops = StopStrings(stop_strings, target.tokenizer) if stop_strings else None
    waiting = []
    for i, prompt in enumerate(prompts):
        if not 0 < len(prompt) < limit:
            raise ValueError(f"prompt {i}: {len(prompt)} tokens, expected 1 to {limit - 1} (context - 1)")
        free, tail = limit - len(prompt), Tail(stops) if stops else None
        waiting.append(_Request(i, keys[i], list(prompt), min(max_new_tokens, free), free, tail))
    if not waiting:
        return [], []
    captured = cuda_graphs(target, 1 if plan is None else plan.room + 1) if graphs else None
    engine = _Engine(
        target, sampling, frozenset(stop_ids), law, leniency, record_orders, record_events, captured
    )
    with torch.no_grad():
        return engine.run(waiting, batch_size, drafter, plan)


def context_length(target: Target) -> int:
    """Most tokens of prompt and text together."""
    # A foreign config: absent where positions are unbounded.
    limit = getattr(target.config, "max_position_embeddings", None)
    return sys.maxsize if limit is None else limit


@dataclass
class _Request:
    """One request; key: its random numbers', budget: tokens it may emit, context: tokens that the target's
    context leaves it, tail: its newest text, where stop strings are looked for; steps, nodes: drafted so
    far."""

    index: int
    key: int
    prompt: list[int]
    budget: int
    context: int
    tail: Tail | None
    ids: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    orders: list[torch.Tensor | None] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
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

    @property
    def reach(self) -> int:
        """Longest draft path whose every position, and the one after it, lies in the target's context."""
        return self.context - len(self.ids) - 1


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
        record_events: bool,
        graphs: Graphs | None,
    ):
        self.target, self.sampling, self.stop_ids = target, sampling, stop_ids
        self.law, self.leniency = law, leniency
        self.record_orders, self.record_events, self.graphs = record_orders, record_events, graphs

    def run(
        self, waiting: list[_Request], batch_size: int, drafter: Drafter | None, plan: Plan | None
    ) -> tuple[list[Generation], list[Timing]]:
        B = min(batch_size, len(waiting))
        room = 0 if plan is None else plan.room
        capacity = max(len(request.prompt) + request.budget for request in waiting) + room + 1
        if self.graphs is not None:
            capacity += self.graphs.longest
        self.cache = target_cache(self.target, B, capacity)
        penalties, V = self.sampling.penalties, self.target.vocab_size
        self.history = None if penalties is None else History(penalties, B, V, self.target.device)
        self.streams = Streams(self.sampling, [0] * B, self.history)
        self.drafting = None if drafter is None else drafter.start(B, capacity)
        if isinstance(self.drafting, Replaying):
            self.drafting.graphs = self.graphs
        self.call = TargetCall(self.target, self.cache, () if drafter is None else drafter.taps, self.graphs)
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
        if self.graphs is not None:
            self.graphs.release()
        return [self.done[i] for i in range(len(waiting))], timings

    def _now(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter() - (0.0 if self.graphs is None else self.graphs.seconds)

    def _prefill(self, queue: list[_Request]) -> None:
        """Fill free places from the end of `queue`: one call on the prompts gives their first tokens."""
        taken: list[int] = []
        num_tokens = 0
        while queue and self.free and (not taken or num_tokens + len(queue[-1].prompt) <= PREFILL_TOKENS):
            place, request = self.free.pop(0), queue.pop()
            num_tokens += len(request.prompt)
            self.places[place] = request
            self.streams.keys[place] = request.key
            if self.history is not None:
                self.history.begin(place, request.prompt)
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
        """A checked proposal per request, empty where the budget has room for one token only.

        A drafter never runs past the target's context: requests that come near it are asked apart.
        """
        assert self.drafting is not None
        found = dict.fromkeys(active, EMPTY)
        alike: dict[int, list[int]] = {}
        for place in active:
            request = self.places[place]
            if request.room > 0:
                alike.setdefault(min(plan.length, request.reach), []).append(place)
        for length, places in alike.items():
            rooms = [self.places[place].room for place in places]
            ranked = RANKED if self.record_orders else 0
            # A tree's shape may not depend on the rooms of other requests; a chain's prefix does not anyway,
            # nor do a static tree's upper levels.
            longest = length if plan.shape == "tree" else min(length, max(rooms))
            asked = replace(plan, length=longest, ranked=ranked)
            if plan.budget is not None:
                rates = tuple(self.places[place].rate(plan.budget) for place in places)
                asked = replace(asked, budget=replace(plan.budget, rates=rates))
            proposals = self.drafting.propose(places, asked, self.streams)
            for place, room, proposal in zip(places, rooms, proposals, strict=True):
                found[place] = clamp(proposal, room)
                check_proposal(found[place], self.target.vocab_size, self.law)
        return list(found.values())

    def _step(
        self, places: list[int], texts: list[list[int]], proposals: list[Proposal]
    ) -> list[Observation]:
        """One target call on new text, whose last token is the root, and draft tokens; verify, cut, commit.
        Returns an observation for each request that goes on."""
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
        taps, final, logits = self.call(requests, parents, flat, judged)

        def laws(which: Sequence[int], nodes: Sequence[int]) -> torch.Tensor:
            rows = [bases[i] + node + 1 for i, node in zip(which, nodes, strict=True)]
            paths = (proposals[i].path(node) for i, node in zip(which, nodes, strict=True))
            wanted = logits if len(rows) == len(logits) else logits[rows]
            return self._law(wanted, [places[i] for i in which], paths)

        verdicts = self._judge(places, roots, proposals, logits, bases, laws)
        paths, observations = [], []
        for i, (place, text, verdict) in enumerate(zip(places, texts, verdicts, strict=True)):
            kept = self._emit(place, proposals[i], verdict)
            path = [*range(len(text)), *(len(text) + node for node in verdict.path)]
            paths.append(path[: len(text) - 1 + len(kept)])
            if self.drafting is not None and place in self.places:
                rows = [starts[i] + node for node in path]
                next_ids = torch.tensor([*text[1:], *kept], device=final.device)
                seen = (self.cache.committed[place], next_ids, taps[rows], final[rows])
                observations.append(Observation(place, *seen, first_id=text[0]))
        self.cache.commit_all(places, paths)
        return observations

    def _judge(
        self,
        places: list[int],
        roots: list[int],
        proposals: list[Proposal],
        logits: torch.Tensor,
        bases: list[int],
        laws: Laws,
    ) -> list[Verdict]:
        """A verdict per proposal. roots: position of each root, bases: its row of `logits`."""
        device = logits.device
        if covers(proposals, device, law=self.law, streams=self.streams):
            return verify_by_kernel(
                proposals, logits, bases, laws,
                law=self.law, streams=self.streams, requests=places, root_positions=roots,
            )  # fmt: skip
        # Some requests at a time, so that their laws stay in a CPU's cache.
        at_once = max(1, CACHED // self.target.vocab_size) if device.type == "cpu" else len(places)
        return verify(
            proposals, laws,
            law=self.law, streams=self.streams, requests=places, root_positions=roots,
            leniency=self.leniency, at_once=at_once,
        )  # fmt: skip

    def _law(self, logits: torch.Tensor, places: list[int], paths: Iterable[list[int]]) -> torch.Tensor:
        """p at the rows of `logits`, one per request at `places`, behind the draft tokens `paths`; an error
        names the prompt."""
        if self.history is not None:
            logits = self.history.penalise(logits, places, paths)
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
        kept, reason = cut(block, self.stop_ids, request.budget - len(request.ids), request.tail)
        if self.drafting is not None and request.ids:
            if self.record_events:
                root = len(request.prompt) + len(request.ids) - 1
                request.events.append(Event.of(root, proposal, verdict, len(kept)))
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
        if self.history is not None:
            self.history.extend([place], [kept])
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
                events=tuple(request.events),
            )
        return kept


def _order(ranked: torch.Tensor | None, row: int) -> torch.Tensor | None:
    """The drafter's likeliest tokens at a row of `ranked`, or None where it was not asked."""
    return None if ranked is None or ranked[row, 0] < 0 else ranked[row]

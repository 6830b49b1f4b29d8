"""Speculative against plain decoding: arms under equal conditions, taken in turns.

A speed-up is only asked for in one process, with the same target, dtype, threads, sampler, batch and limits
on both sides; anything else is refused. Knows no drafter's insides and no report.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch

from spectrain.decode.engine import generate
from spectrain.decode.generation import Generation, Timing
from spectrain.decode.sampling import Sampling
from spectrain.decode_settings import DecodeRunConfig
from spectrain.proposal import Budget, Drafter, Plan
from spectrain.target import Target

UNTIMED = Timing(0.0, 0.0, 0.0, 0.0, 0, 0)
WARM_UP = 16
"""Tokens of a text in a CPU's warm-up. A GPU's kernels are chosen by the length of the text too, so there it
decodes whole texts."""


class Arm(Protocol):
    """One way of decoding a batch of prompts."""

    def decode(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[int]
    ) -> tuple[list[Generation], list[Timing]]:
        """Texts and seconds; `keys` are the stable numbers of the prompts that their random numbers hang
        on."""

    def warm_up(self, prompts: Sequence[Sequence[int]], keys: Sequence[int]) -> None:
        """Decode `prompts` for as long as the first use of code and memory shows in the clock."""

    def conditions(self) -> dict[str, Any]:
        """What decoding runs under right now; equal for two arms that may be compared."""


def sampling_of(run: DecodeRunConfig, *, seed: int) -> Sampling:
    """How a run's tokens are chosen."""
    return Sampling(
        temperature=run.temperature,
        top_k=run.top_k_filter,
        top_p=run.top_p,
        min_p=run.min_p,
        repetition_penalty=run.repetition_penalty,
        presence_penalty=run.presence_penalty,
        frequency_penalty=run.frequency_penalty,
        seed=seed,
        draft_temperature=run.draft_temperature,
    )


@dataclass(frozen=True)
class EngineArm:
    """The engine with one run's settings; plain decoding where `drafter` is None.

    An adaptive run has its costs filled in.
    """

    target: Target
    drafter: Drafter | None
    run: DecodeRunConfig
    max_new_tokens: int
    batch: int
    seed: int
    record_orders: bool = False
    record_events: bool = False

    @property
    def sampling(self) -> Sampling:
        return sampling_of(self.run, seed=self.seed)

    @property
    def plan(self) -> Plan | None:
        """What each round drafts; None for plain decoding."""
        run = self.run
        if self.drafter is None:
            return None
        budget = None
        if run.adaptive:
            root, step, node = run.costs
            budget = Budget(root, step, node)
        return Plan(
            shape=run.proposal,
            length=run.length,
            nodes=run.nodes,
            top_k=run.top_k,
            sampled=run.law == "recursive",
            paths=tuple(map(tuple, run.paths)),
            budget=budget,
        )

    def decode(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[int]
    ) -> tuple[list[Generation], list[Timing]]:
        return generate(
            self.target,
            prompts,
            sampling=self.sampling,
            max_new_tokens=self.max_new_tokens,
            stop_ids=self.target.stop_ids(),
            batch_size=self.batch,
            drafter=self.drafter,
            plan=self.plan,
            law=self.run.law,
            leniency=self.run.leniency,
            request_keys=keys,
            record_orders=self.record_orders,
            record_events=self.record_events,
            graphs=self.run.graphs,
        )

    def warm_up(self, prompts: Sequence[Sequence[int]], keys: Sequence[int]) -> None:
        on_cpu = self.target.device.type == "cpu"
        limit = min(WARM_UP, self.max_new_tokens) if on_cpu else self.max_new_tokens
        replace(self, max_new_tokens=limit).decode(prompts, keys)

    def conditions(self) -> dict[str, Any]:
        return {
            "target": (
                id(self.target.model),
                type(self.target.model).__name__,
            ),  # torch.compile changes the class
            "dtype": str(self.target.dtype),
            "device": str(self.target.device),
            "attention": self.target.config._attn_implementation,
            "threads": torch.get_num_threads(),
            "sampling": asdict(replace(self.sampling, draft_temperature=0.0)),
            "max_new_tokens": self.max_new_tokens,
            "stop_ids": self.target.stop_ids(),
            "batch": self.batch,
            "graphs": self.run.graphs,
        }


class Arms:
    """Decodes the same prompts plainly and with every other arm; who is first rotates, so that drift of the
    clock
    hits all."""

    def __init__(self, plain: Arm, others: Sequence[Arm]):
        self.plain, self.others = plain, others
        self._calls = 0

    def warm_up(self, prompts: Sequence[Sequence[int]], keys: Sequence[int]) -> None:
        for arm in (self.plain, *self.others):
            arm.warm_up(prompts, keys)

    def decode(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[int]
    ) -> list[tuple[list[Generation], Timing]]:
        """Texts and seconds of the plain arm, then of the others; ValueError if conditions differ."""
        for arm in self.others:
            self._compare(arm)
        arms = [self.plain, *self.others]
        results: list[tuple[list[Generation], Timing]] = [([], UNTIMED)] * len(arms)
        for turn in range(len(arms)):
            i = (turn + self._calls) % len(arms)
            texts, timings = arms[i].decode(prompts, keys)
            results[i] = texts, total(timings)
        self._calls += 1
        return results

    def _compare(self, arm: Arm) -> None:
        plain, other = self.plain.conditions(), arm.conditions()
        for key in plain.keys() | other.keys():
            if plain.get(key) != other.get(key):
                raise ValueError(
                    f"eta refused: the arms differ in {key}: "
                    f"{plain.get(key)!r} (plain), {other.get(key)!r} (speculative)"
                )


def total(timings: Sequence[Timing]) -> Timing:
    """Sums of seconds and steps."""
    rows = [asdict(timing) for timing in timings]
    return Timing(**{name: sum(row[name] for row in rows) for name in rows[0]})

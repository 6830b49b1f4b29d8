"""Speculative against plain decoding: two arms under equal conditions, taken in turns.

A speed-up is only asked for in one process, with the same target, dtype, threads, sampler, batch and limits
on both sides; anything else is refused. Knows no drafter's insides and no report.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from spectrain.config import DecodeRunConfig
from spectrain.decode.engine import generate
from spectrain.decode.generation import Generation, Timing
from spectrain.decode.sampling import Sampling
from spectrain.proposal import Drafter, Plan
from spectrain.target import Target


class Arm(Protocol):
    """One way of decoding a batch of prompts."""

    def decode(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[int]
    ) -> tuple[list[Generation], list[Timing]]:
        """Texts and seconds; `keys` are the stable numbers of the prompts that their random numbers hang
        on."""

    def conditions(self) -> dict[str, Any]:
        """What decoding runs under right now; equal for two arms that may be compared."""


@dataclass(frozen=True)
class EngineArm:
    """The engine with one run's settings; plain decoding where `drafter` is None."""

    target: Target
    drafter: Drafter | None
    run: DecodeRunConfig
    max_new_tokens: int
    batch: int
    seed: int
    record_orders: bool = False

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            temperature=self.run.temperature,
            top_k=self.run.top_k_filter,
            top_p=self.run.top_p,
            seed=self.seed,
            draft_temperature=self.run.draft_temperature,
        )

    def decode(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[int]
    ) -> tuple[list[Generation], list[Timing]]:
        run = self.run
        plan = Plan(shape=run.proposal, length=run.length, nodes=run.nodes, top_k=run.top_k)
        return generate(
            self.target,
            prompts,
            sampling=self.sampling,
            max_new_tokens=self.max_new_tokens,
            stop_ids=self.target.stop_ids(),
            batch_size=self.batch,
            drafter=self.drafter,
            plan=None if self.drafter is None else plan,
            law=run.law,
            request_keys=keys,
            record_orders=self.record_orders,
        )

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
            "sampling": asdict(self.sampling),
            "max_new_tokens": self.max_new_tokens,
            "stop_ids": self.target.stop_ids(),
            "batch": self.batch,
        }


class Pairs:
    """Decodes the same prompts with both arms; the first arm alternates, so that drift of the clock hits
    both."""

    def __init__(self, plain: Arm, speculative: Arm):
        self.plain, self.speculative = plain, speculative
        self._calls = 0

    def decode(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[int]
    ) -> tuple[list[Generation], Timing, list[Generation], Timing]:
        """Texts and seconds of the plain, then of the speculative arm; ValueError if their conditions
        differ."""
        plain, speculative = self.plain.conditions(), self.speculative.conditions()
        for key in plain.keys() | speculative.keys():
            if plain.get(key) != speculative.get(key):
                raise ValueError(
                    f"eta refused: the two arms differ in {key}: "
                    f"{plain.get(key)!r} (plain), {speculative.get(key)!r} (speculative)"
                )
        self._calls += 1
        arms = (self.plain, self.speculative) if self._calls % 2 else (self.speculative, self.plain)
        results = {id(arm): arm.decode(prompts, keys) for arm in arms}
        (plain_texts, plain_times), (texts, times) = results[id(self.plain)], results[id(self.speculative)]
        return plain_texts, total(plain_times), texts, total(times)


def total(timings: Sequence[Timing]) -> Timing:
    """Sums of seconds and steps."""
    rows = [asdict(timing) for timing in timings]
    return Timing(**{name: sum(row[name] for row in rows) for name in rows[0]})

"""Prompt lookup: draft what followed the newest tokens the last time they occurred in prompt or text.

The newest n tokens are looked up for n = max_match down to min_match; the most recent earlier occurrence of
the first match gives the chain. Where it runs into the end of the text it goes on with its own tokens, as a
text does that repeats itself:

    text 5 6 7 8 9 5 6, length 3    5 6 occurred at the beginning: 7 8 9
    text 1 2 1 2 1, length 4        2 1 occurred two tokens ago: 2 1, then again 2 1

Each n-gram's last place is kept in a dictionary, so that a lookup does not depend on the text's length. Knows
no target state, has no weights and is never trained. Source: Saxena 2023, prompt lookup decoding; vLLM's
`ngram` takes the earliest occurrence instead of the most recent one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from spectrain.drafters.lookup import chosen, new_tokens
from spectrain.proposal import Observation, Plan, Proposal, Sampler
from spectrain.target import Target

SERVED: dict[str, tuple[str, str]] = {}
NOT_SERVED = {
    "vllm": "no weights, it looks n-grams up itself",
    "sglang": "no weights, it looks n-grams up itself",
    "speculators": "no weights",
    "trtllm": "no weights, it looks n-grams up itself",
    "reference": "no weights",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    family: str = "ngram"
    min_match: int = 1
    """Fewest newest tokens that must have occurred before."""
    max_match: int = 4
    """Most newest tokens that are looked up, the longest first."""
    draft_vocab: ClassVar[int] = 0

    def __post_init__(self):
        if self.min_match < 1:
            raise ValueError(f"drafter.min_match={self.min_match}: expected at least 1")
        if self.max_match < self.min_match:
            raise ValueError(
                f"drafter.max_match={self.max_match}: expected at least drafter.min_match={self.min_match}"
            )


class NGram(nn.Module):
    """A drafter without weights."""

    taps: tuple[int, ...] = ()

    def __init__(self, config: Config, vocab_size: int):
        super().__init__()
        self.config, self.vocab_size = config, vocab_size

    def start(self, num_requests: int, capacity: int) -> "NGramDrafting":
        return NGramDrafting(self.config, self.vocab_size)

    def weights_read(self) -> tuple[int, int]:
        return 0, 0

    def engine_config(self, target: Target, engine: str) -> dict[str, Any]:
        """Refused: there is nothing to write."""
        settings = (
            '{"method": "ngram", "num_speculative_tokens": N, '
            f'"prompt_lookup_min": {self.config.min_match}, "prompt_lookup_max": {self.config.max_match}}}'
        )
        raise ValueError(
            "stages: export: ngram has no weights to export; vLLM looks n-grams up itself: "
            f"--speculative-config '{settings}'"
        )


class NGramDrafting:
    """The texts of several requests (`spectrain.proposal.Drafting`); steps counts lookups."""

    def __init__(self, config: Config, vocab_size: int):
        self.config, self.vocab_size = config, vocab_size
        self.texts: dict[int, _Text] = {}
        self.steps = 0

    def observe(self, observations: Sequence[Observation]) -> None:
        for seen in observations:
            if seen.start == 0:
                self.texts[seen.request] = _Text(self.config.min_match, self.config.max_match)
            for token in new_tokens(seen):
                self.texts[seen.request].append(token)

    def propose(self, requests: Sequence[int], plan: Plan, sampler: Sampler) -> list[Proposal]:
        if plan.shape != "chain":
            raise ValueError(f"proposal={plan.shape}: ngram proposes chains only (suffix has trees)")
        if plan.budget is not None:
            raise ValueError("adaptive=true: ngram has no confidences to stop by (suffix has)")
        self.steps += 1
        found = [self.texts[request].continuation(plan.length) for request in requests]
        return [
            chosen(ids, range(-1, len(ids) - 1), num_ids=self.vocab_size, ranked=plan.ranked > 0)
            for ids in found
        ]


class _Text:
    """Tokens, and for each n-gram that something followed the place of what followed it last."""

    def __init__(self, shortest: int, longest: int):
        self.sizes = range(shortest, longest + 1)
        self.tokens: list[int] = []
        self.places: dict[tuple[int, ...], int] = {}

    def append(self, token: int) -> None:
        here = len(self.tokens)
        for size in self.sizes:
            if size <= here:
                self.places[tuple(self.tokens[-size:])] = here
        self.tokens.append(token)

    def continuation(self, length: int) -> list[int]:
        """`length` tokens behind the longest match, none without a match."""
        for size in reversed(self.sizes):
            place = self.places.get(tuple(self.tokens[-size:]))
            if place is not None:
                found = self.tokens[place : place + length]
                period = len(self.tokens) - place
                while len(found) < length:
                    found.append(found[-period])
                return found
        return []


def build(config: Config, target: Target, kept_ids: torch.Tensor) -> NGram:
    """A drafter that may propose every id of the target; kept_ids plays no part."""
    return NGram(config, target.vocab_size)

"""How often the drafter ranks the target's choice first, second, .. at each depth: what `trees.best_paths`
takes.

Counted where rounds really reach: a depth counts once all before it were accepted, as in alpha_k. Counts of
several runs add up. Knows no model.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from spectrain.decode.generation import Generation


@dataclass(frozen=True)
class RankCounts:
    """hits int64 [D, R]: places at depth d + 1 where the target's token had rank r; seen int64 [D]: all
    places there at which the drafter was asked."""

    hits: np.ndarray
    seen: np.ndarray

    def accuracies(self) -> list[list[float]]:
        """hits / seen, as far down as anything was seen."""
        depth = int((self.seen > 0).cumprod().sum())
        return (self.hits[:depth] / self.seen[:depth, None]).tolist()

    def __add__(self, other: "RankCounts") -> "RankCounts":
        return RankCounts(self.hits + other.hits, self.seen + other.seen)


def count_ranks(
    places: Iterable[tuple[Sequence[torch.Tensor | None], Sequence[int]]], *, depth: int, ranks: int
) -> RankCounts:
    """Counts over (rankings, tokens) of roots.

    rankings: int64 [M] ids by descending draft probability at depth 1, 2, .., None where the drafter was not
    asked; tokens: what the target chose there. From parallel heads on a given text: head k's ranking at t
    and x_{t+2+k}.
    """
    hits, seen = np.zeros((depth, ranks), np.int64), np.zeros(depth, np.int64)
    for rankings, tokens in places:
        for d, (ranking, token) in enumerate(zip(rankings[:depth], tokens, strict=False)):
            if ranking is None:
                continue
            if len(ranking) < ranks:
                raise ValueError(
                    f"ranks={ranks}: the rankings hold {len(ranking)} ids, expected at least as many"
                )
            seen[d] += 1
            hits[d] += (ranking[:ranks] == token).cpu().numpy()
    return RankCounts(hits, seen)


def rounds_of(text: Generation) -> Iterator[tuple[Sequence[torch.Tensor | None], Sequence[int]]]:
    """For each round of a text decoded with record_orders: the rankings and tokens of its emitted places.

    Greedy decoding gives the target's arg-max, sampling a draw from p; either is the target's choice.
    """
    begin = 1  # the prefill's token
    for record in text.rounds:
        places = slice(begin, begin + record.emitted)
        yield text.orders[places], text.ids[places]
        begin += record.emitted

"""Is a sampled text drawn from the target's law? The transform of its tokens, and three tests of what it must
give.

Rosenblatt's transform, randomised for discrete laws: with p the law at a place and the vocabulary in an order
that the draw cannot influence (the drafter's ranking there), u = F(x-) + v p(x), v uniform, is uniform iff x
was drawn from p, whatever came before. A drafter that shifts mass between tokens it ranks high and low bends
u. Knows no model. Legend: M places, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from spectrain.decode.generation import Generation
from spectrain.metrics import after_cut


@dataclass(frozen=True)
class Outcome:
    """statistic: the larger, the worse; p_value: its probability where the text is the target's own."""

    statistic: float
    p_value: float


def transform(
    p_MV: torch.Tensor, ids: Sequence[int], orders: Sequence[torch.Tensor | None], v_M: np.ndarray
) -> np.ndarray:
    """u = F(x-) + v p(x), float64 [M], for tokens `ids` at rows of p.

    orders[i]: ids that come first, in this order, then the rest by id; None: all by descending p, ties by id.

        p = .5 .3 .2, order (2,): cumulated 2, 0, 1      x = 0: F(x-) = .2, u in [.2, .7)
    """
    u = np.empty(len(ids))
    for i, (x, order) in enumerate(zip(ids, orders, strict=True)):
        p_V = p_MV[i].double()
        if order is None:
            before = p_V[p_V > p_V[x]].sum() + p_V[:x][p_V[:x] == p_V[x]].sum()
        else:
            order = order.to(p_V.device)
            place = (order == x).nonzero()
            if len(place):
                before = p_V[order[: place[0, 0]]].sum()
            else:
                before = p_V[order].sum() + p_V[:x].sum() - p_V[order[order < x]].sum()
        u[i] = (before + v_M[i] * p_V[x]).item()
    return np.clip(u, 0.0, 1.0)


def uniformity(u: np.ndarray) -> Outcome:
    """Kolmogorov-Smirnov distance of `u` from uniform; the p-value by the limit law in Stephens' form."""
    n, ordered = len(u), np.sort(u)
    above = np.arange(1, n + 1) / n - ordered
    distance = float(max(above.max(), (1 / n - above).max()))
    x = distance * (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n))
    if x < 0.3:  # the series converges slowly there, and the p-value is 1 to four digits
        return Outcome(distance, 1.0)
    series = 2 * sum((-1) ** (k - 1) * math.exp(-2 * k * k * x * x) for k in range(1, 40))
    return Outcome(distance, min(1.0, max(0.0, series)))


def serial_correlation(texts: Sequence[np.ndarray]) -> Outcome:
    """Correlation of successive u within texts as a normal score, tested on both sides."""
    products = np.concatenate([(u[:-1] - 0.5) * (u[1:] - 0.5) * 12 for u in texts])
    z = float(products.sum() / math.sqrt(max(1, len(products))))
    return Outcome(z, math.erfc(abs(z) / math.sqrt(2)))


def acceptance(generations: Sequence[Generation]) -> Outcome:
    """Chi-square of accepted drafts per slot against the probabilities that the engine stated for them.

    Slots whose expected variance is below 5 are pooled, so that the normal limit holds.
    """
    rounds = [record for generation in generations for record in generation.rounds]
    depth = max((len(record.alphas) for record in rounds), default=0)
    excess, variance = np.zeros((2, depth))
    for record in rounds:
        kept, reached = after_cut(record)
        alphas = np.clip(record.alphas[:reached], 0.0, 1.0)
        excess[:kept] += 1
        excess[:reached] -= alphas
        variance[:reached] += alphas * (1 - alphas)
    rare = variance < 5
    cells = list(zip(excess[~rare], variance[~rare], strict=True))
    if variance[rare].sum() > 1e-6:
        cells.append((excess[rare].sum(), variance[rare].sum()))
    elif abs(excess[rare].sum()) > 1e-3:  # nothing is left to chance there
        return Outcome(math.inf, 0.0)
    statistic = float(sum(e * e / v for e, v in cells))
    return Outcome(statistic, chi_square_tail(statistic, len(cells)))


def chi_square_tail(statistic: float, freedom: int) -> float:
    """Probability that a chi-square variable exceeds `statistic`; 1 without degrees of freedom."""
    if freedom == 0:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item()

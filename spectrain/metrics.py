"""Counters in, numbers out: tau, alpha, c, r, eta and their 95% bootstrap intervals.

Every number is a ratio of sums over texts, and the sums are kept apart until the last division, so that
batches, processes and resamples pool rightly. Definitions: docs/math.md. Knows no model, engine or file.
Legend: P texts, B resamples, K slots.

A cut (stop token or length) drops the tail of a verified block. A slot counts as reached iff its place in the
text is within the cut and all slots before it were accepted, which is known before its coin is tossed; so a
cut biases no alpha:

    accepted 3 of 4 drafts, bonus kept      emitted 4   accepted after the cut 3   reached 4
    accepted 3 of 4 drafts, second is stop  emitted 2   accepted after the cut 2   reached 2   bonus cut
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np

TIMING = ("decode_s", "draft_s", "verify_s", "steps", "draft_steps", "plain_s", "plain_steps", "plain_tokens")

TIMED = (
    "c", "r", "gamma", "overhead", "eta", "eta_model", "eta_leviathan", "limit_share", "throughput_tok_s",
    "plain_throughput_tok_s",
)  # fmt: skip
"""The numbers of `ratios` that hang on seconds or on the steps of a batch."""


class RoundRecord(Protocol):
    """One verification of one request: what `decode.generation.Round` records."""

    @property
    def drafted(self) -> int: ...
    @property
    def emitted(self) -> int: ...
    @property
    def alphas(self) -> Sequence[float]: ...
    @property
    def bonus_cut(self) -> bool: ...


@dataclass(frozen=True)
class Number:
    """A value with its 95% interval; None where undefined, the interval also where there is a single unit."""

    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Counters:
    """The sums behind every number, float64; first axis P texts (or B resamples of their total).

    rounds, drafted, accepted, emitted, bonus_cut [P]: verifications, draft tokens, draft tokens accepted and
    tokens emitted after cuts, rounds whose bonus token was cut. reached, passed, mass [P, K]: rounds that
    reached slot k, that accepted it, and the sum of its analytic acceptance. decode_s, draft_s, verify_s,
    steps, draft_steps [P]: speculative decoding. plain_s, plain_steps, plain_tokens [P]: plain decoding.
    Seconds and steps of a batch are shared equally by its texts.
    """

    rounds: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    emitted: np.ndarray
    bonus_cut: np.ndarray
    reached: np.ndarray
    passed: np.ndarray
    mass: np.ndarray
    decode_s: np.ndarray
    draft_s: np.ndarray
    verify_s: np.ndarray
    steps: np.ndarray
    draft_steps: np.ndarray
    plain_s: np.ndarray
    plain_steps: np.ndarray
    plain_tokens: np.ndarray

    def total(self, weights_BP: np.ndarray) -> "Counters":
        """Weighted sums over texts: [P, ..] becomes [B, ..]."""
        return Counters(**{f.name: weights_BP @ vars(self)[f.name] for f in fields(self)})

    def pooled(self) -> "Counters":
        """The total over all texts, [1, ..]."""
        return self.total(np.ones((1, len(self.rounds))))

    def select(self, rows: Sequence[int]) -> "Counters":
        """The texts `rows` only."""
        return Counters(**{f.name: vars(self)[f.name][list(rows)] for f in fields(self)})


def after_cut(record: RoundRecord) -> tuple[int, int]:
    """Draft tokens of a round accepted within the cut, and slots reached within it."""
    accepted = record.emitted - (not record.bonus_cut)
    return accepted, accepted if record.bonus_cut else len(record.alphas)


def count(
    texts: Sequence[Iterable[RoundRecord]], *, slots: int, timing: dict[str, Sequence[float]] | None = None
) -> Counters:
    """Counters of `texts`, each a list of rounds, over `slots` slots.

    timing: the eight fields of seconds and steps, one value per text; None: zeros, nothing was timed.
    """
    P = len(texts)
    rounds, drafted, accepted, emitted, bonus_cut = np.zeros((5, P))
    reached, passed, mass = np.zeros((3, P, slots))
    for i, records in enumerate(texts):
        for record in records:
            kept, seen = after_cut(record)
            rounds[i] += 1
            drafted[i] += record.drafted
            accepted[i] += kept
            emitted[i] += record.emitted
            bonus_cut[i] += record.bonus_cut
            reached[i, :seen] += 1
            passed[i, :kept] += 1
            mass[i, :seen] += record.alphas[:seen]
    return Counters(
        rounds=rounds, drafted=drafted, accepted=accepted, emitted=emitted, bonus_cut=bonus_cut,
        reached=reached, passed=passed, mass=mass,
        **{name: np.asarray(timing[name] if timing else [0] * P, dtype=float) for name in TIMING},
    )  # fmt: skip


def ratios(sums: Counters, *, length: int, limit_cost: float = math.nan) -> dict[str, np.ndarray]:
    """Every number from sums [B, ..], NaN where undefined.

    length: drafts of a chain or depth of a tree; limit_cost: least cost of a round in plain steps on a named
    GPU (eval/limit.py), NaN where none is named.
    """
    plain_step = _over(sums.plain_s, sums.plain_steps)
    tau = _over(sums.emitted, sums.rounds)
    alpha = _over(sums.mass.sum(1), sums.reached.sum(1))
    c = _over(_over(sums.draft_s, sums.draft_steps), plain_step)
    r = _over(_over(sums.verify_s, sums.steps), plain_step)
    gamma = _over(sums.draft_steps, sums.steps)
    rest = sums.decode_s - sums.draft_s - sums.verify_s
    overhead = _over(_over(rest, sums.steps), plain_step)
    speed, plain_speed = _over(sums.emitted, sums.decode_s), _over(sums.plain_tokens, sums.plain_s)
    eta, eta_limit = _over(speed, plain_speed), tau / limit_cost
    return {
        "tau": tau,
        "alpha": alpha,
        "alpha_empirical": _over(sums.passed.sum(1), sums.reached.sum(1)),
        "alpha_k": _over(sums.passed, sums.reached),
        "joint_k": _over(sums.passed, sums.rounds[:, None]),
        "bonus_cut": _over(sums.bonus_cut, sums.rounds),
        "rate": _over(sums.accepted, sums.drafted),
        "c": c,
        "r": r,
        "gamma": gamma,
        "overhead": overhead,
        "eta": eta,
        "eta_model": _over(tau, r + gamma * c + overhead),
        "eta_leviathan": leviathan(alpha, length, c),
        "eta_limit": eta_limit,
        "limit_share": _over(eta, eta_limit),
        "throughput_tok_s": speed,
        "plain_throughput_tok_s": plain_speed,
    }


def estimate(
    counters: Counters,
    *,
    prompts: Sequence,
    units: Sequence[int],
    length: int,
    resamples: int,
    seed: int,
    limit_cost: float = math.nan,
    trainings: Sequence[int] | None = None,
) -> dict[str, Number | list[Number]]:
    """Every number of `ratios` with its 95% percentile bootstrap interval.

    prompts: for each text its prompt, whose texts are drawn as a whole; units: the same for TIMED, where a
    batch of prompts that was timed together is one unit. trainings: for each text the training of its
    drafter; trainings are then drawn too, and a text counts as often as its prompt times its training.
    """
    point = ratios(counters.pooled(), length=length, limit_cost=limit_cost)
    spreads = {}
    for is_timed, groups in ((False, prompts), (True, units)):
        rng = np.random.default_rng(seed)
        weights_BP, number = drawn(groups, resamples, rng)
        if trainings is not None:
            times_BP, other = drawn(trainings, resamples, rng)
            weights_BP, number = weights_BP * times_BP, max(number, other)
        total = counters.total(weights_BP)
        spread = ratios(total, length=length, limit_cost=limit_cost)
        spreads[is_timed] = spread if number > 1 else dict.fromkeys(spread)
    return {name: _numbers(point[name][0], spreads[name in TIMED][name]) for name in point}


def drawn(groups: Sequence, resamples: int, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """How often each text's group is drawn in each resample [B, P], and the number of groups."""
    _, group_of = np.unique(np.asarray(groups), return_inverse=True)
    number = int(group_of.max()) + 1
    draws = rng.multinomial(number, np.full(number, 1 / number), size=resamples)
    return draws[:, group_of].astype(float), number


def leviathan(alpha: np.ndarray, length: int, c: np.ndarray) -> np.ndarray:
    """Speed-up (1 - a^(g+1)) / ((1 - a)(g c + 1)) of a chain of g = `length` drafts of equal acceptance a."""
    tokens = np.sum([alpha**k for k in range(length + 1)], axis=0)  # the geometric sum, defined at a = 1 too
    return _over(tokens, length * c + 1)


def prefix_length(matches: np.ndarray) -> np.ndarray:
    """Leading True values along the last axis: drafts accepted before the first rejection."""
    return np.cumprod(matches, axis=-1, dtype=int).sum(-1)


def tau_from_alphas(alpha_k: Sequence[float]) -> float:
    """tau of a chain without cuts: 1 + sum over k of the product of alpha_0 .. alpha_k."""
    return 1 + float(np.cumprod(alpha_k).sum())


def _over(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = np.broadcast_arrays(a, b)
    return np.divide(a, b, out=np.full(a.shape, np.nan), where=b != 0)


def _numbers(value: np.ndarray, spread: np.ndarray | None) -> Number | list[Number]:
    if np.ndim(value):
        return [_numbers(v, None if spread is None else spread[:, k]) for k, v in enumerate(value)]  # type: ignore[misc]
    if np.isnan(value):
        return Number(None, None, None)
    if spread is None:
        return Number(float(value), None, None)
    low, high = np.percentile(spread[~np.isnan(spread)], (2.5, 97.5))
    return Number(float(value), float(low), float(high))

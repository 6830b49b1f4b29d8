"""Which samples make up each optimizer step, and where their features come from.

The plan of a run depends on sample ids, lengths, seed and settings alone: not on the number of processes, not
on the order in which files were listed. A step's samples are then dealt to packed rows of equal size, one
list of rows per process. Knows no drafter.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from spectrain.capture import capture_batch, reject_bad
from spectrain.config import TrainConfig
from spectrain.data.packing import Sample, plan_rows
from spectrain.features import FeatureBatch, FeatureStore, hash_samples, id_order
from spectrain.target import Target

STATES_BOUND = {torch.float32: 1e-3, torch.bfloat16: 5e-2}  # a row of another height rounds otherwise

log = logging.getLogger(__name__)

Read = Callable[[Sequence[int]], tuple[FeatureBatch | None, list[list[str]]]]


@dataclass(frozen=True)
class Source:
    """ids, lengths: the samples of a run, by ascending id. read: features of the samples at some places,
    packed, and [sample id, layer] of those left out for non-finite states. ahead: whether a thread may read
    the next step. content: hash of the samples."""

    ids: tuple[str, ...]
    lengths: tuple[int, ...]
    read: Read
    ahead: bool
    content: str


def stored(store: FeatureStore, tap_ids: Sequence[int]) -> Source:
    """Features from disk: every readable sample of the capture, with the taps that the drafter reads."""
    ids = tuple(sorted(store.lengths))
    lengths = tuple(store.lengths[i] for i in ids)
    return Source(
        ids,
        lengths,
        lambda places: (store.batch([ids[i] for i in places], tap_ids), []),
        True,
        store.settings["samples"],
    )


def online(target: Target, samples: Sequence[Sample], tap_ids: Sequence[int]) -> Source:
    """Features computed by the target when a step needs them."""
    order = id_order(samples)

    def read(places: Sequence[int]) -> tuple[FeatureBatch | None, list[list[str]]]:
        row = [samples[order[i]] for i in places]
        return reject_bad(row, capture_batch(target, row, tap_ids))[1:]

    ids, lengths = tuple(samples[i].id for i in order), tuple(len(samples[i].ids) for i in order)
    return Source(ids, lengths, read, False, hash_samples(samples, order))


def open_source(
    config: TrainConfig,
    target: Target,
    samples: Sequence[Sample],
    store: FeatureStore | None,
    tap_ids: Sequence[int],
) -> Source:
    """The source that `train.features` asks for, compared with target, taps and samples of this run."""
    if (config.features == "stored") != (store is not None):
        given = "no captured features" if store is None else "captured features"
        raise ValueError(f"train.features={config.features!r}: {given} given (stages: capture before train)")
    target.self_test()
    if store is None:
        return online(target, samples, tap_ids)
    store.check(target.fingerprint(), tap_ids, samples, taps_bits=config.taps_bits)
    _compare_one(target, samples, store)
    target.release()
    if store.damaged:
        lost = len(samples) - len(store.lengths) - len(store.rejected)
        log.warning("train.skip_bad: %d samples left out with damaged %s", lost, ", ".join(store.damaged))
    return stored(store, tap_ids)


def _compare_one(target: Target, samples: Sequence[Sample], store: FeatureStore) -> None:
    """Compute one short sample again; ValueError if its stored states are not the target's."""
    sample = min(
        (s for s in samples if s.id in store.lengths), key=lambda s: (len(s.ids), s.id), default=None
    )
    if sample is None:
        return
    there, here = store.batch([sample.id]).final.float(), capture_batch(target, [sample], store.tap_ids).final
    off = ((there - here.float().cpu()).norm() / there.norm()).item()
    if not off <= STATES_BOUND[target.dtype]:
        raise ValueError(
            f"{store.folder}: stored states of sample {sample.id} differ from the target's by {off:.3g} of "
            f"their norm (bound {STATES_BOUND[target.dtype]:.3g}): capture again"
        )


@dataclass(frozen=True)
class Step:
    """samples: places in `Source.ids`; number: index of the step in its pass."""

    pass_number: int
    number: int
    samples: tuple[int, ...]


def plan_steps(lengths: Sequence[int], config: TrainConfig) -> list[Step]:
    """The optimizer steps of a run: per pass a fresh order, cut into steps of at most `batch_tokens` tokens.

    A fractional last pass is cut to its share of steps, rounded up. Raises ValueError if no step is left or a
    sample does not fit a row.
    """
    if not lengths:
        raise ValueError("no samples to train on: the prepared corpus is empty")
    if (longest := max(lengths)) > config.micro_tokens:
        raise ValueError(f"train.micro_tokens={config.micro_tokens}: the longest sample has {longest} tokens")
    steps: list[Step] = []
    for pass_number in range(math.ceil(config.passes)):
        order = shuffled(len(lengths), config.seed, pass_number)
        rows = plan_rows(lengths, order, config.batch_tokens)
        share = min(1.0, config.passes - pass_number)
        rows = rows[: math.ceil(share * len(rows))]
        steps += [Step(pass_number, number, tuple(row)) for number, row in enumerate(rows)]
        if config.max_steps and len(steps) >= config.max_steps:
            steps = steps[: config.max_steps]
            break
    if not steps:
        raise ValueError(f"train.passes={config.passes}: expected more than 0")
    return steps


def shuffled(count: int, seed: int, pass_number: int) -> list[int]:
    """A permutation of 0 .. count - 1 from the raw bits of Philox, which no version of numpy changes."""
    bits = np.random.Philox(key=[seed, pass_number]).random_raw(count)
    return np.argsort(bits, kind="stable").tolist()


def step_seed(seed: int, step: int, process: int) -> int:
    """The random state of a step depends on its place alone, so a resumed run draws what the first would have
    drawn."""
    return int(np.random.SeedSequence([seed, step, process]).generate_state(1, np.uint64)[0] >> 1)


def deal(
    samples: Sequence[int], lengths: Sequence[int], micro_tokens: int, processes: int
) -> list[list[list[int]]]:
    """Rows of samples for each process: as many rows for each, of at most `micro_tokens` tokens, about
    equally long.

    The longest sample goes first, each to the shortest row. Rows without samples are dropped, so that a
    process may get none. Lengths 5, 4, 3, 3 on two processes with 8 tokens: [[5, 3]] and [[4, 3]].
    """
    total = sum(lengths[i] for i in samples)
    num_rows = processes * math.ceil(total / (processes * micro_tokens))
    while True:
        rows: list[list[int]] = [[] for _ in range(num_rows)]
        filled = [0] * num_rows
        for i in sorted(samples, key=lambda i: -lengths[i]):
            shortest = filled.index(min(filled))
            rows[shortest].append(i)
            filled[shortest] += lengths[i]
        if max(filled) <= micro_tokens:
            return [[row for row in rows[rank::processes] if row] for rank in range(processes)]
        num_rows += processes


def read_steps(source: Source, rows_of_steps: Iterable[list[list[int]]]) -> Iterator[list]:
    """What `source.read` gives for the rows of each step, one step ahead of the caller where that is
    allowed."""
    if not source.ahead:
        yield from ([source.read(row) for row in rows] for rows in rows_of_steps)
        return
    with ThreadPoolExecutor(max_workers=1) as reader:
        waiting = None
        for rows in rows_of_steps:
            following = reader.submit(lambda rows: [source.read(row) for row in rows], rows)
            if waiting is not None:
                yield waiting.result()
            waiting = following
        if waiting is not None:
            yield waiting.result()

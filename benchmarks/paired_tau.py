"""Difference of tau between two drafters that decoded the same prompts, with its 95% interval.

    python benchmarks/paired_tau.py --run chain4_t0 --these RUN.. --those RUN.. [--category chat]

RUN: run folders with an evaluation, such as the cells of a comparison; the i-th of both lists belong
together, as trained with one seed. Prompts, and seeds if there are several, are drawn for both drafters at
once, so that what makes a prompt easy for both is in neither's favour: two intervals of tau that overlap can
hide a clear difference. With few seeds the interval is too narrow: three can be drawn in ten ways.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from spectrain.eval.records import Text, counters, read_texts
from spectrain.metrics import drawn, ratios

RESAMPLES = 10_000


def pooled(folders: Sequence[Path], run: str, category: str) -> tuple[list[Text], list[tuple]]:
    """Texts of all folders in the order of (folder, prompt, turn), and those keys."""
    found = {
        (number, text.id, text.turn): text
        for number, folder in enumerate(folders)
        for text in read_texts(folder / "eval" / "runs" / run / "texts.jsonl")
        if category in ("", text.category)
    }
    return [found[key] for key in sorted(found)], sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--run", required=True, help="name of the run of eval.runs")
    parser.add_argument("--these", required=True, nargs="+", type=Path)
    parser.add_argument("--those", required=True, nargs="+", type=Path)
    parser.add_argument("--category", default="", help="prompts of one category alone")
    args = parser.parse_args()
    these, keys = pooled(args.these, args.run, args.category)
    those, others = pooled(args.those, args.run, args.category)
    if keys != others or not keys:
        raise SystemExit(
            f"--these and --those did not decode the same prompts: {len(keys)} and {len(others)}, "
            f"the first that one lacks: {min({*keys} ^ {*others}, default='none')}"
        )
    weights, prompts = drawn([name for _, name, _ in keys], RESAMPLES, np.random.default_rng(0))
    seeds, number = drawn([folder for folder, _, _ in keys], RESAMPLES, np.random.default_rng(1))
    taus = []
    for texts in (these, those):
        slots = max((len(r.alphas) for text in texts for r in text.speculative.rounds), default=0)
        sums = counters(texts, slots=slots)
        point = ratios(sums.pooled(), length=slots)["tau"][0]
        taus.append((point, ratios(sums.total(weights * seeds), length=slots)["tau"]))
    (a, a_B), (b, b_B) = taus
    low, high = np.percentile(a_B - b_B, (2.5, 97.5))
    print(
        f"{args.run}{' ' + args.category if args.category else ''}: tau {a:.3f} less {b:.3f} is {a - b:+.3f} "
        f"[{low:+.3f}, {high:+.3f}], {prompts} prompts, {number} seeds"
    )


if __name__ == "__main__":
    main()

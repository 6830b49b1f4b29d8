"""The progress bar of the evaluation, with rate and time left; in a log a line now and then."""

import sys

from tqdm import tqdm  # type: ignore[import-untyped]


def progress_bar(title: str, *, total: int, unit: str) -> tqdm:
    """A bar on standard error over `total` units."""
    seconds = 0.5 if sys.stderr.isatty() else 10
    return tqdm(desc=title, total=total, unit=unit, dynamic_ncols=True, mininterval=seconds)

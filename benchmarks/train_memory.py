"""Peak memory of one EAGLE-3 training step over the length of its packed row, and how linear it is.

    python benchmarks/train_memory.py                          2k, 4k, 8k and 16k tokens
    python benchmarks/train_memory.py --tokens 512 1024 2048

Hidden 1024, 16 query and 8 key/value heads, inner 3072, vocabulary 49,152, draft vocabulary 16,000, 7 steps,
float32, every token supervised, one document, one chunk size for all lengths. Each length is a process of its
own: a step on 256 tokens loads what is loaded once, then one step is taken. "step" is the peak resident size
(VmHWM) less what was resident before that step, "process" the peak from start to end, target and features
included. The line is the least-squares fit of "step"; its residuals are printed beside the lengths.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from train_step import ROOT, conditions, resident

TOKENS = (2048, 4096, 8192, 16384)
LIMIT_MB = 12 * 1024  # of the process at the greatest length


def measure(tokens: int) -> dict[str, float]:
    """MB of one step on `tokens` tokens, and of this process."""
    from train_tensors import SHAPES, eagle3_step, features_of, training

    shape = replace(SHAPES["M"], tokens=tokens)
    ours = eagle3_step(shape, 1.0)
    features = ours.features
    ours.features = features_of(replace(shape, tokens=256), 1.0, ours.target, ours.drafter.taps)
    step = training(ours.drafter, ours.loss)
    step.run()
    ours.drafter.zero_grad()
    ours.features = features
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before, made = resident("VmRSS"), resident("VmHWM")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again at VmRSS
    step.run()
    peak = resident("VmHWM")
    return {"step": peak - before, "process": max(made, peak)}


def in_own_process(tokens: int, threads: int) -> dict[str, float]:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])))
    command = [sys.executable, __file__, "--worker", str(tokens)]
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def line(x: list[float], y: list[float]) -> tuple[float, float, float]:
    """Intercept, slope and R^2 of the least-squares line."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    slope /= sum((a - mean_x) ** 2 for a in x)
    start = mean_y - slope * mean_x
    left = sum((b - start - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    return start, slope, 1 - left / sum((b - mean_y) ** 2 for b in y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="lengths, three or more")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(measure(args.worker)))
        return
    print(conditions())
    found = []
    for tokens in args.tokens:
        found.append(in_own_process(tokens, args.threads))
        print(f"{tokens:6} tokens: step {found[-1]['step']:.0f} MB", flush=True)
    start, slope, fit = line(args.tokens, [row["step"] for row in found])
    print(f"step = {start:.0f} MB + {slope * 1024:.1f} MB per 1024 tokens, R^2 {fit:.6f}")
    print(f"{'tokens':>6} {'step MB':>8} {'line MB':>8} {'residual':>9} {'process MB':>10}")
    for tokens, row in zip(args.tokens, found, strict=True):
        expected = start + slope * tokens
        apart = f"{row['step'] / expected - 1:+.1%}"
        print(f"{tokens:6} {row['step']:8.0f} {expected:8.0f} {apart:>9} {row['process']:10.0f}")
    most = max(row["process"] for row in found)
    print(f"the process at its largest: {most:.0f} of {LIMIT_MB} MB")


if __name__ == "__main__":
    main()

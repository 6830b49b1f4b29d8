"""Kernels, training step and decode loop on one GPU, against what its memory and arithmetic allow.

    python benchmarks/gpu.py [--json FILE]        a CUDA device; at most 8 minutes
    python benchmarks/gpu.py --small              toy sizes on the CPU, to try the script: no figure counts

Each section runs in a process of its own with a time of its own, so that an error on the device, which spoils
the process, costs one section alone; its error stands in the table and the exit code is 1. Kernels are first
compared with their torch reference on the device, and get no time if they are wrong. Time as a share of the
limit is the larger of bytes / copy and FLOPs / product, both measured in the same run, over the median.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = ROOT / "benchmarks" / "gpu_sections.py"
# Seconds of each section, imports and compilation included; together less than 8 minutes. With --small, where
# the machine may be slow and nothing hangs on the time, SLACK times as many.
SLACK = 10
BUDGET = {
    "ceilings": 25, "tree_build": 25, "tree_attention": 60, "verify": 35, "commit": 20, "state_commit": 20,
    "linear_divergence": 40, "ttt_attention": 60, "training": 60, "decode": 130,
}  # fmt: skip


def run_section(name: str, small: bool, seconds: float) -> tuple[list[dict], str]:
    """The section's lines, and its error or "". Lines before the error are kept."""
    command = [sys.executable, str(SECTIONS), name, *(["--small"] if small else [])]
    paths = os.pathsep.join((str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])))
    environment = {**os.environ, "PYTHONPATH": paths}
    error = ""
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
        output = done.stdout
        if done.returncode:
            told = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            error = told[-1]
            print(done.stderr, file=sys.stderr)
    except subprocess.TimeoutExpired as late:
        output = (late.stdout or b"").decode()
        error = f"not done after {seconds:.0f} s"
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")], error


def share(line: dict, ceilings: dict[str, float]) -> float | None:
    """The least time that the measured ceilings allow, over the median; None where nothing is known."""
    least = [line[what] / ceilings[what] for what in ("gib", "gflop") if line[what] and what in ceilings]
    return max(least) * 1e3 / line["ms"][0] if least and line["ms"] else None


def rates(line: dict) -> dict[str, float]:
    """GiB/s and GFLOP/s of a line."""
    return {what: line[what] / line["ms"][0] * 1e3 for what in ("gib", "gflop") if line[what] and line["ms"]}


def row(section: str, line: dict, ceilings: dict[str, float]) -> str:
    """One row of the table."""
    middle, *spread = line["ms"] or (None,)
    ms = "" if middle is None else f"{middle:.3f}"
    if spread:
        ms += f" ({spread[0]:.3f}-{spread[1]:.3f})"
    found, part = rates(line), share(line, ceilings)
    cells = [
        section,
        line["what"],
        ms,
        f"{found['gib']:.1f}" if "gib" in found else "",
        f"{found['gflop'] / 1e3:.2f}" if "gflop" in found else "",
        "" if part is None else f"{part:.0%}",
        line["note"],
    ]
    return f"| {' | '.join(cells)} |"


def conditions(small: bool) -> str:
    """What a figure must be read with."""
    from importlib.metadata import version

    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    revision = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "no git"
    card = "toy sizes on the CPU: no figure means anything"
    if not small:
        query = ["nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"]
        card = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "triton", "transformers"))
    return f"{card}; {versions}; {revision}, {date.today()}; python {' '.join(sys.argv)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="toy sizes on the CPU")
    parser.add_argument("--json", type=Path, help="write the lines to this file as well")
    parser.add_argument("--section", action="append", choices=BUDGET, help="default: all")
    args = parser.parse_args()
    if not args.small and shutil.which("nvidia-smi") is None:
        parser.error("no nvidia-smi, so no CUDA device; --small tries the script on the CPU")
    told = conditions(args.small)
    print(told, "", sep="\n")
    print("| section | what | ms, median (p20-p80) | GiB/s | TFLOP/s | of the limit | |")
    print("| --- | --- | ---: | ---: | ---: | ---: | --- |", flush=True)
    ceilings: dict[str, float] = {}
    kept, failed = [], []
    for name in args.section or BUDGET:
        lines, error = run_section(name, args.small, BUDGET[name] * (SLACK if args.small else 1))
        if name == "ceilings":
            ceilings = {what: rate for line in lines for what, rate in rates(line).items()}
        for line in lines:
            print(row(name, line, ceilings), flush=True)
            kept.append({"section": name, **line, "share": share(line, ceilings)})
        if error:
            failed.append(name)
            print(f"| {name} | FAILED | | | | | {error} |", flush=True)
            kept.append({"section": name, "error": error})
    if args.json:
        args.json.write_text(json.dumps({"conditions": told, "lines": kept}, indent=2) + "\n")
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Where a result comes from: command, time, code, versions, hardware, threads.

Knows nothing of what is run. `append` keeps one entry per invocation in the run folder's provenance.json.
"""

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from spectrain import __version__
from spectrain.artifacts import read_json, write_json

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "deepspeed",
    "triton",
    "safetensors",
    "tokenizers",
    "numpy",
)


def provenance() -> dict[str, Any]:
    """What a reader needs to run this process again: JSON-like, sizes in GiB, times in UTC."""
    return {
        "command": " ".join(_command()),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": git_state(Path(__file__).resolve().parents[1]),
        "versions": {
            "spectrain": __version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in PACKAGES},
        },
        "hardware": hardware(),
        "threads": torch.get_num_threads(),
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
    }


def append(run_dir: Path) -> dict[str, Any]:
    """Add this process to `run_dir`/provenance.json, a list with the newest last; returns the entry."""
    path = run_dir / "provenance.json"
    entry = provenance()
    write_json(path, [*(read_json(path) if path.exists() else []), entry])
    return entry


def git_state(checkout: Path) -> dict[str, Any] | None:
    """SHA and dirty flag of `checkout`, or None where it is not the top of a git checkout."""
    try:
        top = _git(checkout, "rev-parse", "--show-toplevel")
        if Path(top).resolve() != checkout:
            return None
        return {
            "sha": _git(checkout, "rev-parse", "HEAD"),
            "dirty": bool(_git(checkout, "status", "--porcelain")),
        }
    except (OSError, subprocess.CalledProcessError):  # no git, no checkout, no commit
        return None


def hardware() -> dict[str, Any]:
    """CPU name, cores that this process may use, memory in GiB, names and memory of the GPUs."""
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": [{"name": gpu.name, "memory_gib": round(gpu.total_memory / 2**30, 1)} for gpu in gpus],
    }


def _command() -> list[str]:
    name = Path(sys.argv[0]).name
    return ["python", "-m", "spectrain", *sys.argv[1:]] if name == "__main__.py" else [name, *sys.argv[1:]]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )

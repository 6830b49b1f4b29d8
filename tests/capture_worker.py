"""Run as a program, `capture_worker.py FOLDER WORK`: captures that are killed, or torchrun's processes."""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from accelerate import PartialState

from spectrain import capture as module
from spectrain.artifacts import MANIFEST
from spectrain.target import Target
from spectrain.testing import make_sample, random_samples, tiny_llama


def quarantined() -> tuple[Target, list]:
    """Forty-one samples in some thirteen shards; the states of "s020b" are not finite."""
    target = Target(tiny_llama())
    with torch.no_grad():
        target.embedding.weight[250] = float("inf")
    return target, [*random_samples(40, vocab=200), make_sample("s020b", [1, 2, 250, 3], "..SS")]


def run(target: Target, samples: list, folder: Path) -> None:
    module.capture(
        target, samples, (0, 2), folder, micro_tokens=80, max_bad_fraction=0.1, progress=False
    )  # fmt: skip


def die_after_two_shards(folder: Path) -> None:
    write = module.write_shard
    written = []

    def write_then_die(path, *arguments, **settings):
        write(path, *arguments, **settings)
        written.append(path)
        if len(written) == 2:
            path.with_name(f".{path.name}.1.tmp").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)

    module.write_shard = write_then_die
    run(Target(tiny_llama()), random_samples(9), folder)


def ten_random_kills(folder: Path, seed: str) -> None:
    """Uninterrupted into FOLDER/whole; into FOLDER/0 .. FOLDER/9 killed at a random moment, then to the end.

    Each run is a child of its own. Prints for each kill the shards found and whether the manifest was there.
    """
    target, samples = quarantined()
    began = time.perf_counter()
    _wait(_start(target, samples, folder / "whole"))
    seconds = time.perf_counter() - began
    draw = random.Random(int(seed))
    seen = []
    for name in map(str, range(10)):
        child = _start(target, samples, folder / name)
        time.sleep(draw.uniform(0, seconds))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        shards = len(list((folder / name).glob("shard-*.json")))
        seen.append([shards, (folder / name / MANIFEST).exists()])
        _wait(_start(target, samples, folder / name))
    print(json.dumps({"seconds": seconds, "seen": seen}))


def _start(target: Target, samples: list, folder: Path) -> int:
    if child := os.fork():
        return child
    run(target, samples, folder)
    os._exit(0)


def _wait(child: int) -> None:
    if os.waitpid(child, 0)[1]:
        raise RuntimeError("a capture that nobody killed has failed")


def all_processes(folder: Path) -> None:
    run(*quarantined(), folder)


if __name__ == "__main__":
    globals()[sys.argv[2]](Path(sys.argv[1]), *sys.argv[3:])
    PartialState().destroy_process_group()  # as the command does: threads that outlive it abort the process

"""Run as a program: capture into a folder, killed after some shards, or under torchrun with its processes."""

import os
import signal
import sys
from pathlib import Path

from spectrain import capture as module
from spectrain.target import Target
from spectrain.testing import random_samples, tiny_llama


def main(folder: str, kill_after: int) -> None:
    write = module.write_shard
    written = []

    def write_then_die(path, *arguments):
        write(path, *arguments)
        written.append(path)
        if len(written) == kill_after:
            path.with_name(f".{path.name}.1.tmp").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)

    module.write_shard = write_then_die
    samples = random_samples(9)
    module.capture(Target(tiny_llama()), samples, (0, 2), Path(folder), micro_tokens=80, progress=False)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

"""Several processes of one command on this machine, for who has no launcher: `processes=2`.

On a CPU two processes of one thread do more than one process of two threads; on GPUs it is a process per
card. torchrun and accelerate launch do the same and reach over machines. Knows no stage.
"""

import logging
import os
import socket

import torch
from torch.multiprocessing import ProcessExitedException, spawn

log = logging.getLogger(__name__)


def cap(processes: int, device: str) -> int:
    """`processes`, or on GPUs as many as there are if that is less: NCCL takes no two on one card."""
    cards = torch.cuda.device_count()
    if device == "cpu" or not 0 < cards < processes:
        return processes
    log.info("processes=%d: one for each GPU, so %d here", processes, cards)
    return cards


def launch(words: list[str], processes: int) -> int:
    """Run the command with `words` in every process; the first exit code that is not 0, or 0.

    The others are ended when one fails, and all end with this one.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    try:
        spawn(_work, (words, processes, port), nprocs=processes)
    except ProcessExitedException as error:
        return error.exit_code
    return 0


def _work(rank: int, words: list[str], processes: int, port: int) -> None:
    from spectrain.__main__ import main

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(processes),
        LOCAL_WORLD_SIZE=str(processes),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    raise SystemExit(main(words))

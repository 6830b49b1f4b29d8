"""Several processes of one command on this machine, for who has no launcher: `processes=2`.

On a CPU two processes of one thread do more than one process of two threads; on GPUs it is a process per
card. torchrun and accelerate launch do the same and reach over machines. Knows no stage.
"""

import ctypes
import logging
import os
import signal
import socket
import sys
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.synchronize import Lock

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


def launch(words: list[str], processes: int) -> tuple[int, str]:
    """Run the command with `words` in every process; the first exit code that is not 0, or 0, and what is
    still to be said.

    The others are ended when one fails, and all end with this one. An error is printed by the process that
    comes to it first; one ended by a signal cannot, so its signal is what is said, and the code is 1.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # it names those it ends
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    try:
        spawn(_work, (words, processes, port, get_context("spawn").Lock()), nprocs=processes)
    except KeyboardInterrupt:  # of this process alone, as by kill -INT
        for child in active_children():
            child.terminate()
        raise
    except ProcessExitedException as error:
        if error.signal_name is None:
            return error.exit_code, ""
        often = ", as where memory runs out" if error.signal_name == "SIGKILL" else ""
        return 1, f"error: process {error.error_index} of {processes} was ended by {error.signal_name}{often}"
    return 0, ""


def _work(rank: int, words: list[str], processes: int, port: int, first: Lock) -> None:
    from spectrain.__main__ import attempt

    if sys.platform == "linux":
        # PR_SET_PDEATHSIG: torch asks for SIGINT, which what a shell put in the background ignores
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    parent = parent_process()
    if parent is None or not parent.is_alive():  # it ended before we asked
        raise SystemExit(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(processes),
        LOCAL_WORLD_SIZE=str(processes),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    code, said = attempt(words)
    if said and first.acquire(block=False):
        print(said, file=sys.stderr)
    raise SystemExit(code)

"""Several processes of one command: how many, and what is said when one fails."""

import logging
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from spectrain import __main__ as command
from spectrain import launch
from spectrain.compose import recipe_names
from spectrain.launch import cap


def killed(rank, *arguments):
    """Stands for a process that the system ends for its memory, beside one that waits for it."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def waiting(rank, words, *arguments):
    """Stands for a command at work: leaves a file with its process id as name."""
    command.attempt = lambda words: (Path(words[0]) / str(os.getpid())).touch() or time.sleep(60)
    launch._work(rank, words, *arguments)


@pytest.mark.parametrize(
    ("cards", "device", "processes"),
    [(1, "auto", 1), (1, "cuda", 1), (2, "auto", 2), (8, "auto", 3), (1, "cpu", 3), (0, "auto", 3)],
)
def test_there_are_no_more_processes_than_gpus(monkeypatch, caplog, cards, device, processes):
    caplog.set_level(logging.INFO, "spectrain")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    assert cap(3, device) == processes
    expected = [] if processes == 3 else [f"processes=3: one for each GPU, so {processes} here"]
    assert caplog.messages == expected


def test_the_signal_that_ended_a_process_is_named_and_the_code_is_1(monkeypatch, caplog):
    monkeypatch.setattr(launch, "_work", killed)
    said = "error: process 1 of 2 was ended by SIGKILL, as where memory runs out"
    assert launch.launch([], 2) == (1, said)
    assert caplog.messages == []


@pytest.mark.parametrize("ended_by", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_processes_end_with_the_command(tmp_path, monkeypatch, ended_by):
    monkeypatch.setattr(launch, "_work", waiting)
    if (child := os.fork()) == 0:
        try:
            if ended_by != signal.SIGINT:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # as after `command &` in a script
            launch.launch([str(tmp_path)], 2)
        finally:
            os._exit(0)
    deadline = time.monotonic() + 60
    while len(names := [path.name for path in tmp_path.iterdir()]) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    workers = [psutil.Process(int(name)) for name in names]
    os.kill(child, ended_by)
    os.waitpid(child, 0)
    gone, alive = psutil.wait_procs(workers, timeout=20)
    for process in alive:
        process.kill()
    assert len(gone) == 2


def test_a_process_whose_command_ended_before_it_began_does_nothing(monkeypatch):
    monkeypatch.setattr(launch.ctypes, "CDLL", lambda name: SimpleNamespace(prctl=lambda *a: 0))
    monkeypatch.setattr(launch, "parent_process", lambda: SimpleNamespace(is_alive=lambda: False))
    monkeypatch.setattr(command, "attempt", lambda words: pytest.fail("began to work"))
    with pytest.raises(SystemExit, match="1"):
        launch._work(0, [], 2, 0, None)


def test_an_error_of_every_process_is_printed_once(capfd, caplog):
    assert launch.launch(["recipe=quick"], 2) == (2, "")
    expected = f"error: recipe=quick: unknown; known recipes: {', '.join(recipe_names())}\n"
    assert capfd.readouterr() == ("", expected)
    assert caplog.messages == []

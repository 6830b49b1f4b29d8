"""Several processes of one command: how many, and what is said when one fails."""

import logging
import os
import signal
import time

import pytest
import torch

from spectrain import launch
from spectrain.compose import recipe_names
from spectrain.launch import cap


def killed(rank, *arguments):
    """Stands for a process that the system ends for its memory, beside one that waits for it."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


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


def test_an_error_of_every_process_is_printed_once(capfd, caplog):
    assert launch.launch(["recipe=quick"], 2) == (2, "")
    expected = f"error: recipe=quick: unknown; known recipes: {', '.join(recipe_names())}\n"
    assert capfd.readouterr() == ("", expected)
    assert caplog.messages == []

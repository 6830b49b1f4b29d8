"""Several processes of one command: how many, and what is said when one fails."""

import logging

import pytest
import torch

from spectrain.launch import cap


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

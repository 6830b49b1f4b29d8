"""For every test: fixed seeds, no network, NaN in memory that nobody wrote, field cases in the JUnit file.

Without a GPU, Triton's kernels run in its interpreter; that is decided when Triton is first imported.
"""

import os
import random
import socket

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="offline",
)

import numpy
import pytest
import torch

os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"  # Triton 3.9 warns where it is not set

# torch lists its constructors at the first such context. A list made while a test has torch.empty replaced
# would lack the real one, and a later model "on meta" would fill the machine's memory.
with torch.device("meta"):
    torch.empty(0)


def pytest_collection_modifyitems(items):
    without_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(without_gpu)
        for mark in item.iter_markers("case"):
            item.user_properties += [("case", case) for case in mark.args]


@pytest.fixture(autouse=True)
def fixed_seeds():
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    connect = socket.socket.connect

    def guarded(self, address):
        host = address[0] if isinstance(address, tuple) else "localhost"  # a text is a socket file
        if host not in ("localhost", "::1") and not str(host).startswith("127."):
            raise OSError(f"a test tried to reach {host}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan(monkeypatch):
    """torch.empty, empty_like and new_empty give NaN, so that an element which nobody writes shows."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


def _poisoned(make):
    def poisoned(*args, **kwargs):
        tensor = make(*args, **kwargs)
        if tensor.is_floating_point() and not tensor.is_meta:
            with torch.no_grad():
                tensor.fill_(float("nan"))
        return tensor

    return poisoned

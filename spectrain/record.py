"""The record of a training run: metrics.jsonl in the run folder, and its copy on Weights & Biases.

One line per optimizer step. A resumed run first cuts the lines after the step it restored, so that no step is
there twice. The file is the record; W&B is a mirror that never needs the network. A loss that has doubled
since the first step is told once.
"""

import json
import logging
import netrc
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from spectrain.artifacts import fingerprint, write_bytes
from spectrain.config import RunConfig

RISEN = 2.0  # times the first step's loss: training has diverged

log = logging.getLogger(__name__)


class Record:
    """Append-only metrics of one run. last_step: lines of later steps are cut when the file is opened."""

    def __init__(self, folder: Path, config: RunConfig, *, last_step: int):
        path = folder / "metrics.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        kept = [line for line in _whole_lines(path) if json.loads(line)["step"] <= last_step]
        write_bytes(path, "".join(f"{line}\n" for line in kept).encode())
        losses = (json.loads(line).get("train/loss") for line in kept)
        self.first: float | None = next((loss for loss in losses if loss), None)
        self.told = False
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115  closed by close()
        self.wandb = open_wandb(folder, asdict(config)) if config.wandb.enabled else None

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line and hand it to the operating system, which keeps it even if the process is
        killed."""
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        if self.wandb is not None:
            self.wandb.log(_flat(line))
        loss = line.get("train/loss")
        self.first = self.first or loss
        if not self.told and loss and self.first and loss > RISEN * self.first:
            self.told = True
            log.warning(
                "step %d: the loss is %.4g, the first step had %.4g: training diverges; lower "
                "train.learning_rate and, with train.optimizer=muon, train.muon_learning_rate",
                line["step"], loss, self.first,
            )  # fmt: skip

    def close(self) -> None:
        os.fsync(self.file.fileno())
        self.file.close()
        if self.wandb is not None:
            self.wandb.finish()


def _whole_lines(path: Path) -> list[str]:
    """Lines that end with a newline; a last one without was cut by a kill."""
    if not path.exists():
        return []
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def _flat(line: Mapping[str, Any]) -> dict[str, float]:
    """Scalars only: a list becomes name_0, name_1, ..; what is not a number is left out."""
    pairs = []
    for name, value in line.items():
        pairs += (
            [(f"{name}_{i}", v) for i, v in enumerate(value)] if isinstance(value, list) else [(name, value)]
        )
    return {name: value for name, value in pairs if isinstance(value, int | float)}


def run_id(folder: Path) -> str:
    """The id of the run's W&B mirror: the same for every process and restart that works in `folder`."""
    return fingerprint(str(folder.resolve()))


def open_wandb(folder: Path, settings: Mapping[str, Any]):
    """A W&B run whose files lie in `folder`: online with a key or a login, else offline (`wandb sync` uploads
    it). A server that does not answer is told and leaves the mirror offline, since it is only a copy.

    settings: the resolved config as nested dicts, what config.yaml holds.
    """
    import wandb

    def start(mode: Literal["online", "offline"] | None):
        return wandb.init(
            project=settings["wandb"]["project"],
            name=settings["recipe"],
            id=run_id(folder),
            resume=None if mode == "offline" else "allow",
            dir=folder,
            config=dict(settings),
            mode=mode,
            settings=wandb.Settings(console="off", silent=True, init_timeout=30),
        )

    mode = _wandb_mode()
    try:
        run = start(mode)
    except wandb.errors.Error as error:
        if mode == "offline":
            raise
        log.warning("W&B does not answer, the mirror stays offline: %s", error)
        wandb.teardown()  # its process still holds the id
        run = start("offline")
    run.define_metric("*", step_metric="step")
    return run


def _wandb_mode() -> Literal["online", "offline"] | None:
    """None lets W&B itself read WANDB_MODE."""
    if "WANDB_MODE" in os.environ:
        return None
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    path = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    login = path.exists() and netrc.netrc(path).authenticators(host) is not None
    return "online" if login or os.environ.get("WANDB_API_KEY") else "offline"

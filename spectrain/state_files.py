"""Hidden states that an engine wrote: safetensors files of vLLM's connectors and of the speculators project.

    hidden_states         [T, A, D]; A captured layers, the last one the state before the final norm
    token_ids             int64 [T]
    hidden_states_scales  float32 [T, 1, 1], only beside float8 states: what each token is multiplied by

An engine's layer id k is the state in front of layer k, so our tap k, the output of layer k, is its id k + 1
and the state before the final norm of n layers is id n. Of a target of 30 layers, the taps 1, 14 and 26 are
the ids 2, 15, 27, and 30 comes last. Our connector names the ids in the file (`spectrain/vllm_connector.py`);
vLLM's own and speculators do not, so they are given. Knows no model, no server. Legend: T tokens, A captured
layers, D hidden, L taps. Source: vLLM 0.32 (example_hidden_states_connector.py), hs-connectors 0.9.0.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from spectrain.data.packing import Sample

STATES, TOKENS, SCALES = "hidden_states", "token_ids", "hidden_states_scales"


def engine_layer_ids(tap_ids: Sequence[int], num_layers: int) -> list[int]:
    """The layer ids that an engine must capture for our taps and the final state, ascending."""
    return sorted({k + 1 for k in tap_ids} | {num_layers})


def default_layer_ids(num_layers: int) -> list[int]:
    """What vLLM and speculators capture where nobody names layers."""
    return [2, num_layers // 2, num_layers - 3, num_layers]


@dataclass(frozen=True)
class EngineStates:
    """states [T, A, D] of one text at an engine's layer ids. path: where they were read."""

    path: Path
    layer_ids: tuple[int, ...]
    states: torch.Tensor

    def taps(self, tap_ids: Sequence[int]) -> torch.Tensor:
        """States [T, L, D] at our layer ids. Raises ValueError naming the ids that the file holds."""
        return self.states[:, [self._column(k + 1, f"tap {k}") for k in tap_ids]]

    def before_norm(self, num_layers: int) -> torch.Tensor:
        """The state [T, D] before the final norm. Raises ValueError where the file does not hold it."""
        return self.states[:, self._column(num_layers, "the state before the final norm")]

    def _column(self, layer_id: int, name: str) -> int:
        if layer_id not in self.layer_ids:
            raise ValueError(
                f"{self.path}: {name} is the engine's layer id {layer_id}, the file holds "
                f"{list(self.layer_ids)} (drafter.taps, target.server.layer_ids)"
            )
        return self.layer_ids.index(layer_id)


def read_states(
    path: Path, ids: Sequence[int], *, layer_ids: Sequence[int], hidden_size: int, dtype: torch.dtype
) -> EngineStates:
    """States of the text `ids` from one file.

    layer_ids: the engine's, for files that do not name them. dtype: the target's, which states must have
    (float8 ones are multiplied by their scales and rounded to it). Raises ValueError naming the file that is
    missing, damaged, of another shape or dtype, or of other tokens.
    """
    tensors, named = _open(path)
    for name in (STATES, TOKENS):
        if name not in tensors:
            raise ValueError(f"{path}: no tensor {name!r}, only {', '.join(sorted(tensors)) or 'none'}")
    states, tokens = tensors[STATES], tensors[TOKENS].flatten().tolist()
    if tokens != list(ids):
        raise ValueError(f"{path}: {_difference(tokens, list(ids))}")
    known = tuple(json.loads(named["layer_ids"])) if "layer_ids" in named else tuple(layer_ids)
    expected = (len(ids), len(known), hidden_size)
    if tuple(states.shape) != expected:
        raise ValueError(
            f"{path}: hidden_states of shape {list(states.shape)}, expected {list(expected)}: tokens, layers "
            f"{list(known)}, hidden size (target.server.layer_ids)"
        )
    if states.dtype == torch.float8_e4m3fn:
        states = _scaled(path, states, tensors, dtype)
    if states.dtype != dtype:
        there, here = (str(d).removeprefix("torch.") for d in (states.dtype, dtype))
        raise ValueError(f"{path}: hidden_states in {there}, target.dtype={here}")
    return EngineStates(path, known, states)


def _open(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    if not path.exists():
        raise ValueError(f"{path}: no such file")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path}: damaged safetensors file ({error})") from None


def _difference(there: list[int], here: list[int]) -> str:
    if len(there) != len(here):
        return f"states of {len(there)} tokens, the sample has {len(here)}"
    first = next(i for i, (a, b) in enumerate(zip(there, here, strict=True)) if a != b)
    return f"states of other tokens: {there[first]} at place {first}, the sample has {here[first]}"


def _scaled(
    path: Path, states: torch.Tensor, tensors: dict[str, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    if SCALES not in tensors:
        raise ValueError(f"{path}: hidden_states in float8_e4m3fn without {SCALES!r}")
    scales = tensors[SCALES]
    if tuple(scales.shape) != (len(states), 1, 1):
        raise ValueError(f"{path}: {SCALES} of shape {list(scales.shape)}, expected [{len(states)}, 1, 1]")
    return (states.float() * scales.float()).to(dtype)


@dataclass(frozen=True)
class Answer:
    """What a source says of one text. top: log-probability of some tokens after its last one, as the engine
    has it; empty where the source is a file."""

    states: EngineStates
    top: dict[int, float]


class StateFolder:
    """A folder of files that speculators or vLLM's connectors wrote, found by their tokens.

    Raises ValueError for a folder without such files and for a file without tokens.
    """

    def __init__(self, folder: Path, layer_ids: Sequence[int], hidden_size: int, dtype: torch.dtype):
        self.settings: dict[str, Any] = {"layer_ids": layer_ids, "hidden_size": hidden_size, "dtype": dtype}
        self.folder = folder
        self.paths: dict[bytes, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            self.paths.setdefault(_key(_tokens_of(path)), path)
        if not self.paths:
            raise ValueError(f"target.server.files={str(folder)!r}: no *.safetensors there")

    def announce(self, samples: Sequence[Sample]) -> None:
        """Raise ValueError naming the samples without a file, before anything is read."""
        lost = [sample.id for sample in samples if _key(sample.ids) not in self.paths]
        if lost:
            raise ValueError(
                f"{self.folder}: {len(lost)} of {len(samples)} samples have no file with their tokens: "
                f"{', '.join(lost[:20])}"
            )

    def read(self, documents: Sequence[torch.Tensor], tap_ids: Sequence[int]) -> list[Answer]:
        """The states of each text int [T]; ValueError for one that no file holds."""
        answers = []
        for ids in documents:
            path = self.paths.get(_key(ids))
            if path is None:
                raise ValueError(
                    f"{self.folder}: no file with the tokens of a text of {len(ids)} that begins "
                    f"{ids[:8].tolist()}"
                )
            answers.append(Answer(read_states(path, ids.tolist(), **self.settings), {}))
        return answers

    def release(self) -> None:
        """Nothing is held."""


def _key(ids: torch.Tensor) -> bytes:
    return hashlib.sha256(ids.cpu().to(torch.int64).numpy().tobytes()).digest()


def _tokens_of(path: Path) -> torch.Tensor:
    try:
        with safe_open(path, framework="pt") as file:
            if TOKENS not in file.keys():  # noqa: SIM118
                raise ValueError(f"{path}: no tensor {TOKENS!r}, only {', '.join(sorted(file.keys()))}")
            return file.get_tensor(TOKENS).flatten()
    except SafetensorError as error:
        raise ValueError(f"{path}: damaged safetensors file ({error})") from None

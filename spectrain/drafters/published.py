"""A published drafter's files: its config, and its tensors by name, from safetensors or pickled tensors.

A pickle (.bin, .pt) is read only where there is no safetensors file, with torch.load(weights_only=True),
which runs no code from it. What the names mean is each family's matter (`eagle3_forms.py` and its like).
"""

import json
import logging
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file

from spectrain.drafters.layers import OWN_SHAPE, draft_config
from spectrain.target import Target

STEMS = (
    "model.safetensors", "medusa_lm_head.safetensors", "pytorch_model.bin", "medusa_lm_head.pt",
    "hydra_lm_head.pt",
)  # fmt: skip

FLOATS = (torch.float16, torch.bfloat16, torch.float32)

log = logging.getLogger(__name__)


class Published:
    """Config and tensors of the folder or hub id `path`.

    config: parsed config.json; files: the file of each tensor by its name; metadata: of the first file, texts
    by key, empty for a pickle. Raises ValueError naming the file that is missing or damaged.
    """

    def __init__(self, path: str):
        folder = Path(path).expanduser()
        if not folder.is_dir() and (path.startswith(("/", ".", "~")) or path.count("/") != 1):
            raise ValueError(
                f"drafter.init_from={path!r}: no such folder; expected one, or OWNER/NAME of the hub"
            )
        self.path = str(folder) if folder.is_dir() else path
        config_file = self._find("config.json")
        if config_file is None:
            raise ValueError(f"drafter.init_from={path!r}: no config.json there")
        self.config_file, self.config = config_file, _read_json(config_file)
        self._pickled: dict[Path, dict[str, torch.Tensor]] = {}
        self.files = self._files()
        self.metadata = self._metadata()

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor as it is stored; raises ValueError where there is none of this name."""
        if name not in self.files:
            files = ", ".join(sorted({str(file) for file in self.files.values()}))
            raise ValueError(f"{files}: tensor {name} is missing")
        file = self.files[name]
        if file.suffix != ".safetensors":
            return self._unpickled(file)[name]
        with _open(file) as opened:
            return opened.get_tensor(name)

    def _metadata(self) -> dict[str, str]:
        file = next(iter(self.files.values()), None)
        if file is None or file.suffix != ".safetensors":
            return {}
        with _open(file) as opened:
            return opened.metadata() or {}

    def _find(self, name: str) -> Path | None:
        if Path(self.path).is_dir():
            found = Path(self.path) / name
            return found if found.exists() else None
        cached = cached_file(self.path, name, _raise_exceptions_for_missing_entries=False)
        return None if cached is None else Path(cached)

    def _files(self) -> dict[str, Path]:
        for stem in STEMS:
            if (index := self._find(f"{stem}.index.json")) is not None:
                return {
                    name: self._shard(index, file) for name, file in _read_json(index)["weight_map"].items()
                }
            if (file := self._find(stem)) is None:
                continue
            if file.suffix != ".safetensors":
                return dict.fromkeys(self._unpickled(file), file)
            with _open(file) as opened:
                return dict.fromkeys(opened.keys(), file)
        raise ValueError(f"drafter.init_from={self.path!r}: expected one of {', '.join(STEMS)} there")

    def _shard(self, index: Path, name: str) -> Path:
        found = self._find(name)
        if found is None:
            raise ValueError(f"{index}: its file {name} is missing")
        return found

    def _unpickled(self, file: Path) -> dict[str, torch.Tensor]:
        if file not in self._pickled:
            try:
                found = torch.load(file, map_location="cpu", weights_only=True)
            except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
                raise ValueError(f"{file}: holds more than tensors, or is damaged ({error})") from None
            if not isinstance(found, dict) or not all(isinstance(t, torch.Tensor) for t in found.values()):
                raise ValueError(f"{file}: expected a dictionary of tensors")
            self._pickled[file] = found
        return self._pickled[file]


@dataclass(frozen=True)
class Import:
    """What a family makes of a published drafter.

    settings: keys of its Config that the files decide. theirs: our tensor name to that in the files, None for
    a tensor that stays as it is built. read: a tensor by its name in the files. unread: names in the files
    that need not be used. kept_ids: int64 [W] ascending; None where the files leave them open.
    """

    source: Published
    settings: Mapping[str, Any]
    theirs: Callable[[str], str | None]
    read: Callable[[str], torch.Tensor]
    unread: frozenset[str] = frozenset()
    kept_ids: torch.Tensor | None = None


def check_floats(files: Mapping[str, str | Path], name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError naming file and tensor where a weight is quantised: no float of 16 or 32 bits, or with
    a scale beside it, as FP8 checkpoints have. files: the file of each tensor by its name."""
    where = f"{files[name]}: tensor {name}"
    if tensor.dtype not in FLOATS:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(f"{where} is {kind}: expected float16, bfloat16 or float32")
    for scale in (f"{name}_scale_inv", f"{name}_scale"):
        if scale in files:
            raise ValueError(f"{where} has a scale, {scale}: expected weights that are not quantised")


def needed(source: Published, section: Mapping[str, Any], key: str, *, within: str = "") -> Any:
    """A value of config.json or of its section `within`; raises ValueError where it is missing or null."""
    if section.get(key) is None:
        name = f"{within}.{key}" if within else key
        raise ValueError(f"{source.config_file}: key {name} is missing")
    return section[key]


def own_shape(source: Published, body: Mapping[str, Any], target: Target, width: int = 0) -> dict[str, Any]:
    """What the layer of the config `body` has other than the target would give it, by OWN_SHAPE key.

    Raises ValueError for a missing size and for a graph that is not that of a plain Llama layer.
    """
    for key, known in {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}.items():
        if body.get(key) not in (None, known):
            raise ValueError(f"{source.config_file}: {key}={body[key]!r}: expected {known!r}")
    heads, size = (needed(source, body, key) for key in ("num_attention_heads", "hidden_size"))
    found = {
        "intermediate_size": needed(source, body, "intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": body.get("num_key_value_heads") or heads,
        "head_dim": body.get("head_dim") or size // heads,
        "rms_norm_eps": needed(source, body, "rms_norm_eps"),
        "rope_parameters": read_rope(source, body),
    }
    assert set(found) == set(OWN_SHAPE), found
    given = draft_config(target, width).to_dict()
    given["rope_parameters"] = {"rope_type": "default", **_named(given["rope_parameters"])}
    return {key: value for key, value in found.items() if value != given[key]}


def check_authors_layer(shape: Mapping[str, Any]) -> None:
    """Raise ValueError for a layer config that the code of EAGLE's authors reads as another layer."""
    heads, size = shape["num_attention_heads"], shape["hidden_size"]
    if shape["head_dim"] * heads != size:
        raise ValueError(
            f"export.engine=reference: head_dim={shape['head_dim']}: the authors' code takes "
            f"{size} / {heads}, hidden size by heads"
        )
    if (kind := shape["rope_parameters"]["rope_type"]) != "default":
        raise ValueError(
            f"export.engine=reference: rope_type={kind!r}: the authors' code knows 'default' as we do only"
        )


def read_rope(source: Published, body: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` from either dialect of a Llama config; a file without a base means 10000, as every
    reader takes it. Raises ValueError where both dialects are there and differ."""
    old = _named({"rope_theta": body.get("rope_theta"), **(body.get("rope_scaling") or {})})
    new = _named(body.get("rope_parameters") or {})
    for key in sorted({*old} & {*new}):
        if old[key] != new[key]:
            raise ValueError(
                f"{source.config_file}: rope_parameters.{key}={new[key]!r}, but {old[key]!r} as rope_theta "
                "or in rope_scaling"
            )
    if "rope_theta" not in {**old, **new}:
        log.info("%s: no rope_theta, which means 10000", source.config_file)
    return {"rope_type": "default", "rope_theta": 10000.0, **old, **new}


def _named(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Without nulls, with `rope_type` for the older `type`, and the base as a float."""
    found = {"rope_type" if key == "type" else key: value for key, value in rope.items() if value is not None}
    return found | ({"rope_theta": float(found["rope_theta"])} if "rope_theta" in found else {})


def compare_with_own(source: Published, name: str, own_VD: torch.Tensor, what: str) -> None:
    """Warn where a tensor that the files carry is not the target's own, which is used.

    Raises ValueError where their shapes differ.
    """
    stored = source.tensor(name)
    if stored.shape != own_VD.shape:
        raise ValueError(
            f"{source.files[name]}: tensor {name} has shape {list(stored.shape)}: the target's {what} has "
            f"{list(own_VD.shape)}"
        )
    own = own_VD.detach().cpu().to(stored.dtype)
    if not torch.equal(stored, own):
        worst = (stored.float() - own.float()).abs().max().item()
        used = "the target's is used"
        log.warning(
            "%s: %s differs from the target's %s by up to %.3g; %s", source.path, name, what, worst, used
        )


def _open(file: Path):
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file}: damaged safetensors file ({error})") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: damaged JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return found

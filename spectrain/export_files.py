"""An exported folder as it lies there, whoever wrote it: config, tensors, form, and the contract of its form.

Reads leniently, so that `export_check.py` can name every fault and not only the first. Knows the forms of
EAGLE-3, EAGLE-1, Medusa, Hydra, a target with MTP weights, an MTP block alone and an ordinary model. Legend:
as in `replay.py`.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from spectrain.artifacts import read_json
from spectrain.drafters.mtp_weights import SPECULATORS, Names, names_of
from spectrain.replay import IDS_KEY, SPECULATORS_KEY, expected_shapes, plain
from spectrain.replay_heads import (
    HYDRA_KEYS,
    PICKLES,
    eagle1_shapes,
    hydra_shapes,
    medusa_name,
    medusa_shapes,
    read_pickle,
)
from spectrain.replay_mtp import INDEX as INDEX
from spectrain.replay_mtp import SHARD

NOT_FLOAT = {"d2t": "int64", "t2d": "bool", "token_map": "int64"}
ARCHITECTURES = {  # form and engine: what config.json may name
    ("eagle3", "vllm"): ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"),
    ("eagle3", "sglang"): ("LlamaForCausalLMEagle3",),
    ("eagle3", "speculators"): ("Eagle3DraftModel",),
    ("eagle3", "trtllm"): ("LlamaForCausalLMEagle3", "LlamaForCausalLM"),
    ("eagle1", "vllm"): ("LlamaForCausalLM", "EagleLlamaForCausalLM"),
    ("eagle1", "sglang"): ("LlamaForCausalLMEagle",),
    ("medusa", "vllm"): ("MedusaModel",),
}
KEYS = {
    "eagle3": (
        "model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
        "head_dim", "rms_norm_eps", "vocab_size", "draft_vocab_size", "tie_word_embeddings",
        "max_position_embeddings",
    ),
    "eagle1": (
        "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "rms_norm_eps", "vocab_size", "max_position_embeddings",
    ),
    "medusa": ("model_type", "hidden_size", "num_heads", "num_hidden_layers", "vocab_size"),
    "hydra": HYDRA_KEYS,
    "mtp": ("model_type", "num_hidden_layers", "vocab_size"),
    "standalone": ("model_type", "vocab_size"),
}  # fmt: skip


@dataclass(frozen=True)
class Folder:
    """config: parsed config.json; target: its target's config (of the text model); engines: that shall read
    it."""

    path: Path
    target: Any
    engines: tuple[str, ...]

    @cached_property
    def config(self) -> dict[str, Any]:
        return plain(read_json(self.path / "config.json"))

    @cached_property
    def files(self) -> dict[str, tuple[str, ...]]:
        """Names of the tensors of every safetensors file, and of the authors' pickle of heads. Raises
        ValueError for a damaged one."""
        found = {name: tuple(tensors) for name, tensors in self.pickled.items()}
        for path in sorted(self.path.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    found[path.name] = tuple(file.keys())
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path.name} does not load: {error}") from None
        if not found:
            raise ValueError(f"{self.path}: no safetensors file there")
        return found

    @cached_property
    def pickled(self) -> dict[str, dict[str, torch.Tensor]]:
        """The tensors of the authors' pickle, where they are to read it."""
        wanted = PICKLES if "reference" in self.engines else ()
        return {name: read_pickle(self.path / name) for name in wanted if (self.path / name).exists()}

    @property
    def names(self) -> list[str]:
        return [name for names in self.files.values() for name in names]

    def tensor(self, name: str) -> torch.Tensor:
        where = next(file for file, names in self.files.items() if name in names)
        if where in self.pickled:
            return self.pickled[where][name]
        with safe_open(self.path / where, framework="pt") as file:
            return file.get_tensor(name)

    @cached_property
    def metadata(self) -> dict[str, str]:
        fixture = self.path / "check" / "replay.safetensors"  # beside a pickle, which holds none
        path = self.path / SHARD
        if not path.exists():
            path = min(self.path.glob("*.safetensors"), default=fixture)
        if not path.exists():
            return {}
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}

    @cached_property
    def form(self) -> str:
        """The family by architecture and tensors."""
        named = (self.config.get("architectures") or [""])[0]
        if "Eagle3" in named or self.has("midlayer.self_attn.q_proj.weight"):
            return "eagle3"
        if "Eagle" in named or self.has("fc.weight"):
            return "eagle1"
        if self.config.get("model_type") == "medusa" or named == "MedusaModel":
            return "medusa"
        if "hydra_head_arch" in self.config:
            return "hydra"
        return "mtp" if self.mtp_count else "standalone"

    def has(self, name: str) -> bool:
        return any(found in (name, f"model.{name}", f"draft_model.{name}") for found in self.names)

    @property
    def text_config(self) -> dict[str, Any]:
        return self.config.get("text_config") or self.config

    @property
    def mtp_count(self) -> int:
        keys = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
        return next((self.text_config[key] for key in keys if self.text_config.get(key)), 0)

    @cached_property
    def mtp_names(self) -> Names | None:
        if SPECULATORS_KEY in self.config:
            return SPECULATORS
        return names_of(self.target, self.mtp_count)

    @cached_property
    def num_taps(self) -> int:
        """Aux states that fc reads, by the config; three where it says nothing, as engines assume."""
        ids = self.config.get(IDS_KEY) or (self.config.get("eagle_config") or {}).get(IDS_KEY)
        return self.config.get("num_aux_hidden_states") or len(ids or (0, 0, 0))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that engines need, by the config; of MTP the four around its layer.

        Raises KeyError for a key that is not there.
        """
        config = {**self.config, "num_aux_hidden_states": self.num_taps}
        if self.form == "eagle3":
            config.setdefault("target_hidden_size", config["hidden_size"])
            config.setdefault("fc_norm", False)
            config.setdefault("num_hidden_layers", 1)
            config["draft_vocab_size"] = config["draft_vocab_size"] or config["vocab_size"]
            return {name: shape for name, shape in expected_shapes(config).items() if name != "t2d"}
        if self.form == "eagle1":
            shapes = eagle1_shapes({**config, "architectures": ["EagleLlamaForCausalLM"]})
            authors = "reference" in self.engines and self.config.get("bias", True)
            bias = "sglang" in self.engines or authors
            return {**shapes, **({"fc.bias": (config["hidden_size"],)} if bias else {})}
        if self.form == "medusa":
            config.setdefault("truncated_vocab_size", config["vocab_size"])
            config.setdefault("medusa_fc_bias", False)
            config.setdefault("original_lm_head", False)
            return medusa_shapes(config)
        if self.form == "hydra":
            return hydra_shapes(config)
        if self.form == "mtp" and self.mtp_names is not None:
            D = self.target.hidden_size
            found: dict[str, tuple[int, ...]] = {}
            for k in range(self.mtp_count):
                block = f"blocks.{k}."
                for part, shape in (
                    ("enorm", (D,)),
                    ("hnorm", (D,)),
                    ("norm", (D,)),
                    ("eh_proj", (D, 2 * D)),
                ):
                    found[self.mtp_names.name(f"{block}{part}.weight")] = shape
            return found
        return {}

    def canonical(self, name: str) -> str:
        """A tensor's name as `shapes` has it: engines read layers.0. and midlayer. alike in EAGLE-3; of
        Medusa, vLLM's for the authors'."""
        if self.form == "medusa":
            return medusa_name(name)
        return name.replace("layers.0.", "midlayer.", 1) if self.form == "eagle3" else name

    def fixture(self) -> Path | None:
        path = self.path / "check" / "replay.safetensors"
        return path if path.exists() else None

    def recorded_engines(self) -> tuple[str, ...] | None:
        """The engines that a folder was written for, where the file says so."""
        found = self.metadata.get("engines")
        return None if found is None else tuple(json.loads(found))

    def recorded_taps(self) -> tuple[int, ...] | None:
        """Layer outputs that fc was trained on, where the file says so."""
        found = self.metadata.get("tap_ids")
        return None if found is None else tuple(json.loads(found))

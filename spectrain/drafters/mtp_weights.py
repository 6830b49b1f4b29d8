"""MTP weights in a target's own files: their names by kind of target, and how they are read.

speculators has names of its own for every kind.
Our names are blocks.K.{enorm, hnorm, eh_proj, norm, layer.*}. Columns of eh_proj are embedding first, but for
MiMo. Experts lie one by one in checkpoints and stacked in transformers' layers. Norms are taken as they are:
where a kind writes w for 1 + w, its norm class adds the one.
Knows no training. Source: the checkpoints as vLLM, SGLang, TensorRT-LLM, speculators 0.9 and transformers
5.24 load them.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.utils import cached_file

from spectrain.drafters.published import check_floats
from spectrain.target import resolve_path

STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)$")


@dataclass(frozen=True)
class Names:
    """How one kind of target names its blocks. prefix: of block K, with {n} for its number among all layers
    and {k} for K; parts: our part to theirs, each behind the prefix; feedback: by engine, whether a step
    reads the state before it `pre` or `post` its last norm; count_key: of config.json, the number of
    blocks."""

    order: str
    prefix: str
    parts: dict[str, str]
    first_layer: int
    feedback: dict[str, str]
    count_key: str

    def name(self, ours: str) -> str:
        """blocks.0.enorm.weight of a DeepSeek-V3 is model.layers.61.enorm.weight."""
        _, k, part, rest = ours.split(".", 3)
        prefix = self.prefix.format(n=self.first_layer + int(k), k=int(k))
        return f"{prefix}{self.parts[part]}{rest}"


SPECULATORS = Names(
    "embedding_first",
    "mtp_layers.{k}.",
    {
        "enorm": "token_layernorm.",
        "hnorm": "hidden_layernorm.",
        "eh_proj": "input_proj.",
        "norm": "final_layernorm.",
        "layer": "",
    },
    first_layer=0,
    feedback={"speculators": "post"},
    count_key="num_nextn_predict_layers",
)
SPECULATORS_KINDS = ("qwen3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
TRTLLM_KINDS = ("deepseek_v3", "deepseek_v32", "glm4_moe", "qwen3_next")  # read in its sources; others not
BEHIND_THE_LAYERS = (
    "embedding_first",
    "model.layers.{n}.",
    {
        "enorm": "enorm.",
        "hnorm": "hnorm.",
        "eh_proj": "eh_proj.",
        "norm": "shared_head.norm.",
        "layer": "",
    },
)
KINDS = {
    ("deepseek_v3", "deepseek_v32"): BEHIND_THE_LAYERS,
    ("glm4_moe", "glm4_moe_lite"): BEHIND_THE_LAYERS,
    ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"): (
        "embedding_first",
        "mtp.",
        {
            "enorm": "pre_fc_norm_embedding.",
            "hnorm": "pre_fc_norm_hidden.",
            "eh_proj": "fc.",
            "norm": "norm.",
            "layer": "layers.0.",
        },
    ),
    ("mimo",): (
        "hidden_first",
        "model.mtp_layers.{k}.",
        {
            "enorm": "token_layernorm.",
            "hnorm": "hidden_layernorm.",
            "eh_proj": "input_proj.",
            "norm": "final_layernorm.",
            "layer": "",
        },
    ),
}


def names_of(config: Any, blocks: int) -> Names | None:
    """The names of a target's kind by its config, or None for a kind without so many blocks."""
    kind = config.model_type
    for types, (order, prefix, parts) in KINDS.items():
        if kind in types and (blocks == 1 or "{" in prefix):
            return Names(
                order,
                prefix,
                parts,
                config.num_hidden_layers,
                # vLLM 0.32's GLM-4 goes on with the state before its norm; all others, SGLang's too, behind
                # it
                feedback={
                    "vllm": "pre" if kind.startswith("glm4") else "post",
                    "sglang": "post",
                    "trtllm": "post",
                },
                count_key="mtp_num_hidden_layers" if "qwen3_5" in kind else "num_nextn_predict_layers",
            )
    return None


def served_names(config: Any, blocks: int, engine: str) -> Names:
    """The names by which `engine` reads the MTP weights of a target's kind.

    Raises ValueError for a kind that it reads none of.
    """
    found = SPECULATORS if engine == "speculators" else names_of(config, blocks)
    kinds = {"speculators": SPECULATORS_KINDS, "trtllm": TRTLLM_KINDS}.get(engine, (config.model_type,))
    if found is None or config.model_type not in kinds:
        known = f"; expected one of {', '.join(kinds)}" if engine in ("speculators", "trtllm") else ""
        raise ValueError(
            f"export.engine={engine}: engines know no MTP weights of a {config.model_type} target{known}"
        )
    return found


def own_tensors(
    names: Names, ours: Mapping[str, torch.Tensor], embedding_VD: torch.Tensor, head_VD: torch.Tensor
) -> dict[str, torch.Tensor]:
    """`blocks.K..` by their names in the target's files, experts one by one. Kinds with a shared_head carry
    the target's embedding and head in each block too."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in ours.items():
        theirs = names.name(name)
        if not (stacked := STACKED.match(theirs)):
            found[theirs] = tensor
            continue
        parts = ("gate_proj", "up_proj") if stacked[2] == "gate_up_proj" else ("down_proj",)
        for i, expert in enumerate(tensor):
            for part, rows in zip(parts, expert.chunk(len(parts)), strict=True):
                found[f"{stacked[1]}.{i}.{part}.weight"] = rows
    for name in [name for name in found if name.endswith("shared_head.norm.weight")]:
        block = name.removesuffix("shared_head.norm.weight")
        found[f"{block}embed_tokens.weight"] = embedding_VD
        found[f"{block}shared_head.head.weight"] = head_VD
    return found


@torch.no_grad()
def load_own(blocks: nn.ModuleList, target: Any, order: str) -> None:
    """Copy the target's own MTP weights into `blocks`.

    Raises ValueError where its kind has none, they are in another order, or a tensor is missing, misshapen or
    quantised.
    """
    names = names_of(target.config, len(blocks))
    if names is None:
        known = ", ".join(kind for kinds in KINDS for kind in kinds)
        raise ValueError(
            f"drafter.weights=target: a target of model_type {target.config.model_type!r} has none for "
            f"{len(blocks)} blocks; expected one of {known}"
        )
    if names.order != order:
        raise ValueError(f"drafter.order={order}: the target's own weights are {names.order}")
    read = reader(resolve_path(target.path))
    for ours, tensor in nn.ModuleDict({"blocks": blocks}).state_dict().items():
        found = tensor_by(read, names.name(ours))
        if found.shape != tensor.shape:
            raise ValueError(
                f"{target.path}: tensor {names.name(ours)} has shape {list(found.shape)}: expected "
                f"{list(tensor.shape)}"
            )
        tensor.copy_(found)


def tensor_by(read: Callable[[str], torch.Tensor | None], name: str) -> torch.Tensor:
    """A tensor by its name; stacked experts from those of each."""
    found, stacked = read(name), STACKED.match(name)
    if found is None and stacked:
        parts = ("gate_proj", "up_proj") if stacked[2] == "gate_up_proj" else ("down_proj",)
        experts: list[torch.Tensor] = []
        while read(f"{stacked[1]}.{len(experts)}.{parts[0]}.weight") is not None:
            rows = [tensor_by(read, f"{stacked[1]}.{len(experts)}.{part}.weight") for part in parts]
            experts.append(torch.cat(rows))
        found = torch.stack(experts) if experts else None
    if found is None:
        raise ValueError(f"drafter.family=mtp: tensor {name} is not in the files of its weights")
    return found


def reader(path: str) -> Callable[[str], torch.Tensor | None]:
    """Reads a tensor of a model folder or hub id by name; None where there is no such tensor."""
    index = cached_file(path, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False)
    single = index or cached_file(path, "model.safetensors", _raise_exceptions_for_missing_entries=False)
    if single is None:
        raise ValueError(f"drafter.weights=target: {path}: no model.safetensors there")
    if index is None:
        with safe_open(single, framework="pt") as file:
            files = dict.fromkeys(file.keys(), single)
    else:
        files = json.loads(Path(index).read_text())["weight_map"]

    def read(name: str) -> torch.Tensor | None:
        if name not in files:
            return None
        where = single if index is None else cached_file(path, files[name])
        with safe_open(where, framework="pt") as file:
            found = file.get_tensor(name)
        check_floats(files, name, found)
        return found

    return read

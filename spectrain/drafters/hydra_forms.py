"""Hydra in the form of its authors: hydra_lm_head.pt, with the names of their plain ("mlp") heads.

hydra_mlp.H.L.linear of block L of head H, hydra_mlp.H.0.res_connection of the first block's skip,
hydra_lm_head.H; input_embed_fn.weight, if there, is the target's embedding. Skip and head have a bias there,
which ours lack: an export has zeros, and a file with others is refused. Their code builds the blocks behind
the first as one module used several times.
Source: zankner/Hydra.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch

from spectrain.drafters.published import Import, Published, compare_with_own, needed
from spectrain.target import Target

OURS = re.compile(r"blocks\.(\d+)\.(?:layers\.(\d+)\.(weight|bias)|skip\.weight)|lm_heads\.(\d+)\.weight")
WITHOUT_BIAS = re.compile(r"hydra_mlp\.\d+\.0\.res_connection\.bias|hydra_lm_head\.\d+\.bias")
EMBEDDING = "input_embed_fn.weight"


def theirs(name: str) -> str:
    """blocks.1.layers.0.bias is hydra_mlp.1.0.linear.bias."""
    match = OURS.fullmatch(name)
    assert match, name
    if match[4]:
        return f"hydra_lm_head.{match[4]}.weight"
    return f"hydra_mlp.{match[1]}." + (
        f"{match[2]}.linear.{match[3]}" if match[2] else "0.res_connection.weight"
    )


def imported(source: Published, config: Any, target: Target) -> Import:
    """A Hydra checkpoint. Raises ValueError naming key or tensor where it is none, or has parts that ours
    lacks."""
    for key, known in {"hydra_head_arch": "mlp", "grounded_heads": True}.items():
        if (found := needed(source, source.config, key)) != known:
            raise ValueError(f"{source.config_file}: {key}={found!r}: expected {known!r}")
    unread = {name for name in source.files if WITHOUT_BIAS.fullmatch(name)}
    for name in sorted(unread):
        if source.tensor(name).any():
            raise ValueError(f"{source.files[name]}: tensor {name} is not zero: our heads have no such bias")
    if EMBEDDING in source.files:
        compare_with_own(source, EMBEDDING, target.embedding.get_parameter("weight"), "embedding")
        unread.add(EMBEDDING)
    settings = {
        "heads": needed(source, source.config, "hydra_num_heads"),
        "blocks": needed(source, source.config, "hydra_num_layers"),
        "draft_vocab": 0,
    }
    every = torch.arange(target.vocab_size)
    return Import(source, settings, theirs, source.tensor, frozenset(unread), every)


def authors_tensors(
    ours: Mapping[str, torch.Tensor], heads: int, rows_WD: torch.Tensor, trained: bool
) -> dict[str, torch.Tensor]:
    """Our tensors by the authors' names, with biases of zero. rows: of the head that all share, where none
    is trained."""
    found = {theirs(name): tensor for name, tensor in ours.items()}
    for h in range(heads):
        if not trained:
            found[f"hydra_lm_head.{h}.weight"] = rows_WD
        for name in (f"hydra_mlp.{h}.0.res_connection", f"hydra_lm_head.{h}"):
            weight = found[f"{name}.weight"]
            found[f"{name}.bias"] = weight.new_zeros(len(weight))
    return found

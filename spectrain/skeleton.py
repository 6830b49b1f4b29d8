"""A target without its layers: config, embedding, final norm and head, for targets that another engine runs.

The model is made on the meta device, where a parameter has a shape and no memory; three modules are then
filled from the checkpoint's safetensors files. Other tensors are only looked at for the fingerprint, 4096
places of each, through the file's memory map. Knows no server and runs no layer.
"""

import json
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# What checkpoints and models put in front of the same tensor's name, one or several of them.
WRAPPERS = ("model", "language_model", "text_model", "transformer", "backbone", "decoder")


class Checkpoint:
    """The tensors of a folder's safetensors files by name, read when asked for.

    Raises ValueError for a folder without such files.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        if (folder / INDEX).exists():
            files = json.loads((folder / INDEX).read_text())["weight_map"]
        elif (folder / SINGLE).exists():
            with safe_open(folder / SINGLE, framework="pt") as file:
                files = dict.fromkeys(file.keys(), SINGLE)
        else:
            raise ValueError(f"{folder}: neither {INDEX} nor {SINGLE}: a served target is read from these")
        self.places = {_bare(name): (name, file) for name, file in files.items()}
        if len(self.places) < len(files):
            raise ValueError(f"{folder}: tensors whose names differ only in {', '.join(WRAPPERS)} in front")

    def __contains__(self, name: str) -> bool:
        return _bare(name) in self.places

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor that the model calls `name`, memory-mapped; ValueError lists the names there are."""
        if name not in self:
            near = sorted(there for there, _ in self.places.values() if ".layers." not in there)
            raise ValueError(f"{self.folder}: no tensor {name!r}; outside the layers: {', '.join(near[:20])}")
        there, file = self.places[_bare(name)]
        with safe_open(self.folder / file, framework="pt") as opened:
            return opened.get_tensor(there)


def _bare(name: str) -> str:
    parts = name.split(".")
    while len(parts) > 2 and parts[0] in WRAPPERS:
        parts = parts[1:]
    return ".".join(parts)


def load_skeleton(folder: Path, dtype: torch.dtype, device: str, *, trust_remote_code: bool) -> Any:
    """The model of a folder with embedding, final norm and head in `dtype` on `device`, all else on meta.

    Raises ValueError naming what the folder lacks.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    model.tie_weights()  # parameters on meta are new ones
    checkpoint = Checkpoint(folder)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight
    names = {module: name for name, module in model.named_modules()}
    for module in (embedding, final_norm(model.get_decoder(), embedding.weight.shape[1]), head):
        for name, empty in list(module.named_parameters()):
            if module is head and tied and name == "weight":
                head.weight = embedding.weight
                continue
            full = f"{names[module]}.{name}"
            value = checkpoint.tensor(full).to(device, dtype, copy=True)
            if value.shape != empty.shape:
                shapes = f"{list(value.shape)}, the config says {list(empty.shape)}"
                raise ValueError(f"{folder}: {full} of shape {shapes}")
            setattr(module, name, nn.Parameter(value))
        module.to(device)  # its buffers
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def final_norm(decoder: nn.Module, hidden_size: int) -> nn.Module:
    """The norm behind the layers: the decoder's one direct child whose parameters are all of hidden size.

    Raises ValueError naming the children where there is not exactly one.
    """
    found = {}
    for name, child in decoder.named_children():
        shapes = [tuple(parameter.shape) for parameter in child.parameters()]
        if shapes and all(shape == (hidden_size,) for shape in shapes):
            found[name] = child
    if len(found) != 1:
        raise ValueError(
            f"{type(decoder).__name__}: expected one final norm, found {', '.join(found) or 'none'} among "
            f"{', '.join(name for name, _ in decoder.named_children())}"
        )
    return next(iter(found.values()))

"""Exports that are a whole model: a standalone draft model, and a target with other MTP weights.

MTP weights lie in the target's own files. The folder is the target's with a new shard, an index that names
it, and the number of blocks in config.json; shards are links to the target's, but one that holds a tensor of
the new shard is written again without it, since engines read every tensor of every file that the index names.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM
from transformers.utils import cached_file

from spectrain.artifacts import read_json, write_json, write_tensors
from spectrain.config import RunConfig
from spectrain.drafters.mtp_weights import reader
from spectrain.replay_mtp import INDEX, SHARD
from spectrain.target import Target, packed_layout, resolve_path

OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
ROWS, TOLERANCE = 16, 1e-4  # of the largest logit: two attention programs, many layers


@contextmanager
def rounded(drafter, dtype: torch.dtype) -> Iterator[None]:
    """The drafter with weights rounded to `dtype` and held in float32, put back at the end."""
    tensors = [*drafter.parameters(), *(b for n, b in drafter.named_buffers() if n == "rows_of_target")]
    original = [(t, t.data) for t in tensors]
    try:
        for t, data in original:
            t.data = data.to(dtype).float()
        yield
    finally:
        for t, data in original:
            t.data = data


@torch.no_grad()
def write_standalone(config: RunConfig, target: Target, drafter, folder: Path, engines: list[str]) -> float:
    """The draft model as `save_pretrained` writes it, with the target's tokenizer; returns the largest
    difference of a logit between the folder, loaded alone, and the drafter.

    Raises ValueError where that exceeds TOLERANCE of the largest logit.
    """
    dtype = getattr(torch, config.export.dtype)
    drafter.written_model(dtype).save_pretrained(folder)
    own = read_json(folder / "config.json")
    write_json(folder / "config.json", {**own, "torch_dtype": own["dtype"]})  # for older readers
    if target.tokenizer is not None:
        target.tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    known = len(drafter.kept_ids)
    ids = torch.randint(known, (ROWS,), generator=torch.Generator().manual_seed(0))
    with rounded(drafter, dtype):
        on = ids.to(target.device)
        states = drafter.states(on, torch.arange(ROWS, device=on.device), packed_layout((0, ROWS)))
        logits = (states @ drafter.head_weight().T).float().cpu()
    worst = (model(ids[None]).logits[0, :, :known] - logits).abs().max().item()
    bound = TOLERANCE * max(1.0, logits.abs().max().item())
    if not worst <= bound:
        raise ValueError(f"{folder}: its logits differ from the drafter's by {worst:.3g} (bound {bound:.3g})")
    return worst


def write_mtp(config: RunConfig, target: Target, drafter, folder: Path, engines: list[str]) -> float:
    """The target's folder with the drafter's blocks, or for speculators the blocks alone; returns 0, since
    all that was written is read back equal.

    Raises ValueError for a target that is not on disk as safetensors, or is quantised.
    """
    dtype = getattr(torch, config.export.dtype)
    # routing by a rounded correction would choose other experts; engines hold it in float32
    new = {
        name: t.detach().to(t.dtype if name.endswith("e_score_correction_bias") else dtype).cpu()
        for name, t in drafter.export_tensors(engines[0]).items()
    }
    metadata = {
        "format": "pt",
        "target": json.dumps(target.fingerprint()),
        "recipe": config.recipe,
        "engines": json.dumps(engines),
    }
    if engines == ["speculators"]:
        own = {"tie_word_embeddings": False, "dtype": config.export.dtype}
        write_json(folder / "config.json", drafter.engine_config(target, engines[0]) | own)
        write_tensors(folder / "model.safetensors", new, metadata)
    else:
        _write_into_target(target, drafter, folder, engines[0], new, metadata)
    read = reader(str(folder))
    for name, tensor in new.items():
        back = read(name)
        if back is None or not torch.equal(back, tensor):
            raise ValueError(f"{folder}: tensor {name} is not read back as it was written")
    return 0.0


def _write_into_target(
    target: Target, drafter, folder: Path, engine: str, new: dict[str, torch.Tensor], metadata: dict[str, str]
) -> None:
    """The target's folder, config.json and index with the tensors `new`."""
    source = _local(target.path)
    own = read_json(source / "config.json")
    inner = own.get("text_config", own)
    if "quantization_config" in own:
        raise ValueError(f"{source}: a quantised target; its MTP weights cannot be replaced by plain ones")
    inner |= drafter.engine_config(target, engine)
    weights = _weight_map(source)
    for name in sorted({*weights.values()}):
        _shard(source / name, folder / name, set(new))
    for path in source.iterdir():
        if path.is_file() and path.suffix not in (".safetensors", *OTHER_WEIGHTS) and path.name != INDEX:
            shutil.copyfile(path, folder / path.name)
    write_json(folder / "config.json", own)
    write_tensors(folder / SHARD, new, metadata)
    weights |= dict.fromkeys(new, SHARD)
    kept = {name for name in weights.values() if (folder / name).exists()}
    size = sum((folder / name).stat().st_size for name in kept)
    write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weights})


def _local(path: str) -> Path:
    """The folder of a target's files, in the hub's cache for a hub id."""
    resolved = resolve_path(path)
    if Path(resolved).is_dir():
        return Path(resolved)
    found = cached_file(resolved, "config.json")
    assert found is not None, "cached_file raises where there is no such file"
    return Path(found).parent


def _weight_map(source: Path) -> dict[str, str]:
    """The file of every tensor of a model folder."""
    if (source / INDEX).exists():
        return dict(read_json(source / INDEX)["weight_map"])
    single = source / "model.safetensors"
    if not single.exists():
        raise ValueError(f"{source}: no model.safetensors there, which the export of MTP adds to")
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single.name)


def _shard(source: Path, made: Path, replaced: set[str]) -> None:
    """A link to a shard, or the shard without `replaced` where it holds some of them; nothing if it holds no
    other."""
    with safe_open(source, framework="pt") as file:
        names = set(file.keys())
        kept = {name: file.get_tensor(name) for name in names - replaced} if names & replaced else {}
    if not names & replaced:
        made.symlink_to(source.resolve())
    elif kept:
        write_tensors(made, kept, {"format": "pt"})

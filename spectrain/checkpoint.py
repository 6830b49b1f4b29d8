"""Checkpoints: folders step-000123 that hold all a run needs to go on, or an evaluation to load the drafter.

    drafter.safetensors    trained tensors, float32, under the family's own names
    kept_ids.safetensors   int64 target ids of the draft vocabulary, ascending
    config.json            family config, tap ids, target fingerprint, version
    optimizer.safetensors  AdamW moments and step of each tensor
    state.json             step, data cursor, random seeds, counters, settings
    manifest.json          SHA-256 of every file above; written last: a folder without it is no checkpoint

A folder is written under a temporary name, read back and checked, renamed, and only then marked. Nothing is
pickled. Knows no loop and no family: a family's module is imported by its name.
"""

import hashlib
import importlib
import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spectrain import __version__
from spectrain.artifacts import MANIFEST, hash_file, read_json, read_tensors, write_json, write_tensors
from spectrain.checks import choose
from spectrain.compose import families
from spectrain.config import RunConfig
from spectrain.optim import Optimizers, load_optimizer, optimizer_tensors, trainable
from spectrain.target import Target

FILES = ("drafter.safetensors", "kept_ids.safetensors", "config.json", "optimizer.safetensors", "state.json")
IDENTITY = ("config", "weights", "tokenizer")  # of a target's fingerprint; its dtype may differ

# Settings that do not shape the weights, so that a resumed run may change them.
NO_EFFECT = ("save_every", "keep", "eval_every", "eval_prompts", "skip_bad", "max_bad_fraction")

log = logging.getLogger(__name__)


def build_drafter(drafter_config: Any, target: Target, kept_ids: torch.Tensor, *, seed: int = 0) -> Any:
    """A new drafter of the family that `drafter_config.family` names; the same seed gives the same weights.

    kept_ids: int64 [W], ascending. The process's random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _family(drafter_config.family).build(drafter_config, target, kept_ids)


def weightless_drafter(family: str, target: Target, *, key: str) -> Any:
    """A drafter of a family that needs no training, with its default settings.

    Raises ValueError naming `key` for another family.
    """
    choose(key, family, families())
    drafter = build_drafter(_family(family).Config(), target, torch.arange(target.vocab_size))
    if trainable(drafter):
        raise ValueError(
            f"{key}={family!r}: it needs training; expected a family that does not, such as ngram"
        )
    return drafter


def _family(name: str):
    choose("drafter.family", name, families())
    return importlib.import_module(f"spectrain.drafters.{name}")


def step_folder(run_folder: Path, step: int) -> Path:
    return run_folder / "checkpoints" / f"step-{step:06d}"


def save(
    run_folder: Path,
    drafter: Any,
    optimizer: Optimizers,
    state: Mapping[str, Any],
    *,
    target: Mapping[str, str],
    keep: int,
) -> Path:
    """Write the checkpoint of `state["step"]`, then delete all but the newest `keep` and the best; returns
    its folder.

    drafter: a module with `config`, `taps` and `kept_ids`; state: JSON-like; target: fingerprint. Raises
    ValueError naming file and tensor if what was written is not the drafter.
    """
    if not trainable(drafter):
        raise ValueError(
            f"drafter.family={drafter.config.family!r}: nothing of it is trained, so it has no checkpoint"
        )
    final = step_folder(run_folder, state["step"])
    staging = final.with_name(f".{final.name}.tmp")
    for path in (staging, final):
        if path.exists():
            shutil.rmtree(path)
    # what is not trained is made again by the family: a frozen head, buffers
    fixed = {name for name, p in drafter.named_parameters() if not p.requires_grad}
    fixed |= {name for name, _ in drafter.named_buffers()}
    trained = {name: t for name, t in drafter.state_dict().items() if name not in fixed}
    _write_drafter(staging, trained, drafter, target)
    write_tensors(staging / FILES[3], optimizer_tensors(drafter, optimizer))
    write_json(staging / FILES[4], dict(state))
    check_tensors(staging / FILES[0], read_tensors(staging / FILES[0]), drafter)
    hashes = {name: hash_file(staging / name) for name in FILES}
    staging.rename(final)
    write_json(final / MANIFEST, {"files": hashes})
    _prune(run_folder, keep)
    return final


def save_drafter(
    folder: Path, tensors: Mapping[str, torch.Tensor], drafter: Any, *, target: Mapping[str, str]
) -> None:
    """Write what `load_drafter` needs and no more: a checkpoint that no training goes on from.

    tensors: the trained ones of `drafter`, which gives the rest. Raises ValueError as `save` does.
    """
    (folder / MANIFEST).unlink(missing_ok=True)
    check_tensors(folder / FILES[0], tensors, drafter)
    _write_drafter(folder, tensors, drafter, target)
    write_json(folder / MANIFEST, {"files": {name: hash_file(folder / name) for name in FILES[:3]}})


def _write_drafter(
    folder: Path, tensors: Mapping[str, torch.Tensor], drafter: Any, target: Mapping[str, str]
) -> None:
    write_tensors(folder / FILES[0], tensors)
    write_tensors(folder / FILES[1], {"kept_ids": drafter.kept_ids})
    config = {
        "drafter": asdict(drafter.config),
        "tap_ids": list(drafter.taps),
        "target": dict(target),
        "spectrain_version": __version__,
    }
    write_json(folder / FILES[2], config)


def check_tensors(path: Path, tensors: Mapping[str, torch.Tensor], drafter: nn.Module) -> None:
    """Raise ValueError naming `path` and the first tensor that is missing, unknown, empty, misshapen or not
    finite."""
    expected = trainable(drafter)
    for name, parameter in expected.items():
        if name not in tensors:
            raise ValueError(f"{path}: tensor {name} is missing")
        if tensors[name].numel() == 0:
            raise ValueError(f"{path}: tensor {name} is empty: expected shape {list(parameter.shape)}")
        if tensors[name].shape != parameter.shape:
            found = list(tensors[name].shape)
            raise ValueError(f"{path}: tensor {name} has shape {found}: expected {list(parameter.shape)}")
        if not tensors[name].isfinite().all():
            raise ValueError(f"{path}: tensor {name} holds values that are not finite")
    if unknown := sorted(set(tensors) - set(expected)):
        raise ValueError(f"{path}: tensor {unknown[0]} is not one of the drafter's")


def complete(run_folder: Path) -> list[Path]:
    """Finished checkpoints of a run, oldest first; folders without the marker are ignored and named in the
    log."""
    folders = sorted(
        (run_folder / "checkpoints").glob("step-*"), key=lambda path: int(path.name.removeprefix("step-"))
    )
    for folder in folders:
        if not (folder / MANIFEST).exists():
            log.warning("%s: ignored, the checkpoint was not finished (no %s)", folder, MANIFEST)
    return [folder for folder in folders if (folder / MANIFEST).exists()]


def latest(run_folder: Path) -> Path | None:
    """The newest finished checkpoint of a run, or None if there is none."""
    found = complete(run_folder)
    return found[-1] if found else None


def best(run_folder: Path) -> Path | None:
    """The finished checkpoint with the highest evaluated tau (the newest of equals); the newest if none was
    evaluated."""
    found = complete(run_folder)
    scored = [
        (tau, i) for i, folder in enumerate(found) if (tau := read_json(folder / FILES[4])["tau"]) is not None
    ]
    return found[max(scored)[1]] if scored else latest(run_folder)


def weights_print(drafter: Any, settings: Any = "") -> str:
    """A hash of the values that a drafter decodes with, in their dtype, and of `settings`."""
    found = hashlib.sha256(repr(settings).encode())
    for key, tensor in sorted(drafter.state_dict().items()):
        numbers = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        found.update(key.encode() + numbers)
    return found.hexdigest()


def _prune(run_folder: Path, keep: int) -> None:
    """Delete unfinished folders, and finished ones but for the newest `keep` and the best."""
    checkpoints = run_folder / "checkpoints"
    for folder in (*checkpoints.glob(".step-*.tmp"), *checkpoints.glob("step-*")):
        if not (folder / MANIFEST).exists():
            shutil.rmtree(folder)
    found = complete(run_folder)
    kept = {*found[-keep:], best(run_folder)}
    for folder in found:
        if folder not in kept:
            (
                folder / MANIFEST
            ).unlink()  # first, so that a kill in between leaves no half checkpoint that looks whole
            shutil.rmtree(folder)


def settings(config: RunConfig, target: Mapping[str, str], samples: str) -> dict[str, Any]:
    """Everything that decides the weights, by config key; `samples` is a hash of what is trained on."""
    train = {f"train.{key}": value for key, value in asdict(config.train).items() if key not in NO_EFFECT}
    drafter = {f"drafter.{key}": value for key, value in asdict(config.drafter).items()}
    objective = {f"objective.{key}": value for key, value in asdict(config.objective).items()}
    joint = (
        {f"joint.{key}": value for key, value in asdict(config.joint).items()} if config.joint.rank else {}
    )
    values = train | drafter | objective | joint | {"target": dict(target), "samples": samples}
    return json.loads(json.dumps(values))  # as a checkpoint gives them back


def check_settings(
    folder: Path, there: Mapping[str, Any], here: Mapping[str, Any], config: RunConfig
) -> None:
    """Raise ValueError naming every key whose value in a checkpoint is not that of this run.

    A setting of `config` that the checkpoint does not hold is newer than it and had its default there.
    """
    parts = {"train": config.train, "drafter": config.drafter, "objective": config.objective}
    parts |= {"joint": config.joint} if config.joint.rank else {}
    defaults = {
        f"{part}.{field.name}": field.default if field.default_factory is MISSING else field.default_factory()
        for part, values in parts.items()
        for field in fields(values)
    }
    there = {key: defaults[key] for key in here if key in defaults} | {**there}
    changed = [key for key in sorted({*there, *here}) if there.get(key) != here.get(key)]
    if changed:
        listed = "; ".join(f"{key}: {there.get(key)!r} there, {here.get(key)!r} here" for key in changed)
        raise ValueError(
            f"{folder}: trained with other settings ({listed}): choose another run_dir or delete checkpoints/"
        )


def read_checked(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Tensors of one file of a checkpoint, compared with the manifest's hash; CheckFailed names the file."""
    return read_tensors(folder / name, sha256=read_json(folder / MANIFEST)["files"][name])


def restore(folder: Path, drafter: Any, optimizer: Optimizers) -> dict[str, Any]:
    """Load a checkpoint into drafter and optimizer and return its state.

    Raises ValueError if it was trained with another draft vocabulary.
    """
    there, here = read_checked(folder, FILES[1])["kept_ids"], drafter.kept_ids.cpu()
    if not torch.equal(there, here):
        own = len(set(there.tolist()) - set(here.tolist()))
        raise ValueError(
            f"{folder}: trained with another draft vocabulary (drafter.draft_vocab: {len(there)} kept ids "
            f"there, {len(here)} here; {own} of those there are not kept here): choose another run_dir or "
            "delete checkpoints/"
        )
    load_weights(folder, drafter)
    load_optimizer(drafter, optimizer, read_checked(folder, FILES[3]))
    return read_json(folder / FILES[4])


def load_weights(folder: Path, drafter: nn.Module) -> None:
    """Copy a checkpoint's tensors into `drafter` after checking every name, shape and value."""
    tensors = read_checked(folder, FILES[0])
    check_tensors(folder / FILES[0], tensors, drafter)
    with torch.no_grad():
        for name, parameter in trainable(drafter).items():
            parameter.copy_(tensors[name])


def load_drafter(folder: Path, target: Target) -> Any:
    """The drafter of a checkpoint folder, or of a run folder's best checkpoint, on the target's device in
    eval mode.

    Raises ValueError if there is no finished checkpoint or it was trained on another target (its dtype may
    differ).
    """
    if (folder / "checkpoints").exists():
        found = best(folder)
        if found is None:
            raise ValueError(
                f"{folder / 'checkpoints'}: no finished checkpoint; run the train stage (stages=[train])"
            )
        folder = found
    if not (folder / MANIFEST).exists():
        raise ValueError(f"{folder}: not a finished checkpoint (no {MANIFEST})")
    stored = read_json(folder / FILES[2])
    check_target(folder, stored["target"], target.fingerprint())
    config = _family(stored["drafter"]["family"]).Config(**stored["drafter"])
    kept_ids = read_checked(folder, FILES[1])["kept_ids"].to(target.device)
    drafter = build_drafter(config, target, kept_ids)
    if list(drafter.taps) != stored["tap_ids"]:
        raise ValueError(
            f"{folder}: trained on taps {stored['tap_ids']}, this version builds taps {list(drafter.taps)}"
        )
    load_weights(folder, drafter)
    return drafter.eval()


def check_target(folder: Path, trained: Mapping[str, str], here: Mapping[str, str]) -> None:
    """Raise ValueError naming both fingerprints unless they are of the same target; the dtype may differ."""
    differing = [key for key in IDENTITY if trained[key] != here[key]]
    if differing:
        raise ValueError(
            f"{folder}: trained on another target (different {', '.join(differing)}): "
            f"{dict(trained)} there, {dict(here)} in this run (target.path)"
        )

"""What joint training leaves: a target of its own, a drafter for it, and how far the target moved.

    R/tuned/target          the target with the adapters of the best checkpoint in its weights
    R/tuned/drafter         the drafter of that checkpoint; its fingerprint is the tuned target's
    R/tuned/manifest.json   fingerprints of both targets and `change`, written last

`change` compares the folder as it is served with the original, on the answers of held-out conversations.
Knows no family and no loop.
"""

import gc
import logging
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from spectrain import checkpoint
from spectrain.artifacts import MANIFEST, hash_file, reuse_or_run
from spectrain.capture import capture_batch
from spectrain.config import RunConfig
from spectrain.data.packing import Sample
from spectrain.features import FeatureBatch
from spectrain.joint import ADAPTERS, Shift, answer_rows, merge
from spectrain.target import Target, load_target

MEASURED = 100_000
"""Tokens of answers after which the measurement of the change stops."""

log = logging.getLogger(__name__)


def finished(run_folder: Path) -> Path:
    """R/tuned; raises ValueError where joint training has not ended yet."""
    if not (run_folder / "tuned" / MANIFEST).exists():
        raise ValueError(f"{run_folder / 'tuned'}: no tuned target; run the train stage (stages=[train])")
    return run_folder / "tuned"


def check_held_out(config: RunConfig, held_out: Sequence[Sample]) -> None:
    """Raise ValueError now where joint training would leave a change that cannot be measured."""
    if config.joint.rank and not held_out:
        raise ValueError(
            f"corpus.eval_fraction={config.corpus.eval_fraction}: no conversation is held out, on which the "
            f"target's change could be measured (joint.rank={config.joint.rank})"
        )


def write_tuned(
    config: RunConfig, target: Target, drafter: Any, held_out: Sequence[Sample], run_folder: Path
) -> None:
    """Make R/tuned of the best checkpoint, unless it is there.

    target: the original; drafter: of the run, for its form alone; held_out: passed `check_held_out`.
    """
    best = checkpoint.best(run_folder)
    assert best is not None, "training leaves a checkpoint"
    folder = run_folder / "tuned"

    def make() -> dict[str, Any]:
        tensors = checkpoint.read_checked(best, checkpoint.FILES[0])
        adapters = {name: t for name, t in tensors.items() if name.startswith(ADAPTERS)}
        _save_merged(config, target, adapters, folder / "target")
        served = replace(config.target, path=str(folder / "target"))
        tuned = load_target(served, device=str(target.device))
        own = {name: t for name, t in tensors.items() if name not in adapters}
        checkpoint.save_drafter(folder / "drafter", own, drafter, target=tuned.fingerprint())
        change = {"original": config.target.path, **measure(target, tuned, held_out)}
        log.info(
            "the target moved: KL(original || tuned) %.4f nats a token over %d tokens of held-out answers, "
            "their loss %.4f, %.4f before",
            change["kl"], change["tokens"], change["loss_tuned"], change["loss_original"],
        )  # fmt: skip
        prints = {"original": target.fingerprint(), "tuned": tuned.fingerprint()}
        return {"targets": prints, "change": change}

    reuse_or_run(folder, {"checkpoint": hash_file(best / MANIFEST)}, make)


def _save_merged(
    config: RunConfig, original: Target, adapters: dict[str, torch.Tensor], folder: Path
) -> None:
    """A second copy of the target with the adapters in its weights."""
    merged = load_target(config.target, device=str(original.device))
    named = {name.removeprefix(ADAPTERS): t for name, t in adapters.items()}
    merge(merged, named, config.joint.scale)
    staging = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.parent.mkdir(exist_ok=True)
    merged.model.save_pretrained(staging)
    merged.tokenizer.save_pretrained(staging)
    shutil.rmtree(folder, ignore_errors=True)
    staging.rename(folder)
    del merged
    gc.collect()


@torch.no_grad()
def measure(original: Target, tuned: Target, held_out: Sequence[Sample]) -> dict[str, Any]:
    """Means over the tokens of answers, in nats: `kl` of KL(original || tuned), `loss_original` and
    `loss_tuned` of the answer's own tokens; `agreement`: share with the same likeliest token; `tokens`."""
    shift = Shift(original)
    names = ("kl", "agreement", "loss_original", "loss_tuned")
    sums, tokens = dict.fromkeys(names, 0.0), 0
    for sample in held_out:
        one, two = (capture_batch(target, [sample], ()) for target in (original, tuned))
        stats = shift.loss(two, one, 1.0).stats
        found = (float(stats["loss"][0]), float(stats["agree"][0]), _loss(original, one), _loss(tuned, two))
        sums = {name: sums[name] + value for name, value in zip(names, found, strict=True)}
        tokens += len(answer_rows(one.tokens))
        if tokens >= MEASURED:
            break
    return {**{name: total / tokens for name, total in sums.items()}, "tokens": tokens}


def _loss(target: Target, batch: FeatureBatch) -> float:
    """Sum of -log p of the tokens of answers under the target, whose states the batch holds."""
    rows = answer_rows(batch.tokens)
    labels = target.head.weight[batch.tokens.ids[rows + 1]]
    return float((batch.lse[rows] - (batch.final[rows].float() * labels.float()).sum(-1)).sum())

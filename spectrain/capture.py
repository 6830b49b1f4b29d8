"""Run the frozen target over samples and keep its states: to shards on disk, or straight to the training
loop.

One function, `capture_batch`, computes the features of one packed row for both. Documents never see each
other in the target, so a sample's states do not depend on what it is packed with, beyond the rounding of
matrix products of another height. Knows no drafter and no objective. Legend: T tokens, D hidden, V
vocabulary, L taps.
"""

import errno
import json
import logging
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import nn
from tqdm import tqdm

from spectrain.artifacts import MANIFEST, fingerprint, read_json, write_json
from spectrain.config import TrainConfig
from spectrain.data.packing import Sample, TokenBatch, pack, plan_rows
from spectrain.features import (
    FeatureBatch,
    bytes_per_token,
    capture_settings,
    damaged_shards,
    hash_samples,
    id_order,
    shard_path,
    write_manifest,
    write_shard,
)
from spectrain.kernels.products import bfloat16_products
from spectrain.shared_prefix import prefix_length, share
from spectrain.target import Target, packed_layout

SETTINGS = "capture.json"
# Rows x ids of one block of float32 logits, 16 MiB: 0.16 s for 506 rows of SmolLM2, 0.21 with 16384 ids
# and 0.18 with 1024 (one thread of a Xeon with AMX, 2026-11-29).
LAW_ROWS, LAW_IDS = 1024, 4096

log = logging.getLogger(__name__)


@torch.no_grad()
def capture_batch(target: Target, samples: Sequence[Sample], tap_ids: Sequence[int]) -> FeatureBatch:
    """Features of `samples` packed into one row, on the target's device.

    Raises RuntimeError if the target returns another number of rows than it was given tokens.
    """
    tokens = pack(samples)
    ids, positions = tokens.ids.to(target.device), tokens.positions.to(target.device)
    prefix = prefix_length(samples) if target.reads_layouts else 0
    if prefix:
        run, places, layout = share(tokens, prefix)
        run, places = run.to(target.device), places.to(target.device)
        states = target.states(ids[run], positions[run], layout, taps=tap_ids)
        expected = len(run)
    else:
        states = target.states(ids, positions, packed_layout(tokens.offsets), taps=tap_ids)
        expected = len(tokens)
    for name, rows in (("taps", states.taps), ("final", states.final)):
        if len(rows) != expected:
            raise RuntimeError(
                f"target returned {len(rows)} rows of {name} for {expected} tokens "
                f"(samples {', '.join(tokens.sample_ids)})"
            )
    taps, final = (states.taps[places], states.final[places]) if prefix else (states.taps, states.final)
    lse, argmax = _law(target, final, tokens)
    return FeatureBatch(tokens, tuple(tap_ids), taps, final, lse, argmax).to(target.device)


def _law(target: Target, final_TD: torch.Tensor, tokens: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-sum-exp [T] float32 and arg-max [T] int64 of the target's logits where the next token is
    supervised.

    Logits are float32 whatever the target's dtype, as in the objective, which subtracts this log-sum-exp from
    its own; bfloat16 factors lose nothing where state and head are bfloat16.
    """
    head = target.head
    if not isinstance(head, nn.Linear) or not head.weight.is_floating_point():
        raise ValueError(
            f"target head {type(head).__name__} of {head.weight.dtype}: expected an unquantised nn.Linear"
        )
    lse = torch.zeros(len(tokens), device=final_TD.device)
    argmax = torch.full((len(tokens),), -1, device=final_TD.device)
    same = tokens.document_ids[1:] == tokens.document_ids[:-1]
    supervised = (tokens.loss_mask[1:] & same).nonzero()[:, 0].to(final_TD.device)
    with bfloat16_products(head.weight.dtype == final_TD.dtype == torch.bfloat16):
        for rows in supervised.split(LAW_ROWS):
            state = final_TD[rows].float()
            total = torch.full((len(rows),), -torch.inf, device=state.device)
            best = total.clone()
            for first in range(0, target.vocab_size, LAW_IDS):
                part = slice(first, first + LAW_IDS)
                bias = None if head.bias is None else head.bias[part].float()
                logits = target.adjust(nn.functional.linear(state, head.weight[part].float(), bias))
                top, where = logits.max(-1)
                argmax[rows] = torch.where(top > best, where + first, argmax[rows])
                best = torch.maximum(best, top)
                mass = logits.sub_(top[:, None]).exp_().sum(-1)
                total = torch.logaddexp(total, mass.log() + top)
            lse[rows] = total
    return lse, argmax


def reject_bad(
    samples: Sequence[Sample], batch: FeatureBatch
) -> tuple[list[Sample], FeatureBatch | None, list[list[str]]]:
    """Take samples with non-finite states out of a batch.

    Returns the samples kept, their features (None if none is left) and [sample id, layer] of each one
    rejected, where layer is the first non-finite tap, "final", or "logits".
    """
    checks = {str(k): batch.taps[:, i].abs().amax(-1) for i, k in enumerate(batch.tap_ids)}
    checks |= {"final": batch.final.abs().amax(-1), "logits": batch.lse}
    finite = {layer: values.isfinite().cpu() for layer, values in checks.items()}
    if all(bool(ok.all()) for ok in finite.values()):
        return list(samples), batch, []
    offsets = batch.tokens.offsets
    kept, rows, rejected = [], [], []
    for sample, first, last in zip(samples, offsets, offsets[1:], strict=False):
        bad = [layer for layer, ok in finite.items() if not bool(ok[first:last].all())]
        if bad:
            rejected.append([sample.id, bad[0]])
        else:
            kept.append(sample)
            rows.append(torch.arange(first, last, device=batch.final.device))
    if not kept:
        return [], None, rejected
    index = torch.cat(rows)
    parts = {name: getattr(batch, name)[index] for name in ("taps", "final", "lse", "argmax")}
    return kept, replace(batch, tokens=pack(kept), **parts).to(batch.final.device), rejected


def check_rejected(
    rejected: Sequence[Sequence[str]], count: int, num_samples: int, max_bad_fraction: float
) -> None:
    """Raise ValueError once `count` is more than the allowed share of samples; names those in `rejected` and
    the layers."""
    if count > max_bad_fraction * num_samples:
        names = ", ".join(f"{sample_id} (layer {layer})" for sample_id, layer in rejected[:20])
        raise ValueError(
            f"{count} of {num_samples} samples have non-finite target states, more than "
            f"train.max_bad_fraction={max_bad_fraction}: {names}"
        )


def capture(
    target: Target,
    samples: Sequence[Sample],
    tap_ids: Sequence[int],
    folder: Path,
    *,
    micro_tokens: int,
    max_bad_fraction: float = TrainConfig.max_bad_fraction,
    taps_bits: int = TrainConfig.taps_bits,
    progress: bool = True,
) -> dict[str, Any]:
    """Write the features of `samples` to shards in `folder` and return the manifest; only missing shards are
    computed.

    One shard is one packed row of at most `micro_tokens` tokens; with several processes each writes its
    share, and what is written depends neither on their number nor on where an earlier run stopped. Raises
    ValueError when the target fails its self-test or too many samples are rejected, OSError when the disk is
    too small.
    """
    target.self_test()
    order = id_order(samples)
    content = hash_samples(samples, order)
    settings = capture_settings(target.fingerprint(), tap_ids, micro_tokens, content, taps_bits)
    plan = plan_rows([len(sample.ids) for sample in samples], order, micro_tokens)
    rows = [[samples[i] for i in row] for row in plan]
    process = PartialState(cpu=target.device.type == "cpu")
    if process.is_main_process:
        _open(folder, settings)
    process.wait_for_everyone()
    own = range(process.process_index, len(rows), process.num_processes)
    mine = _missing(folder, rows, own)
    missing = gather_object(mine)
    if process.is_main_process:
        tokens = sum(len(sample.ids) for number in missing for sample in rows[number])
        needed = tokens * bytes_per_token(len(tap_ids), target.hidden_size, target.dtype, taps_bits)
        _check_space(folder, needed, len(missing), len(rows))
    process.wait_for_everyone()
    rejected = _rejected(_records(folder, sorted(set(own) - set(mine))))
    interval = 0.1 if sys.stderr.isatty() else 10
    target.announce([samples[i] for number in mine for i in plan[number]])
    hidden = not (progress and process.is_main_process)
    with tqdm(
        total=sum(len(sample.ids) for number in mine for sample in rows[number]),
        unit="tok", desc="capture", disable=hidden, mininterval=interval,
    ) as bar:  # fmt: skip
        for number in mine:
            kept, batch, bad = reject_bad(rows[number], capture_batch(target, rows[number], tap_ids))
            for sample_id, layer in bad:
                log.warning("sample %s rejected: non-finite states at layer %s", sample_id, layer)
            rejected += bad
            check_rejected(rejected, len(rejected), len(samples), max_bad_fraction)
            write_shard(shard_path(folder, number), kept, batch, bad, taps_bits=taps_bits)
            bar.update(sum(len(sample.ids) for sample in rows[number]))
    process.wait_for_everyone()
    if process.is_main_process:
        _finish(folder, settings, len(rows), len(samples), max_bad_fraction)
    process.wait_for_everyone()
    return read_json(folder / MANIFEST)


def _finish(
    folder: Path, settings: dict[str, Any], num_shards: int, num_samples: int, max_bad_fraction: float
) -> None:
    """Gather what all processes wrote into the manifest and say what was left out."""
    records = _records(folder, range(num_shards))
    rejected = _rejected(records)
    check_rejected(rejected, len(rejected), num_samples, max_bad_fraction)
    if rejected:
        log.warning("capture: %d of %d samples left out, non-finite states", len(rejected), num_samples)
    write_manifest(folder, settings, records)


def _open(folder: Path, settings: dict[str, Any]) -> None:
    """Make the folder ready: no shard of other settings, no half-written file."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(".*.tmp"):
        path.unlink()
    shards = sorted(folder.glob("shard-*"))
    if (folder / SETTINGS).exists():
        old = read_json(folder / SETTINGS)
        if fingerprint(old) == fingerprint(settings):
            return
        changed = ", ".join(sorted(key for key in settings if old.get(key) != settings[key]))
        log.info("%s: holds features of other settings (%s); capturing again", folder, changed)
    elif shards:
        raise ValueError(
            f"{folder}: holds shards but no {SETTINGS}: not a capture of this version; move or delete it"
        )
    for path in (folder / MANIFEST, *shards):
        path.unlink(missing_ok=True)
    write_json(folder / SETTINGS, settings)


def _records(folder: Path, numbers: Iterable[int]) -> list[dict[str, Any]]:
    """The records of those shards."""
    return [read_json(shard_path(folder, number).with_suffix(".json")) for number in numbers]


def _rejected(records: Sequence[dict[str, Any]]) -> list[list[str]]:
    return [pair for record in records for pair in record["rejected"]]


def _missing(folder: Path, rows: Sequence[Sequence[Sample]], numbers: Iterable[int]) -> list[int]:
    """Those of `numbers` whose shard or record is not there or damaged; shard n holds `rows[n]`."""
    numbers = list(numbers)
    written = [n for n in numbers if _has_record(folder, n, rows[n])]
    damaged = damaged_shards(folder, _records(folder, written))
    for file, reason in damaged.items():
        log.info("%s: %s; writing it again", folder / file, reason)
    whole = {n for n in written if shard_path(folder, n).name not in damaged}
    return [n for n in numbers if n not in whole]


def _has_record(folder: Path, number: int, row: Sequence[Sample]) -> bool:
    """Whether the record of a shard is there and accounts for every sample of its row."""
    path = shard_path(folder, number).with_suffix(".json")
    if not path.exists():
        return False
    expected = {sample.id: len(sample.ids) for sample in row}
    try:
        record = json.loads(path.read_bytes())
        found = dict(record["samples"]) | {
            sample_id: expected[sample_id] for sample_id, _ in record["rejected"]
        }
        whole = found == expected and record["file"] == shard_path(folder, number).name
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        log.info("%s: damaged record; writing its shard again", path)
    return whole


def _check_space(folder: Path, needed: int, missing: int, num_shards: int) -> None:
    free = shutil.disk_usage(folder).free
    gib = 2**30
    log.info(
        "capture: %d of %d shards to write, %.2f GiB (%.2f GiB free)",
        missing,
        num_shards,
        needed / gib,
        free / gib,
    )
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"disk full: the features need {needed / gib:.2f} GiB, {free / gib:.2f} GiB are free: free "
            "space, use fewer samples, train.taps_bits=8, or train.features=online",
            str(folder),
        )

"""FeatureBatch: a TokenBatch with the target's states, and the shards that hold them on disk.

Layer id k is the output of the 0-based decoder layer k, the raw residual stream; `final` is the state after
the final norm, what feeds lm_head. A shard is one safetensors file of ragged rows: the samples of one packed
row of the capture, end to end, without padding; taps in the target's dtype or in 8 bits. The manifest names
every shard with its samples, size and SHA-256, and carries a hash of that list. Knows no drafter.
"""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from spectrain.artifacts import MANIFEST, fingerprint, hash_file, read_json, write_json, write_tensors
from spectrain.checks import CheckFailed
from spectrain.data.packing import Sample, TokenBatch, pack
from spectrain.tap_codes import decode, encode

FORMAT = 2  # raise when the content of a shard changes


@dataclass(frozen=True)
class FeatureBatch:
    """tokens: the TokenBatch of T tokens.

    taps [T, L, Dt]: states at the layer ids of `tap_ids`, in the target's dtype; final [T, Dt]. lse [T]
    float32, argmax [T] int64: log-sum-exp and arg-max of the target's logits over its full vocabulary at the
    positions whose next token is supervised; 0 and -1 elsewhere.
    """

    tokens: TokenBatch
    tap_ids: tuple[int, ...]
    taps: torch.Tensor
    final: torch.Tensor
    lse: torch.Tensor
    argmax: torch.Tensor

    def to(self, device: torch.device) -> "FeatureBatch":
        """The same batch with every tensor on `device`."""
        tokens = replace(self.tokens, **_moved(self.tokens, device))
        return replace(self, tokens=tokens, **_moved(self, device))


def _moved(noun: TokenBatch | FeatureBatch, device: torch.device) -> dict[str, Any]:
    values = {field.name: getattr(noun, field.name) for field in fields(noun)}
    return {name: value.to(device) for name, value in values.items() if isinstance(value, torch.Tensor)}


def id_order(samples: Sequence[Sample]) -> list[int]:
    """Places of `samples` by ascending id: the one order that does not depend on how files were listed.

    Raises ValueError for an id that comes twice.
    """
    ids = [sample.id for sample in samples]
    order = sorted(range(len(ids)), key=ids.__getitem__)
    for a, b in pairwise(order):
        if ids[a] == ids[b]:
            raise ValueError(f"sample id {ids[a]!r} comes twice: ids must be unique")
    return order


def hash_samples(samples: Sequence[Sample], order: Sequence[int]) -> str:
    """A hash of ids, tokens and masks of `samples` in `order`."""
    digest = hashlib.sha256()
    for sample in map(samples.__getitem__, order):
        digest.update(f"{sample.id}\0{len(sample.ids)}\0".encode())
        for tensor in (sample.ids, sample.loss_mask, sample.span_ids):
            digest.update(tensor.to(torch.int32).numpy().tobytes())
    return digest.hexdigest()[:16]


def bytes_per_token(num_taps: int, hidden_size: int, dtype: torch.dtype, taps_bits: int = 0) -> int:
    """Bytes of a shard per token: ids, mask, span, lse, arg-max, the final state, and the taps."""
    tap = hidden_size + 4 if taps_bits == 8 else hidden_size * dtype.itemsize
    return 4 + 1 + 4 + 4 + 4 + hidden_size * dtype.itemsize + num_taps * tap


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.safetensors"


def write_shard(
    path: Path,
    samples: Sequence[Sample],
    batch: FeatureBatch | None,
    rejected: list[list[str]],
    *,
    taps_bits: int = 0,
) -> None:
    """Write a shard, then its record beside it (the same name with .json), which makes it count.

    batch: the features of `samples` in that order, or None if all of the row's samples were rejected.
    rejected: [sample id, layer] pairs, kept in the record. taps_bits: 8 stores codes and
    `taps_scale` (spectrain/tap_codes.py).
    """
    record: dict[str, Any] = {
        "file": path.name,
        "samples": [[sample.id, len(sample.ids)] for sample in samples],
        "rejected": rejected,
        "bytes": 0,
        "sha256": "",
    }
    if batch is not None:
        tensors = {
            "ids": torch.cat([sample.ids for sample in samples]).to(torch.int32),
            "loss_mask": torch.cat([sample.loss_mask for sample in samples]),
            "span_ids": torch.cat([sample.span_ids for sample in samples]).to(torch.int32),
            "final": batch.final.cpu(),
            "lse": batch.lse.cpu(),
            "argmax": batch.argmax.cpu().to(torch.int32),
        }
        if taps_bits == 8:
            codes, scale = encode(batch.taps)
            tensors |= {"taps": codes.cpu(), "taps_scale": scale.cpu()}
        else:
            tensors["taps"] = batch.taps.cpu()
        record["sha256"] = write_tensors(path, tensors)
        record["bytes"] = path.stat().st_size
    write_json(path.with_suffix(".json"), record)


def shard_damage(folder: Path, record: dict[str, Any]) -> str:
    """What is wrong with the shard of `record`: "" if nothing is, else the reason. Reads the whole file."""
    if not record["bytes"]:
        return ""
    path = folder / record["file"]
    if not path.exists():
        return "the file is missing"
    if (size := path.stat().st_size) != record["bytes"]:
        return f"{size} bytes, {record['bytes']} in the manifest"
    return "" if hash_file(path) == record["sha256"] else "the content hash differs from the manifest's"


def damaged_shards(folder: Path, records: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Name of each damaged shard and the reason; files are read by a few threads at once."""
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        reasons = pool.map(lambda record: shard_damage(folder, record), records)
        return {record["file"]: reason for record, reason in zip(records, reasons, strict=True) if reason}


@dataclass(frozen=True)
class FeatureStore:
    """The captured features of a corpus, read from disk by sample id.

    lengths: tokens of each readable sample; places: its shard and its first row there; rejected: [sample id,
    layer] of samples with non-finite states; damaged: names of shards left out by `skip_bad`.
    """

    folder: Path
    settings: dict[str, Any]
    lengths: dict[str, int]
    places: dict[str, tuple[str, int]]
    rejected: tuple[tuple[str, str], ...]
    damaged: tuple[str, ...]

    @classmethod
    def load(cls, folder: Path, *, skip_bad: bool = False) -> "FeatureStore":
        """Open a finished capture and check every shard's size and content hash.

        Raises ValueError if the capture has not finished or its manifest is damaged, CheckFailed naming
        damaged shards and their samples (`skip_bad` leaves them out instead). Call `check` before reading.
        """
        if not (folder / MANIFEST).exists():
            raise ValueError(f"{folder}: no finished capture there; run the capture stage (stages=[capture])")
        manifest = read_json(folder / MANIFEST)
        if manifest.get("content") != _content(manifest):
            raise ValueError(
                f"{folder / MANIFEST}: damaged, or of another version: its hash is not that of its content; "
                "run the capture stage again (stages=[capture])"
            )
        damaged = damaged_shards(folder, manifest["shards"])
        if damaged and not skip_bad:
            raise CheckFailed(
                "\n".join(_describe(folder, r, damaged) for r in manifest["shards"] if r["file"] in damaged)
            )
        lengths, places = {}, {}
        for record in manifest["shards"]:
            if record["file"] in damaged:
                continue
            first = 0
            for sample_id, length in record["samples"]:
                lengths[sample_id], places[sample_id] = length, (record["file"], first)
                first += length
        rejected = tuple((sample_id, layer) for sample_id, layer in manifest["rejected"])
        return cls(folder, manifest["settings"], lengths, places, rejected, tuple(damaged))

    @property
    def tap_ids(self) -> tuple[int, ...]:
        return tuple(self.settings["tap_ids"])

    def check(
        self,
        target: dict[str, str],
        tap_ids: Sequence[int],
        samples: Sequence[Sample],
        *,
        taps_bits: int = 0,
    ) -> None:
        """Compare with the target's fingerprint, the taps and the samples of this run; ValueError names both
        sides."""
        if self.settings["target"] != target:
            raise ValueError(
                f"{self.folder}: captured from another target: {self.settings['target']} there, "
                f"{target} in this run (target.path, target.dtype)"
            )
        if not {*tap_ids} <= {*self.tap_ids}:
            raise ValueError(
                f"{self.folder}: holds taps {list(self.tap_ids)}, the drafter reads {list(tap_ids)}"
            )
        if self.settings["taps_bits"] != taps_bits:
            raise ValueError(
                f"{self.folder}: captured with train.taps_bits={self.settings['taps_bits']}, this run has "
                f"train.taps_bits={taps_bits}; run the capture stage again (stages=[capture])"
            )
        if self.settings["samples"] != (here := hash_samples(samples, id_order(samples))):
            raise ValueError(
                f"{self.folder}: captured from other samples: hash {self.settings['samples']} there, {here} "
                "in this run; run the capture stage again (stages=[capture])"
            )

    def batch(self, sample_ids: Sequence[str], tap_ids: Sequence[int] | None = None) -> FeatureBatch:
        """The samples packed in the order given, on the CPU, with those taps (None: all that are stored);
        only their rows are read.

        Raises ValueError for an unknown sample and, naming shard and samples, for a file that cannot be read.
        """
        samples, parts = [], []
        for sample_id in sample_ids:
            if sample_id not in self.places:
                raise ValueError(f"{self.folder}: no features of sample {sample_id!r}")
            file, first = self.places[sample_id]
            rows = self._read(file, first, first + self.lengths[sample_id])
            samples.append(Sample(sample_id, rows["ids"], rows["loss_mask"], rows["span_ids"]))
            parts.append(rows)
        joined = {
            name: torch.cat([part[name] for part in parts]) for name in ("taps", "final", "lse", "argmax")
        }
        joined["argmax"] = joined["argmax"].long()
        tap_ids = self.tap_ids if tap_ids is None else tuple(tap_ids)
        if tap_ids != self.tap_ids:
            joined["taps"] = joined["taps"][:, [self.tap_ids.index(k) for k in tap_ids]]
        return FeatureBatch(tokens=pack(samples), tap_ids=tap_ids, **joined)

    def _read(self, file: str, first: int, last: int) -> dict[str, torch.Tensor]:
        path = self.folder / file
        try:
            with safe_open(path, framework="pt") as shard:
                rows = {name: shard.get_slice(name)[first:last] for name in shard.keys()}  # noqa: SIM118
        except (SafetensorError, FileNotFoundError) as error:
            names = [sample_id for sample_id, (where, _) in self.places.items() if where == file]
            raise CheckFailed(f"{path}: damaged shard ({error}); samples: {', '.join(names)}") from None
        if "taps_scale" in rows:
            rows["taps"] = decode(rows["taps"], rows["taps_scale"], rows["final"].dtype)
        return rows


def _describe(folder: Path, record: dict[str, Any], damaged: dict[str, str]) -> str:
    names = ", ".join(sample_id for sample_id, _ in record["samples"])
    return (
        f"{folder / record['file']}: damaged shard ({damaged[record['file']]}); samples: {names}. "
        "The capture stage writes it again; train.skip_bad=true leaves these samples out."
    )


def capture_settings(
    target: dict[str, str], tap_ids: Sequence[int], micro_tokens: int, samples: str, taps_bits: int
) -> dict[str, Any]:
    """Everything that shapes the shards; its fingerprint names the capture."""
    return {
        "format": FORMAT,
        "target": target,
        "tap_ids": list(tap_ids),
        "taps_bits": taps_bits,
        "micro_tokens": micro_tokens,
        "samples": samples,
    }


def write_manifest(
    folder: Path, settings: dict[str, Any], records: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Gather the shards' records into the manifest, which makes the capture count as finished."""
    manifest = {
        "fingerprint": fingerprint(settings),
        "settings": settings,
        "samples": sum(len(record["samples"]) for record in records),
        "tokens": sum(length for record in records for _, length in record["samples"]),
        "bytes": sum(record["bytes"] for record in records),
        "rejected": [pair for record in records for pair in record["rejected"]],
        "shards": [{key: value for key, value in record.items() if key != "rejected"} for record in records],
    }
    manifest["content"] = _content(manifest)
    write_json(folder / MANIFEST, manifest)
    return manifest


def _content(manifest: dict[str, Any]) -> str:
    """A hash of everything else that a manifest says."""
    return fingerprint({key: value for key, value in manifest.items() if key != "content"})

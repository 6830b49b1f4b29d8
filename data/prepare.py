"""The prepare stage: files of conversations -> training and held-out Samples on disk, written once.

A result lies in a folder named by the fingerprint of everything that shapes it, so another setting never
meets stale rows and going back to an old one costs nothing. Knows nothing of models and draft vocabularies.
"""

import json
import logging
import shutil
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, overload

import torch

from spectrain import artifacts
from spectrain.config import CorpusConfig
from spectrain.data.packing import Sample
from spectrain.data.rendering import Renderer, Tally, render
from spectrain.data.sources import Source, open_sources
from spectrain.data.summary import table

log = logging.getLogger(__name__)

FORM = 2  # raise when rows or files change their form
SHARD_TOKENS = 2**25
CURRENT = "current.json"
SOURCES = {  # where those parts of the fingerprint come from that are no corpus settings
    "form": "version of spectrain",
    "tokenizer": "target.path (tokenizer)",
    "template": "target.path (chat template)",
    "stop_ids": "target.path (stop tokens)",
}


class Samples(Sequence[Sample]):
    """Samples of one split, cut out of ragged shards when asked for.

    Each shard holds ids int32 [T], span_ids int16 [T], offsets int64 [S + 1] and sample_ids, the names in
    UTF-8, one a line.
    """

    def __init__(self, shards: Sequence[Mapping[str, torch.Tensor]]):
        self.shards = shards
        self.names = [name for shard in shards for name in bytes(shard["sample_ids"]).decode().split("\n")]
        self.starts = [0]
        for shard in shards:
            self.starts.append(self.starts[-1] + len(shard["offsets"]) - 1)

    def __len__(self) -> int:
        return self.starts[-1]

    @overload
    def __getitem__(self, i: int) -> Sample: ...
    @overload
    def __getitem__(self, i: slice) -> list[Sample]: ...
    def __getitem__(self, i):
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        i %= len(self)
        k = bisect_right(self.starts, i) - 1
        shard, j = self.shards[k], i - self.starts[k]
        a, b = shard["offsets"][j : j + 2].tolist()
        span_ids = shard["span_ids"][a:b].int()
        return Sample(self.names[i], shard["ids"][a:b], span_ids >= 0, span_ids)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample."""
        return [length for shard in self.shards for length in shard["offsets"].diff().tolist()]


@dataclass(frozen=True)
class Prepared:
    """What the prepare stage made of a corpus.

    train, eval: Samples, every conversation on one side only. counts int64 [N], N past the tokenizer's
    largest id: how often each token is supervised in training. summary: counts of lines, drops, samples and
    tokens. end_ids: what ends an answer. fingerprint: names everything that shaped the rows. reused: they
    were there already.
    """

    folder: Path
    fingerprint: str
    train: Samples
    eval: Samples
    counts: torch.Tensor
    summary: dict[str, Any]
    end_ids: list[int]
    reused: bool = True

    @staticmethod
    def load(folder: Path, *, reused: bool = True) -> "Prepared":
        """What `prepare` wrote into `folder` last; raises ValueError naming a missing or damaged file."""
        place = folder / artifacts.read_json(folder / CURRENT)["fingerprint"]
        manifest = artifacts.read_json(place / artifacts.MANIFEST)
        if manifest.get("fingerprint") != place.name:
            raise ValueError(f"{place}: its manifest does not say what shaped it; delete the folder")

        def read(name: str) -> dict[str, torch.Tensor]:
            return artifacts.read_tensors(place / name, sha256=manifest["files"][name])

        splits = {
            split: Samples([read(name) for name in manifest["files"] if name.startswith(split)])
            for split in ("train", "eval")
        }
        return Prepared(
            place,
            manifest["fingerprint"],
            splits["train"],
            splits["eval"],
            read("counts.safetensors")["counts"],
            manifest["summary"],
            manifest["end_ids"],
            reused,
        )


def prepare(config: CorpusConfig, tokenizer, folder: Path, *, stop_ids: Sequence[int] = ()) -> Prepared:
    """Render `config.path` with the tokenizer's chat template into `folder`, or reuse what is there for these
    settings.

    stop_ids: ids that end a turn when served, besides the one that the template writes. Raises ValueError
    naming file and line (strict), the config key, or the counts if no conversation or no training sample is
    left.
    """
    sources = open_sources(config.path)
    settings = _settings(config, sources, tokenizer, stop_ids)
    print_ = artifacts.fingerprint(settings)
    place = folder / print_
    reused = artifacts.reuse_or_run(
        place, settings, lambda: _build(config, sources, tokenizer, place, stop_ids)
    )
    artifacts.write_json(folder / CURRENT, {"fingerprint": print_})
    prepared = Prepared.load(folder, reused=reused)
    log.info("\n".join(table(prepared.summary)))
    return prepared


def load_prepared(config: CorpusConfig, tokenizer, folder: Path, *, stop_ids: Sequence[int] = ()) -> Prepared:
    """What `prepare` wrote into `folder` last, which must be what these settings ask for.

    An empty `config.path` asks for no file in particular. Raises ValueError naming the keys that differ.
    """
    prepared = Prepared.load(folder)
    there = artifacts.read_json(prepared.folder / artifacts.MANIFEST)["settings"]
    sources = open_sources(config.path) if config.path else []
    here = json.loads(json.dumps(_settings(config, sources, tokenizer, stop_ids)))  # as a manifest gives it
    own = ("corpus",) if config.path else ("corpus", "sources")
    parts = [key for key in here if key not in own and there.get(key) != here[key]]
    options = [key for key, value in here["corpus"].items() if there["corpus"].get(key) != value]
    changed = [SOURCES.get(key, f"corpus.path={config.path!r}") for key in parts]
    changed += [f"corpus.{key}={here['corpus'][key]!r}" for key in options]
    if changed:
        keys = ", ".join(dict.fromkeys(changed))
        raise ValueError(
            f"{prepared.folder}: prepared with other settings (changed: {keys}); "
            "run the prepare stage (stages=[prepare,...])"
        )
    return prepared


def _settings(
    config: CorpusConfig, sources: Sequence[Source], tokenizer, stop_ids: Sequence[int]
) -> dict[str, Any]:
    """Everything that shapes the rows."""
    options = asdict(config)
    del options["path"], options["processes"]
    return {
        "form": FORM,
        "sources": [[source.name, source.digest()] for source in sources],
        "tokenizer": tokenizer_hash(tokenizer),
        "template": tokenizer.chat_template,
        "stop_ids": sorted(stop_ids),
        "corpus": options,
    }


def tokenizer_hash(tokenizer) -> str:
    """A hash of vocabulary, merges and special tokens, whatever padding state earlier calls left behind."""
    if tokenizer.is_fast:
        core = json.loads(tokenizer.backend_tokenizer.to_str())
        content = {key: value for key, value in core.items() if key not in ("padding", "truncation")}
    else:
        content = tokenizer.get_vocab()
    return artifacts.fingerprint([content, {k: str(v) for k, v in tokenizer.special_tokens_map.items()}])


@dataclass
class _Split:
    """Samples of one split on their way into shards."""

    name: str
    counts: torch.Tensor
    waiting: list[Sample] = field(default_factory=list)
    waiting_tokens: int = 0
    files: dict[str, str] = field(default_factory=dict)
    num_samples: int = 0
    num_tokens: int = 0

    def add(self, sample: Sample, place: Path) -> None:
        self.waiting.append(sample)
        self.waiting_tokens += len(sample.ids)
        self.num_samples += 1
        self.num_tokens += len(sample.ids)
        if self.waiting_tokens >= SHARD_TOKENS:
            self.flush(place)

    def flush(self, place: Path) -> None:
        """Write the samples that wait as one shard."""
        if not self.waiting:
            return
        ids = torch.cat([sample.ids for sample in self.waiting])
        span_ids = torch.cat([sample.span_ids for sample in self.waiting])
        names = "\n".join(sample.id for sample in self.waiting)
        tensors = {
            "ids": ids,
            "span_ids": span_ids.short(),
            "offsets": torch.tensor([0, *(len(sample.ids) for sample in self.waiting)]).cumsum(0),
            "sample_ids": torch.frombuffer(bytearray(names.encode()), dtype=torch.uint8),
        }
        name = f"{self.name}-{len(self.files):05d}.safetensors"
        self.files[name] = artifacts.write_tensors(place / name, tensors)
        self.counts += torch.bincount(ids[span_ids >= 0], minlength=len(self.counts))
        self.waiting, self.waiting_tokens = [], 0


def _build(
    config: CorpusConfig, sources: Sequence[Source], tokenizer, place: Path, stop_ids: Sequence[int]
) -> dict[str, Any]:
    """Write shards and counts into `place`; returns the manifest's files (name to hash) and summary."""
    num_ids = max(tokenizer.get_vocab().values()) + 1
    splits = [_Split(name, torch.zeros(num_ids, dtype=torch.int64)) for name in ("train", "eval")]
    total, started, scratch = Tally(), time.monotonic(), place / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    renderer = Renderer(config, sources, tokenizer, stop_ids)
    for samples, tally in render(renderer, scratch, processes=config.processes, strict=config.strict):
        total.add(tally)
        for sample, held_out in samples:
            splits[held_out].add(sample, place)
    for split in splits:
        split.flush(place)
    summary = {
        "files": [source.name for source in sources],
        **total.summary(),
        "samples": {split.name: split.num_samples for split in splits},
        "tokens": {split.name: split.num_tokens for split in splits},
        "supervised": {split.name: int(split.counts.sum()) for split in splits},
    }
    if not splits[0].num_samples:
        raise ValueError(
            f"{', '.join(summary['files'])}: no training sample is left\n" + "\n".join(table(summary))
        )
    seconds = time.monotonic() - started
    log.info("rendered in %.1f s, %.0f tokens/s", seconds, sum(summary["tokens"].values()) / seconds)
    files = splits[0].files | splits[1].files
    files["counts.safetensors"] = artifacts.write_tensors(
        place / "counts.safetensors", {"counts": splits[0].counts}
    )
    artifacts.write_json(place / "rejected.json", total.rejects)
    shutil.rmtree(scratch)
    return {"files": files, "summary": summary, "end_ids": renderer.end_ids}

"""Blocks of rows -> their samples as tokens, in as many processes as asked for, in the order of the corpus.

Each process reads its own blocks. What it makes of them does not depend on their number, and every row is
counted: read = blank + kept + rejected. Knows nothing of shards and folders, but for a scratch folder.
"""

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spectrain.config import CorpusConfig
from spectrain.data.chat import Chat, token_samples
from spectrain.data.corpus import BadRow, Conversation, TokenRow, from_row, parse, without_nulls
from spectrain.data.packing import Sample
from spectrain.data.sources import Source


@dataclass
class Tally:
    """What became of some rows. rejects: (place, reason, detail); drops: turns and samples by reason; cut:
    conversations that a length limit stopped."""

    read: int = 0
    blank: int = 0
    cut: int = 0
    drops: Counter[str] = field(default_factory=Counter)
    rejects: list[list[str]] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        self.read += other.read
        self.blank += other.blank
        self.cut += other.cut
        self.drops += other.drops
        self.rejects += other.rejects

    def summary(self) -> dict[str, Any]:
        """Numbers of rows; the rejected ones by reason, with the place and detail of each reason's first."""
        rejected = Counter(reason for _, reason, _ in self.rejects)
        first = {reason: [place, detail] for place, reason, detail in reversed(self.rejects)}
        return {
            "read": self.read,
            "kept": self.read - self.blank - len(self.rejects),
            "blank": self.blank,
            "rejected": dict(rejected),
            "first": {reason: first[reason] for reason in rejected},
            "cut": self.cut,
            "dropped": dict(self.drops),
        }


def read(content: bytes | dict[str, Any], *, source: str, line: int) -> Conversation | TokenRow:
    """What one row of a source says; raises BadRow."""
    if isinstance(content, bytes):
        return parse(content, source=source, line=line)
    return from_row(without_nulls(content), source=source, line=line)


def conversations(sources: Sequence[Source]) -> Iterator[Conversation]:
    """Every conversation of `sources`; raises ValueError naming the first row that is none."""
    for source in sources:
        for block in source.blocks():
            for line, content in source.rows(*block):
                if isinstance(content, bytes) and not content.strip():
                    continue
                try:
                    row = read(content, source=source.name, line=line)
                except BadRow as error:
                    raise ValueError(f"{source.name}:{line}: {error}") from error
                if isinstance(row, TokenRow):
                    raise ValueError(f"{source.name}:{line}: tokens, expected a conversation")
                yield row


class Renderer:
    """Turns one block into flat arrays; called in every process."""

    def __init__(self, config: CorpusConfig, sources: Sequence[Source], tokenizer, stop_ids: Sequence[int]):
        self.sources = sources
        self.limits = {"max_length": config.max_length, "min_supervised": config.min_supervised}
        self.fraction = config.eval_fraction
        self.num_ids = max(tokenizer.get_vocab().values()) + 1
        self.chat = (
            Chat(tokenizer, **self.limits, template_arguments=config.template_arguments, stop_ids=stop_ids)
            if tokenizer.chat_template
            else None
        )
        self.end_ids = sorted(
            self.chat.end_ids if self.chat else {*stop_ids, tokenizer.eos_token_id} - {None}
        )

    def __call__(self, block: dict[str, int]) -> dict[str, Any]:
        source, tally = self.sources[block["source"]], Tally()
        samples: list[Sample] = []
        held_out: list[bool] = []
        for line, content in source.rows(block["start"], block["stop"], block["line"]):
            tally.read += 1
            if isinstance(content, bytes) and not content.strip():
                tally.blank += 1
                continue
            try:
                made = self._row(content, source.name, line, tally)
            except BadRow as error:
                tally.rejects.append([f"{source.name}:{line}", error.reason, error.detail])
                continue
            samples += made[1]
            held_out += [is_held_out(made[0], self.fraction)] * len(made[1])
        empty = [torch.empty(0, dtype=torch.int32)]
        return {
            "ids": torch.cat([sample.ids for sample in samples] or empty).numpy(),
            "span_ids": torch.cat([sample.span_ids for sample in samples] or empty).numpy(),
            "lengths": np.array([len(sample.ids) for sample in samples], dtype=np.int32),
            "names": [sample.id for sample in samples],
            "held_out": held_out,
            "tally": json.dumps(vars(tally)),
        }

    def _row(
        self, content: bytes | dict[str, Any], source: str, line: int, tally: Tally
    ) -> tuple[Conversation | TokenRow, list[Sample]]:
        row = read(content, source=source, line=line)
        if isinstance(row, TokenRow):
            samples, drops = token_samples(row, **self.limits, num_ids=self.num_ids)
        elif self.chat is None:
            raise ValueError(
                f"{row.id}: a conversation, but the tokenizer of target.path has no chat template"
            )
        else:
            samples, drops = self.chat.samples(row)
            tally.cut += row.cut
        tally.drops += drops
        return row, samples


def render(
    renderer: Renderer, scratch: Path, *, processes: int, strict: bool
) -> Iterator[tuple[list[tuple[Sample, bool]], Tally]]:
    """Per block its samples, each with whether it is held out of training, and what became of its rows.

    scratch: a folder for what the processes write, which the caller deletes. Raises ValueError naming the
    first bad row if `strict`.
    """
    import datasets

    for block in _map(datasets, renderer, processes, scratch).with_format("numpy"):
        found = json.loads(str(block["tally"]))
        tally = Tally(**found | {"drops": Counter(found["drops"])})
        if strict and tally.rejects:
            place, reason, detail = tally.rejects[0]
            raise ValueError(f"{place}: {reason} ({detail})")
        stops = np.cumsum(block["lengths"])
        samples = []
        for name, length, stop, held_out in zip(
            block["names"], block["lengths"], stops, block["held_out"], strict=True
        ):
            ids, span_ids = (
                torch.from_numpy(block[key][stop - length : stop].astype(np.int32))
                for key in ("ids", "span_ids")
            )
            samples.append((Sample(str(name), ids, span_ids >= 0, span_ids), bool(held_out)))
        yield samples, tally


def _map(datasets, renderer: Renderer, processes: int, scratch: Path):
    """Run `renderer` over the blocks of its sources, with a progress bar where somebody watches."""
    keys = ("source", "start", "stop", "line")
    blocks = [(i, *block) for i, source in enumerate(renderer.sources) for block in source.blocks()]
    table = {key: [block[k] for block in blocks] for k, key in enumerate(keys)}
    number = {name: datasets.Value(name) for name in ("int16", "int32", "bool", "string")}
    features = {
        "lengths": "int32",
        "names": "string",
        "held_out": "bool",
        "ids": "int32",
        "span_ids": "int16",
    }
    (datasets.enable_progress_bars if sys.stderr.isatty() else datasets.disable_progress_bars)()
    scratch.mkdir(parents=True, exist_ok=True)
    workers = min(processes or os.cpu_count() or 1, len(blocks))
    return datasets.Dataset.from_dict(table).map(
        renderer,
        remove_columns=list(keys),
        features=datasets.Features(
            {name: datasets.List(number[kind]) for name, kind in features.items()}
            | {"tally": number["string"]}
        ),
        num_proc=workers if workers > 1 else None,
        cache_file_name=str(scratch / "rows.arrow"),
        load_from_cache_file=False,
        new_fingerprint="rendered",  # the function is not hashed: nothing here is ever looked up again
        writer_batch_size=16,
        desc="prepare",
    )


def is_held_out(row: Conversation | TokenRow, fraction: float) -> bool:
    """Whether a hash of the first thing asked is below `fraction`: answers to one question, and the rows of a
    conversation that a file holds turn by turn, stay on one side."""
    if isinstance(row, TokenRow):
        start = row.mask.index(True) if True in row.mask else len(row.ids)
        asked: list[Any] = row.ids[:start]
    else:
        users = [message["content"] for message in row.messages if message["role"] == "user"]
        asked = users[:1] or [row.messages[0]["content"]]
    digest = hashlib.sha256(json.dumps(asked).encode()).digest()
    return int.from_bytes(digest[:8]) < fraction * 2**64

"""Where rows come from: files and hub datasets, each cut into blocks that any process can read by itself.

A block is (start, stop, line): bytes of a JSON file, a row group of a Parquet file, rows of a hub dataset;
`line` is the number of its first row, from 1. JSON is read row by row, since the types of its values vary.
Knows nothing of what a row means.
"""

import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from spectrain import artifacts

BLOCK_BYTES = 2**18
BLOCK_ROWS = 256
PACKAGED = ("quickstart", "smollm2_long", "smollm2_wide")
HUB = re.compile(
    r"hub:(?P<name>[^/@:]+/[^/@:]+)(/(?P<config>[^/@:]+))?(@(?P<revision>[^:]+))?(:(?P<split>.+))?"
)
BOM = b"\xef\xbb\xbf"


class Source(Protocol):
    """One file or dataset."""

    @property
    def name(self) -> str:
        """What stands in sample ids and messages."""

    def digest(self) -> str:
        """A hash of the content."""

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """(start, stop, line) of every block."""

    def rows(self, start: int, stop: int, line: int) -> Iterator[tuple[int, bytes | dict[str, Any]]]:
        """Line number and content of each row of a block: JSON that nobody parsed yet, or a table's row."""


def open_sources(paths: str | Sequence[str], key: str = "corpus.path") -> list[Source]:
    """The sources that `key` names, in its order; raises ValueError for one that is not there."""
    given = [paths] if isinstance(paths, str) else list(paths)
    files = {name: corpus_path(name, key).absolute() for name in given if not name.startswith("hub:")}
    if len({*given}) < len(given) or len({*files.values()}) < len(files):
        raise ValueError(f"{key}={given}: names something twice")
    short = _short_names(list(files.values()))
    return [_open(files[name], short[files[name]]) if name in files else _open_hub(name) for name in given]


def corpus_path(name: str, key: str = "corpus.path") -> Path:
    """The file that `key` names; those of PACKAGED lie beside this module. ValueError if missing."""
    packaged = name in PACKAGED
    path = Path(__file__).with_name(f"{name}.jsonl") if packaged else Path(name).expanduser()
    if not path.is_file():
        hint = "; write it with stages=regenerate" if packaged else ""
        raise ValueError(f"{key}={name!r}: no file {path}{hint}")
    return path


@dataclass(frozen=True)
class JsonLines:
    """A row on each line, blank lines between them allowed."""

    path: Path
    name: str

    def digest(self) -> str:
        return artifacts.hash_file(self.path)

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        start, line = 0, 1
        with open(self.path, "rb") as file:
            while content := file.read(BLOCK_BYTES):
                content += file.readline()
                yield start, start + len(content), line
                start += len(content)
                line += content.count(b"\n")

    def rows(self, start: int, stop: int, line: int) -> Iterator[tuple[int, bytes]]:
        content = _read(self.path, start, stop)
        if start == 0:
            content = content.removeprefix(BOM)
        yield from enumerate(io.BytesIO(content), line)


@dataclass(frozen=True)
class JsonArray:
    """One list of rows; the n-th row counts as line n."""

    path: Path
    name: str

    def digest(self) -> str:
        return artifacts.hash_file(self.path)

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        content = self.path.read_bytes()
        start, line = -1, 1
        items = self._items(content.decode("latin-1"), content.index(b"[") + 1)
        for number, (first, stop) in enumerate(items, 1):
            start = first if start < 0 else start
            if stop - start >= BLOCK_BYTES:
                yield start, stop, line
                start, line = -1, number + 1
        if start >= 0:
            yield start, stop, line

    def rows(self, start: int, stop: int, line: int) -> Iterator[tuple[int, bytes]]:
        content = _read(self.path, start, stop)
        for number, (a, b) in enumerate(self._items(content.decode("latin-1") + "]", 0), line):
            yield number, content[a:b]

    def _items(self, text: str, at: int) -> Iterator[tuple[int, int]]:
        """First and last byte of each item behind `at`; in Latin-1 a byte is a character, and JSON's own
        signs are ASCII."""
        decoder, space = json.JSONDecoder(), re.compile(r"\s*")
        at = space.match(text, at).end()  # type: ignore[union-attr]
        while text[at : at + 1] != "]":
            try:
                _, stop = decoder.raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                line = text.count("\n", 0, at) + 1
                raise ValueError(
                    f"{self.path}:{line}: bad_json ({error}) in the item that begins here"
                ) from None
            yield at, stop
            at = space.match(text, stop).end()  # type: ignore[union-attr]
            if text[at : at + 1] == ",":
                at = space.match(text, at + 1).end()  # type: ignore[union-attr]


@dataclass(frozen=True)
class Parquet:
    """A Parquet file; its blocks are its row groups."""

    path: Path
    name: str

    def digest(self) -> str:
        return artifacts.hash_file(self.path)

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        metadata, line = self._file().metadata, 1
        for group in range(metadata.num_row_groups):
            yield group, group + 1, line
            line += metadata.row_group(group).num_rows

    def rows(self, start: int, stop: int, line: int) -> Iterator[tuple[int, dict[str, Any]]]:
        batches = self._file().iter_batches(BLOCK_ROWS, row_groups=range(start, stop))
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), line)

    def _file(self):
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile

        try:
            return ParquetFile(self.path)
        except ArrowInvalid as error:
            raise ValueError(f"{self.path}: no Parquet file ({error})") from None


@dataclass(frozen=True)
class Hub:
    """A split of a hub dataset as `datasets` has put it into its cache."""

    name: str
    dataset: Any

    def digest(self) -> str:
        return artifacts.fingerprint(
            [artifacts.hash_file(Path(f["filename"])) for f in self.dataset.cache_files]
        )

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        for start in range(0, len(self.dataset), BLOCK_ROWS):
            yield start, min(start + BLOCK_ROWS, len(self.dataset)), start + 1

    def rows(self, start: int, stop: int, line: int) -> Iterator[tuple[int, dict[str, Any]]]:
        yield from enumerate((self.dataset[i] for i in range(start, stop)), line)


def _open(path: Path, name: str) -> Source:
    """By its ending; a .json file may hold a list or a row on each line."""
    kind = path.suffix.lower()
    if kind == ".parquet":
        return Parquet(path, name)
    if kind not in (".jsonl", ".ndjson", ".json"):
        raise ValueError(f"corpus.path: {path} ends in {kind!r}; expected .jsonl, .ndjson, .json or .parquet")
    if kind == ".json":
        with open(path, "rb") as file:
            if file.read(1024).removeprefix(BOM).lstrip().startswith(b"["):
                return JsonArray(path, name)
    return JsonLines(path, name)


def _open_hub(given: str) -> Hub:
    """hub:OWNER/NAME[/CONFIG][@REVISION][:SPLIT], of which the split is `train` unless named."""
    import datasets

    parts = HUB.fullmatch(given)
    if parts is None:
        raise ValueError(f"corpus.path={given!r}: expected hub:OWNER/NAME[/CONFIG][@REVISION][:SPLIT]")
    try:
        dataset = datasets.load_dataset(
            parts["name"], parts["config"], revision=parts["revision"], split=parts["split"] or "train"
        )
    except (ValueError, FileNotFoundError, ConnectionError) as error:
        raise ValueError(f"corpus.path={given!r}: {error}") from error
    return Hub(given.removeprefix("hub:"), dataset)


def _read(path: Path, start: int, stop: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(stop - start)


def _short_names(paths: Sequence[Path]) -> dict[Path, str]:
    """Each path's last part, or as many of its last parts as tell all of them apart."""
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return {path: "/".join(path.parts[-depth:]) for path in paths}

"""Held-out prompts: JSONL lines in, chat prompts as token ids out.

One line is {"turns": [text, ..]} with optional `id` and `category`; several turns are asked one after the
other, each with the target's own answers before it. Knows nothing of decoding.
"""

import json
from codecs import BOM_UTF8
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

QUICKSTART = Path(__file__).with_name("quickstart_prompts.jsonl")


@dataclass(frozen=True)
class Prompt:
    id: str
    category: str
    turns: tuple[str, ...]


def load_prompts(source: str, *, limit: int = 0) -> list[Prompt]:
    """Prompts of the JSONL file `source` ("quickstart": the package's own), spread over the categories.

    The categories take turns, so that any leading part is spread too; limit 0 keeps all. A line without
    category gets the file's name. Raises ValueError naming file and line.
    """
    path = QUICKSTART if source == "quickstart" else Path(source).expanduser()
    if not path.is_file():
        raise ValueError(f"eval.prompts={source!r}: no such file; expected a JSONL file or 'quickstart'")
    by_category: dict[str, list[Prompt]] = {}
    seen = set()
    for number, line in read_lines(path):
        prompt = _parse(line, f"{path}:{number}", f"{path.stem}-{number}", path.stem)
        if prompt.id in seen:
            raise ValueError(f"{path}:{number}: id {prompt.id!r} occurs twice")
        seen.add(prompt.id)
        by_category.setdefault(prompt.category, []).append(prompt)
    if not seen:
        raise ValueError(f"{path}: no prompts")
    spread = [p for rank in zip_longest(*by_category.values()) for p in rank if p is not None]
    return spread[: limit or None]


def read_lines(path: Path) -> list[tuple[int, str]]:
    """Number and text of each line that is not blank; a byte order mark is none of the first one's.

    Raises ValueError naming file and line of what is no UTF-8.
    """
    found = []
    for number, line in enumerate(path.read_bytes().removeprefix(BOM_UTF8).split(b"\n"), 1):
        try:
            found.append((number, line.decode()))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}:{number}: not UTF-8 ({error})") from None
    return [(number, text) for number, text in found if text.strip()]


def render(
    tokenizer, messages: Sequence[dict[str, Any]], template_arguments: dict[str, Any], *, tools: Any = None
) -> list[int]:
    """Token ids of a conversation up to where the target answers, by the tokenizer's chat template.

    Raises ValueError if it has none.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "target.path: its tokenizer has no chat template, by which prompts are rendered; expected one, "
            "such as a file chat_template.jinja beside it"
        )
    text = tokenizer.apply_chat_template(
        list(messages), tools=tools, tokenize=False, add_generation_prompt=True, **template_arguments
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _parse(line: str, where: str, default_id: str, default_category: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error})") from None
    turns = row.get("turns") if isinstance(row, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t for t in turns):
        raise ValueError(f"{where}: expected an object with 'turns', a list of texts that are not empty")
    return Prompt(str(row.get("id", default_id)), str(row.get("category", default_category)), tuple(turns))

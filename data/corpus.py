"""Conversation: the turns of one line of a JSONL file, in one form whatever the file's form is.

Reads OpenAI rows (`messages` with role/content) and ShareGPT rows (`conversations` with from/value). Every
line is kept or rejected with a reason; nothing vanishes without a count. Knows nothing of tokens and
templates.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}

RENAMED = ("role", "from", "content", "value", "reasoning", "reasoning_content")


@dataclass(frozen=True)
class Conversation:
    """messages: dicts with role (system, developer, user, assistant, tool), content (a text) and, where the
    row has them, reasoning_content, tool_calls (arguments are objects) and any other key a template may read.
    tools: the tool schemas or None. cut: the last assistant turn was stopped by a length limit. source, line:
    where it was read.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    cut: bool
    source: str
    line: int

    @property
    def id(self) -> str:
        return f"{self.source}:{self.line}"


class BadRow(ValueError):
    """A line that is no usable conversation. reason: a short name to count by; detail: what was found."""

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason} ({detail})")
        self.reason = reason
        self.detail = detail[:200]


class Corpus:
    """The conversations of a JSONL file, read line by line, and what became of every line.

    read = kept + blank + len(rejects); a reject is a line number, a reason and a detail. `strict` turns the
    first reject into a ValueError naming file and line; a ValueError also ends an iteration that kept no
    line.
    """

    def __init__(self, path: Path, *, strict: bool = False):
        self.path = path
        self.strict = strict
        self.read = self.blank = self.num_bytes = 0
        self.rejects: list[tuple[int, str, str]] = []

    def __iter__(self) -> Iterator[Conversation]:
        self.read = self.blank = self.num_bytes = 0
        self.rejects = []
        with open(self.path, "rb") as file:
            for line, raw in enumerate(file, 1):
                self.read += 1
                self.num_bytes += len(raw)
                if line == 1:
                    raw = raw.removeprefix(b"\xef\xbb\xbf")
                if not raw.strip():
                    self.blank += 1
                    continue
                try:
                    conversation = parse(raw, source=self.path.name, line=line)
                except BadRow as error:
                    self.reject(line, error)
                    continue
                yield conversation
        if not self.kept:
            raise ValueError(f"{self.path}: no conversation is left of {self.summary()}")

    @property
    def kept(self) -> int:
        return self.read - self.blank - len(self.rejects)

    def reject(self, line: int, error: BadRow) -> None:
        """Count a bad line; also for a caller who finds that a conversation cannot be used."""
        if self.strict:
            raise ValueError(f"{self.path}:{line}: {error}") from error
        self.rejects.append((line, error.reason, error.detail))

    def summary(self) -> dict[str, Any]:
        """Numbers of lines; the rejected ones by reason, with the first of them."""
        rejected = dict(Counter(reason for _, reason, _ in self.rejects))
        counts = {"read": self.read, "kept": self.kept, "blank": self.blank, "rejected": rejected}
        return counts | ({"first_reject": list(self.rejects[0])} if self.rejects else {})


PACKAGED = ("quickstart", "smollm2_long")


def corpus_path(name: str, *, key: str = "corpus.path") -> Path:
    """The JSONL file of `corpus.path`; those of PACKAGED lie beside this module. ValueError if missing."""
    packaged = name in PACKAGED
    path = Path(__file__).with_name(f"{name}.jsonl") if packaged else Path(name).expanduser()
    if not path.is_file():
        hint = "; write it with stages=regenerate" if packaged else ""
        raise ValueError(f"{key}={name!r}: no file {path}{hint}")
    return path


def parse(raw: bytes, *, source: str, line: int) -> Conversation:
    """One line as a Conversation; raises BadRow."""
    try:
        row = json.loads(raw.decode())
        if b"\\ud" in raw.lower():  # half a surrogate pair is valid JSON but no text
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeError as error:
        raise BadRow("bad_utf8", str(error)) from None
    except (ValueError, RecursionError) as error:
        raise BadRow("bad_json", str(error)) from None
    if not isinstance(row, dict):
        raise BadRow("not_object", f"the line holds a {type(row).__name__}")
    turns = row.get("messages", row.get("conversations"))
    if not isinstance(turns, list) or not turns:
        raise BadRow("no_turns", "neither `messages` nor `conversations` holds turns")
    messages = [_message(turn, f"turn {i}") for i, turn in enumerate(turns)]
    if isinstance(row.get("system"), str):
        messages.insert(0, {"role": "system", "content": row["system"]})
    if not any(message["role"] == "assistant" for message in messages[1:]):
        raise BadRow("no_assistant", f"{len(messages)} turns, none of the assistant after the first")
    cut = row.get("finish_reason") == "length"
    last = next(message for message in reversed(messages) if message["role"] == "assistant")
    if cut and not last["content"]:
        raise BadRow("cut_before_answer", "the length limit fell before the first word of the answer")
    return Conversation(messages, _tools(row.get("tools")), cut, source, line)


def _message(turn: Any, where: str) -> dict[str, Any]:
    """A turn with its role, content and reasoning under one name each; other keys stay for the template."""
    if not isinstance(turn, dict):
        raise BadRow("bad_turn", f"{where} is a {type(turn).__name__}")
    name = turn.get("role", turn.get("from"))
    role = ROLES.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        raise BadRow(f"unknown_role:{name}", f"{where} has role {name!r}; known: {', '.join(ROLES)}")
    message: dict[str, Any] = {"role": role, "content": _content(turn, where)}
    message |= {key: value for key, value in turn.items() if key not in RENAMED}
    if reasoning := turn.get("reasoning_content", turn.get("reasoning")):
        message["reasoning_content"] = reasoning
    if calls := turn.get("tool_calls"):
        message["tool_calls"] = [_call(call, where) for call in calls]
    return message


def _content(turn: dict[str, Any], where: str) -> str:
    """The text of a turn: text parts are joined, null beside a tool call or reasoning is the empty text."""
    content = turn.get("content", turn.get("value"))
    if isinstance(content, str):
        return content
    if content is None and any(turn.get(key) for key in ("tool_calls", "reasoning_content", "reasoning")):
        return ""
    if isinstance(content, list):
        texts = [
            part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)
        ]
        if len(texts) == len(content):
            return "".join(texts)
    raise BadRow("bad_content", f"{where}: content is {json.dumps(content)[:60]}, expected a text")


def _call(call: Any, where: str) -> dict[str, Any]:
    """A tool call with its arguments as an object: templates would escape the wire form, a text, again."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow("bad_tool_call", f"{where}: a tool call needs a function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise BadRow("bad_tool_call", f"{where}: arguments are no JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise BadRow("bad_tool_call", f"{where}: arguments are no object")
    return {"type": "function", **call, "function": {"name": function["name"], "arguments": arguments}}


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools or "null")
        except ValueError as error:
            raise BadRow("bad_tools", f"`tools` is no JSON: {error}") from None
    if tools is not None and not isinstance(tools, list):
        raise BadRow("bad_tools", f"`tools` is a {type(tools).__name__}, expected a list")
    return tools or None

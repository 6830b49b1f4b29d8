"""Conversation: the turns of one row, in one form whatever the row's form is; or TokenRow, the row's tokens.

Reads OpenAI rows (`messages` with role/content), ShareGPT rows (`conversations` with from/value), pairs
(`prompt` with `response` or `completion`, texts or lists of turns) and tokens (`input_ids` with `loss_mask`).
A row becomes one of these or a BadRow with a reason. Knows nothing of files and templates.
"""

import json
from dataclasses import dataclass
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


@dataclass(frozen=True)
class TokenRow:
    """A row that holds tokens: ids, and for each whether it is supervised; read from `line` of `source`."""

    ids: list[int]
    mask: list[bool]
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


def parse(raw: bytes, *, source: str, line: int) -> Conversation | TokenRow:
    """One line of JSON as a Conversation or its tokens; raises BadRow."""
    try:
        row = json.loads(raw.decode())
        if b"\\ud" in raw.lower():  # half a surrogate pair is valid JSON but no text
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeError as error:
        raise BadRow("bad_utf8", str(error)) from None
    except (ValueError, RecursionError) as error:
        raise BadRow("bad_json", str(error)) from None
    return from_row(row, source=source, line=line)


def from_row(row: Any, *, source: str, line: int) -> Conversation | TokenRow:
    """One row of a table or a parsed line as a Conversation or its tokens; raises BadRow."""
    if not isinstance(row, dict):
        raise BadRow("not_object", f"the line holds a {type(row).__name__}")
    if row.get("input_ids") is not None:
        return _tokens(row, source, line)
    messages = [_message(turn, f"turn {i}") for i, turn in enumerate(_turns(row))]
    if isinstance(row.get("system"), str):
        messages.insert(0, {"role": "system", "content": row["system"]})
    if not any(message["role"] == "assistant" for message in messages[1:]):
        raise BadRow("no_assistant", f"{len(messages)} turns, none of the assistant after the first")
    cut = row.get("finish_reason") == "length"
    last = next(message for message in reversed(messages) if message["role"] == "assistant")
    if cut and not last["content"]:
        raise BadRow("cut_before_answer", "the length limit fell before the first word of the answer")
    return Conversation(messages, _tools(row.get("tools")), cut, source, line)


def without_nulls(value: Any) -> Any:
    """`value` without the keys that hold None: a column fills in the keys that only other rows have."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _tokens(row: dict[str, Any], source: str, line: int) -> TokenRow:
    ids, mask = row["input_ids"], row.get("loss_mask")
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise BadRow("bad_tokens", "`input_ids` is no list of whole numbers")
    if not isinstance(mask, list) or not all(m in (0, 1) for m in mask):
        raise BadRow("bad_tokens", "`loss_mask` is no list of 0 and 1")
    if len(ids) != len(mask):
        raise BadRow("bad_tokens", f"{len(ids)} `input_ids` beside {len(mask)} of `loss_mask`")
    return TokenRow(ids, list(map(bool, mask)), source, line)


def _turns(row: dict[str, Any]) -> list[Any]:
    """The turns in the form they have; those of a pair are the prompt's and the reply's."""
    turns = row.get("messages") or row.get("conversations")
    if not turns and row.get("prompt") is not None:
        reply = row.get("response", row.get("completion"))
        turns = _side("prompt", row["prompt"], "user") + _side("response", reply, "assistant")
    if not isinstance(turns, list) or not turns:
        raise BadRow("no_turns", "no turns in `messages`, `conversations` or `prompt` with `response`")
    return turns


def _side(name: str, value: Any, role: str) -> list[Any]:
    if isinstance(value, list):
        return value
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    raise BadRow("bad_content", f"`{name}` is {value!r:.60}, expected a text or turns")


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
        if not isinstance(calls, list):
            raise BadRow("bad_tool_call", f"{where}: `tool_calls` is {calls!r:.60}, expected a list")
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
    raise BadRow("bad_content", f"{where}: content is {content!r:.60}, expected a text")


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
    if tools is not None and (not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools)):
        raise BadRow("bad_tools", f"`tools` is {tools!r:.60}, expected a list of objects")
    return tools or None

"""What `stages=regenerate` asks: prompts or whole conversations, of which every answer is given anew.

A line of the JSONL file is `{"turns": [text, ..]}` (eval/prompts.py) or a conversation in any form that
data/corpus.py reads, with system prompt, tools and tool results; its old answers only say where an answer is
due. A conversation may also end before the answer. Knows no model.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from spectrain.data.corpus import BadRow, TokenRow, parse
from spectrain.eval.prompts import load_prompts, read_lines

PACKAGED = ("quickstart", "smollm2_wide")
"""Sets of prompts that the package carries, as data/NAME_prompts.jsonl."""

ENDED = ("stop", "tool_calls", "function_call")
"""Finish reasons of an answer that came to its own end."""


@dataclass(frozen=True)
class Question:
    """given: the turns, old answers among them; tools: their schemas or None."""

    id: str
    given: tuple[dict[str, Any], ...]
    tools: list[dict[str, Any]] | None = None

    @property
    def answers(self) -> int:
        """Most answers that may be due."""
        due = sum(turn["role"] == "assistant" for turn in self.given[1:])
        return due + (self.given[-1]["role"] != "assistant")

    @property
    def length(self) -> int:
        """Characters of what is given, by which jobs of like size are put side by side."""
        return sum(len(turn["content"]) for turn in self.given)


@dataclass
class Dialogue:
    """A question on the way to its answers; messages: the turns so far, finish_reason: of the newest answer.

    The turns a (user), b (old answer), c (user) are answered as a B c C; a tool's result follows only an
    answer that makes the very calls the result belongs to.
    """

    question: Question
    messages: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str = "stop"
    _place: int = 0
    _over: bool = False

    def waits(self) -> bool:
        """Put the given turns up to the next answer into `messages`; False once no answer is due."""
        given = self.question.given
        while not self._over and self._place < len(given):
            turn = given[self._place]
            if turn["role"] == "assistant" and self.messages:
                return True
            self.messages.append(turn)
            self._place += 1
        return not self._over and self.messages[-1]["role"] != "assistant"

    def answer(self, message: dict[str, Any], finish_reason: str) -> None:
        """Take the answer that was due. The dialogue is over after one that was cut, and after tool calls
        whose results are not given."""
        given = self.question.given
        self.messages.append(message)
        self.finish_reason = finish_reason
        old = given[self._place] if self._place < len(given) else {}
        self._place += 1
        results = list(takewhile(lambda turn: turn["role"] == "tool", given[self._place :]))
        calls = message.get("tool_calls") or []
        if results:
            goes_on = _calls(calls) == _calls(old.get("tool_calls") or []) and len(calls) == len(results)
        else:
            goes_on = not calls
        self._over = finish_reason not in ENDED or not goes_on
        if not self._over:
            ids = [{"tool_call_id": call["id"]} if "id" in call else {} for call in calls]
            self.messages += [result | id_ for result, id_ in zip(results, ids, strict=True)]
            self._place += len(results)


def _calls(calls: Sequence[dict[str, Any]]) -> list[tuple[str, Any]]:
    """Name and arguments of each call; arguments that are no JSON stay the text they are."""
    found = []
    for call in calls:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            with suppress(ValueError):
                arguments = json.loads(arguments or "{}")
        found.append((call["function"]["name"], arguments))
    return found


def load_questions(source: str) -> list[Question]:
    """Questions of the JSONL file `source`, or of one of PACKAGED.

    Raises ValueError naming file and line, and for an id that occurs twice.
    """
    here = Path(__file__).parent / "data"
    path = here / f"{source}_prompts.jsonl" if source in PACKAGED else Path(source).expanduser()
    if not path.is_file():
        known = ", ".join(PACKAGED)
        raise ValueError(
            f"regenerate.prompts={source!r}: no such file; expected a JSONL file or one of {known}"
        )
    written = read_lines(path)
    if not written or '"turns"' in written[0][1]:
        return [Question(prompt.id, _asked(prompt.turns)) for prompt in load_prompts(str(path))]
    questions: dict[str, Question] = {}
    for number, line in written:
        question = _parse(line, path, number)
        if question.id in questions:
            raise ValueError(f"{path}:{number}: id {question.id!r} occurs twice")
        questions[question.id] = question
    return list(questions.values())


def _asked(texts: Sequence[str]) -> tuple[dict[str, Any], ...]:
    """User turns with places for the answers between them."""
    turns = [
        {"role": role, "content": text} for t in texts for role, text in (("user", t), ("assistant", ""))
    ]
    return tuple(turns[:-1])


def _parse(line: str, path: Path, number: int) -> Question:
    """A conversation; one that ends before its answer gets an empty one for the corpus reader."""
    try:
        row = json.loads(line)
        key = "messages" if "messages" in row else "conversations"
        turns, open_ended = row[key], False
        if turns[-1].get("role", turns[-1].get("from")) not in (
            "assistant",
            "gpt",
            "bot",
            "chatgpt",
            "model",
        ):
            row[key], open_ended = [*turns, {"role": "assistant", "content": ""}], True
        row.pop("finish_reason", None)
        found = parse(json.dumps(row).encode(), source=path.name, line=number)
        if isinstance(found, TokenRow):
            raise BadRow("tokens", "expected a conversation")
    except BadRow as error:
        raise ValueError(f"{path}:{number}: {error}") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{path}:{number}: expected 'turns' or a conversation as JSON ({error})") from None
    given = tuple(found.messages[:-1] if open_ended else found.messages)
    return Question(str(row.get("id", f"{path.stem}-{number}")), given, found.tools)

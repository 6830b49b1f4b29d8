"""Conversation -> Samples: the chat template as served, and which tokens the target itself would generate.

A span is found by rendering alone: the turns before an answer with the generation prompt must be a token
prefix of the turns up to the answer; what follows that prefix, up to and with the end-of-turn token, is the
span. No text is searched and no {% generation %} tag is read. Knows nothing of files and models.

With one byte a token, [user "hi", assistant "yo"] in ChatML:
    <|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n yo<|im_end|> \\n
    prompt, 21 tokens                                       span, 3     glue, 1
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import jinja2
import torch

from spectrain.data.corpus import BadRow, Conversation, TokenRow
from spectrain.data.packing import Sample


@dataclass(frozen=True)
class Turn:
    """An answer as rendered: `ids` end with it, `ids[start:stop]` is its span, messages[index] its text."""

    index: int
    ids: list[int]
    start: int
    stop: int


class Chat:
    """A tokenizer with its chat template and the arguments that the server passes to it.

    stop_ids: further ids that end a turn when served (the target's generation config). Raises ValueError if
    there is no template, or if it writes something after an answer but no end-of-turn token.
    """

    def __init__(
        self,
        tokenizer,
        *,
        max_length: int,
        min_supervised: int,
        template_arguments: dict[str, Any],
        stop_ids: Sequence[int] = (),
    ):
        if not tokenizer.chat_template:
            raise ValueError("target.path: its tokenizer has no chat template")
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.min_supervised = min_supervised
        self.template_arguments = template_arguments
        self.end_ids = {*stop_ids, tokenizer.eos_token_id} - {None}
        self.end_ids |= self._end_of_turn()

    def samples(self, conversation: Conversation) -> tuple[list[Sample], Counter[str]]:
        """Samples of a conversation, one if its template only appends, and how many of what was dropped.

        Turns: unstable_turn (the prompt is no prefix of prompt and answer), turn_beyond_max_length. Samples
        with fewer than `min_supervised` supervised tokens: too_short, or truncated if max_length is why;
        shortened ones are kept without their end. Raises BadRow if the template refuses the conversation.
        """
        turns, drops = self._turns(conversation)
        rows = _rows(turns, self.end_ids)
        drops["truncated"] += not rows and drops["turn_beyond_max_length"] > 0
        samples = []
        for row in rows:
            name = conversation.id if len(rows) == 1 else f"{conversation.id}#{row[-1].index}"
            spans = [(turn.start, turn.stop) for turn in row]
            samples += _fit(name, row[-1].ids, spans, drops, self.max_length, self.min_supervised)
        return samples, +drops

    def _turns(self, conversation: Conversation) -> tuple[list[Turn], Counter[str]]:
        """The answers to supervise; a leading assistant turn is context, since no prompt precedes it."""
        messages, tools = conversation.messages, conversation.tools
        answers = [i for i, m in enumerate(messages) if i and m["role"] == "assistant"]
        turns: list[Turn] = []
        drops: Counter[str] = Counter()
        for k, i in enumerate(answers):
            prompt = self._encode(messages[:i], tools=tools, ask=True)
            if len(prompt) >= self.max_length:
                drops["turn_beyond_max_length"] = len(answers) - k
                break
            ids = self._encode(messages[: i + 1], tools=tools, ask=False)
            if ids[: len(prompt)] != prompt:
                drops["unstable_turn"] += 1
                continue
            end = next((j for j in range(len(prompt), len(ids)) if ids[j] in self.end_ids), None)
            stop = len(ids) if end is None else end + 1
            if conversation.cut and i == answers[-1]:
                stop = len(ids) if end is None else end
                ids = ids[:stop]
            turns.append(Turn(i, ids, len(prompt), stop))
        return turns, drops

    def _encode(self, messages: list[dict], *, tools: list[dict] | None, ask: bool) -> list[int]:
        """Token ids as served, with the generation prompt if `ask`; special tokens come from the template."""
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=ask,
                **self.template_arguments,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise BadRow("template_error", str(error)) from error
        return self.tokenizer.encode(text, add_special_tokens=False, verbose=False)

    def _end_of_turn(self) -> set[int]:
        """The first special token after an answer: what ends two different answers, the template adds."""
        user = {"role": "user", "content": "a"}
        short, long = (
            self._encode([user, {"role": "assistant", "content": content}], tools=None, ask=False)
            for content in ("b", "b c")
        )
        same = takewhile(lambda pair: pair[0] == pair[1], zip(reversed(short), reversed(long), strict=False))
        added = [token for token, _ in same][::-1]
        special = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        end = next((token for token in added if token in special | self.end_ids), None)
        if added and end is None:
            text = self.tokenizer.decode(added)
            raise ValueError(f"target.path: its chat template ends an answer with {text!r}, no special token")
        return set() if end is None else {end}


def token_samples(
    row: TokenRow, *, max_length: int, min_supervised: int, num_ids: int
) -> tuple[list[Sample], Counter[str]]:
    """The sample of a row that holds tokens, and what was dropped; each run of its mask is a span.

    num_ids: one past the tokenizer's largest id; raises BadRow for an id outside.
    """
    outside = next((i for i in row.ids if not 0 <= i < num_ids), None)
    if outside is not None:
        raise BadRow("bad_tokens", f"id {outside}, but the tokenizer's ids are 0 to {num_ids - 1}")
    edges = [i for i, m in enumerate(row.mask) if m != (i > 0 and row.mask[i - 1])] + [len(row.mask)]
    drops: Counter[str] = Counter()
    spans = list(zip(edges[::2], edges[1::2], strict=False))
    return _fit(row.id, row.ids, spans, drops, max_length, min_supervised), +drops


def _fit(
    name: str,
    ids: list[int],
    spans: list[tuple[int, int]],
    drops: Counter[str],
    max_length: int,
    min_supervised: int,
) -> list[Sample]:
    """The sample cut at `max_length`, or none with its reason counted in `drops`."""
    length = min(len(ids), max_length)
    span_ids = torch.full((length,), -1, dtype=torch.int32)
    for k, (start, stop) in enumerate(spans):
        span_ids[start:stop] = k
    loss_mask = span_ids >= 0
    if int(loss_mask.sum()) < min_supervised:
        whole = sum(stop - start for start, stop in spans)
        drops["too_short" if whole < min_supervised else "truncated"] += 1
        return []
    drops["shortened"] += length < len(ids)
    return [Sample(name, torch.tensor(ids[:length], dtype=torch.int32), loss_mask, span_ids)]


def _rows(turns: Sequence[Turn], end_ids: set[int]) -> list[list[Turn]]:
    """Group turns whose prompt and span are, token for token, the beginning of a later turn's row.

    A template that only appends gives one row; one that rewrites history gives one row per answer that it
    rewrites. Where the next role's header is the end-of-turn token (GLM), a later turn shows it and it joins
    the span.
    """
    rows: list[list[Turn]] = []
    for turn in reversed(turns):
        ids = rows[-1][-1].ids if rows else []
        if ids[: turn.stop] == turn.ids[: turn.stop]:
            if ids[turn.stop - 1] not in end_ids and end_ids.intersection(ids[turn.stop : turn.stop + 1]):
                turn = replace(turn, stop=turn.stop + 1)
            rows[-1].insert(0, turn)
        else:
            rows.append([turn])
    return rows[::-1]

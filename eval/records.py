"""What a run leaves on disk: for each text both arms' tokens, the rounds and the seconds, one JSON line each.

Every number of the report is computed from these lines (`counters`), so that none needs decoding again. Knows
nothing of models.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spectrain.artifacts import write_bytes
from spectrain.decode.generation import Generation, Round, Timing
from spectrain.eval.prompts import Prompt
from spectrain.metrics import Counters, after_cut, count


@dataclass(frozen=True)
class Text:
    """One answer, decoded speculatively and plainly from the same prompt.

    unit: what the bootstrap draws as a whole, the prompt or the batch that was timed together. The timings
    are the batch's divided by its texts.
    """

    id: str
    category: str
    turn: int
    unit: int
    speculative: Generation
    plain: Generation
    timing: Timing
    plain_timing: Timing


def share(timing: Timing, texts: int) -> Timing:
    """Each text's equal part of a batch's seconds and steps."""
    return Timing(**{name: value / texts for name, value in asdict(timing).items()})


def counters(texts: Sequence[Text], *, slots: int) -> Counters:
    """The sums behind the numbers of a run; tokens of the prefill are left out on both sides."""
    return count(
        [t.speculative.rounds for t in texts],
        slots=slots,
        timing={
            "decode_s": [t.timing.decode_s for t in texts],
            "draft_s": [t.timing.draft_s for t in texts],
            "verify_s": [t.timing.verify_s for t in texts],
            "steps": [t.timing.steps for t in texts],
            "draft_steps": [t.timing.draft_steps for t in texts],
            "plain_s": [t.plain_timing.decode_s for t in texts],
            "plain_steps": [t.plain_timing.steps for t in texts],
            "plain_tokens": [len(t.plain.ids) - 1 for t in texts],
        },
    )


def write_texts(path: Path, texts: Iterable[Text]) -> None:
    write_bytes(path, "".join(json.dumps(_to_json(text)) + "\n" for text in texts).encode())


def write_events(path: Path, texts: Iterable[Text]) -> None:
    """One JSON line per verification, in the order of the texts (docs/formats.md)."""
    rows = (
        {"id": text.id, "turn": text.turn, "round": number, **asdict(event)}
        for text in texts
        for number, event in enumerate(text.speculative.events)
    )
    write_bytes(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def read_texts(path: Path) -> list[Text]:
    """The texts of a finished run; raises ValueError naming file and line when one is damaged."""
    if not path.exists():
        raise ValueError(f"{path}: no such file")
    texts = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            texts.append(_from_json(json.loads(line)))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: damaged record ({error!r})") from None
    return texts


def _to_json(text: Text) -> dict:
    row = asdict(text)
    for arm in ("speculative", "plain"):
        del row[arm]["orders"], row[arm]["events"]  # the certificate's alone, and a file of their own
    row["speculative"]["rounds"] = [list(asdict(r).values()) for r in text.speculative.rounds]
    return row


def _from_json(row: dict) -> Text:
    return Text(
        **{
            **row,
            "speculative": _generation(row["speculative"]),
            "plain": _generation(row["plain"]),
            "timing": Timing(**row["timing"]),
            "plain_timing": Timing(**row["plain_timing"]),
        }
    )


def _generation(row: dict) -> Generation:
    rounds = (
        Round(drafted, depth, accepted, emitted, tuple(alphas), bonus_cut)
        for drafted, depth, accepted, emitted, alphas, bonus_cut in row["rounds"]
    )
    return Generation(
        prompt_ids=tuple(row["prompt_ids"]),
        ids=tuple(row["ids"]),
        finish_reason=row["finish_reason"],
        rounds=tuple(rounds),
        lossless=row["lossless"],
    )


def shown(tokenizer, prompts: Sequence[Prompt], texts: Sequence[Text]) -> list[dict[str, Any]]:
    """The first text of each category as [piece, whether a draft token wrote it] pairs, for the report to
    show."""
    asked = {prompt.id: prompt.turns[0] for prompt in prompts}
    first = {text.category: text for text in reversed(texts) if text.turn == 0}
    return [
        {
            "id": t.id,
            "category": category,
            "prompt": asked[t.id],
            "pieces": _pieces(tokenizer, t.speculative),
        }
        for category, t in sorted(first.items())
    ]


def _pieces(tokenizer, text: Generation) -> list[list]:
    drafted = [False]  # the prefill's token
    for record in text.rounds:
        accepted = after_cut(record)[0]
        drafted += [True] * accepted + [False] * (record.emitted - accepted)
    pieces: list[list] = []
    text_so_far = ""
    for i, is_draft in enumerate(drafted):
        so_far = tokenizer.decode(text.ids[: i + 1], skip_special_tokens=True)
        if so_far.endswith("\N{REPLACEMENT CHARACTER}"):  # half of a character; the next token completes it
            continue
        pieces.append([so_far[len(text_so_far) :], is_draft])
        text_so_far = so_far
    return pieces

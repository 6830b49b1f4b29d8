"""The counts of a prepared corpus as a table: at most 80 columns, so that a terminal and a log show it whole.

Knows nothing of how rows are read or rendered, but the names of what they are dropped for.
"""

from typing import Any

WIDTH = 80
ADVICE = {
    "bad_json": "the line is no JSON",
    "bad_utf8": "the line is no UTF-8 text",
    "not_object": "a row must be an object",
    "no_turns": "messages, conversations, or prompt with response",
    "no_assistant": "no answer after the first turn",
    "bad_turn": "a turn must be an object",
    "bad_content": "the content of a turn must be a text",
    "bad_tool_call": "a call needs a name and an object of arguments",
    "bad_tools": "tools must be a list of objects",
    "bad_tokens": "input_ids and loss_mask, equally long, ids of the tokenizer",
    "cut_before_answer": "a length limit left no answer",
    "template_error": "the chat template refuses the conversation",
    "too_short": "fewer supervised tokens than corpus.min_supervised",
    "truncated": "corpus.max_length leaves too little of the answer",
    "turn_beyond_max_length": "turns whose prompt alone fills corpus.max_length",
    "shortened": "kept, but corpus.max_length cuts the end",
    "unstable_turn": "the template's prompt is no prefix of prompt and answer",
}


def table(summary: dict[str, Any]) -> list[str]:
    """Lines of at most WIDTH columns: rows, rejects with the first of each reason, drops, samples, tokens."""
    lines = fold("corpus    ", ", ".join(summary["files"]))
    lines.append(
        f"rows      {summary['read']:>12,} read {summary['kept']:>12,} kept {summary['blank']:>8,} blank"
    )
    for reason, count in summary["rejected"].items():
        place, detail = summary["first"][reason]
        lines += fold(f"rejected  {count:>12,} ", f"{reason}: {advice(reason)}")
        lines += fold(" " * 23, f"first {place}: {detail}")
    for reason, count in summary["dropped"].items():
        lines += fold(f"dropped   {count:>12,} ", f"{reason}: {advice(reason)}")
    if summary["cut"]:
        lines.append(
            f"cut       {summary['cut']:>12,} answers stopped by a length limit, without an end token"
        )
    for key in ("samples", "tokens", "supervised"):
        lines.append(f"{key:10}{summary[key]['train']:>12,} train {summary[key]['eval']:>11,} held out")
    return lines


def advice(reason: str) -> str:
    return ADVICE.get(reason, "a role that no conversation has")


def fold(head: str, text: str) -> list[str]:
    """`text` behind `head`, on as many lines of WIDTH columns as it needs."""
    import textwrap

    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_on_hyphens=False,
    ) or [head]

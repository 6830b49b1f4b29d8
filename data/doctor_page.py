"""The doctor's page: samples with their supervised tokens marked, counts and findings, in 80 columns.

Without colours the marks are {+ and +}. Knows nothing of how a corpus is judged.
"""

import unicodedata
from collections import Counter
from itertools import groupby
from typing import Any

import torch

from spectrain.data.doctor import Diagnosis, Facts
from spectrain.data.packing import Sample
from spectrain.data.summary import WIDTH, fold, table

GREEN, PLAIN = "\033[32m", "\033[0m"
LONGEST = 600  # characters of a run of text that are shown whole
INDENT = "  "


def page(
    diagnosis: Diagnosis, summary: dict[str, Any], tokenizer, kept: int, *, colour: bool, tokens: bool
) -> str:
    """Everything as text. kept: number of draft ids; colour: mark by colour; tokens: show samples token by
    token."""
    lines = ["CORPUS", *table(summary), "", "SAMPLES"]
    for name, facts in (("training", diagnosis.train), ("held out", diagnosis.eval)):
        lines += [f"{name}", *_counts(facts)] if len(facts.lengths) else [f"{name}  none"]
    lines += ["", "DRAFT VOCABULARY", *_vocabulary(diagnosis, tokenizer, kept), ""]
    mark = "in green" if colour else "between {+ and +}"
    lines += fold("", f"SUPERVISED TOKENS stand {mark}; \\n is a line's end.")
    for sample in diagnosis.shown:
        lines += ["", f"{sample.id}: {len(sample.ids)} tokens, {int(sample.loss_mask.sum())} supervised"]
        show = _token_by_token if tokens else _running
        lines += show(sample, tokenizer, colour)
    lines += ["", "FINDINGS"]
    for finding in sorted(diagnosis.findings, key=lambda finding: not finding.error):
        lines += fold(f"{'ERROR' if finding.error else 'note'}  ", f"{finding.name}: {finding.text}")
    if not diagnosis.findings:
        lines.append("none: nothing is wrong with this corpus")
    return "\n".join(lines)


def _counts(facts: Facts) -> list[str]:
    bos = Counter(facts.bos.tolist()).most_common(4)
    of_bos = ", ".join(f"{count} in {samples:,} samples" for count, samples in bos)
    rows = [("tokens of a sample", _spread(facts.lengths)), ("tokens of a span", _spread(facts.spans))]
    rows += [("spans", f"{len(facts.spans):,}, {facts.unended:,} of them without a stop token at the end")]
    rows += [("BOS of a sample", of_bos), ("copies", f"{facts.copies:,}")]
    return [line for name, text in rows for line in fold(f"{INDENT}{name:20}", text)]


def _spread(numbers: torch.Tensor) -> str:
    ordered = numbers.sort().values
    last = len(ordered) - 1
    low, middle, high = (int(ordered[int(share * last)]) for share in (0.05, 0.5, 0.95))
    return f"{ordered[0]} least, {low} 5%, {middle} median, {high} 95%, {ordered[-1]} most"


def _vocabulary(diagnosis: Diagnosis, tokenizer, kept: int) -> list[str]:
    shares = ", ".join(f"{share:.2%} {name}" for name, share in diagnosis.covered.items())
    lines = fold(INDENT, f"{kept:,} ids hold this share of the supervised tokens: {shares}")
    if diagnosis.missing:
        words = ", ".join(f"{tokenizer.decode([i])!r} {n:,}" for i, n in diagnosis.missing)
        lines += fold(INDENT, f"most frequent outside: {words}")
    return lines


def _running(sample: Sample, tokenizer, colour: bool) -> list[str]:
    """The sample's text; long runs lose their middle."""
    lines = [INDENT]
    for span, run in groupby(zip(sample.span_ids.tolist(), sample.ids.tolist(), strict=True), lambda t: t[0]):
        text = _printable(tokenizer.decode([token for _, token in run]))
        if len(text) > LONGEST:
            left_out = len(text) - LONGEST
            text = f"{text[: LONGEST // 2]}[.. {left_out} characters ..]{text[-LONGEST // 2 :]}"
        if span >= 0 and not colour:
            text = f"{{+{text}+}}"
        _wrap(lines, text, colour and span >= 0)
    return [line for line in lines if line.strip()]


def _wrap(lines: list[str], text: str, green: bool) -> None:
    """Add `text` to the last line and, where WIDTH ends or a line's end is shown, to new ones."""
    room = WIDTH - _columns(lines[-1].replace(GREEN, "").replace(PLAIN, ""))
    piece = ""

    def close() -> None:
        nonlocal piece
        lines[-1] += f"{GREEN}{piece}{PLAIN}" if green and piece else piece
        piece = ""

    for part in text.replace("\\n", "\\n\0").split("\0"):
        for sign in part:
            if (width := _columns(sign)) > room:
                close()
                lines.append(INDENT)
                room = WIDTH - len(INDENT)
            piece += sign
            room -= width
        if part.endswith("\\n"):
            close()
            lines.append(INDENT)
            room = WIDTH - len(INDENT)
    close()


def _token_by_token(sample: Sample, tokenizer, colour: bool) -> list[str]:
    """Place, id, span and text of each token, one a line."""
    lines = [f"{INDENT}{'place':>6} {'id':>8} {'span':>5}  text"]
    for place, (token, span) in enumerate(zip(sample.ids.tolist(), sample.span_ids.tolist(), strict=True)):
        text = _printable(tokenizer.decode([token]))[:50]
        inside = span >= 0
        head = f"{INDENT}{place:>6} {token:>8} {span if inside else '':>5}  "
        if inside:
            text = f"{GREEN}{text}{PLAIN}" if colour else f"{{+{text}+}}"
        lines.append(head + text)
    return lines


def _printable(text: str) -> str:
    """Line ends and control characters as their escapes, a backslash of the text itself as it is."""
    signs = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return "".join(
        signs.get(sign) or (f"\\x{ord(sign):02x}" if unicodedata.category(sign) == "Cc" else sign)
        for sign in text
    )


def _columns(text: str) -> int:
    """Columns of a terminal that `text` takes: two for a wide sign, none for a combining one."""
    return sum(
        0 if unicodedata.combining(sign) else 1 + (unicodedata.east_asian_width(sign) in "WF")
        for sign in text
    )

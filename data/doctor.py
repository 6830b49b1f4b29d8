"""The doctor stage: what a drafter would be trained on, shown and counted, and what is wrong with it.

Reads what the prepare stage wrote and nothing else. A note names a loss; an error names what cannot train or
would train on text that is never served. Knows no model; `data/doctor_page.py` lays the page out.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from spectrain.data.packing import Sample
from spectrain.data.prepare import Prepared, Samples
from spectrain.data.summary import advice

OPENING = 8
LOW_COVERAGE = 0.9  # below it a perfect drafter loses a tenth of its acceptance


@dataclass(frozen=True)
class Finding:
    """name: what it is counted by; error: whether training must not start."""

    name: str
    text: str
    error: bool = False


@dataclass(frozen=True)
class Facts:
    """Of the samples of one split or both. lengths, bos int64 [S]: tokens, and ids of the tokenizer's BOS, of
    each sample; spans int64 [N]: tokens of each span. double_bos: samples that begin with BOS twice; unended:
    spans that no stop token ends; opening: the tokens that every span begins with, at most OPENING; copies:
    samples whose tokens an earlier one has too; counts: how often each id is supervised."""

    lengths: torch.Tensor
    spans: torch.Tensor
    bos: torch.Tensor
    double_bos: list[str]
    unended: int
    opening: list[int]
    copies: int
    counts: torch.Tensor


@dataclass(frozen=True)
class Diagnosis:
    train: Facts
    eval: Facts
    covered: dict[str, float]
    missing: list[tuple[int, int]]
    findings: list[Finding]
    shown: list[Sample]

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.error]


def examine(
    prepared: Prepared,
    *,
    bos_id: int | None,
    end_ids: Iterable[int],
    kept_ids: torch.Tensor,
    max_tokens: int,
    num_shown: int,
) -> Diagnosis:
    """Count and judge a prepared corpus.

    bos_id: the tokenizer's, None without one. end_ids: tokens that end an answer. kept_ids: int64 [W], the
    draft vocabulary. max_tokens: the longest sample that training can hold. num_shown: training samples to
    show, the first, the last and the middle one.
    """
    ends = torch.tensor(sorted(end_ids), dtype=torch.int64)
    size = len(prepared.counts)
    train, held_out = (_facts(s, bos_id, ends, size) for s in (prepared.train, prepared.eval))
    inside = torch.zeros(size, dtype=torch.bool)
    inside[kept_ids[kept_ids < size]] = True
    covered = {
        name: int(facts.counts[inside].sum()) / int(facts.counts.sum())
        for name, facts in (("train", train), ("held out", held_out))
        if facts.counts.sum()
    }
    outside = torch.where(inside, 0, train.counts)
    top = outside.topk(min(5, size))
    missing = [(int(i), int(n)) for n, i in zip(top.values, top.indices, strict=True) if n]
    findings = [
        *_lost_rows(prepared),
        *_double_bos(train.double_bos + held_out.double_bos),
        *_wrong_samples(train, max_tokens),
        *_thin(covered),
    ]
    places = {1: [0], 2: [0, -1], 3: [0, len(prepared.train) // 2, -1]}[num_shown]
    shown = [prepared.train[i] for i in dict.fromkeys(i % len(prepared.train) for i in places)]
    return Diagnosis(train, held_out, covered, missing, findings, shown)


def _lost_rows(prepared: Prepared) -> list[Finding]:
    """A note for every reason for which rows, turns or samples are missing."""
    summary = prepared.summary
    found = [
        Finding(reason, f"{count} rejected, the first at {summary['first'][reason][0]}: {advice(reason)}")
        for reason, count in summary["rejected"].items()
    ]
    found += [Finding(reason, f"{n}: {advice(reason)}") for reason, n in summary["dropped"].items()]
    if summary["cut"]:
        found.append(
            Finding("cut", f"{summary['cut']} answers were stopped by a length limit (finish_reason)")
        )
    if not len(prepared.eval):
        found.append(Finding("nothing_held_out", "no sample is held out (corpus.eval_fraction)"))
    return found


def _double_bos(names: list[str]) -> list[Finding]:
    if not names:
        return []
    text = f"{len(names)} samples begin with BOS twice, the first is {names[0]}"
    return [Finding("bos_twice", f"{text}: they were tokenised with a second one in front", True)]


def _wrong_samples(facts: Facts, max_tokens: int) -> list[Finding]:
    found = []
    longest = int(facts.lengths.max())
    if longest > max_tokens:
        number = int((facts.lengths > max_tokens).sum())
        text = f"{number} samples are longer than train.micro_tokens={max_tokens}, the longest has {longest}"
        found.append(Finding("too_long", f"{text}: lower corpus.max_length or raise it", True))
    if facts.unended == len(facts.spans):
        text = "no answer ends with a stop token: a drafter would never learn to stop"
        found.append(Finding("no_end_token", text, True))
    elif facts.unended:
        text = f"{facts.unended} of {len(facts.spans)} answers end without a stop token"
        found.append(Finding("unended", f"{text}: cut by a length limit, or their mask leaves it out"))
    if len(facts.opening) > 1 and len(facts.spans) > 1:
        text = f"every answer begins with the same {len(facts.opening)} tokens {facts.opening}"
        found.append(
            Finding("same_opening", f"{text}: does the server write them (corpus.template_arguments)?")
        )
    if facts.copies:
        text = f"{facts.copies} training samples are copies of another"
        found.append(Finding("copies", f"{text}: they weigh more than once"))
    return found


def _thin(covered: dict[str, float]) -> list[Finding]:
    share = covered["train"]
    if share == 0:
        text = "the draft vocabulary holds none of the supervised tokens (drafter.draft_vocab)"
        return [Finding("no_coverage", text, True)]
    if share < LOW_COVERAGE:
        text = f"the draft vocabulary holds {share:.1%} of the supervised tokens: every other is a rejection"
        return [Finding("low_coverage", f"{text} (drafter.draft_vocab)")]
    return []


def _facts(samples: Samples, bos_id: int | None, end_ids: torch.Tensor, size: int) -> Facts:
    """Counts of the samples, shard by shard; size: one past the largest id."""
    none = torch.empty(0, dtype=torch.int64)
    lengths, spans, bos, openings = [none], [none], [none], []
    double_bos: list[str] = []
    counts, unended = torch.zeros(size, dtype=torch.int64), 0
    seen: Counter[int] = Counter()
    for k, shard in enumerate(samples.shards):
        ids, span_ids, offsets = shard["ids"].long(), shard["span_ids"].long(), shard["offsets"]
        lengths.append(offsets.diff())
        is_bos = ids == bos_id if bos_id is not None else torch.zeros_like(ids, dtype=torch.bool)
        before = torch.cat([torch.zeros(1, dtype=torch.int64), is_bos.long().cumsum(0)])
        bos.append(before[offsets[1:]] - before[offsets[:-1]])
        second = (offsets[:-1] + 1).clamp(max=len(ids) - 1)
        twice = is_bos[offsets[:-1]] & is_bos[second] & (lengths[-1] > 1)
        double_bos += [samples.names[samples.starts[k] + i] for i in twice.nonzero()[:, 0].tolist()]
        counts += torch.bincount(ids[span_ids >= 0], minlength=size)
        starts, stops = _spans(span_ids, offsets)
        spans.append(stops - starts)
        unended += int((~torch.isin(ids[stops - 1], end_ids)).sum())
        openings.append(
            _opening(
                [
                    ids[a:b].tolist()
                    for a, b in zip(starts.tolist(), (starts + OPENING).minimum(stops).tolist(), strict=True)
                ]
            )
        )
        seen.update(hash(ids[a:b].numpy().tobytes()) for a, b in zip(offsets, offsets[1:], strict=False))
    return Facts(
        torch.cat(lengths),
        torch.cat(spans),
        torch.cat(bos),
        double_bos,
        unended,
        _opening(openings),
        seen.total() - len(seen),
        counts,
    )


def _spans(span_ids: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First token of each span of a shard, and one past its last; both int64 [N]."""
    document_ids = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
    key = document_ids * 2**16 + span_ids
    edge = torch.cat([torch.ones(1, dtype=torch.bool), key.diff() != 0])
    starts = edge.nonzero()[:, 0]
    stops = torch.cat([starts[1:], torch.tensor([len(key)])])
    is_span = span_ids[starts] >= 0
    return starts[is_span], stops[is_span]


def _opening(texts: list[list[int]]) -> list[int]:
    """The tokens that all of them begin with."""
    first, last = min(texts, default=[]), max(texts, default=[])
    return [a for k, (a, b) in enumerate(zip(first, last, strict=False)) if first[: k + 1] == last[: k + 1]]

"""The greedy half of the certificate: speculative text equals plain text token for token, and plain text is
the arg-max of a plain forward over the finished text, with nothing cached.

Knows no drafter's insides and no file. Legend: M places, V vocabulary.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from spectrain.config import EvalConfig
from spectrain.decode.generation import Generation
from spectrain.decode.penalties import Penalties, along_text
from spectrain.decode_settings import DecodeRunConfig
from spectrain.eval.progress import progress_bar
from spectrain.eval.records import Text
from spectrain.eval.speed import EngineArm, sampling_of
from spectrain.proposal import Drafter
from spectrain.target import Target, packed_layout

MARGIN = 1e-4
"""Logit gap below which float32 arithmetic may decide a greedy token either way."""
BF16_STEPS = 4
"""The same for bfloat16, in units of its step at the logit of largest size.

On SmolLM2, calls of one token against calls of six change the gap of the two largest logits by 0.5 steps at
the median, 2.6 at the 99th percentile and 3 at most (144 places, CPU, 2026-11).
"""
BATCH = 24
"""Texts decoded at once; losslessness may not depend on it."""
CHUNK = 64
"""Places whose laws are held at once."""


@dataclass(frozen=True)
class Difference:
    """A greedy token that is not the expected one.

    text: id of the prompt; place: index among the emitted tokens, where both texts are equal up to; expected,
    found: token ids; margin: how far the lower of the two lies below the largest logit of the plain forward;
    bound: the margin below which this is a tie.
    """

    text: str
    place: int
    expected: int
    found: int
    margin: float
    bound: float

    @property
    def is_tie(self) -> bool:
        return self.margin < self.bound


@dataclass(frozen=True)
class Question:
    """A prompt ready to decode; key: the stable number that its random numbers hang on."""

    id: str
    ids: tuple[int, ...]
    key: int


def greedy_certificate(
    target: Target,
    drafters: Mapping[str, Drafter],
    questions: Sequence[Question],
    config: EvalConfig,
    runs: Sequence[DecodeRunConfig],
    *,
    batch: int = BATCH,
) -> dict:
    """Each run's proposals in greedy decoding against plain decoding, in the target's dtype.

    Takes config.greedy_prompts prompts of config.greedy_tokens tokens each, and more prompts where texts stop
    early; batch: texts decoded at once.
    """
    wanted = config.greedy_prompts * config.greedy_tokens
    differences: list[Difference] = []
    ties: list[dict] = []
    compared = dict.fromkeys((run.name for run in runs), 0)
    baselines = {penalties_of(run): run for run in reversed(runs)}
    plain_tokens = dict.fromkeys(baselines, 0)
    used = 0
    progress = progress_bar("certificate, greedy", total=wanted * (len(baselines) + len(runs)), unit="token")
    while used < len(questions) and (used < config.greedy_prompts or min(plain_tokens.values()) < wanted):
        missing = math.ceil((wanted - min(plain_tokens.values())) / config.greedy_tokens)
        part = questions[used : used + (min(BATCH, missing) if used else config.greedy_prompts)]
        used += len(part)
        limits = (config.greedy_tokens, batch)
        plain = {p: _decode(target, None, part, run, *limits) for p, run in baselines.items()}
        for penalties, texts in plain.items():
            for question, text in zip(part, texts, strict=True):
                below = not_argmax(target, question.id, text, penalties=penalties)
                ties += [{"run": "plain", **asdict(d)} for d in below if d.is_tie]
                differences += [d for d in below if not d.is_tie]
                plain_tokens[penalties] += len(text.ids)
                progress.update(len(text.ids))
        for run in runs:
            found = _decode(target, drafters[run.drafter], part, run, *limits)
            penalties = penalties_of(run)
            for question, text, other in zip(part, plain[penalties], found, strict=True):
                difference = first_difference(target, question.id, text, other, penalties=penalties)
                compared[run.name] += len(text.ids) if difference is None else difference.place + 1
                if difference is not None and difference.is_tie:
                    ties.append({"run": run.name, **asdict(difference)})
                elif difference is not None:
                    differences.append(difference)
            progress.update(sum(len(text.ids) for text in found))
    progress.close()
    return {
        "dtype": "float32",
        "prompts": used,
        "tokens": min(compared.values()),
        "differences": len(differences),
        "difference_list": [asdict(d) for d in differences],
        "ties": ties,
        "margin": MARGIN,
        "plans": [{"proposal": r.proposal, "length": r.length, "tokens": compared[r.name]} for r in runs],
        "pass": not differences and min(plain_tokens.values()) > 0,
    }


def merge(parts: Sequence[dict]) -> dict:
    """One greedy certificate from those of several processes, each of prompts of its own."""
    plans = [
        {**plan, "tokens": sum(part["plans"][i]["tokens"] for part in parts)}
        for i, plan in enumerate(parts[0]["plans"])
    ]
    return {
        **parts[0],
        "prompts": sum(part["prompts"] for part in parts),
        "tokens": min(plan["tokens"] for plan in plans),
        "differences": sum(part["differences"] for part in parts),
        "difference_list": [difference for part in parts for difference in part["difference_list"]],
        "ties": [tie for part in parts for tie in part["ties"]],
        "plans": plans,
        "pass": all(part["pass"] for part in parts),
    }


def compare_run(target: Target, run: DecodeRunConfig, texts: Sequence[Text]) -> dict:
    """First differences between the two arms of a finished greedy run, sorted into ties and real ones."""
    found = []
    for text in texts:
        arms = (text.plain, text.speculative)
        difference = first_difference(target, text.id, *arms, dtype=run.dtype, penalties=penalties_of(run))
        found += [] if difference is None else [difference]
    real = [asdict(d) for d in found if not d.is_tie]
    return {
        "name": run.name,
        "dtype": run.dtype,
        "texts": len(texts),
        "identical": len(texts) - len(found),
        "ties": [asdict(d) for d in found if d.is_tie],
        "differences": len(real),
        "difference_list": real,
    }


def plain_logits(
    target: Target, text: Generation, penalties: Penalties | None
) -> Iterator[tuple[int, torch.Tensor]]:
    """(first, penalised logits float32 [M, V]) of the places first .. first + M - 1 of a text, from one fresh
    forward over it."""
    ids = torch.tensor([*text.prompt_ids, *text.ids[:-1]], device=target.device)
    positions = torch.arange(len(ids), device=target.device)
    final = target.states(ids, positions, packed_layout((0, len(ids)))).final[len(text.prompt_ids) - 1 :]
    for first in range(0, len(final), CHUNK):
        logits = target.logits(final[first : first + CHUNK]).float()
        if penalties is not None:
            logits = along_text(logits, text.prompt_ids, text.ids, first, penalties)
        yield first, logits


def first_difference(
    target: Target,
    name: str,
    plain: Generation,
    found: Generation,
    *,
    dtype: str = "float32",
    penalties: Penalties | None = None,
) -> Difference | None:
    """Where a greedy text leaves the plain one, both decoded in `dtype`; None if they are equal."""
    if plain.ids == found.ids:
        return None
    shorter = min(len(plain.ids), len(found.ids))
    place = next((i for i in range(shorter) if plain.ids[i] != found.ids[i]), shorter)
    if place == shorter:  # one goes on where the other ends: a wrong stop, which no tie excuses
        return Difference(name, place, -1, -1, math.inf, 0.0)
    chunks = plain_logits(target, plain, penalties)
    first, logits = next((f, rows) for f, rows in chunks if place < f + len(rows))
    row, a, b = logits[place - first], plain.ids[place], found.ids[place]
    margin = (row.max() - torch.minimum(row[a], row[b])).item()
    bound = MARGIN if dtype == "float32" else BF16_STEPS * bf16_step(row.abs().max().item())
    return Difference(name, place, a, b, margin, bound)


def not_argmax(
    target: Target, name: str, text: Generation, *, penalties: Penalties | None = None
) -> list[Difference]:
    """Tokens of a float32 greedy text that lie below the largest logit of the plain forward."""
    wrong = []
    for first, logits in plain_logits(target, text, penalties):
        found = torch.tensor(text.ids[first : first + len(logits)], device=logits.device)
        best = logits.max(-1)
        gaps = best.values - logits.gather(-1, found[:, None])[:, 0]
        for i in (gaps > 0).nonzero()[:, 0].tolist():
            expected = int(best.indices[i])
            wrong.append(Difference(name, first + i, expected, int(found[i]), gaps[i].item(), MARGIN))
    return wrong


def bf16_step(logit: float) -> float:
    """Distance of neighbouring bfloat16 numbers, which keep 8 bits: 0.0625 from 8 to 16."""
    return 2.0 ** (math.floor(math.log2(abs(logit))) - 7)


def penalties_of(run: DecodeRunConfig) -> Penalties | None:
    return sampling_of(run, seed=0).penalties


def _decode(
    target: Target,
    drafter: Drafter | None,
    questions: Sequence[Question],
    run: DecodeRunConfig,
    tokens: int,
    batch: int,
) -> list[Generation]:
    arm = EngineArm(target, drafter, run, tokens, batch, seed=0)
    return arm.decode([q.ids for q in questions], [q.key for q in questions])[0]

"""The certificate of losslessness: is decoded text what the target alone would have written?

The target's laws come from an independent plain forward over the finished text, with nothing cached, never
from the engine. greedy: speculative text equals plain text token for token, and plain text is the arg-max of
the plain forward. sampling: the tests of `eval/pit.py`, one of which has the engine's word: whether drafts
were accepted as often as it says they should be. Knows no drafter's insides and no file.
Legend: M places, V vocabulary.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from spectrain.config import EvalConfig
from spectrain.decode.generation import Generation
from spectrain.decode.penalties import Penalties, along_text
from spectrain.decode.sampling import Sampling
from spectrain.decode_settings import DecodeRunConfig
from spectrain.eval.pit import acceptance, serial_correlation, transform, uniformity
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
BOUNDARY = 1e-3
"""Distance within which rounding may move a token across a filter's edge: cumulative mass for top-p, log
probability for filters that compare tokens (top-k)."""
LEVEL = 1e-4
"""Bonferroni-corrected p-value below which the sampling certificate fails."""
BATCH = 24
"""Texts decoded at once; losslessness may not depend on it."""
CHUNK = 64
"""Places whose laws are held at once."""
KEYS = 1 << 32
"""Above every prompt's key: sets the random numbers of one pass through the prompts apart from the next's."""


class CertificateFailed(Exception):
    """Decoded text is not the target's; the command exits with code 3."""


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


def certify(
    target: Target,
    drafters: Mapping[str, Drafter],
    questions: Sequence[Question],
    config: EvalConfig,
    texts: Mapping[str, Sequence[Text]],
) -> dict:
    """The certificate of all runs as a JSON-like dict; `target` must be float32.

    Runs of a lossy law are named and not tested, so they neither pass nor fail it.

    drafters: those of the runs by `run.drafter`. texts: by name of the run, what the greedy runs decoded, in
    whatever dtype.
    """
    assert target.dtype == torch.float32, target.dtype
    began = time.perf_counter()
    greedy_runs = [run for run in config.runs if run.temperature == 0]
    sampled_runs = [run for run in config.runs if run.temperature > 0 and not run.lossy]

    def check_greedy() -> dict:
        plans: dict[tuple, DecodeRunConfig] = {}
        for run in greedy_runs:
            shape = (run.drafter, run.proposal, run.length, run.nodes, run.top_k, run.law)
            plans.setdefault((*shape, str((run.paths, run.costs)), _penalties(run)), run)
        greedy = greedy_certificate(target, drafters, questions, config, list(plans.values()))
        greedy["runs"] = [compare_run(target, run, texts[run.name]) for run in greedy_runs]
        greedy["pass"] = greedy["pass"] and not any(run["differences"] for run in greedy["runs"])
        return greedy

    checks: list[tuple[str, Callable[[], dict]]] = []
    if greedy_runs:
        checks.append(("greedy", check_greedy))
    if sampled_runs:
        checks.append(
            ("sampling", lambda: sampling_certificate(target, drafters, questions, config, sampled_runs))
        )
    process = PartialState()  # several processes share the checks
    found = [(name, check()) for name, check in checks[process.process_index :: process.num_processes]]
    results = dict(gather_object(found))
    return {
        "greedy": results.get("greedy"),
        "sampling": results.get("sampling"),
        "lossy": [
            {"name": run.name, "law": run.law, "lossless": False, "leniency": run.leniency.of(run.law)}
            for run in config.runs
            if run.lossy
        ],
        "pass": all(result["pass"] for result in results.values()),
        "seconds": time.perf_counter() - began,
    }


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
    baselines = {_penalties(run): run for run in reversed(runs)}
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
            penalties = _penalties(run)
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


def compare_run(target: Target, run: DecodeRunConfig, texts: Sequence[Text]) -> dict:
    """First differences between the two arms of a finished greedy run, sorted into ties and real ones."""
    found = []
    for text in texts:
        arms = (text.plain, text.speculative)
        difference = first_difference(target, text.id, *arms, dtype=run.dtype, penalties=_penalties(run))
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


def sampling_certificate(
    target: Target,
    drafters: Mapping[str, Drafter],
    questions: Sequence[Question],
    config: EvalConfig,
    runs: Sequence[DecodeRunConfig],
) -> dict:
    """The tests of `eval/pit.py` on at least config.sampling_tokens sampled tokens of each run."""
    results = []
    for run in runs:
        drafter, limits = drafters[run.drafter], (config.max_new_tokens, BATCH, config.seed)
        arm = EngineArm(target, drafter, run, *limits, record_orders=True)
        texts: list[Generation] = []
        names: list[str] = []
        wanted, tokens = config.sampling_tokens, 0  # counted here: a bar that is switched off counts nothing
        progress = progress_bar(f"certificate, {run.name}", total=wanted, unit="token")
        while tokens < wanted:
            turn, first = divmod(len(texts), len(questions))
            fewest = math.ceil((wanted - tokens) / config.max_new_tokens)
            part = questions[first : first + min(BATCH, fewest)]
            # Another turn through the prompts draws other texts.
            found, _ = arm.decode([q.ids for q in part], [q.key + turn * KEYS for q in part])
            texts += found
            names += [q.id for q in part]
            tokens += sum(len(text.ids) for text in found)
            progress.update(tokens - progress.n)
        progress.close()
        results.append({"name": run.name, "law": run.law, **examine(target, texts, names, arm.sampling)})
    worst = min(results, key=lambda result: result["p_value"])
    p_value = min(1.0, worst["p_value"] * len(results))
    return {
        "dtype": "float32",
        "tokens": sum(result["tokens"] for result in results),
        "statistic": worst["statistic"],
        "p_value": p_value,
        "level": LEVEL,
        "runs": results,
        "pass": p_value >= LEVEL,
    }


def examine(target: Target, texts: Sequence[Generation], names: Sequence[str], sampling: Sampling) -> dict:
    """Test sampled texts, which carry their orders, against the target's law; names: id of each text.

    The drafter's order sees mass that moves between what it ranks high and low, the target's own order sees a
    wrong temperature even where the drafter knows nothing. p_value: the smallest of the four tests' times
    four, 0 if a token was emitted that the law does not allow.
    """
    draw = np.random.default_rng(sampling.seed).random
    by_draft: list[np.ndarray] = []
    by_target: list[np.ndarray] = []
    impossible: list[dict] = []
    boundary: list[dict] = []
    for name, text in zip(names, texts, strict=True):
        found: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        for first, logits in plain_logits(target, text, sampling.penalties):
            ids = text.ids[first : first + len(logits)]
            p_MV, v_M = sampling.law(logits), draw(len(ids))
            possible = p_MV[range(len(ids)), list(ids)].cpu().numpy() > 0
            orders = text.orders[first : first + len(ids)]
            for parts, order in zip(found, (orders, [None] * len(ids)), strict=True):
                parts.append(transform(p_MV, ids, order, v_M)[possible])
            for i in np.flatnonzero(~possible):
                where = boundary if near_boundary(logits[i], ids[i], sampling) else impossible
                where.append({"text": name, "place": first + int(i), "token": ids[i]})
        by_draft.append(np.concatenate(found[0]))
        by_target.append(np.concatenate(found[1]))
    u = np.concatenate(by_draft)
    tests = {
        "uniformity": uniformity(u),
        "uniformity_by_target": uniformity(np.concatenate(by_target)),
        "serial_correlation": serial_correlation(by_draft),
        "acceptance": acceptance(texts),
    }
    return {
        "tokens": len(u),
        "statistic": tests["uniformity"].statistic,
        "p_value": 0.0 if impossible else min(1.0, len(tests) * min(t.p_value for t in tests.values())),
        **{name: asdict(test) for name, test in tests.items()},
        "histogram": np.histogram(u, bins=20, range=(0, 1))[0].tolist(),
        "impossible": impossible,
        "boundary": boundary,
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


def near_boundary(logits_V: torch.Tensor, token: int, sampling: Sampling) -> bool:
    """Whether `token`, which a filter drops, would be kept if its log probability or top_p were BOUNDARY
    larger."""
    raised = logits_V.clone()
    raised[token] += BOUNDARY * sampling.temperature
    wider = replace(sampling, top_p=min(1.0, sampling.top_p + BOUNDARY))
    return bool(wider.law(raised[None])[0, token] > 0)


def _penalties(run: DecodeRunConfig) -> Penalties | None:
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

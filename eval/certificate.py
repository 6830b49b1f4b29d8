"""The certificate of losslessness: is decoded text what the target alone would have written?

The target's laws come from an independent plain forward over the finished text, with nothing cached, never
from the engine. greedy: `eval/greedy.py`. sampling: the tests of `eval/pit.py`, one of which has the engine's
word: whether drafts were accepted as often as it says they should be. Several processes share the sampled
runs and the prompts of the greedy half. Knows no drafter's insides and no file. Legend: V vocabulary.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from spectrain.config import EvalConfig
from spectrain.decode.generation import Generation
from spectrain.decode.sampling import Sampling
from spectrain.decode_settings import DecodeRunConfig
from spectrain.eval.greedy import (
    BATCH,
    Question,
    compare_run,
    greedy_certificate,
    merge,
    penalties_of,
    plain_logits,
)
from spectrain.eval.pit import acceptance, serial_correlation, transform, uniformity
from spectrain.eval.progress import progress_bar
from spectrain.eval.records import Text
from spectrain.eval.speed import EngineArm
from spectrain.proposal import Drafter
from spectrain.target import Target

BOUNDARY = 1e-3
"""Distance within which rounding may move a token across a filter's edge: cumulative mass for top-p, log
probability for filters that compare tokens (top-k)."""
LEVEL = 1e-4
"""Bonferroni-corrected p-value below which the sampling certificate fails."""
KEYS = 1 << 32
"""Above every prompt's key: sets the random numbers of one pass through the prompts apart from the next's."""


class CertificateFailed(Exception):
    """Decoded text is not the target's; the command exits with code 3."""


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

    plans: dict[tuple, DecodeRunConfig] = {}
    for run in greedy_runs:
        shape = (run.drafter, run.proposal, run.length, run.nodes, run.top_k, run.law)
        plans.setdefault((*shape, str((run.paths, run.costs)), penalties_of(run)), run)
    process = PartialState()
    rank = process.process_index
    owners, load = deal(process.num_processes, [config.sampling_tokens] * len(sampled_runs))
    sampled = [
        sampled_run(target, drafters, questions, config, run)
        for run, owner in zip(sampled_runs, owners, strict=True)
        if owner == rank
    ]
    greedy = []
    if greedy_runs:
        arms = len(plans) + len({penalties_of(run) for run in plans.values()})
        first = questions[: config.greedy_prompts]
        owners, _ = deal(process.num_processes, [config.greedy_tokens * arms] * len(first), load)
        mine = [question for question, owner in zip(first, owners, strict=True) if owner == rank]
        if mine:
            spare = questions[len(first) :][rank :: process.num_processes]
            part = replace(config, greedy_prompts=len(mine))
            greedy = [greedy_certificate(target, drafters, [*mine, *spare], part, list(plans.values()))]
    results = {}
    if parts := [part for found in gather_object([greedy]) for part in found]:
        runs = [compare_run(target, run, texts[run.name]) for run in greedy_runs]
        results["greedy"] = merge(parts) | {"runs": runs}
        results["greedy"]["pass"] &= not any(run["differences"] for run in runs)
    if tested := [result for found in gather_object([sampled]) for result in found]:
        results["sampling"] = judge(tested)
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


def deal(processes: int, costs: Sequence[int], load: Sequence[int] = ()) -> tuple[list[int], list[int]]:
    """The process of each piece of work, the least loaded so far, and the load of each process then; costs
    are tokens to decode. Costs 6, 2, 2, 2, 2 on two processes: [0, 1, 1, 1, 0] and [8, 6]."""
    loads = list(load) or [0] * processes
    owners = []
    for cost in costs:
        owners.append(loads.index(min(loads)))
        loads[owners[-1]] += cost
    return owners, loads


def sampling_certificate(
    target: Target,
    drafters: Mapping[str, Drafter],
    questions: Sequence[Question],
    config: EvalConfig,
    runs: Sequence[DecodeRunConfig],
) -> dict:
    """The tests of `eval/pit.py` on at least config.sampling_tokens sampled tokens of each run."""
    return judge([sampled_run(target, drafters, questions, config, run) for run in runs])


def sampled_run(
    target: Target,
    drafters: Mapping[str, Drafter],
    questions: Sequence[Question],
    config: EvalConfig,
    run: DecodeRunConfig,
) -> dict:
    """One run's texts and what `examine` says of them."""
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
    return {"name": run.name, "law": run.law, **examine(target, texts, names, arm.sampling)}


def judge(results: Sequence[dict]) -> dict:
    """The sampling certificate from the results of its runs."""
    worst = min(results, key=lambda result: result["p_value"])
    p_value = min(1.0, worst["p_value"] * len(results))
    return {
        "dtype": "float32",
        "tokens": sum(result["tokens"] for result in results),
        "statistic": worst["statistic"],
        "p_value": p_value,
        "level": LEVEL,
        "runs": list(results),
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


def near_boundary(logits_V: torch.Tensor, token: int, sampling: Sampling) -> bool:
    """Whether `token`, which a filter drops, would be kept if its log probability or top_p were BOUNDARY
    larger."""
    raised = logits_V.clone()
    raised[token] += BOUNDARY * sampling.temperature
    wider = replace(sampling, top_p=min(1.0, sampling.top_p + BOUNDARY))
    return bool(wider.law(raised[None])[0, token] > 0)

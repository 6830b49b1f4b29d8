"""The evaluation: every run decodes the held-out prompts speculatively and plainly, then the certificate is
made.

    R/eval/runs/NAME/texts.jsonl    one line per text (eval/records.py), manifest.json beside it
    R/eval/runs/NAME/events.jsonl   one line per verification, with eval.events
    R/eval/costs/NAME/              manifest.json with the measured costs of an adaptive run
    R/eval/certificate/             certificate.json, manifest.json
    R/eval/manifest.json            the settings, written last

A run is written when it is finished and reused when nothing that shaped it has changed, so a killed
evaluation goes on with the first unfinished run. Several processes share the prompts of each run and the
checks of the certificate; the first one writes. Knows no family: target and drafter come through the
functions it is given.
"""

import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from spectrain.artifacts import MANIFEST, fingerprint, is_done, read_json, reuse_or_run, write_json
from spectrain.checkpoint import weightless_drafter, weights_print
from spectrain.config import EvalConfig, RunConfig
from spectrain.decode_settings import DecodeRunConfig
from spectrain.eval.certificate import certify
from spectrain.eval.costs import measure_costs
from spectrain.eval.greedy import Question
from spectrain.eval.limit import DraftShape, target_shape
from spectrain.eval.progress import progress_bar
from spectrain.eval.prompts import Prompt, load_prompts, render
from spectrain.eval.records import Text, read_texts, share, shown, write_events, write_texts
from spectrain.eval.report import write_report
from spectrain.eval.speed import Arms, EngineArm, sampling_of
from spectrain.metrics import count, ratios
from spectrain.provenance import provenance
from spectrain.target import Target

FORM = 2
"""Raise when decoding or the certificate changes what it gives: older results are then not reused."""
COST_TOKENS = 32
"""Tokens per prompt that measure the costs of an adaptive run."""
QUEUED = 4
"""Prompts per place of a batch that are decoded as one queue."""
TURNS = 64
"""Above the turns of any prompt: sets the random numbers of a prompt's turns apart."""

log = logging.getLogger(__name__)


def evaluate(
    config: RunConfig,
    load_target: Callable[[str], Target],
    load_drafter: Callable[[Target], Any],
    folder: Path,
) -> None:
    """Decode every run of `config.eval` and certify losslessness; the results go to `folder`, R/eval.

    load_target: dtype to target; load_drafter: target to drafter. Raises CertificateFailed, after the report
    is written, if decoded text is not the target's.
    """
    began = time.perf_counter()
    baseline = config.eval.baseline
    config = replace(config, eval=config.eval.with_baseline(config.drafter.family))
    prompts = load_prompts(config.eval.prompts, limit=config.eval.max_prompts)
    texts: dict[str, list[Text]] = {}
    process = PartialState()
    if process.is_main_process:
        (folder / MANIFEST).unlink(missing_ok=True)  # a report never reads one that is half another's
    # The certificate needs float32, so that dtype comes last; each target is loaded once, one at a time.
    for dtype in sorted({run.dtype for run in config.eval.runs} | {"float32"}, key=lambda d: d == "float32"):
        target = load_target(dtype)
        drafters = {"": load_drafter(target).to(target.dtype)}  # as it is served
        drafters |= other_drafters(config.eval, target, baseline=baseline)
        identity = _identity(config, target, drafters)
        with process.main_process_first():  # which measures and writes; the others read
            config = _priced(config, dtype, target, drafters, prompts, identity, folder / "costs")
        for runs in _by_baseline([run for run in config.eval.runs if run.dtype == dtype]):
            asked = prompts[: runs[0].prompts or None]
            texts |= _decode_runs(config, runs, target, drafters, asked, identity, folder / "runs")
        if dtype == "float32":
            shapes = {
                "target": asdict(target_shape(target)),
                "drafters": {name: asdict(DraftShape(*d.weights_read())) for name, d in drafters.items()},
            }
            passed = _certify(config, target, drafters, texts, identity, folder / "certificate")
        del target, drafters
        gc.collect()
    manifest = {
        "eval": asdict(config.eval),
        "recipe": config.recipe,
        "note": config.note,
        "target": config.target.path,
        "drafter": config.drafter.family,
        "prompts": len(prompts),
        "shapes": shapes,
        "seconds": time.perf_counter() - began,
    }
    if process.is_main_process:
        write_json(folder / MANIFEST, manifest)
        if not passed:
            write_report(folder.parent)


def other_drafters(config: EvalConfig, target: Target, *, baseline: str) -> dict[str, Any]:
    """By family, the drafters without weights that the runs name, `baseline` as eval.baseline.

    Raises ValueError naming the key of a family with weights.
    """
    keys = {run.drafter: f"eval.runs.{run.name}.drafter" for run in config.runs if run.drafter}
    keys |= {baseline: "eval.baseline"} if baseline in keys else {}
    return {family: weightless_drafter(family, target, key=key) for family, key in keys.items()}


def _priced(
    config: RunConfig,
    dtype: str,
    target: Target,
    drafters: Mapping[str, Any],
    prompts: Sequence[Prompt],
    identity: Mapping[str, Any],
    folder: Path,
) -> RunConfig:
    """The settings with the costs of the adaptive runs of `dtype` filled in: as given, read back or measured.

    They are kept, so that an evaluation that goes on, and its certificate, draft as the first part did.
    """
    runs = []
    for run in config.eval.runs:
        if run.adaptive and not run.costs and run.dtype == dtype:
            asked = _questions(config, target, prompts)[: run.batch]
            limits = (COST_TOKENS, run.batch, config.eval.seed)
            plain, fast = (EngineArm(target, one, run, *limits) for one in (None, drafters[run.drafter]))

            def measure(plain=plain, fast=fast, asked=asked) -> dict[str, Any]:
                with _threads(config.eval.threads):  # as the run decodes
                    costs = measure_costs(plain, fast, [q.ids for q in asked], [q.key for q in asked])
                return {"costs": costs}

            settings: dict[str, Any] = {"run": asdict(run), "questions": _print(asked), "limits": limits}
            settings |= {**_of_run(identity, run), "threads": config.eval.threads}
            reuse_or_run(folder / run.name, settings, measure)
            run = replace(run, costs=read_json(folder / run.name / MANIFEST)["costs"])
            log.info("eval: run %s drafts at costs %s", run.name, ", ".join(f"{c:.3f}" for c in run.costs))
        runs.append(run)
    return replace(config, eval=replace(config.eval, runs=runs))


def decode_held_out(
    config: RunConfig, target: Target, drafter: Any, run: DecodeRunConfig
) -> dict[str, float]:
    """tau, alpha and alpha_k of `run` on the first train.eval_prompts prompts: what training asks for.

    Really decoded, in one batch and in the dtype of `target`; nothing is timed or written, so an adaptive run
    drafts its full plan here. Raises ValueError naming the run where it cannot be decoded.
    """
    run = replace(run, adaptive=False, costs=[])
    prompts = load_prompts(config.eval.prompts, limit=config.train.eval_prompts)
    arm = EngineArm(target, drafter, run, config.eval.max_new_tokens, len(prompts), config.eval.seed)
    questions = _questions(config, target, prompts)
    try:
        found, _ = arm.decode([q.ids for q in questions], [q.key for q in questions])
    except ValueError as error:
        raise ValueError(f"eval.runs.{run.name}: {error}") from error
    sums = count([text.rounds for text in found], slots=run.length)
    numbers = ratios(sums.pooled(), length=run.length)
    by_slot = {f"alpha_{k}": alpha for k, alpha in enumerate(numbers["alpha_k"][0]) if alpha == alpha}
    return {
        name: float(value)
        for name, value in {"tau": numbers["tau"][0], "alpha": numbers["alpha"][0], **by_slot}.items()
    }


def decode_in_turns(
    arms: Arms,
    prompts: Sequence[Prompt],
    *,
    batch: int,
    encode: Callable[[Sequence[str], Sequence[str]], Sequence[int]],
    decode: Callable[[Sequence[int]], str],
    title: str,
    queued: int = QUEUED,
) -> list[list[Text]]:
    """Every turn of every prompt with every arm; for each arm but the plain one its texts.

    A batch is kept full from a queue of `queued` prompts per place, as in serving: else the requests with
    long accepted paths leave it to the slow ones. The queue is what is timed together. One batch warms up
    first. encode: user turns and the answers between them to token ids; decode: token
    ids to text. Later turns see the plain arm's answers, so that all arms continue one conversation. Several
    processes decode a share of the prompts each, at the same time, and all get all texts.
    """
    process = PartialState()
    keys = {prompt.id: TURNS * i for i, prompt in enumerate(prompts)}
    ordered = list(prompts) if batch == 1 else sorted(prompts, key=lambda prompt: prompt.category)
    ordered = ordered[process.process_index :: process.num_processes]
    queue = batch if batch == 1 else queued * batch
    groups = [ordered[i : i + queue] for i in range(0, len(ordered), queue)]
    if groups:
        first = groups[0][:batch]
        arms.warm_up([encode(p.turns[:1], []) for p in first], [keys[p.id] for p in first])
    texts: list[list[Text]] = [[] for _ in arms.others]
    progress = progress_bar(title, total=len(ordered), unit="prompt")
    for i, group in enumerate(groups):
        unit = i * process.num_processes + process.process_index
        answers: dict[str, list[str]] = {prompt.id: [] for prompt in group}
        for turn in range(max(len(prompt.turns) for prompt in group)):
            asked = [prompt for prompt in group if turn < len(prompt.turns)]
            (plain, plain_time), *others = arms.decode(
                [encode(p.turns[: turn + 1], answers[p.id]) for p in asked],
                [keys[p.id] + turn for p in asked],
            )
            for found, (fast, fast_time) in zip(texts, others, strict=True):
                timings = share(fast_time, len(asked)), share(plain_time, len(asked))
                found += [
                    Text(prompt.id, prompt.category, turn, unit, a, b, *timings)
                    for prompt, a, b in zip(asked, fast, plain, strict=True)
                ]
            for prompt, text in zip(asked, plain, strict=True):
                answers[prompt.id].append(decode(text.ids))
        progress.update(len(group))
    progress.close()
    shares = gather_object([texts])  # by process
    return [sorted(chain(*found), key=lambda text: text.unit) for found in zip(*shares, strict=True)]


def _decode_runs(
    config: RunConfig,
    runs: Sequence[DecodeRunConfig],
    target: Target,
    drafters: Mapping[str, Any],
    prompts: Sequence[Prompt],
    identity: Mapping[str, Any],
    folder: Path,
) -> dict[str, list[Text]]:
    """The texts of runs that share a plain baseline, by name: read back, or decoded together where
    unfinished."""
    limits = (config.eval.max_new_tokens, runs[0].batch, config.eval.seed)
    events = config.eval.events
    asked: dict[str, Any] = {
        "prompts": [asdict(p) for p in prompts],
        "questions": _print(_questions(config, target, prompts)),
    }
    asked |= {"limits": limits, "threads": config.eval.threads, "events": events}
    settings = {run.name: {"run": asdict(run), **asked, **_of_run(identity, run)} for run in runs}
    pending = [run for run in runs if not is_done(folder / run.name, fingerprint(settings[run.name]))]
    for run in runs:
        if run not in pending:
            log.info("eval: run %s reused", run.name)
    process = PartialState()
    if pending:
        began = time.perf_counter()
        others = [EngineArm(target, drafters[r.drafter], r, *limits, record_events=events) for r in pending]
        with _threads(config.eval.threads):
            found = decode_in_turns(
                Arms(EngineArm(target, None, runs[0], *limits), others),
                prompts,
                batch=runs[0].batch,
                encode=lambda turns, answers: _encode(config, target, turns, answers),
                decode=lambda ids: target.tokenizer.decode(ids, skip_special_tokens=True),
                title="eval " + ", ".join(run.name for run in pending),
            )
            made = provenance()
        seconds = time.perf_counter() - began
        for run, texts in zip(pending, found, strict=True) if process.is_main_process else ():
            (folder / run.name / MANIFEST).unlink(missing_ok=True)  # it must not outlive what it describes
            write_texts(folder / run.name / "texts.jsonl", texts)
            (folder / run.name / "events.jsonl").unlink(missing_ok=True)
            if events:
                write_events(folder / run.name / "events.jsonl", texts)
            mine = settings[run.name]
            samples = shown(target.tokenizer, prompts, texts)
            result = {"seconds": seconds, "samples": samples, "provenance": made}
            write_json(
                folder / run.name / MANIFEST, {"fingerprint": fingerprint(mine), "settings": mine, **result}
            )
        process.wait_for_everyone()  # before another reads
    return {run.name: read_texts(folder / run.name / "texts.jsonl") for run in runs}


def _certify(
    config: RunConfig,
    target: Target,
    drafters: Mapping[str, Any],
    texts: Mapping[str, Sequence[Text]],
    identity: Mapping[str, Any],
    folder: Path,
) -> bool:
    """Make the certificate or read it back; whether it passed."""
    path, process = folder / "certificate.json", PartialState()
    questions = _questions(config, target, load_prompts(config.eval.prompts))
    decoded = {
        name: fingerprint([[asdict(text.speculative), asdict(text.plain)] for text in found])
        for name, found in texts.items()
    }
    shaping = {k: v for k, v in asdict(config.eval).items() if k not in ("bootstrap", "limit_gpu", "events")}
    settings = {
        "eval": shaping,
        "questions": _print(questions),
        "texts": decoded,
        "weights": weights_print(drafters[""]),
        **identity,
    }
    if is_done(folder, fingerprint(settings)):
        log.info("eval: certificate reused")
        return read_json(path)["pass"]
    certificate = certify(target, drafters, questions, config.eval, texts)
    certificate["drafter"] = settings["weights"]

    def make() -> dict[str, Any]:
        write_json(path, certificate)
        return {}

    if process.is_main_process:
        reuse_or_run(folder, settings, make)
    return certificate["pass"]


def _encode(config: RunConfig, target: Target, turns: Sequence[str], answers: Sequence[str]) -> list[int]:
    messages = []
    for i, turn in enumerate(turns):
        messages.append({"role": "user", "content": turn})
        messages += [{"role": "assistant", "content": answer} for answer in answers[i : i + 1]]
    return render(target.tokenizer, messages, config.corpus.template_arguments)


def _questions(config: RunConfig, target: Target, prompts: Sequence[Prompt]) -> list[Question]:
    """First turns, with the keys that the runs use for them."""
    return [
        Question(p.id, tuple(_encode(config, target, p.turns[:1], [])), TURNS * i)
        for i, p in enumerate(prompts)
    ]


def _print(questions: Sequence[Question]) -> str:
    """A hash of the ids of questions and of their rendered texts."""
    return fingerprint([asdict(question) for question in questions])


def _identity(config: RunConfig, target: Target, drafters: Mapping[str, Any]) -> dict[str, Any]:
    """What else shapes a run: code, target, drafters with settings and weights, template, hardware kind."""
    prints = {
        name: weights_print(drafter, drafter.config if name else config.drafter)
        for name, drafter in drafters.items()
    }
    return {
        "form": FORM,
        "spectrain": provenance()["versions"]["spectrain"],
        "target": target.fingerprint(),
        "drafters": prints,
        "template_arguments": config.corpus.template_arguments,
        "device": target.device.type,
    }


def _of_run(identity: Mapping[str, Any], run: DecodeRunConfig) -> dict[str, Any]:
    """The identity with the run's own drafter alone."""
    return {**identity, "drafters": identity["drafters"][run.drafter]}


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """CPU threads of what is timed inside; 0: as the process has."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _by_baseline(runs: Sequence[DecodeRunConfig]) -> list[list[DecodeRunConfig]]:
    """Runs of one dtype in groups whose plain decoding is the same."""
    groups: dict[tuple, list[DecodeRunConfig]] = {}
    for run in runs:
        plain = replace(sampling_of(run, seed=0), draft_temperature=0.0)
        groups.setdefault((plain, run.batch, run.graphs, run.prompts), []).append(run)
    return list(groups.values())

"""The road of a run: each stage in order, its result reused when nothing that shaped it has changed.

    R/prepared   R/features   R/checkpoints + metrics.jsonl   R/eval   R/export   R/report.json, report.html
    R/tuned             with joint training: the tuned target, and the drafter for it
    R/config.yaml       the settings of the newest invocation, resolved
    R/provenance.json   one entry per invocation
    R/stages.json       seconds and budget of each stage
    R/cells/NAME-SEED   a run folder for each cell of a comparison; R/compare.json, R/compare.md

A stage's own fingerprint decides whether its result is reused; this file only says what came out. With
several processes all capture, train, evaluate and regenerate; the rest is the first one's. Knows no stage's
work: a stage's imports come when it runs.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from omegaconf import OmegaConf

from spectrain import checkpoint, provenance
from spectrain.artifacts import alone, read_json, reuse_or_run, write_bytes, write_json
from spectrain.config import ON_REQUEST, STAGES, RunConfig, TargetConfig
from spectrain.data.prepare import Prepared, load_prepared
from spectrain.imports import load, open_import
from spectrain.target import Target, load_target
from spectrain.training_checks import check_training
from spectrain.tuned import check_held_out, finished, write_tuned

log = logging.getLogger(__name__)

EVERY_PROCESS = ("capture", "train", "eval", "regenerate", "compare")
OUTPUTS = {
    "prepare": ("prepared",),
    "capture": ("features",),
    "train": ("checkpoints", "tuned"),
    "eval": ("eval",),
    "export": ("export",),
}
RECORDS = ("manifest.json", "current.json")  # rewritten even where the result is reused


def run(config: RunConfig) -> Path:
    """Do the stages of `config.stages` in the order of the road; returns the run folder.

    Raises ValueError for wrong input, CertificateFailed when decoded text is not the target's, CheckFailed
    when training diverges, a file of the run is damaged, an export is not the drafter that was trained, or an
    engine does not serve it so.
    """
    road = Road(config)
    writes = not set(config.stages) <= {"report", "check_export"}
    with alone(road.folder / ".lock") if writes and road.process.is_main_process else nullcontext():
        road.process.wait_for_everyone()
        walk(road)
    road.process.destroy_process_group()
    return road.folder


def walk(road: "Road") -> None:
    """Do the stages of `road.config.stages`."""
    config = road.config
    if road.process.is_main_process:
        _open_folder(road)
    untrained = config.train.passes == 0
    if untrained and (skipped := [stage for stage in ("capture", "train") if stage in config.stages]):
        reason = "train.passes=0, the drafter is used as it is built"
        log.info("-- %s skipped: %s", " and ".join(skipped), reason)
    for stage in STAGES + ON_REQUEST:
        if stage not in config.stages or stage == "capture" and config.train.features == "online":
            continue
        if untrained and stage in ("capture", "train"):
            continue
        if road.process.is_main_process or stage in EVERY_PROCESS:
            _timed(road, stage)
        road.process.wait_for_everyone()


class Road:
    """What the stages of one run share: folder, processes, the target in one dtype at a time.

    parent: the comparison that this run is a cell of; its prepared/ and features/ are read and its target,
    which must be this run's, is shared.
    """

    def __init__(self, config: RunConfig, parent: "Road | None" = None):
        self.config = config
        self.folder = Path(config.run_dir or Path("runs") / config.recipe).expanduser()
        self.inputs = self.folder if parent is None else parent.folder
        self._targets: dict[str, Target] = {} if parent is None else parent._targets
        cpu = config.device == "cpu" or config.device == "auto" and not torch.cuda.is_available()
        if not cpu and not torch.cuda.is_available():
            raise ValueError(f"device={config.device!r}: no CUDA device here; expected auto or cpu")
        # A process that waits for the first one's stage must not give up on it.
        wait = {"timeout": timedelta(days=7)} if "WORLD_SIZE" in os.environ else {}
        self.process = PartialState(cpu=cpu, **wait)

    def target(self, dtype: str) -> Target:
        """The target in `dtype`; the one held before is let go first."""
        return self._load(replace(self.config.target, dtype=dtype))

    def trained_target(self, dtype: str) -> Target:
        """The target that the trained drafter is for: with joint training, the tuned one."""
        return self._load(replace(self.trained_config.target, dtype=dtype))

    @cached_property
    def trained_config(self) -> RunConfig:
        """The settings of the stages behind the training, with the target that it leaves."""
        if not self.config.joint.rank:
            return self.config
        path = str(finished(self.folder) / "target")
        return replace(self.config, target=replace(self.config.target, path=path))

    def _load(self, settings: TargetConfig) -> Target:
        key = f"{settings.dtype} {settings.path}"
        if key not in self._targets:
            self._targets.clear()
            self._targets[key] = load_target(settings, device=str(self.process.device))
        return self._targets[key]

    @cached_property
    def prepared(self) -> Prepared:
        folder = self.inputs / "prepared"
        if not folder.exists():
            raise ValueError(f"{folder}: not there; run the prepare stage (stages=[prepare,...])")
        target = self.target(self.config.target.dtype)
        return load_prepared(self.config.corpus, target.tokenizer, folder, stop_ids=target.stop_ids())

    @cached_property
    def kept_ids(self) -> torch.Tensor:
        """The draft vocabulary, int64 [W]: an imported drafter's own, else from the tokens that training
        supervises; 0 keeps every id."""
        from spectrain.drafters.vocab import choose_kept_ids, coverage, forced_ids

        target = self.target(self.config.target.dtype)
        settings, found = open_import(self.config.drafter, target)
        if found is not None and found.kept_ids is not None:
            return found.kept_ids
        size = settings.draft_vocab
        if not size:
            return torch.arange(target.vocab_size)
        counts = self.prepared.counts
        forced = forced_ids(target.tokenizer, counts, target.stop_ids())
        kept_ids = choose_kept_ids(counts, size, num_tokens=len(target.tokenizer), forced=forced)
        log.info(
            "draft vocabulary: %d of %d ids, %.2f%% of the supervised tokens",
            len(kept_ids), target.vocab_size, 100 * coverage(kept_ids, counts),
        )  # fmt: skip
        return kept_ids

    def new_drafter(self, target: Target) -> Any:
        """A drafter before its training, the same at every call; one that the export stage would refuse, or
        that the settings of the training do not fit, raises ValueError now."""
        config = self.config
        settings, found = open_import(config.drafter, target)
        drafter = checkpoint.build_drafter(settings, target, self.kept_ids, seed=config.train.seed)
        if found is not None:
            load(found, drafter)
        check_training(config, drafter, target)
        if "export" in config.stages:
            from spectrain.export import check_untrained

            check_untrained(target, drafter, config.export)
        return drafter

    def tried_drafter(self, target: Target) -> Any:
        """A drafter before its training that has decoded three tokens with every run of the evaluation: what
        cannot be decoded raises ValueError before capture and training. A served target decodes nothing."""
        from spectrain.eval.run import decode_held_out, other_drafters

        config, drafter = self.config, self.new_drafter(target).eval()
        if config.target.server.given:
            return drafter
        plan = replace(config.eval.with_baseline(config.drafter.family), max_new_tokens=3)
        drafters = {"": drafter, **other_drafters(plan, target, baseline=config.eval.baseline)}
        trial = replace(config, eval=plan, train=replace(config.train, eval_prompts=1))
        for run in plan.runs:
            decode_held_out(trial, target, drafters[run.drafter], run)
        return drafter

    def trained_drafter(self, target: Target) -> Any:
        """The best checkpoint's drafter, or the one that is used as it is built."""
        if self.config.train.passes == 0:
            return self.new_drafter(target).eval()
        if self.config.joint.rank:
            return checkpoint.load_drafter(finished(self.folder) / "drafter", target)
        return checkpoint.load_drafter(self.folder, target)


def prepare(road: Road) -> None:
    from spectrain.data.prepare import prepare

    target, folder = road.target(road.config.target.dtype), road.folder / "prepared"
    road.prepared = prepare(road.config.corpus, target.tokenizer, folder, stop_ids=target.stop_ids())


def capture(road: Road) -> None:
    capture_taps(road, road.tried_drafter(road.target(road.config.target.dtype)).taps)


def capture_taps(road: Road, tap_ids: Sequence[int]) -> None:
    from spectrain.capture import capture

    target, settings = road.target(road.config.target.dtype), road.config.train
    capture(
        target,
        road.prepared.train,
        tap_ids,
        road.folder / "features",
        micro_tokens=settings.micro_tokens,
        max_bad_fraction=settings.max_bad_fraction,
        taps_bits=settings.taps_bits,
    )
    target.release()


def train(road: Road) -> None:
    from spectrain.eval.run import decode_held_out
    from spectrain.features import FeatureStore
    from spectrain.train import train

    config = road.config
    if config.joint.rank:
        check_held_out(config, road.prepared.eval)
    stored, served = config.train.features == "stored", config.target.server.given
    store = FeatureStore.load(road.inputs / "features", skip_bad=config.train.skip_bad) if stored else None
    target = road.target(config.target.dtype)
    drafter = road.tried_drafter(target)
    train(
        config,
        target,
        road.prepared,
        store,
        drafter,
        road.folder,
        evaluate=None if served else lambda d: decode_held_out(config, target, d, config.eval.runs[0]),
    )
    if config.joint.rank and road.process.is_main_process:
        write_tuned(config, target, drafter, road.prepared.eval, road.folder)


def evaluate(road: Road) -> None:
    from spectrain.eval.run import evaluate

    evaluate(road.trained_config, road.trained_target, road.trained_drafter, road.folder / "eval")


def export(road: Road) -> None:
    from spectrain.export import FORM, export, reached

    folder, target = road.folder / "export", road.trained_target(road.config.target.dtype)
    drafter = road.trained_drafter(target)
    if road.config.train.passes == 0:
        raise ValueError("stages: export: train.passes=0 leaves nothing trained to export")
    settings = {
        "form": FORM,
        "reached": reached(road.folder, drafter),
        "drafter": checkpoint.weights_print(drafter, drafter.config),
        "target": target.fingerprint(),
        "export": {"dtype": road.config.export.dtype, "engine": road.config.export.engine},
    }
    made = partial(export, road.trained_config, target, drafter, folder)
    reuse_or_run(folder, settings, lambda: {"folders": [path.name for path in made()]})


def check_export(road: Road) -> None:
    from transformers import AutoConfig

    from spectrain.export_check import examine_all
    from spectrain.target import resolve_path

    settings, target = road.config.export, road.config.target
    folder = Path(settings.path).expanduser() if settings.path else road.folder / "export"
    path = resolve_path(target.path)
    config = AutoConfig.from_pretrained(path, trust_remote_code=target.trust_remote_code)
    examine_all(folder, config.get_text_config(), settings.engine)


def report(road: Road) -> None:
    from spectrain.eval.report import write_report

    write_report(road.folder)


def regenerate(road: Road) -> None:
    from spectrain.regenerate import regenerate

    config = road.config
    target = None if config.regenerate.server else road.target(config.target.dtype)
    regenerate(config, target, road.folder / "regenerated.jsonl")


def doctor(road: Road) -> None:
    from spectrain.data.doctor import examine
    from spectrain.data.doctor_page import page

    prepare(road)
    config, prepared = road.config, road.prepared
    target = road.target(config.target.dtype)
    diagnosis = examine(
        prepared,
        bos_id=target.tokenizer.bos_token_id,
        end_ids=prepared.end_ids,
        kept_ids=road.kept_ids,
        max_tokens=config.train.micro_tokens,
        num_shown=config.doctor.samples,
    )
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    kept = len(road.kept_ids)
    print(
        page(diagnosis, prepared.summary, target.tokenizer, kept, colour=colour, tokens=config.doctor.tokens)
    )
    if diagnosis.errors:
        names = ", ".join(finding.name for finding in diagnosis.errors)
        raise ValueError(f"corpus.path={config.corpus.path!r}: this corpus cannot train: {names}")


def serve_check(road: Road) -> None:
    from spectrain.serve_check import serve_check

    def load_both() -> tuple[Target, Any]:
        target = road.trained_target(road.config.target.dtype)
        return target, road.trained_drafter(target).to(target.dtype)

    serve_check(road.trained_config, load_both, road.folder)


def compare(road: Road) -> None:
    from spectrain.compare import compare

    compare(road)


WORK: dict[str, Callable[[Road], None]] = {
    "prepare": prepare,
    "capture": capture,
    "train": train,
    "eval": evaluate,
    "export": export,
    "report": report,
    "regenerate": regenerate,
    "doctor": doctor,
    "serve_check": serve_check,
    "compare": compare,
    "check_export": check_export,
}


def _open_folder(road: Road) -> None:
    """Write settings and provenance, and say what is about to happen."""
    config = road.config
    write_bytes(road.folder / "config.yaml", OmegaConf.to_yaml(asdict(config)).encode())
    entry = provenance.append(road.folder)
    hardware = entry["hardware"]
    gpus = "".join(f", {gpu['name']}" for gpu in hardware["gpus"])
    log.info("recipe %s, target %s, results in %s", config.recipe, config.target.path, road.folder)
    log.info("on %s, %d threads%s", hardware["cpu"], entry["threads"], gpus)
    if config.note:
        log.info("%s", config.note)
    budget = {stage: s for stage, s in config.budget_s.items() if stage in config.stages}
    if budget:
        parts = " + ".join(f"{stage} {s:.0f}" for stage, s in budget.items())
        log.info("budget: %s = %.0f s", parts, sum(budget.values()))


def _timed(road: Road, stage: str) -> None:
    """Do one stage, say how long it took or that its result was reused, and keep that in stages.json."""
    main = road.process.is_main_process
    budget = road.config.budget_s.get(stage)
    words = "" if budget is None else f" (budget {budget:.0f} s)"
    log.info("-- %s%s", stage, words)
    before, start = _state(road.folder, stage) if main else {}, time.perf_counter()
    WORK[stage](road)
    seconds = time.perf_counter() - start
    if not main:
        return
    reused = bool(before) and before == _state(road.folder, stage)
    log.info("-- %s %s %.1f s%s", stage, "reused, checked in" if reused else "done in", seconds, words)
    path = road.folder / "stages.json"
    stages = read_json(path) if path.exists() else {}
    if not reused or stage not in stages:
        stages[stage] = {"seconds": round(seconds, 1), "budget_s": budget}
    write_json(path, stages | {stage: stages[stage] | {"reused": reused}})


def _state(folder: Path, stage: str) -> dict[str, int]:
    """Time of the last change of every file that a stage made."""
    files = [f for name in OUTPUTS.get(stage, ()) for f in (folder / name).rglob("*") if f.is_file()]
    return {str(f): f.stat().st_mtime_ns for f in files if f.name not in RECORDS}

"""The compare stage: drafters trained and decoded at equal budget, each in a cell for each seed.

    R/prepared, R/features   made once, with the taps of all drafters
    R/cells/NAME-SEED        a run folder (spectrain/stages.py) for each drafter and seed; its manifest.json
                             is written when the cell is finished
    R/compare.json, R/compare.md   (eval/comparison.py)

The comparison decides target, conversations, evaluation and how much is trained; `compare.drafters` decides
the rest. A cell is finished once and then reused; one that was killed goes on as its stages do. Knows no
family.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from spectrain.artifacts import reuse_or_run, write_bytes, write_json
from spectrain.checks import CheckFailed
from spectrain.compose import compose
from spectrain.config import CompareConfig, EvalConfig, ObjectiveConfig, RunConfig, TrainConfig
from spectrain.eval.certificate import CertificateFailed
from spectrain.eval.comparison import Cell, build_comparison, markdown
from spectrain.eval.prompts import load_prompts
from spectrain.optim import trainable
from spectrain.provenance import provenance
from spectrain.stages import Road, capture_taps, prepare, walk
from spectrain.training_checks import OPTIMIZER

CELL_STAGES = ["train", "eval", "report"]
BUDGET = tuple(f.name for f in fields(TrainConfig) if f.name not in (*OPTIMIZER, "seed"))
"""Settings of train that the comparison decides for every drafter."""

log = logging.getLogger(__name__)


def compare(road: Road) -> None:
    """Finish every cell, write compare.json and compare.md and print the table.

    Raises, after everything is written, CertificateFailed if decoded text of a cell is not the target's, else
    CheckFailed if a cell failed, for example by a loss that diverges.
    """
    if road.process.num_processes > 1:
        raise ValueError(
            f"stages: compare: measures seconds in one process; found {road.process.num_processes}"
        )
    cells = plan_cells(road.config, road.folder)
    shared, parameters = _share(road, cells)
    lossy: list[str] = []
    failed: dict[Cell, str] = {}
    for number, cell in enumerate(cells, 1):
        log.info("== cell %d of %d: %s, seed %d", number, len(cells), cell.drafter, cell.seed)

        def make(cell=cell) -> dict[str, Any]:
            walk(Road(cell.config, parent=road))
            return {}

        settings = {key: value for key, value in asdict(cell.config).items() if key != "run_dir"}
        try:
            if reuse_or_run(cell.folder, shared | {"settings": settings}, make):
                log.info("compare: cell reused")
        except CertificateFailed as error:  # raised again below; the table says it meanwhile
            lossy.append(f"{cell.drafter}, seed {cell.seed}: {error}")
        except (ValueError, CheckFailed) as error:  # likewise
            log.error("cell failed: %s", error)
            failed[cell] = str(error)
    comparison = build_comparison(road.config, cells, parameters, failed)
    write_json(road.folder / "compare.json", comparison)
    page = markdown(comparison)
    write_bytes(road.folder / "compare.md", page.encode())
    print(page)
    print(f"comparison: {road.folder / 'compare.md'}")
    broken = [f"{cell.drafter}, seed {cell.seed}: {error}" for cell, error in failed.items()]
    if lossy:
        raise CertificateFailed("; ".join(lossy + broken))
    if broken:
        raise CheckFailed("; ".join(broken))


def plan_cells(config: RunConfig, folder: Path) -> list[Cell]:
    """The cells of a comparison in the order they are run: every drafter with the first seed, then the next
    seed.

    Raises ValueError naming the key of a setting that would have no effect.
    """
    idle = [key for key, value, default in _own_settings(config) if value != default]
    if idle:
        raise ValueError(
            f"{idle[0]}: no effect on a comparison; it is each drafter's own (compare.drafters) or "
            "compare.seeds"
        )
    drafters = {name: _drafter(name, words) for name, words in config.compare.drafters.items()}
    return [
        Cell(name, seed, _cell(config, drafter, seed, folder / "cells" / f"{name}-{seed}"))
        for seed in config.compare.seeds
        for name, drafter in drafters.items()
    ]


def _own_settings(config: RunConfig) -> list[tuple[str, Any, Any]]:
    """Key, value and default of the settings that come from a drafter's words or from compare.seeds."""
    train = [
        (f"train.{k}", getattr(config.train, k), getattr(TrainConfig(), k)) for k in (*OPTIMIZER, "seed")
    ]
    return [
        *train,
        ("eval.seed", config.eval.seed, EvalConfig.seed),
        ("objective", config.objective, ObjectiveConfig()),
        ("drafter", config.drafter, type(config.drafter)()),
    ]


def _drafter(name: str, words: Sequence[str]) -> RunConfig:
    """The settings that a drafter's words mean, of which the comparison takes what is the drafter's own."""
    for word in words:
        key = word.partition("=")[0]
        section = key.partition(".")[0]
        own = section in ("recipe", "drafter", "objective") or key in [f"train.{k}" for k in OPTIMIZER]
        if not own and word != "train.passes=0":
            raise ValueError(
                f"compare.drafters.{name}: {word!r}: the comparison decides it; expected recipe=NAME, "
                f"drafter.., objective.., train.passes=0, or train. with one of {', '.join(OPTIMIZER)}"
            )
    try:
        settings = compose([*words, f"stages=[{','.join(CELL_STAGES)}]"])
    except ValueError as error:
        raise ValueError(f"compare.drafters.{name}: {error}") from error
    if settings.joint.rank:
        raise ValueError(
            f"compare.drafters.{name}: joint.rank={settings.joint.rank}: all drafters share one target"
        )
    return settings


def _cell(config: RunConfig, own: RunConfig, seed: int, folder: Path) -> RunConfig:
    train = replace(own.train, **{key: getattr(config.train, key) for key in BUDGET}, seed=seed)
    if own.train.passes == 0:
        train = replace(train, passes=0.0)
    return replace(
        config,
        recipe=own.recipe,
        stages=CELL_STAGES,
        run_dir=str(folder),
        budget_s={},
        compare=CompareConfig(),
        drafter=own.drafter,
        objective=own.objective,
        train=train,
        eval=replace(config.eval, seed=seed),
    )


def _share(road: Road, cells: Sequence[Cell]) -> tuple[dict[str, Any], dict[str, int]]:
    """Make what all cells read and draft with every drafter once.

    Returns what shapes every cell, and each drafter's number of trainable parameters.
    """
    prepare(road)
    target = road.target(road.config.target.dtype)
    taps: set[int] = set()
    parameters = {}
    for cell in (cell for cell in cells if cell.seed == cells[0].seed):
        drafter = Road(cell.config, parent=road).tried_drafter(target)
        taps |= {*drafter.taps}
        parameters[cell.drafter] = sum(p.numel() for p in trainable(drafter).values())
    if road.config.train.features == "stored" and any(cell.config.train.passes for cell in cells):
        capture_taps(road, sorted(taps))
    shared = {
        "target": target.fingerprint(),
        "prepared": road.prepared.fingerprint,
        "prompts": [asdict(p) for p in load_prompts(road.config.eval.prompts)],
        "spectrain": provenance()["versions"]["spectrain"],
    }
    return shared, parameters

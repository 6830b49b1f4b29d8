"""What several drafters reach, trained alike with several seeds: the content of compare.json and compare.md.

A drafter's number pools the texts of its cells, one cell for each seed; its interval is over prompts and
seeds (`metrics.estimate`). Everything is computed from what the cells left in their run folders; nothing is
decoded again. docs/formats.md lists the keys. Knows no model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectrain.artifacts import MANIFEST, read_json
from spectrain.config import RunConfig
from spectrain.eval.records import Text, read_texts
from spectrain.eval.report import numbers
from spectrain.eval.report_table import interval
from spectrain.provenance import provenance

SHOWN = ("name", "temperature", "proposal", "law", "dtype", "batch", "length")
OF_CATEGORY = ("tau", "alpha", "eta", "texts")


@dataclass(frozen=True, eq=False)
class Cell:
    """One run of a comparison: the drafter's name in the table, the seed, the settings."""

    drafter: str
    seed: int
    config: RunConfig

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.config.run_dir)


def build_comparison(
    config: RunConfig, cells: Sequence[Cell], parameters: Mapping[str, int], failed: Mapping[Cell, str]
) -> dict[str, Any]:
    """The content of compare.json: the `cells` of the comparison `config`, each finished or `failed`.

    parameters: trainable ones of each drafter by its name; failed: the error of each failed cell. Raises
    ValueError naming the drafters that were trained on different budgets with one seed.
    """
    reports = {cell: read_json(cell.folder / "report.json") for cell in cells if cell not in failed}
    return {
        "recipe": config.recipe,
        "note": config.note,
        "target": config.target.path,
        "seeds": config.compare.seeds,
        "budget": {
            str(seed): _budget({c: r for c, r in reports.items() if c.seed == seed})
            for seed in config.compare.seeds
        },
        "lossless": bool(reports) and all(report["lossless"] for report in reports.values()),
        "drafters": [
            {"name": name, "words": words, "parameters": parameters[name]}
            | _drafter([cell for cell in cells if cell.drafter == name], reports, failed)
            for name, words in config.compare.drafters.items()
        ],
        "provenance": provenance(),
    }


def markdown(comparison: Mapping[str, Any]) -> str:
    """The page compare.md: where the numbers come from, the table, tau by category."""
    made, drafters = comparison["provenance"], comparison["drafters"]
    decoded = [drafter for drafter in drafters if drafter["runs"]]
    git = made["git"]
    code = f"commit {git['sha'][:12]}{' with changes' if git['dirty'] else ''}" if git else "no git checkout"
    hardware = ", ".join([made["hardware"]["cpu"], *(gpu["name"] for gpu in made["hardware"]["gpus"])])
    seeds = ", ".join(map(str, comparison["seeds"]))
    budgets = sorted({(b["steps"], b["tokens"]) for b in comparison["budget"].values() if b})
    spent = " or ".join(f"{steps} steps, {tokens:,} tokens (prompts counted)" for steps, tokens in budgets)
    lines = [
        f"# Drafters for {comparison['target']} at equal budget",
        "",
        f"`{made['command']}`",
        "",
        f"{made['time'][:10]}, {code}; {hardware}, {made['threads']} threads; torch "
        f"{made['versions']['torch']}, transformers {made['versions']['transformers']}.",
        f"Training: {spent or 'none'}; seeds {seeds}.",
        "[95% interval over prompts and seeds]; untrained drafters have no training seconds.",
        "",
        *(_settings(decoded[0]["runs"]) if decoded else ()),
    ]
    lines += [f"- {drafter['name']}: {' '.join(drafter['words'])}" for drafter in drafters]
    lines += [f"- {d['name']}, seed {f['seed']}, failed: {f['error']}" for d in drafters for f in d["failed"]]
    if comparison["note"]:
        lines += ["", comparison["note"]]
    return "\n".join(
        [*lines, "", *_main_table(drafters), "", *(_category_table(decoded) if decoded else ()), ""]
    )


def _drafter(
    cells: Sequence[Cell], reports: Mapping[Cell, Mapping[str, Any]], failed: Mapping[Cell, str]
) -> dict[str, Any]:
    """One drafter over its seeds; numbers are those of the finished cells."""
    done = [cell for cell in cells if cell in reports]
    own = [reports[cell] for cell in done]
    bad = [str(cell.seed) for cell in done if not reports[cell]["lossless"]]
    reason = f"certificate failed for seed {', '.join(bad)}" if bad else None
    trained = [report["training"] for report in own if report["training"]]
    manifest = read_json(done[0].folder / "eval" / MANIFEST) if done else {"eval": {"runs": []}}
    return {
        "family": cells[0].config.drafter.family,
        "training_s": sum(t["seconds"] for t in trained) / len(trained) if trained else None,
        "lossless": bool(own) and not bad,
        "runs": [_run(run, done, manifest, reason) for run in manifest["eval"]["runs"]],
        "cells": [_cell(cell, reports[cell]) for cell in done],
        "failed": [
            {"seed": cell.seed, "folder": cell.folder.name, "error": failed[cell]}
            for cell in cells
            if cell in failed
        ],
    }


def _run(
    run: Mapping[str, Any], cells: Sequence[Cell], manifest: Mapping[str, Any], reason: str | None
) -> dict[str, Any]:
    """One run of one drafter, its texts pooled over the cells."""
    pooled: list[tuple[Text, int]] = [
        (text, cell.seed)
        for cell in cells
        for text in read_texts(cell.folder / "eval" / "runs" / run["name"] / "texts.jsonl")
    ]

    def over(part: Sequence[tuple[Text, int]]) -> dict[str, Any]:
        texts, seeds = [text for text, _ in part], [seed for _, seed in part]
        return numbers(texts, run, manifest, reason, trainings=seeds)

    categories = {
        name: over([(text, seed) for text, seed in pooled if text.category == name])
        for name in sorted({text.category for text, _ in pooled})
    }
    return {
        **{key: run[key] for key in SHOWN},
        **over(pooled),
        "categories": {name: {key: found[key] for key in OF_CATEGORY} for name, found in categories.items()},
    }


def _cell(cell: Cell, report: Mapping[str, Any]) -> dict[str, Any]:
    """What one cell's own report says, shortened."""
    names = ("tau", "alpha", "alpha_k", "c", "eta", "counters")
    return {
        "seed": cell.seed,
        "folder": cell.folder.name,
        "lossless": report["lossless"],
        "certificate": {kind: report["certificate"][kind] for kind in ("greedy", "sampling")},
        "training": report["training"],
        "decoded": {key: report["provenance"][key] for key in ("time", "git")},
        "runs": {run["name"]: {name: run[name] for name in names} for run in report["runs"]},
    }


def _budget(reports: Mapping[Cell, Mapping[str, Any]]) -> dict[str, int] | None:
    """Steps and tokens of the trained cells of one seed; None if none was trained."""
    spent = {
        cell.drafter: {key: report["training"][key] for key in ("steps", "tokens")}
        for cell, report in reports.items()
        if report["training"]
    }
    if any(budget != next(iter(spent.values())) for budget in spent.values()):
        raise ValueError(f"trained on different budgets: {spent}")
    return next(iter(spent.values()), None)


def _settings(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"- {run['name']}: {run['proposal']} of {run['length']}, T={run['temperature']:g}, {run['law']}, "
        f"{run['dtype']}, batch {run['batch']}, {run['texts']} texts"
        for run in runs
    ]


def _main_table(drafters: Sequence[Mapping[str, Any]]) -> list[str]:
    slots = max((run["length"] for drafter in drafters for run in drafter["runs"]), default=0)
    head = ["drafter", "parameters", "training s", "run", "tau", *(f"alpha_{k}" for k in range(slots))]
    rows = [[*head, "c", "eta", "certificate"]]
    for drafter in drafters:
        seconds = "-" if drafter["training_s"] is None else f"{drafter['training_s']:.0f}"
        passed = sum(cell["lossless"] for cell in drafter["cells"])
        verdict = f"{'pass' if drafter['lossless'] else 'FAIL'} {passed}/{len(drafter['cells'])}"
        for run in drafter["runs"]:
            alphas = [interval(number) for number in run["alpha_k"]]
            alphas += ["-"] * (slots - len(alphas))
            eta = "withheld" if "withheld" in run["eta"] else interval(run["eta"])
            name, parameters = drafter["name"], f"{drafter['parameters']:,}"
            row = [name, parameters, seconds, run["name"], interval(run["tau"]), *alphas]
            rows.append([*row, interval(run["c"], 3), eta, verdict])
        for cell in drafter["failed"]:
            row = [drafter["name"], f"{drafter['parameters']:,}", "-", f"FAILED, seed {cell['seed']}"]
            rows.append(row + ["-"] * (len(rows[0]) - len(row)))
    return _grid(rows)


def _category_table(drafters: Sequence[Mapping[str, Any]]) -> list[str]:
    """tau of the first run."""
    categories = list(drafters[0]["runs"][0]["categories"])
    rows = [[f"tau, {drafters[0]['runs'][0]['name']}", *categories]]
    for drafter in drafters:
        found = drafter["runs"][0]["categories"]
        rows.append([drafter["name"], *(interval(found[name]["tau"]) for name in categories)])
    return _grid(rows)


def _grid(rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table whose columns line up on a terminal too; the first row is its head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)) + " |" for row in rows]
    return [lines[0], "| " + " | ".join("-" * w for w in widths) + " |", *lines[1:]]

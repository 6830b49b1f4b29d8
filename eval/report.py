"""report.json, the table on the terminal, report.html and the copy on Weights & Biases.

Everything is computed from what the stages left in the run folder; nothing is decoded again. docs/formats.md
lists every key of report.json. Knows no model.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from spectrain.artifacts import MANIFEST, read_json, write_bytes, write_json
from spectrain.eval.certificate import CertificateFailed
from spectrain.eval.limit import GPUS, DraftShape, Load, TargetShape, round_cost
from spectrain.eval.records import Text, counters, read_texts
from spectrain.eval.report_html import page
from spectrain.eval.report_table import table
from spectrain.metrics import Counters, Number, after_cut, estimate
from spectrain.record import open_wandb

FILTERS = ("top_k_filter", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
SPEED_UPS = (
    "eta", "eta_model", "eta_leviathan", "eta_limit", "limit_share", "throughput_tok_s"
)  # fmt: skip
"""What a failed certificate withholds: a text that is not the target's has no speed-up."""


def write_report(run_dir: Path) -> None:
    """Write report.json and report.html into the run folder and print the table.

    Raises ValueError naming the file if the evaluation is missing, and CertificateFailed after everything is
    written if decoded text is not the target's.
    """
    report = build_report(run_dir)
    write_json(run_dir / "report.json", report)
    write_bytes(run_dir / "report.html", page(report, training_lines(run_dir)).encode())
    print(table(report, colour=sys.stdout.isatty()))
    print(f"report: {run_dir / 'report.html'}")
    config = yaml.safe_load((run_dir / "config.yaml").read_text())  # of the invocation that reports
    if config["wandb"]["enabled"]:
        mirror = open_wandb(run_dir, config)
        mirror.summary.update(scalars(report))
        mirror.finish()
    if not report["certificate"]["pass"]:
        raise CertificateFailed(
            f"the text is not the target's, so eta is withheld: {failure(report['certificate'])}"
        )


def build_report(run_dir: Path) -> dict[str, Any]:
    """The content of report.json (docs/formats.md)."""
    evaluation = run_dir / "eval"
    if not (evaluation / MANIFEST).exists():
        raise ValueError(
            f"{evaluation / MANIFEST}: no finished evaluation; run the eval stage (stages=[eval])"
        )
    manifest = read_json(evaluation / MANIFEST)
    names = ("recipe", "note", "target", "drafter")
    missing = [key for key in (*names, "shapes") if key not in manifest]
    missing = missing or [
        key for key in ("costs", "drafter", *FILTERS) if key not in manifest["eval"]["runs"][0]
    ]
    if missing:
        raise ValueError(
            f"{evaluation / MANIFEST}: no {missing[0]}: made by an older version; "
            "run the eval stage (stages=[eval])"
        )
    settings = manifest["eval"]
    path = evaluation / "certificate" / "certificate.json"
    certificate = read_json(path)
    if "lossy" not in certificate:
        raise ValueError(f"{path}: no lossy: made by an older version; run the eval stage (stages=[eval])")
    runs = [_run(run, evaluation / "runs" / run["name"], manifest, certificate) for run in settings["runs"]]
    stages = read_json(run_dir / "stages.json") if (run_dir / "stages.json").exists() else {}
    return {
        **{key: manifest[key] for key in names},
        **runs[0],
        "lossless": certificate["pass"],
        "limit_gpu": settings["limit_gpu"],
        "runs": runs,
        "certificate": certificate,
        "training": _training(training_lines(run_dir)),
        "target_change": _target_change(run_dir),
        "budget": {name: {"seconds": s["seconds"], "budget_s": s["budget_s"]} for name, s in stages.items()},
        "provenance": read_json(evaluation / "runs" / settings["runs"][0]["name"] / MANIFEST)["provenance"],
    }


def scalars(report: Mapping[str, Any]) -> dict[str, float | str]:
    """The numbers of all runs as eval/RUN/NAME, with eval/lossless and eval/RUN/lossless; what W&B shows.

    A withheld one is the word "withheld", which takes the place of what an earlier report wrote there.
    """
    found: dict[str, float | str] = {"eval/lossless": float(report["lossless"])}
    for run in report["runs"]:
        found[f"eval/{run['name']}/lossless"] = float(run["lossless"])
        for name, number in run.items():
            if isinstance(number, dict) and "withheld" in number:
                found[f"eval/{run['name']}/{name}"] = "withheld"
            elif isinstance(number, dict) and number.get("value") is not None:
                found[f"eval/{run['name']}/{name}"] = number["value"]
    return found


def training_lines(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; none if nothing was trained here."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]  # a line cut by a kill has no end


def failure(certificate: Mapping[str, Any]) -> str:
    """Why a certificate failed, in words."""
    reasons = []
    greedy, sampling = certificate["greedy"], certificate["sampling"]
    if greedy and not greedy["pass"]:
        in_runs = sum(run["differences"] for run in greedy["runs"])
        reasons.append(
            f"greedy text differs in {greedy['differences']} places in float32 and {in_runs} in the runs"
        )
    if sampling and not sampling["pass"]:
        impossible = sum(len(run["impossible"]) for run in sampling["runs"])
        reasons.append(f"sampled text has p = {sampling['p_value']:.1e} ({impossible} impossible tokens)")
    return "; ".join(reasons)


def _run(
    run: Mapping[str, Any], folder: Path, manifest: Mapping[str, Any], certificate: Mapping[str, Any]
) -> dict:
    texts = read_texts(folder / "texts.jsonl")
    part = certificate["greedy" if run["temperature"] == 0 else "sampling"]
    lossy = run["name"] in [other["name"] for other in certificate["lossy"]]
    reason = None if certificate["pass"] else f"certificate failed: {failure(certificate)}"
    categories: dict[str, list[Text]] = {}
    for text in texts:
        categories.setdefault(text.category, []).append(text)
    return {
        **{key: run[key] for key in ("name", "temperature", *FILTERS, "proposal", "law", "dtype", "batch")},
        "drafter": run["drafter"] or manifest["drafter"],
        "length": run["length"],
        "nodes": run["length"] if run["proposal"] == "chain" else run["nodes"],
        **{key: run[key] for key in ("paths", "adaptive", "costs")},
        **numbers(texts, run, manifest, reason),
        "categories": {
            name: numbers(found, run, manifest, reason) for name, found in sorted(categories.items())
        },
        "lossless": not lossy and part["pass"],
        "lossy": lossy,
        "samples": read_json(folder / MANIFEST)["samples"],
    }


def numbers(
    texts: Sequence[Text],
    run: Mapping[str, Any],
    manifest: Mapping[str, Any],
    reason: str | None,
    *,
    trainings: Sequence[int] | None = None,
) -> dict:
    """Every number of one run with its interval, and the counters they are ratios of.

    reason: why a certificate failed, which withholds SPEED_UPS; trainings: where the texts are of several
    trained drafters, for each text which one (`metrics.estimate`).
    """
    sums, settings = counters(texts, slots=run["length"]), manifest["eval"]
    found = estimate(
        sums,
        limit_cost=_limit_cost(texts, sums, run["drafter"], manifest),
        prompts=[text.id for text in texts],
        units=[text.unit for text in texts],
        length=run["length"],
        resamples=settings["bootstrap"],
        seed=settings["seed"],
        trainings=trainings,
    )
    shown = {k: [asdict(n) for n in v] if isinstance(v, list) else asdict(v) for k, v in found.items()}
    if reason is not None:
        shown |= {key: {**asdict(Number(None, None, None)), "withheld": reason} for key in SPEED_UPS}
    total = {name: value[0].tolist() for name, value in vars(sums.pooled()).items()}
    accepted = [after_cut(record)[0] for text in texts for record in text.speculative.rounds]
    histogram = [accepted.count(k) for k in range(run["length"] + 1)]
    return {**shown, "texts": len(texts), "accepted_histogram": histogram, "counters": total}


def _limit_cost(texts: Sequence[Text], sums: Counters, drafter: str, manifest: Mapping[str, Any]) -> float:
    """Least cost of this run's rounds in plain steps on eval.limit_gpu; NaN for none, or without rounds."""
    gpu, total = manifest["eval"]["limit_gpu"], {k: v[0] for k, v in vars(sums.pooled()).items()}
    rounds, steps = total["rounds"], total["steps"]
    if gpu == "none" or not rounds:
        return math.nan
    contexts = 0
    for text in texts:
        committed = len(text.speculative.prompt_ids)  # all but the root, the prefill's token at first
        for record in text.speculative.rounds:
            contexts += committed
            committed += record.emitted
    load = Load(
        batch=rounds / steps,
        context=contexts / rounds,
        drafted=total["drafted"] / rounds,
        draft_steps=total["draft_steps"] / steps,
        emitted=total["emitted"] / rounds,
    )
    shapes = manifest["shapes"]
    return round_cost(
        GPUS[gpu], TargetShape(**shapes["target"]), DraftShape(**shapes["drafters"][drafter]), load
    )


def _target_change(run_dir: Path) -> dict[str, Any] | None:
    """How far joint training moved the target (spectrain/tuned.py); None where the target is the original."""
    path = run_dir / "tuned" / MANIFEST
    return read_json(path)["change"] if path.exists() else None


def _training(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    if not lines:
        return None
    evaluated = [line["eval/tau"] for line in lines if "eval/tau" in line]
    return {
        "steps": lines[-1]["step"],
        "passes": lines[-1]["pass"] + 1,
        "tokens": sum(line["train/tokens"] for line in lines),
        "supervised_rows": sum(sum(line["train/rows"]) for line in lines),
        "seconds": sum(line["train/time_s"] for line in lines),
        "loss": lines[-1]["train/loss"],
        "tau": max(evaluated) if evaluated else None,
    }

"""The report as plain text for a terminal of 80 columns. Knows the report's content and nothing else."""

import textwrap
from collections.abc import Mapping
from typing import Any

WIDTH = 80
PASS, FAIL, BOLD, FAINT, RESET = "\033[32m", "\033[31m", "\033[1m", "\033[2m", "\033[0m"


def table(report: Mapping[str, Any], *, colour: bool = False) -> str:
    """The whole report in lines of at most 80 characters (escape codes of `colour` not counted)."""
    lines = [
        *_head(report),
        *_target_change(report),
        *_runs(report),
        *_slots(report),
        *_categories(report),
        *_costs(report),
        *_certificate(report["certificate"]),
        *_training(report),
    ]
    if report["note"]:
        lines += ["", *_wrapped(f"Note: {report['note']}")]
    return "\n".join(_paint(line) if colour else line for line in ["", *lines, ""])


def interval(number: Mapping[str, Any], digits: int = 2) -> str:
    """value [low, high], or a dash where there is none."""
    if number["value"] is None:
        return "-"
    if number["low"] is None:
        return f"{number['value']:.{digits}f}"
    return f"{number['value']:.{digits}f} [{number['low']:.{digits}f}, {number['high']:.{digits}f}]"


def _head(report: Mapping[str, Any]) -> list[str]:
    title = f"{report['drafter']} for {report['target']}"
    headline = f"tau {interval(report['tau'])}    eta {interval(report['eta'])}"
    verdict = "LOSSLESS" if report["lossless"] else "NOT LOSSLESS"
    return [
        f"{title:<{WIDTH - 24}.{WIDTH - 24}}{'recipe ' + report['recipe']:>24.24}",
        "=" * WIDTH,
        f"{headline:<{WIDTH - 14}}{verdict:>14}",
        "tau: tokens per verification. eta: speed against plain decoding. [95% interval]",
    ]


def change_in_words(change: Mapping[str, Any]) -> str:
    """What joint training did to the target, for terminal and page."""
    kl, same = f"{change['kl']:.4f} nats a token", f"{100 * change['agreement']:.1f}%"
    losses = f"{change['loss_tuned']:.4f}, the original's {change['loss_original']:.4f}"
    return (
        f"The target was trained too and is no longer {change['original']}. Over {change['tokens']:,} tokens "
        f"of held-out answers: KL(original || tuned) {kl}, same likeliest token for {same}, loss {losses}"
        ". Lossless here means: the tuned target's text."
    )


def _target_change(report: Mapping[str, Any]) -> list[str]:
    change = report["target_change"]
    return [] if change is None else _section(["TARGET CHANGED", *_wrapped(change_in_words(change))])


def _runs(report: Mapping[str, Any]) -> list[str]:
    lines = [f"{'RUN':<14}{'T':>4} {'law':<12}{'dtype':<6}{'tau':<19}{'eta':<19}{'alpha':>5}"]
    for run in report["runs"]:
        dtype = {"bfloat16": "bf16", "float32": "fp32"}[run["dtype"]]
        eta = "withheld" if "withheld" in run["eta"] else interval(run["eta"])
        lines.append(
            f"{run['name']:<14.13}{run['temperature']:>4.1f} {run['law']:<12}{dtype:<6}"
            f"{interval(run['tau']):<19}{eta:<19}{_value(run['alpha']):>5}"
        )
        if run["lossy"]:
            lines.append(f"{'  LOSSY: this text is not of the law of the target':<{WIDTH - 5}}LOSSY")
    return _section(lines)


def _slots(report: Mapping[str, Any]) -> list[str]:
    lines = [f"{'SLOT':<24}" + "".join(f"{k:>7}" for k in range(report["length"]))]
    lines.append(f"{'alpha_k (given before)':<24}" + "".join(f"{_value(n):>7}" for n in report["alpha_k"]))
    lines.append(f"{'joint_k (all to here)':<24}" + "".join(f"{_value(n):>7}" for n in report["joint_k"]))
    return _section(lines)


def _categories(report: Mapping[str, Any]) -> list[str]:
    lines = [f"{'CATEGORY':<16}{'tau':<21}{'eta':<21}{'alpha':>6}{'texts':>8}"]
    for name, found in report["categories"].items():
        lines.append(
            f"{name:<16.15}{interval(found['tau']):<21}{interval(found['eta']):<21}"
            f"{_value(found['alpha']):>6}{found['texts']:>8}"
        )
    return _section(lines)


def _costs(report: Mapping[str, Any]) -> list[str]:
    r, c, gamma, rest = (report[name]["value"] for name in ("r", "c", "gamma", "overhead"))
    if None in (r, c, gamma, rest):
        return []
    cost = [
        "COST OF A ROUND, in plain steps",
        f"verify r {r:.2f} + {gamma:.1f} draft steps of c {c:.3f} + rest {rest:.2f} "
        f"= {r + gamma * c + rest:.2f}",
    ]
    if "withheld" in report["eta"]:
        return _section([*cost, "every speed-up is withheld: the certificate failed"])
    lines = [
        *cost,
        f"plain {_value(report['plain_throughput_tok_s'], 1)} tok/s, "
        f"speculative {_value(report['throughput_tok_s'], 1)} tok/s; "
        f"eta by model {_value(report['eta_model'])}, Leviathan's {_value(report['eta_leviathan'])}",
        "eta by model is eta itself at batch 1, since rest is the measured remainder",
    ]
    if report["eta_limit"]["value"] is not None:
        share = _value(report["limit_share"])
        lines.append(
            f"eta_limit {interval(report['eta_limit'])} on {report['limit_gpu']}, eta/eta_limit {share}"
        )
        lines.append("(a model of its bandwidth and arithmetic with this tau, not a measurement)")
    return _section(lines)


def _certificate(certificate: Mapping[str, Any]) -> list[str]:
    lines = [f"{'CERTIFICATE':<70}{'pass' if certificate['pass'] else 'FAIL':>10}"]
    if greedy := certificate["greedy"]:
        text = (
            f"greedy fp32: {greedy['prompts']} prompts, {greedy['tokens']} tokens, "
            f"{greedy['differences']} differences, {len(greedy['ties'])} ties"
        )
        lines.append(f"{text:<70}{'pass' if greedy['pass'] else 'FAIL':>10}")
        for run in greedy["runs"]:
            lines.append(
                f"  {run['name']} in {run['dtype']}: {run['identical']} of {run['texts']} texts identical, "
                f"{len(run['ties'])} ties, {run['differences']} real"
            )
    if sampling := certificate["sampling"]:
        text = f"sampling fp32: {sampling['tokens']} tokens, KS {sampling['statistic']:.4f}"
        text += f", p {sampling['p_value']:.2g}"
        lines.append(f"{text:<70}{'pass' if sampling['pass'] else 'FAIL':>10}")
    for run in certificate["lossy"]:
        settings = ", ".join(f"{name} {value:g}" for name, value in run["leniency"].items())
        text = f"{run['name']:.16}: {run['law']}, {settings}"
        lines.append(f"{text:<70}{'LOSSY':>10}")
    lines.append(f"  made in {certificate['seconds']:.0f} s")
    return _section(lines)


def _training(report: Mapping[str, Any]) -> list[str]:
    lines = []
    if training := report["training"]:
        lines.append(
            f"trained on {training['tokens']:,} tokens (each pass counted), {training['steps']} steps, "
            f"{training['seconds']:.0f} s"
        )
    spent = [f"{name} {stage['seconds']:.0f}{_planned(stage)}" for name, stage in report["budget"].items()]
    if spent:
        lines += _wrapped("seconds (budget): " + ", ".join(spent))
    return _section(lines) if lines else []


def _planned(stage: Mapping[str, Any]) -> str:
    return "" if stage["budget_s"] is None else f" ({stage['budget_s']:.0f})"


def _section(lines: list[str]) -> list[str]:
    return ["-" * WIDTH, *lines]


def _value(number: Mapping[str, Any], digits: int = 2) -> str:
    return "-" if number["value"] is None else f"{number['value']:.{digits}f}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH)


def _paint(line: str) -> str:
    """Bold headings, green and red verdicts, faint rules."""
    if set(line) <= set("-=") and line:
        return f"{FAINT}{line}{RESET}"
    for word, code in (
        ("NOT LOSSLESS", FAIL),
        ("LOSSY", FAIL),
        ("LOSSLESS", PASS),
        ("FAIL", FAIL),
        ("pass", PASS),
    ):
        if line.endswith(word):
            return f"{line[: -len(word)]}{code}{word}{RESET}"
    return f"{BOLD}{line}{RESET}" if line.split(" ")[0].isupper() else line

"""report.html: one page without scripts, fonts or files from elsewhere, light and dark by the reader's
setting.

Knows the content of report.json (docs/formats.md) and the lines of metrics.jsonl; every picture is an inline
SVG.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from spectrain.eval import plots
from spectrain.eval.report_style import STYLE
from spectrain.eval.report_table import change_in_words

DTYPES = {"bfloat16": "bf16", "float32": "fp32"}


def page(report: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> str:
    """The whole page; lines: those of metrics.jsonl, none if nothing was trained."""
    title = f"{report['drafter']} for {report['target']}"
    sections = [
        _header(report, title),
        _cards(report),
        _runs(report),
        _acceptance(report),
        _costs(report),
        _text_sample(report),
        _certificate(report["certificate"]),
        _training(report, lines),
        _provenance(report),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        '<meta name="color-scheme" content="light dark"/>'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main>\n{chr(10).join(part for part in sections if part)}\n</main></body></html>\n"
    )


def _header(report: Mapping[str, Any], title: str) -> str:
    made = report["provenance"]
    facts = [
        f"recipe {report['recipe']}",
        made["time"][:16].replace("T", " ") + " UTC",
        made["hardware"]["cpu"],
    ]
    facts += [gpu["name"] for gpu in made["hardware"]["gpus"]]
    notes = [report["note"]] if report["note"] else []
    notes += [change_in_words(report["target_change"])] if report["target_change"] else []
    note = "".join(f'<p class="note">{escape(text)}</p>' for text in notes)
    return (
        f'<header><div class="brand">spectrain report</div><h1>{escape(title)}</h1>'
        f'<p class="facts">{escape("  ·  ".join(facts))}</p>{note}</header>'
    )


def _cards(report: Mapping[str, Any]) -> str:
    eta = report["eta"]
    if "withheld" in eta:
        speed = _card("eta, speed-up", "withheld", "", escape(eta["withheld"]), "bad")
    else:
        rates = [_show(report[name], 1) for name in ("plain_throughput_tok_s", "throughput_tok_s")]
        words = f"{rates[0]} tokens/s plain, {rates[1]} with drafts, same process"
        speed = _card("eta, speed-up", _show(eta) + "×", _span(eta), words)
    parts = [report["certificate"][name] for name in ("greedy", "sampling") if report["certificate"][name]]
    tokens = sum(part["tokens"] for part in parts)
    if report["lossless"]:
        alone = "the tuned target" if report["target_change"] else "the target alone"
        verdict = _card("certificate", "lossless", "", f"{tokens:,} tokens tested against {alone}", "good")
    else:
        verdict = _card("certificate", "not lossless", "", "decoded text is not the target's own", "bad")
    return (
        '<section class="cards">'
        + _card(
            "tau, tokens per verification",
            _show(report["tau"]),
            _span(report["tau"]),
            f"{_shape(report)}, {_setting(report)}",
        )
        + speed
        + _card(
            "alpha, acceptance",
            _show(report["alpha"]),
            _span(report["alpha"]),
            "of a draft token that is reached",
        )
        + verdict
        + "</section>"
    )


def _shape(run: Mapping[str, Any]) -> str:
    names = {"chain": "chain", "tree": "tree", "static": "static tree"}
    return f"{names[run['proposal']]} of {run['nodes']}"  # a chain's nodes are its length


def _label(run: Mapping[str, Any]) -> str:
    return f"{run['name']} (lossy)" if run["lossy"] else run["name"]


def _setting(run: Mapping[str, Any]) -> str:
    filters = f", top-p {run['top_p']:g}" if run["top_p"] < 1 else ""
    off = {
        "top_k_filter": 0,
        "min_p": 0,
        "repetition_penalty": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
    }
    for key, value in off.items():
        if run[key] != value:
            filters += f", {key.removesuffix('_filter').replace('_', '-')} {run[key]:g}"
    return f"T = {run['temperature']:g}{filters}, {DTYPES[run['dtype']]}, batch {run['batch']}"


def _card(name: str, value: str, span: str, words: str, kind: str = "") -> str:
    interval = f'<div class="span">{span}</div>' if span else ""
    return (
        f'<div class="card {kind}"><div class="name">{name}</div><div class="value">{value}</div>'
        f'{interval}<div class="words">{words}</div></div>'
    )


def _runs(report: Mapping[str, Any]) -> str:
    columns = ("run", "proposal", "law", "tau", "eta", "alpha", "r", "c", "texts", "")
    rows = []
    for run in report["runs"]:
        eta = '<span class="bad">withheld</span>' if "withheld" in run["eta"] else _cell(run["eta"])
        words = "lossy" if run["lossy"] else "lossless" if run["lossless"] else "not lossless"
        badge = _tag(words, run["lossless"])
        cells = [
            f"<b>{escape(_label(run))}</b>", f"{_shape(run)}<br/><small>{_setting(run)}</small>",
            run["law"], _cell(run["tau"]), eta,
            _cell(run["alpha"]), _show(run["r"]), _show(run["c"], 3), str(run["texts"]), badge,
        ]  # fmt: skip
        rows.append(cells)
    caption = (
        "Every run decodes the held-out prompts, or the first of them (texts), speculatively and plainly in "
        "turns. Values with 95% bootstrap intervals over prompts. r: one verification, c: one draft step, in "
        "plain steps."
    )
    return _section("Runs", _table(columns, rows), caption)


def _acceptance(report: Mapping[str, Any]) -> str:
    runs = report["runs"]
    names = [_label(run) for run in runs]
    slots = [str(k) for k in range(max(run["length"] for run in runs))]
    alphas = [(_label(run), [_interval(n) for n in run["alpha_k"]]) for run in runs]
    counts = [run["accepted_histogram"] for run in runs]
    shares = [(n, [100 * v / max(1, sum(c)) for v in c]) for n, c in zip(names, counts, strict=True)]
    categories = list(report["categories"])
    rows = ["all", *categories]
    taus = []
    for run in runs:  # one of few prompts may have none of a category
        parts = [run, *(run["categories"].get(name) for name in categories)]
        taus.append((_label(run), [part and _interval(part["tau"]) for part in parts]))
    accepted_labels = [str(k) for k in range(len(slots) + 1)]
    figures = [
        _figure(
            "Acceptance by slot",
            "How often the draft at slot k is kept, given that all before it were.",
            plots.intervals(alphas, slots, x="slot k", y="alpha_k"),
        ),
        _figure(
            "Accepted drafts per verification",
            "Share of verifications by drafts kept; the target adds one token of its own.",
            plots.bars(shares, accepted_labels, x="accepted draft tokens", y="verifications"),
        ),
        _figure(
            "tau by category",
            "Tokens per verification; plain decoding is 1.",
            plots.dots(taus, rows, x="tau", start=1.0),
        ),
    ]
    return _section("Acceptance", plots.legend(names) + f'<div class="grid3">{"".join(figures)}</div>')


def _costs(report: Mapping[str, Any]) -> str:
    rows = []
    for run in report["runs"]:
        r, c, gamma, rest = (run[name]["value"] for name in ("r", "c", "gamma", "overhead"))
        if None not in (r, c, gamma, rest):
            rows.append((_label(run), [("verify", r), ("draft", gamma * c), ("rest", max(rest, 0.0))]))
    if not rows:
        return ""
    body = plots.legend(["verify", "draft", "rest"])
    body += plots.stack(rows, x="cost of one round, in plain decoding steps; eta = tau / cost")
    if not report["certificate"]["pass"]:
        return _section("Where a round's time goes", body)
    gpu = report["limit_gpu"]
    models = [
        f"{escape(_label(run))}: measured {_show(run['eta'])}, by costs {_show(run['eta_model'])}, "
        f"Leviathan's formula {_show(run['eta_leviathan'])}"
        + (f", limit {_show(run['eta_limit'])} ({_show(run['limit_share'])} of it)" if gpu != "none" else "")
        for run in report["runs"]
    ]
    words = "Speed-up. " + "; ".join(models) + "."
    if gpu != "none":
        words += f" The limit is a model of the bandwidth and arithmetic of {gpu}, not a measurement."
    return _section("Where a round's time goes", body, words)


def _text_sample(report: Mapping[str, Any]) -> str:
    blocks: list[str] = []
    for sample in report["samples"]:
        pieces = "".join(
            f"<mark>{escape(piece)}</mark>" if drafted else escape(piece)
            for piece, drafted in sample["pieces"]
        )
        blocks.append(
            f"<details{'' if blocks else ' open'}><summary>{escape(sample['category'])}</summary>"
            f'<p class="prompt">{escape(sample["prompt"])}</p><p class="answer">{pieces}</p></details>'
        )
    caption = (
        "The headline run's text. <mark>Marked</mark>: written by the drafter and kept; the rest: the target."
    )
    return _section("What it looks like", "".join(blocks), caption) if blocks else ""


def _certificate(certificate: Mapping[str, Any]) -> str:
    rows = []
    if greedy := certificate["greedy"]:
        what = f"{greedy['prompts']} prompts, {greedy['tokens']:,} tokens for each kind of proposal"
        found = f"{greedy['differences']} differences, {len(greedy['ties'])} ties"
        rows.append(["greedy, fp32", what, found, _verdict(greedy["pass"])])
        for run in greedy["runs"]:
            found = f"{run['identical']} identical, {len(run['ties'])} ties, {run['differences']} differences"
            name = f"greedy, {DTYPES[run['dtype']]}"
            rows.append(
                [
                    name,
                    f"{escape(run['name'])}, {run['texts']} texts",
                    found,
                    _verdict(not run["differences"]),
                ]
            )
    figures = []
    if sampling := certificate["sampling"]:
        for run in sampling["runs"]:
            what = f"{escape(run['name'])}, {run['tokens']:,} tokens, law {run['law']}"
            found = ", ".join(
                f"{name} p {run[key]['p_value']:.2g}"
                for name, key in (
                    ("uniform", "uniformity"),
                    ("by target", "uniformity_by_target"),
                    ("serial", "serial_correlation"),
                    ("accepts", "acceptance"),
                )
            )
            found += f"; {len(run['impossible'])} impossible tokens"
            rows.append(["sampling, fp32", what, found, _verdict(run["p_value"] >= sampling["level"])])
            text = "Each sampled token's place in the target's own law: flat if the text is the target's."
            figures.append(_figure(run["name"], text, plots.histogram(run["histogram"], x="u")))
    for run in certificate["lossy"]:
        settings = ", ".join(f"{name} {value:g}" for name, value in run["leniency"].items())
        what = f"{escape(run['name'])}, law {run['law']}, {settings}"
        rows.append(["none", what, "the law does not keep the target's", _tag("lossy", False)])
    caption = (
        "Tested against an independent forward of the target over the finished text, never against the "
        f"engine's own numbers. Made in {certificate['seconds']:.0f} s."
    )
    body = _table(("test", "what", "found", ""), rows) + f'<div class="grid2">{"".join(figures)}</div>'
    return _section("Certificate of losslessness", body, caption)


def _training(report: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> str:
    training, figures = report["training"], []
    points = [(line["step"], line["train/loss"]) for line in lines]
    if len(points) > 1:
        figures.append(
            _figure(
                "Training loss", "Per step, and its running mean.", plots.curve(points, x="step", y="loss")
            )
        )
    facts = []
    if training:
        facts = [
            ["tokens seen", f"{training['tokens']:,}"],
            ["passes", str(training["passes"])],
            ["steps", f"{training['steps']:,}"],
            ["seconds", f"{training['seconds']:,.0f}"],
            ["last loss", f"{training['loss']:.4f}"],
        ]
    for name, stage in report["budget"].items():
        budget = "" if stage["budget_s"] is None else f" of {stage['budget_s']:.0f} planned"
        facts.append([f"stage {escape(name)}", f"{stage['seconds']:.0f} s{budget}"])
    if not facts:
        return ""
    return _section(
        "Training and budget", f'<div class="grid2">{"".join(figures)}<div>{_table((), facts)}</div></div>'
    )


def _provenance(report: Mapping[str, Any]) -> str:
    made = report["provenance"]
    git = made["git"] or {"sha": "none", "dirty": False}
    rows = [
        ["command", f"<code>{escape(made['command'])}</code>"],
        ["code", f"<code>{escape(git['sha'][:12])}</code>{' with changes' if git['dirty'] else ''}"],
        ["threads, processes", f"{made['threads']}, {made['processes']}"],
        ["memory", f"{made['hardware']['memory_gib']} GiB"],
        ["versions", escape(", ".join(f"{k} {v}" for k, v in made["versions"].items() if v))],
    ]
    return _section("Provenance", _table((), rows))


def _section(title: str, body: str, caption: str = "") -> str:
    words = f'<p class="caption">{caption}</p>' if caption else ""
    return f"<section><h2>{escape(title)}</h2>{words}{body}</section>"


def _figure(title: str, words: str, svg: str) -> str:
    return f"<figure><figcaption><b>{escape(title)}</b> {escape(words)}</figcaption>{svg}</figure>"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = f"<thead><tr>{''.join(f'<th>{name}</th>' for name in columns)}</tr></thead>" if columns else ""
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def _tag(words: str, good: bool) -> str:
    return f'<span class="tag {"good" if good else "bad"}">{words}</span>'


def _verdict(passed: bool) -> str:
    return _tag("pass" if passed else "fail", passed)


def _show(number: Mapping[str, Any], digits: int = 2) -> str:
    return "–" if number["value"] is None else f"{number['value']:.{digits}f}"


def _span(number: Mapping[str, Any]) -> str:
    return "" if number["low"] is None else f"{number['low']:.2f} to {number['high']:.2f}"


def _cell(number: Mapping[str, Any]) -> str:
    return f"{_show(number)} <small>{_span(number)}</small>"


def _interval(number: Mapping[str, Any]) -> plots.Interval | None:
    return None if number["value"] is None else (number["value"], number["low"], number["high"])

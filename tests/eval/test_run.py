"""The evaluation on a tiny target: results on disk, reuse, failure, and the report made of them."""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from spectrain import provenance
from spectrain.artifacts import write_json
from spectrain.config import EvalConfig, RunConfig, TrainConfig, WandbConfig
from spectrain.decode_settings import DecodeRunConfig
from spectrain.eval import run as evaluation
from spectrain.eval.certificate import CertificateFailed
from spectrain.eval.records import read_texts
from spectrain.eval.report import SPEED_UPS, build_report, scalars, write_report
from spectrain.eval.report_table import table

DOCS = Path(__file__).parents[2] / "docs" / "formats.md"
CHAIN = DecodeRunConfig(name="chain", dtype="float32", length=3)
RUNS = [
    CHAIN,
    replace(CHAIN, name="chain_t1", temperature=1.0),
    replace(CHAIN, name="tree", proposal="tree", law="target_only", nodes=6, top_k=2, batch=2),
    replace(CHAIN, name="typical_t1", temperature=1.0, law="typical"),
]


@dataclass(frozen=True)
class Family:
    family: str = "bigram"


def settings(folder: Path) -> RunConfig:
    rows = [
        {"id": f"{c}-{i}", "category": c, "turns": [f"{c} {i}?", "Why?"][: 1 + i]}
        for c in "ab"
        for i in (0, 1)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunConfig(
        recipe="tiny",
        note="A demo <of> a report.",
        drafter=Family(),
        wandb=WandbConfig(enabled=False),
        train=TrainConfig(eval_prompts=3),
        eval=EvalConfig(
            prompts=str(folder / "prompts.jsonl"),
            max_new_tokens=24,
            runs=RUNS,
            greedy_prompts=3,
            greedy_tokens=20,
            sampling_tokens=300,
            bootstrap=200,
        ),
    )


def one_run(folder: Path, **changes) -> RunConfig:
    config = settings(folder)
    return replace(config, eval=replace(config.eval, runs=[CHAIN], baseline="", **changes))


def fill(folder: Path, config: RunConfig) -> None:
    """What the other stages leave in a run folder."""
    (folder / "config.yaml").write_text(yaml.safe_dump(asdict(config)))
    provenance.append(folder)
    write_json(folder / "stages.json", {"eval": {"seconds": 1.5, "budget_s": None, "reused": False}})
    same = {"pass": 0, "train/tokens": 100, "train/rows": [9, 8], "train/time_s": 0.5}
    lines: list[dict] = [{"step": s, "train/loss": 3.0 / s, **same} for s in (1, 2, 3)]
    lines[-1]["eval/tau"] = 1.5
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4')


def run_evaluation(config: RunConfig, target, drafter, folder: Path) -> None:
    evaluation.evaluate(config, lambda dtype: target, lambda target: drafter, folder / "eval")


@pytest.fixture(scope="module")
def done(target, drafter, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    config = settings(folder)
    fill(folder, config)
    run_evaluation(config, target, drafter, folder)
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def report(done) -> dict:
    return json.loads((done / "report.json").read_text())


def test_every_turn_of_every_prompt_is_decoded_by_both_arms(done):
    texts = read_texts(done / "eval" / "runs" / "chain" / "texts.jsonl")
    assert [f"{t.id} {t.turn}" for t in texts] == ["a-0 0", "b-0 0", "a-1 0", "a-1 1", "b-1 0", "b-1 1"]
    assert [t.unit for t in texts] == [0, 1, 2, 2, 3, 3]
    assert all(t.speculative.ids == t.plain.ids for t in texts)
    assert len(texts[3].plain.prompt_ids) > len(texts[2].plain.prompt_ids) + len(texts[2].plain.ids)


def test_batched_texts_equal_single_ones(done):
    single, batched = (
        {(t.id, t.turn): t.plain.ids for t in read_texts(done / "eval" / "runs" / name / "texts.jsonl")}
        for name in ("chain", "tree")
    )
    assert single == batched


def test_the_report_is_the_headline_run_and_holds_all_runs(report):
    assert [run["name"] for run in report["runs"]] == ["chain", "chain_t1", "tree", "typical_t1", "ngram"]
    assert report["tau"] == report["runs"][0]["tau"]
    assert report["lossless"] and report["certificate"]["pass"]
    tau, joint = report["tau"]["value"], sum(n["value"] for n in report["joint_k"])
    assert tau == pytest.approx(1 + joint - report["bonus_cut"]["value"], rel=1e-12)
    assert report["tau"]["low"] <= tau <= report["tau"]["high"]
    assert sum(report["accepted_histogram"]) == report["counters"]["rounds"]
    assert report["eta"]["value"] > 0


def test_the_baseline_is_a_run_like_the_headline_that_says_who_drafted_it(report):
    headline, ngram = report["runs"][0], report["runs"][-1]
    assert (report["drafter"], headline["drafter"], ngram["drafter"]) == ("bigram", "bigram", "ngram")
    same = ("temperature", "proposal", "length", "law", "dtype", "batch", "texts")
    assert [ngram[key] for key in same] == [headline[key] for key in same]
    assert ngram["lossless"] and 1 <= ngram["tau"]["value"] < headline["tau"]["value"]
    assert ngram["eta_limit"]["value"] > 0  # its lookups read no weights
    assert report["certificate"]["greedy"]["runs"][-1]["name"] == "ngram"
    assert len(report["certificate"]["greedy"]["plans"]) == 3
    assert any(line.startswith("ngram ") for line in table(report).splitlines())


@pytest.mark.case("O-S08")
def test_a_demo_says_so_and_shows_how_little_it_has_seen(report, done):
    training = report["training"]
    assert (training["tokens"], training["supervised_rows"], training["steps"]) == (300, 51, 3)
    assert (training["seconds"], training["passes"], training["loss"], training["tau"]) == (1.5, 1, 1.0, 1.5)
    assert report["note"] == "A demo <of> a report."
    assert "A demo &lt;of&gt; a report." in (done / "report.html").read_text()
    assert "trained on 300 tokens" in table(report) and "A demo <of> a report." in table(report)


def documented() -> dict[str, set[str]]:
    """Keys by the heading of their table in docs/formats.md."""
    found: dict[str, set[str]] = {}
    for section in DOCS.read_text().split("\n### ")[1:]:
        section = section.split("\n## ")[0]
        rows = re.findall(r"^\| (`.*?) \|", section, flags=re.M)
        found[section.splitlines()[0]] = {key for row in rows for key in re.findall(r"`([^`]+)`", row)}
    return found


def test_the_report_has_exactly_the_documented_keys(report):
    docs = documented()
    numbers, run = docs["Numbers"], docs["Run"] | docs["Numbers"]
    certificate, training = report["certificate"], report["training"]
    assert set(report) == docs["Top level"] | run
    assert all(set(found) == run for found in report["runs"])
    assert all(set(found) == numbers for found in report["categories"].values())
    assert set(report["tau"]) | {"withheld"} == docs["Number"]
    assert set(report["counters"]) == docs["Counters"]
    assert set(report["samples"][0]) == docs["Sample"]
    assert set(certificate) == docs["Certificate"]
    assert set(certificate["lossy"][0]) == docs["Lossy run"]
    assert set(certificate["greedy"]) == docs["Greedy"]
    assert set(certificate["greedy"]["runs"][0]) == docs["Greedy run"]
    assert set(certificate["sampling"]) == docs["Sampling"]
    assert set(certificate["sampling"]["runs"][0]) == docs["Sampling run"]
    assert set(training) == docs["Training"]
    assert set(report["budget"]["eval"]) == docs["Budget"]


def test_what_is_undefined_is_null(done):
    assert "NaN" not in (done / "report.json").read_text()


def test_samples_mark_the_tokens_that_drafts_wrote(report, target, done):
    text = read_texts(done / "eval" / "runs" / "chain" / "texts.jsonl")[0]
    sample = report["samples"][0]
    assert (sample["id"], sample["category"], sample["prompt"]) == ("a-0", "a", "a 0?")
    written = "".join(piece for piece, _ in sample["pieces"])
    assert target.tokenizer.decode(text.speculative.ids, skip_special_tokens=True).startswith(written)


def test_the_table_fits_a_terminal(report):
    lines = table(report).splitlines()
    assert max(map(len, lines)) <= 80
    assert "\033" not in table(report) and "\033[32m" in table(report, colour=True)
    assert any(line.startswith("chain_t1") for line in lines)
    assert "eta by model is eta itself at batch 1, since rest is the measured remainder" in lines


class Page(HTMLParser):
    """Checks nesting and collects tags, attributes and text."""

    VOID = ("meta", "br")

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.values: list[str] = []
        self.words = ""

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.values += [f"{name}={value}" for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.values += [f"{name}={value}" for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data


def test_the_page_is_well_formed_and_needs_nothing_from_elsewhere(done):
    page = Page()
    page.feed((done / "report.html").read_text())
    page.close()
    assert page.open == []
    assert {"svg", "table", "mark", "figure"} <= page.tags
    assert not {"script", "link", "img", "iframe", "object"} & page.tags
    assert not [value for value in page.values if re.search(r"https?:|//|^(src|href)=|url\(", value)]
    assert "A demo <of> a report." in page.words and "@import" not in page.words and "url(" not in page.words


def test_scalars_carry_every_number_of_every_run(report):
    found = scalars(report)
    assert found["eval/lossless"] == 1.0
    assert found["eval/chain_t1/tau"] == report["runs"][1]["tau"]["value"]


def decoded_again(config, target, drafter, folder, monkeypatch) -> list[str]:
    """What an evaluation of a finished folder makes anew: titles of runs, "certificate"."""
    made: list[str] = []
    decode, certify = evaluation.decode_in_turns, evaluation.certify
    monkeypatch.setattr(
        evaluation, "decode_in_turns", lambda *args, **kw: made.append(kw["title"]) or decode(*args, **kw)
    )
    monkeypatch.setattr(evaluation, "certify", lambda *args: made.append("certificate") or certify(*args))
    run_evaluation(config, target, drafter, folder)
    return made


def test_finished_runs_are_reused_and_a_missing_one_is_made(done, target, drafter, monkeypatch):
    (done / "eval" / "runs" / "tree" / "manifest.json").unlink()  # as if killed before the end
    assert decoded_again(settings(done), target, drafter, done, monkeypatch) == ["eval tree"]


def test_a_report_made_elsewhere_shows_where_and_with_what_the_evaluation_was_made(done, report):
    """A report made on another machine, after an invocation with other names that was refused."""
    config = replace(settings(done), note="other", recipe="other")
    (done / "config.yaml").write_text(yaml.safe_dump(asdict(config)))
    write_json(done / "provenance.json", [{"hardware": {"cpu": "another"}}])
    again = build_report(done)
    for key in ("recipe", "note", "target", "drafter", "provenance"):
        assert again[key] == report[key], key
    fill(done, settings(done))


def test_reused_runs_keep_the_provenance_of_their_decoding(done, target, drafter, monkeypatch):
    before = build_report(done)["provenance"]
    made = json.loads(json.dumps(before)) | {"hardware": {"cpu": "another", "gpus": []}}
    monkeypatch.setattr(evaluation, "provenance", lambda: made)
    run_evaluation(settings(done), target, drafter, done)
    assert build_report(done)["provenance"] == before


def test_results_of_another_form_of_decoding_or_version_are_not_reused(
    tmp_path, target, drafter, monkeypatch
):
    config = one_run(tmp_path)
    run_evaluation(config, target, drafter, tmp_path)
    monkeypatch.setattr(evaluation, "FORM", evaluation.FORM + 1)
    assert decoded_again(config, target, drafter, tmp_path, monkeypatch) == ["eval chain", "certificate"]
    made = evaluation.provenance()
    made["versions"]["spectrain"] = "another"
    monkeypatch.setattr(evaluation, "provenance", lambda: made)
    assert "eval chain" in decoded_again(config, target, drafter, tmp_path, monkeypatch)


def test_a_certificate_of_other_questions_or_plain_texts_is_made_again(
    tmp_path, target, drafter, monkeypatch
):
    """One prompt is decoded, but the certificate asks more of the file."""
    config = one_run(tmp_path, max_prompts=1)
    run_evaluation(config, target, drafter, tmp_path)
    path = tmp_path / "prompts.jsonl"
    path.write_text(path.read_text().replace("b 1?", "b one?"))
    with monkeypatch.context() as patch:
        assert decoded_again(config, target, drafter, tmp_path, patch) == ["certificate"]
    texts = tmp_path / "eval" / "runs" / "chain" / "texts.jsonl"
    line = json.loads(texts.read_text())
    line["plain"]["ids"][-1] ^= 1
    texts.write_text(json.dumps(line) + "\n")
    with monkeypatch.context() as patch, pytest.raises(CertificateFailed):
        fill(tmp_path, config)
        decoded_again(config, target, drafter, tmp_path, patch)


def test_another_drafter_is_not_mixed_in(done, target, drafter, monkeypatch):
    config = settings(done)
    titles: list[str] = []

    def stop(*args, title, **kw) -> Iterator:
        titles.append(title)
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluation, "decode_in_turns", stop)
    other = type(drafter)(target)
    other.logits_VV.mul_(1.01)
    with pytest.raises(KeyboardInterrupt):
        run_evaluation(config, target, other, done)
    assert titles == ["eval chain"]


def test_no_report_is_made_of_an_evaluation_that_was_stopped_half_way(tmp_path, target, drafter, monkeypatch):
    """Texts of another drafter beside the manifest and certificate of the first would read as lossless."""
    config = one_run(tmp_path)
    fill(tmp_path, config)
    run_evaluation(config, target, drafter, tmp_path)
    other = type(drafter)(target)
    other.logits_VV.mul_(1.01)

    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluation, "certify", stop)
    with pytest.raises(KeyboardInterrupt):
        run_evaluation(config, target, other, tmp_path)
    with pytest.raises(ValueError, match="no finished evaluation"):
        build_report(tmp_path)


def test_texts_are_not_reused_under_the_manifest_of_those_before(tmp_path, target, drafter, monkeypatch):
    config = one_run(tmp_path)
    run_evaluation(config, target, drafter, tmp_path)
    other = type(drafter)(target)
    other.logits_VV.mul_(1.01)

    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluation, "shown", stop)  # after the texts are written, before their manifest
    with pytest.raises(KeyboardInterrupt):
        run_evaluation(config, target, other, tmp_path)
    assert not (tmp_path / "eval" / "runs" / "chain" / "manifest.json").exists()


def test_a_failed_certificate_withholds_eta_after_the_report_is_written(
    tmp_path, target, drafter, monkeypatch
):
    config = one_run(tmp_path)
    fill(tmp_path, config)
    real = evaluation.certify

    def fail(*args) -> dict:
        found = real(*args)
        difference = {"text": "a-0", "place": 3, "expected": 1, "found": 2, "margin": 1.0, "bound": 1e-4}
        greedy = found["greedy"] | {"differences": 1, "difference_list": [difference], "pass": False}
        return found | {"greedy": greedy, "pass": False}

    monkeypatch.setattr(evaluation, "certify", fail)
    with pytest.raises(
        CertificateFailed, match="eta is withheld: greedy text differs in 1 places in float32"
    ):
        run_evaluation(config, target, drafter, tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["lossless"] is False and report["tau"]["value"] > 1
    for part in (report, *report["runs"], *report["categories"].values()):
        for name in SPEED_UPS:
            assert part[name]["value"] is None and "greedy text differs" in part[name]["withheld"]
    assert {scalars(report)[f"eval/chain/{name}"] for name in SPEED_UPS} == {"withheld"}
    assert "withheld" in (tmp_path / "report.html").read_text() and "NOT LOSSLESS" in table(report)
    assert "every speed-up is withheld" in table(report) and "tok/s" not in table(report)
    with pytest.raises(CertificateFailed):
        write_report(tmp_path)


def test_a_report_without_an_evaluation_names_the_stage(tmp_path):
    with pytest.raises(ValueError, match=r"no finished evaluation; run the eval stage"):
        build_report(tmp_path)


def test_training_asks_for_tau_by_real_decoding(tmp_path, target, drafter):
    found = evaluation.decode_held_out(settings(tmp_path), target, drafter, CHAIN)
    assert set(found) == {"tau", "alpha", "alpha_0", "alpha_1", "alpha_2"}
    assert 1 < found["tau"] < 4 and 0 < found["alpha"] < 1

"""A run of a lossy law beside a lossless headline: its numbers are shown, and everywhere called lossy."""

import json
from types import SimpleNamespace

import pytest

from spectrain.config import EvalConfig, RunConfig, WandbConfig
from spectrain.decode_settings import DecodeRunConfig
from spectrain.eval import run as evaluation
from spectrain.eval.records import read_texts
from spectrain.eval.report import build_report, scalars
from spectrain.eval.report_html import page
from spectrain.eval.report_table import table

CHAIN = DecodeRunConfig(name="chain", dtype="float32", length=2)
TYPICAL = DecodeRunConfig(name="typical_t1", dtype="float32", length=2, temperature=1.0, law="typical")


@pytest.fixture(scope="module")
def done(target, drafter, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    rows = [{"id": f"p{i}", "category": "a", "turns": [f"Question {i}?"]} for i in range(2)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = EvalConfig(
        baseline="",
        prompts=str(folder / "prompts.jsonl"),
        max_new_tokens=12,
        runs=[CHAIN, TYPICAL],
        greedy_prompts=1,
        greedy_tokens=4,
    )
    config = RunConfig(
        recipe="tiny",
        drafter=SimpleNamespace(family="bigram"),
        wandb=WandbConfig(enabled=False),
        eval=settings,
    )
    evaluation.evaluate(config, lambda dtype: target, lambda target: drafter, folder / "eval")
    return folder


@pytest.fixture(scope="module")
def report(done):
    return build_report(done)


def test_the_certificate_names_it_and_tests_the_others_alone(report):
    entry = {"name": "typical_t1", "law": "typical", "lossless": False}
    certificate = report["certificate"]
    assert certificate["lossy"] == [{**entry, "leniency": {"epsilon": 0.09, "delta": 0.3}}]
    assert certificate["sampling"] is None and certificate["greedy"]["pass"] and certificate["pass"]


def test_its_eta_is_shown_and_it_is_not_lossless(report):
    chain, typical = report["runs"]
    assert (chain["lossless"], chain["lossy"]) == (True, False)
    assert (typical["lossless"], typical["lossy"]) == (False, True)
    assert typical["eta"]["value"] > 0 and typical["tau"]["value"] > 1
    assert scalars(report)["eval/typical_t1/lossless"] == 0.0
    assert scalars(report)["eval/chain/lossless"] == 1.0


def test_the_table_says_lossy_below_its_row_and_in_the_certificate(report):
    lines = table(report).splitlines()
    (row,) = (i for i, line in enumerate(lines) if line.startswith("typical_t1 "))
    assert lines[row + 1].endswith("LOSSY") and max(map(len, lines)) <= 80
    (entry,) = (line for line in lines if line.startswith("typical_t1: typical, epsilon 0.09, delta 0.3"))
    assert entry.endswith("LOSSY")


def test_the_page_says_lossy_beside_every_mention(report):
    found = page(report, [])
    # The certificate's row has the word in a cell of its own.
    assert found.count("typical_t1") == found.count("typical_t1 (lossy)") + 1 > 4


def test_its_texts_say_that_they_are_not_lossless(done):
    texts = read_texts(done / "eval" / "runs" / "typical_t1" / "texts.jsonl")
    assert not any(text.speculative.lossless for text in texts)
    assert all(text.plain.lossless for text in texts)

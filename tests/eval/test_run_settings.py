"""What an evaluation's settings say of its runs: prompts of each, threads of both arms, the GPU
of the limit."""

import json
from types import SimpleNamespace

import pytest
import torch

from spectrain.config import EvalConfig, RunConfig, WandbConfig
from spectrain.decode_settings import DecodeRunConfig
from spectrain.eval import run as evaluation
from spectrain.eval.records import read_texts
from spectrain.eval.report import build_report
from spectrain.eval.report_html import _shape, page
from spectrain.eval.report_table import table


def evaluate(folder, target, drafter, runs, **settings):
    rows = [{"id": f"p{i}", "category": "aab"[i], "turns": [f"Question {i}?"]} for i in range(3)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = EvalConfig(
        baseline="",
        prompts=str(folder / "prompts.jsonl"),
        max_new_tokens=6,
        runs=runs,
        greedy_prompts=1,
        greedy_tokens=4,
        **settings,
    )
    config = RunConfig(
        recipe="tiny", drafter=SimpleNamespace(family="bigram"), wandb=WandbConfig(enabled=False), eval=plan
    )
    evaluation.evaluate(config, lambda dtype: target, lambda target: drafter, folder / "eval")


def run_of(name, **changes):
    return DecodeRunConfig(name=name, dtype="float32", length=2, **changes)


def test_a_run_may_ask_the_first_prompts_alone(tmp_path, target, drafter):
    evaluate(tmp_path, target, drafter, [run_of("all"), run_of("one", prompts=1)])
    asked = {
        name: [text.id for text in read_texts(tmp_path / "eval" / "runs" / name / "texts.jsonl")]
        for name in ("all", "one")
    }
    assert asked == {"all": ["p0", "p2", "p1"], "one": ["p0"]}
    report = build_report(tmp_path)
    assert [list(run["categories"]) for run in report["runs"]] == [["a", "b"], ["a"]]
    html = page(report, [])  # "one" has no number for category b
    assert "Every run decodes the held-out prompts, or the first of them (texts)" in html


@pytest.mark.parametrize(
    ("proposal", "nodes", "shape"),
    [("chain", 5, "chain of 5"), ("tree", 24, "tree of 24"), ("static", 7, "static tree of 7")],
)
def test_the_report_names_each_shape_of_proposal(proposal, nodes, shape):
    assert _shape({"proposal": proposal, "nodes": nodes}) == shape


def test_both_arms_decode_with_the_threads_asked_for_and_the_process_keeps_its_own(
    tmp_path, target, drafter, monkeypatch
):
    own, seen = torch.get_num_threads(), []
    decode = evaluation.decode_in_turns

    def watched(*args, **kwargs):
        seen.append(torch.get_num_threads())
        return decode(*args, **kwargs)

    monkeypatch.setattr(evaluation, "decode_in_turns", watched)
    evaluate(tmp_path, target, drafter, [run_of("all")], threads=own + 1)
    assert (seen, torch.get_num_threads()) == ([own + 1], own)


def test_the_limit_is_a_model_of_a_named_gpu_and_changing_it_decodes_nothing_again(
    tmp_path, target, drafter, monkeypatch
):
    runs = [run_of("x")]
    evaluate(tmp_path, target, drafter, runs)
    report = build_report(tmp_path)
    limit, tau = report["eta_limit"], report["tau"]
    cost = tau["value"] / limit["value"]
    assert cost > 1 and limit["low"] * cost == pytest.approx(tau["low"], rel=1e-9)
    assert report["limit_share"]["value"] == pytest.approx(report["eta"]["value"] / limit["value"], rel=1e-9)
    assert "on h200, eta/eta_limit" in table(report) and "not a measurement" in table(report)
    assert "model of the bandwidth and arithmetic of h200, not a measurement" in page(report, [])
    monkeypatch.setattr(evaluation, "decode_in_turns", None)  # a call would raise TypeError
    monkeypatch.setattr(evaluation, "certify", None)
    evaluate(tmp_path, target, drafter, runs, limit_gpu="none")
    again = build_report(tmp_path)
    assert again["eta_limit"] == again["limit_share"] == {"value": None, "low": None, "high": None}
    assert "eta_limit" not in table(again) and "not a measurement" not in page(again, [])


def test_a_run_may_be_drafted_by_a_family_without_weights_and_by_no_other(tmp_path, target, drafter):
    evaluate(tmp_path, target, drafter, [run_of("own"), run_of("looked_up", drafter="suffix")])
    assert [run["drafter"] for run in build_report(tmp_path)["runs"]] == ["bigram", "suffix"]
    message = r"^eval\.runs\.x\.drafter='standalone': it needs training; expected a family that does not"
    with pytest.raises(ValueError, match=message):
        evaluate(tmp_path, target, drafter, [run_of("x", drafter="standalone")])


def test_the_baseline_follows_the_headline_in_chains():
    tree = DecodeRunConfig(
        name="s", proposal="static", law="target_only", paths=[[0], [0, 0]], adaptive=True, batch=2
    )
    found = EvalConfig(runs=[tree]).with_baseline("eagle3").runs[-1]
    assert found == DecodeRunConfig(name="ngram", drafter="ngram", length=2, nodes=2, batch=2)
    assert EvalConfig(runs=[tree]).with_baseline("ngram").runs == [tree]
    assert EvalConfig(runs=[tree], baseline="").with_baseline("eagle3").runs == [tree]


def test_runs_of_two_dtypes_are_decoded_one_dtype_after_the_other(tmp_path, target, drafter):
    half = DecodeRunConfig(name="half", length=2, dtype="bfloat16")
    evaluate(tmp_path, target, drafter, [run_of("full"), half])
    assert [run["name"] for run in build_report(tmp_path)["runs"]] == ["full", "half"]

"""The prices of an adaptive run."""

import json
from dataclasses import dataclass

import pytest

from spectrain.artifacts import read_json
from spectrain.config import EvalConfig, RunConfig
from spectrain.decode.generation import Timing
from spectrain.decode_settings import DecodeRunConfig
from spectrain.eval import run as evaluation
from spectrain.eval.costs import costs_of, measure_costs
from spectrain.eval.speed import EngineArm


def test_costs_are_counted_in_plain_steps():
    """A plain step takes 0.1 s, a verification of 5 drafts 0.15 s, a draft step 0.01 s, the rest of a round
    0.02 s."""
    plain = Timing(prefill_s=9.0, decode_s=2.0, draft_s=0.0, verify_s=2.0, steps=20, draft_steps=0)
    fast = Timing(prefill_s=9.0, decode_s=2.2, draft_s=0.5, verify_s=1.5, steps=10, draft_steps=50)
    assert costs_of(plain, fast, drafted=5.0) == pytest.approx([1 + 0.1 + 0.2, 0.1, 0.1])


def test_deeper_heads_of_a_drafter_that_is_called_once_a_round_cost_no_step():
    plain = Timing(prefill_s=9.0, decode_s=2.0, draft_s=0.0, verify_s=2.0, steps=20, draft_steps=0)
    fast = Timing(prefill_s=9.0, decode_s=1.8, draft_s=0.1, verify_s=1.5, steps=10, draft_steps=10)
    assert costs_of(plain, fast, drafted=5.0) == pytest.approx([1 + 0.1 + 0.2, 0.0, 0.1])


def test_a_verification_faster_than_a_plain_step_costs_nothing_more():
    plain = Timing(0.0, 2.0, 0.0, 2.0, 20, 0)
    assert costs_of(plain, Timing(0.0, 1.4, 0.5, 0.9, 10, 50), drafted=5.0)[2] == 0.0


def test_costs_are_measured_on_the_full_plan(target, drafter):
    run = DecodeRunConfig(name="a", dtype="float32", length=3, adaptive=True)
    plain, fast = (EngineArm(target, d, run, 8, 1, 0) for d in (None, drafter))
    root, step, node = measure_costs(plain, fast, [[5, 9, 13]], [0])
    assert root > 1 and step > 0 and node >= 0


def test_texts_too_short_to_measure_are_refused(target, drafter):
    run = DecodeRunConfig(name="a", dtype="float32", length=3, adaptive=True)
    plain, fast = (EngineArm(target, d, run, 1, 1, 0) for d in (None, drafter))
    with pytest.raises(ValueError, match="^costs: the prompts' texts end before a round"):
        measure_costs(plain, fast, [[5, 9, 13]], [0])


@dataclass(frozen=True)
class Family:
    family: str = "bigram"


def test_costs_are_measured_once_and_kept_for_what_follows(tmp_path, target, drafter, monkeypatch):
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"id": "a", "category": "a", "turns": ["a?"]}) + "\n")
    run = DecodeRunConfig(name="a", dtype="float32", length=3, adaptive=True)
    given = DecodeRunConfig(name="b", dtype="float32", length=3, adaptive=True, costs=[1.0, 0.1, 0.1])
    config = EvalConfig(
        baseline="",
        prompts=str(tmp_path / "prompts.jsonl"), max_new_tokens=8, runs=[run, given],
        greedy_prompts=1, greedy_tokens=8, bootstrap=10,
    )  # fmt: skip
    settings = RunConfig(recipe="tiny", drafter=Family(), eval=config)
    used = []
    engine_arm = evaluation.EngineArm

    def noted(target, drafter, run, *rest, **more):
        used.append((run.name, run.costs))
        return engine_arm(target, drafter, run, *rest, **more)

    def measured_again(*rest):
        raise AssertionError("costs are there already")

    def evaluate():
        evaluation.evaluate(settings, lambda dtype: target, lambda target: drafter, tmp_path / "eval")
        return [run["costs"] for run in read_json(tmp_path / "eval" / "manifest.json")["eval"]["runs"]]

    first = evaluate()
    assert len(first[0]) == 3 and first[1] == [1.0, 0.1, 0.1]
    monkeypatch.setattr(evaluation, "measure_costs", measured_again)
    (tmp_path / "eval" / "runs" / "a" / "manifest.json").unlink()
    monkeypatch.setattr(evaluation, "EngineArm", noted)
    assert evaluate() == first
    assert ("a", first[0]) in used and ("b", [1.0, 0.1, 0.1]) not in used  # b was reused

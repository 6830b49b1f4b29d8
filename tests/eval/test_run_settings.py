"""What an evaluation's settings say of its runs: how many prompts each asks, and the threads of both arms."""

import json
from types import SimpleNamespace

import torch

from spectrain.config import DecodeRunConfig, EvalConfig, RunConfig, WandbConfig
from spectrain.eval import run as evaluation
from spectrain.eval.records import read_texts


def evaluate(folder, target, drafter, runs, **settings):
    rows = [{"id": f"p{i}", "category": "a", "turns": [f"Question {i}?"]} for i in range(3)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = EvalConfig(
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
    evaluate(tmp_path, target, drafter, [run_of("all"), run_of("two", prompts=2)])
    asked = {
        name: [text.id for text in read_texts(tmp_path / "eval" / "runs" / name / "texts.jsonl")]
        for name in ("all", "two")
    }
    assert asked == {"all": ["p0", "p1", "p2"], "two": ["p0", "p1"]}


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

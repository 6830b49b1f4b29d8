"""Joint training from the first stage to the report, on a tiny Llama."""

import json

import pytest
import torch
from safetensors.torch import load_file

from spectrain import __main__ as command
from spectrain.artifacts import read_json
from spectrain.eval.report_html import page
from spectrain.eval.report_table import table
from spectrain.testing import byte_tokenizer, tiny_llama


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder with a target, a corpus of 40 conversations and 4 prompts."""
    folder = tmp_path_factory.mktemp("inputs")
    model = tiny_llama(layers=2)
    model.save_pretrained(folder / "target")
    byte_tokenizer().save_pretrained(folder / "target")
    with open(folder / "corpus.jsonl", "w") as file:
        for i in range(40):
            answer = " ".join(map(str, range(i % 12 + 2)))
            turns = [{"role": "user", "content": f"count to {i}"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}) + "\n")
    with open(folder / "prompts.jsonl", "w") as file:
        for i in range(4):
            file.write(json.dumps({"id": f"p{i}", "category": "a", "turns": [f"say {i}"]}) + "\n")
    return folder


def spectrain(inputs, run_dir, *words):
    return command.main(
        [
            "recipe=medusa2_smollm2",
            f"target={inputs}/target",
            f"corpus.path={inputs}/corpus.jsonl",
            "corpus.eval_fraction=0.2",
            f"run_dir={run_dir}",
            "target.dtype=float32",
            "drafter.draft_vocab=0",
            "drafter.heads=2",
            "joint.rank=2",
            "joint.drafter_first=0.25",
            "joint.rate_share=1.0",
            "train.learning_rate=0.01",
            "train.dtype=float32",
            "train.max_steps=8",
            "train.batch_tokens=512",
            "train.micro_tokens=256",
            "train.eval_prompts=2",
            f"eval.prompts={inputs}/prompts.jsonl",
            "eval.max_new_tokens=8",
            "eval.max_prompts=2",
            "eval.greedy_prompts=2",
            "eval.greedy_tokens=8",
            "eval.sampling_tokens=20",
            "eval.bootstrap=20",
            "eval.baseline=''",
            "eval.runs=[{name: chain, length: 2, dtype: float32}]",
            "wandb.enabled=false",
            "budget_s={}",
            "device=cpu",
            *words,
        ]
    )


@pytest.fixture(autouse=True, scope="module")
def loud():
    """Leave the test process's warnings and loggers as they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "silence_libraries", lambda: None)
        yield


@pytest.fixture(scope="module")
def finished(inputs, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "joint"
    assert spectrain(inputs, run_dir, "stages=[prepare,train,eval,export,report]") == 0
    return run_dir


def test_the_run_leaves_a_tuned_target_whose_layers_moved_and_whose_ends_did_not(finished, inputs):
    before, after = (
        load_file(folder / "model.safetensors") for folder in (inputs / "target", finished / "tuned/target")
    )
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if "_proj" in name}


def test_the_report_says_that_the_target_changed_and_by_how_much(finished, inputs):
    report, tuned = read_json(finished / "report.json"), read_json(finished / "tuned/manifest.json")
    change = report["target_change"]
    assert change == tuned["change"]
    assert change["original"] == f"{inputs}/target" and change["tokens"] > 0
    assert change["kl"] > 0 and 0 <= change["agreement"] <= 1
    assert change["loss_original"] != change["loss_tuned"]
    assert report["target"] == str(finished / "tuned/target") and report["lossless"] is True
    for text in (" ".join(table(report).split()), page(report, [])):
        assert f"{change['kl']:.4f} nats a token" in text
        assert "Lossless here means: the tuned target" in text


def test_what_is_decoded_and_exported_is_for_the_tuned_target(finished):
    targets = read_json(finished / "tuned/manifest.json")["targets"]
    assert targets["original"]["weights"] != targets["tuned"]["weights"]
    decoded = read_json(finished / "eval/runs/chain/manifest.json")["settings"]["target"]
    assert decoded["weights"] == targets["tuned"]["weights"]
    assert read_json(finished / "tuned/drafter/config.json")["target"] == targets["tuned"]
    heads = load_file(finished / "tuned/drafter/drafter.safetensors")
    assert heads and not [name for name in heads if name.startswith("adapters.")]
    assert (finished / "export/medusa/model.safetensors").exists()


def test_the_same_command_again_reuses_the_tuned_target(finished, inputs):
    before = (finished / "tuned/manifest.json").stat().st_mtime_ns
    assert spectrain(inputs, finished, "stages=[train,eval]") == 0
    assert (finished / "tuned/manifest.json").stat().st_mtime_ns == before
    assert read_json(finished / "stages.json")["train"]["reused"] is True


def test_without_a_tuned_target_evaluation_asks_for_the_training(inputs, tmp_path, capsys):
    assert spectrain(inputs, tmp_path / "new", "stages=eval") == 2
    assert "tuned: no tuned target; run the train stage (stages=[train])" in capsys.readouterr().err


def test_a_corpus_without_held_out_conversations_is_refused_before_training(inputs, tmp_path, capsys):
    words = ("stages=[prepare,train]", "corpus.eval_fraction=0.0001")
    assert spectrain(inputs, tmp_path / "new", *words) == 2
    assert "corpus.eval_fraction=0.0001: no conversation is held out" in capsys.readouterr().err
    assert not (tmp_path / "new/checkpoints").exists()

"""The road of drafters that train nothing, and of a standalone model, on a tiny target."""

import json
import logging

import pytest

from spectrain import stages
from spectrain.artifacts import read_json
from spectrain.compose import compose
from spectrain.testing import byte_tokenizer, tiny_llama

SMALL = (
    "target.dtype=float32",
    "eval.max_new_tokens=12",
    "eval.max_prompts=0",
    "eval.greedy_prompts=2",
    "eval.greedy_tokens=12",
    "eval.sampling_tokens=30",
    "eval.bootstrap=20",
    "wandb.enabled=false",
    "device=cpu",
)
CHAIN = "eval.runs=[{name: chain, length: 3, dtype: float32}]"
SAMPLED = "{name: chain_t1, temperature: 1.0, dtype: float32}"
SMALL_TRAINING = (
    "train.dtype=float32",
    "train.max_steps=3",
    "train.batch_tokens=256",
    "train.micro_tokens=256",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder with a target, a smaller model with its tokenizer, 6 conversations and 2 prompts."""
    folder = tmp_path_factory.mktemp("inputs")
    for name, layers in (("target", 2), ("small", 1)):
        tiny_llama(layers=layers).save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    with open(folder / "corpus.jsonl", "w") as file:
        for i in range(6):
            turns = [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": "a b c a b"}]
            file.write(json.dumps({"messages": turns}) + "\n")
    prompts = [{"id": f"p{i}", "category": "a", "turns": [f"say {i}"]} for i in range(2)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return folder


def run(inputs, run_dir, recipe, *words):
    paths = (f"target={inputs}/target", f"run_dir={run_dir}", f"eval.prompts={inputs}/prompts.jsonl")
    return stages.run(compose([f"recipe={recipe}", *paths, *SMALL, CHAIN, *words]))


@pytest.mark.parametrize("recipe", ["ngram_smollm2", "suffix_smollm2"])
def test_a_family_without_weights_says_once_what_is_skipped_and_reports(inputs, tmp_path, caplog, recipe):
    caplog.set_level(logging.INFO, "spectrain")
    corpus = [f"drafter.corpus={inputs}/corpus.jsonl"] if recipe.startswith("suffix") else []
    run(inputs, tmp_path, recipe, *corpus, f"eval.runs=[{{name: chain, dtype: float32}}, {SAMPLED}]")
    skipped = [line for line in caplog.messages if "skipped" in line]
    reason = "train.passes=0, the drafter is used as it is built"
    assert skipped == [f"-- capture and train skipped: {reason}"]
    report = read_json(tmp_path / "report.json")
    family = recipe.removesuffix("_smollm2")
    assert (report["drafter"], report["lossless"], report["training"]) == (family, True, None)
    # n-gram is its own baseline
    assert [r["drafter"] for r in report["runs"]] == [family] * 2 + ["ngram"] * (family != "ngram")
    assert not (tmp_path / "checkpoints").exists() and not (tmp_path / "prepared").exists()


def test_export_refuses_before_anything_is_decoded_and_names_the_engines_own_setting(inputs, tmp_path):
    settings = '"method": "ngram", .*"prompt_lookup_min": 1, "prompt_lookup_max": 4'
    with pytest.raises(ValueError, match=f"^stages: export: ngram has no weights.*{settings}"):
        run(inputs, tmp_path, "ngram_smollm2", "stages=[eval,export,report]")
    assert not (tmp_path / "eval" / "runs").exists()


def test_what_has_nothing_to_train_is_not_trained(inputs, tmp_path):
    words = ("stages=[prepare,capture,train]", f"corpus.path={inputs}/corpus.jsonl", "train.passes=2")
    with pytest.raises(ValueError, match="train.passes=2.0: nothing of drafter ngram is trained"):
        run(inputs, tmp_path, "ngram_smollm2", *words)


def test_a_standalone_model_is_distilled_from_stored_features_and_evaluated_beside_itself_untrained(
    inputs, tmp_path
):
    words = (f"drafter.path={inputs}/small", f"corpus.path={inputs}/corpus.jsonl", *SMALL_TRAINING)
    run(inputs, tmp_path / "trained", "standalone_smollm2", *words)
    report = read_json(tmp_path / "trained" / "report.json")
    assert report["lossless"] and report["training"]["steps"] == 3
    assert report["training"]["supervised_rows"] > 0

    untrained = (
        "drafter.frozen=true",
        "train.passes=0",
        "eval.baseline=''",
        "stages=[capture,train,eval,report]",
    )
    run(inputs, tmp_path / "frozen", "standalone_smollm2", words[0], *untrained)
    report = read_json(tmp_path / "frozen" / "report.json")
    assert report["lossless"] and report["training"] is None and len(report["runs"]) == 1

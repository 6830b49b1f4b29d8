"""The comparison of drafters at equal budget: what it shares, reuses and refuses, what its table says."""

import json
import os
import signal

import pytest

from spectrain import stages
from spectrain import train as training
from spectrain.artifacts import read_json
from spectrain.checks import CheckFailed
from spectrain.compare import plan_cells
from spectrain.compose import compose
from spectrain.eval import run as evaluation
from spectrain.eval.certificate import CertificateFailed
from spectrain.testing import byte_tokenizer, tiny_llama

SMALL = """
target: {dtype: float32}
compare:
  seeds: [3, 4]
  drafters:
    medusa: [recipe=medusa_smollm2, drafter.heads=2, drafter.draft_vocab=0]
    eagle3: [recipe=quickstart, drafter.draft_vocab=0, "drafter.taps=[1, 2]"]
    ngram: [recipe=ngram_smollm2]
train: {dtype: float32, passes: 1, max_steps: 2, batch_tokens: 128, micro_tokens: 128, eval_prompts: 1}
eval:
  max_new_tokens: 8
  greedy_prompts: 2
  greedy_tokens: 8
  sampling_tokens: 20
  bootstrap: 40
  baseline: ""
  runs:
    - {name: greedy, length: 2, dtype: float32, batch: 2}
    - {name: sampled, length: 2, dtype: float32, temperature: 1.0, prompts: 2}
stages: [compare]
wandb: {enabled: false}
device: cpu
"""


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """The command line of a comparison on a tiny target: two trained families and n-gram, two seeds."""
    folder = tmp_path_factory.mktemp("inputs")
    tiny_llama(layers=4).save_pretrained(folder / "target")
    byte_tokenizer().save_pretrained(folder / "target")
    with open(folder / "corpus.jsonl", "w") as file:
        for i in range(12):
            turns = [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": "a b c a b"}]
            file.write(json.dumps({"messages": turns}) + "\n")
    prompts = [{"id": f"p{i}", "category": "ab"[i % 2], "turns": [f"say {i}"]} for i in range(4)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    (folder / "small.yaml").write_text(SMALL)
    return [
        f"recipe={folder}/small.yaml",
        f"target={folder}/target",
        f"corpus.path={folder}/corpus.jsonl",
        f"eval.prompts={folder}/prompts.jsonl",
    ]


@pytest.fixture(scope="module")
def finished(words, tmp_path_factory):
    """The folder of a comparison that was killed in its third cell's evaluation and then run again; the
    times of the first two cells' files before and after."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    child = os.fork()
    if not child:
        decode, calls = evaluation._certify, []

        def die_in_the_third(*args):
            calls.append(args)
            if len(calls) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return decode(*args)

        evaluation._certify = die_in_the_third
        try:
            stages.run(compose([*words, f"run_dir={folder}"]))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    before = times(folder)
    stages.run(compose([*words, f"run_dir={folder}"]))
    return folder, before


def times(folder):
    """Time of the last change of every file of the cells and of every shard of the shared features."""
    files = [
        f for f in folder.rglob("*") if f.is_file() and (f.suffix == ".safetensors" or "cells" in f.parts)
    ]
    return {f.relative_to(folder): f.stat().st_mtime_ns for f in files}


@pytest.fixture(scope="module")
def comparison(finished):
    return read_json(finished[0] / "compare.json")


def test_there_is_a_run_folder_for_each_drafter_and_seed(finished):
    names = {path.name for path in (finished[0] / "cells").iterdir()}
    assert names == {f"{name}-{seed}" for name in ("medusa", "eagle3", "ngram") for seed in (3, 4)}


def test_a_killed_comparison_goes_on_where_it_was(finished):
    folder, before = finished
    after = times(folder)
    whole = {file for file in before if file.parts[1] in ("medusa-3", "eagle3-3")}
    assert whole and all(after[file] == before[file] for file in whole)
    decoded = {file for file in before if file.name == "texts.jsonl"}
    assert len(decoded) == 6 and all(after[file] == before[file] for file in decoded)


def test_features_are_captured_once_with_the_taps_of_all_drafters(finished):
    folder, before = finished
    assert read_json(folder / "features" / "manifest.json")["settings"]["tap_ids"] == [1, 2]
    shards = {file for file in before if file.suffix == ".safetensors" and file.parts[0] == "features"}
    assert shards and all(times(folder)[file] == before[file] for file in shards)
    assert not list(folder.glob("cells/*/features")) and not list(folder.glob("cells/*/prepared"))


def test_every_drafter_is_trained_on_the_same_budget_with_its_own_settings(finished, comparison):
    assert comparison["budget"].keys() == {"3", "4"}
    for drafter in comparison["drafters"]:
        spent = [cell["training"] for cell in drafter["cells"]]
        if drafter["name"] == "ngram":
            assert spent == [None, None] and drafter["training_s"] is None
            continue
        expected = list(comparison["budget"].values())
        assert [{key: t[key] for key in ("steps", "tokens")} for t in spent] == expected
        assert drafter["training_s"] == sum(t["seconds"] for t in spent) / 2
    manifests = [read_json(finished[0] / f"cells/{name}-3/manifest.json") for name in ("medusa", "eagle3")]
    settings = [manifest["settings"]["settings"] for manifest in manifests]
    assert [s["train"]["optimizer"] for s in settings] == ["adamw", "muon"]
    assert settings[0]["train"]["seed"] == settings[0]["eval"]["seed"] == 3


def test_the_numbers_of_a_cell_are_those_of_its_report(finished, comparison):
    for drafter in comparison["drafters"]:
        for cell in drafter["cells"]:
            report = read_json(finished[0] / "cells" / cell["folder"] / "report.json")
            assert cell["lossless"] is report["lossless"] is True
            for run in report["runs"]:
                shown = cell["runs"][run["name"]]
                assert shown == {name: run[name] for name in shown}
                assert {"tau", "alpha_k", "c", "eta"} <= shown.keys()


def test_a_number_of_the_table_is_the_ratio_of_the_cells_sums(comparison):
    for drafter in comparison["drafters"]:
        for run in drafter["runs"]:
            sums = [cell["runs"][run["name"]]["counters"] for cell in drafter["cells"]]
            emitted, rounds = (sum(s[name] for s in sums) for name in ("emitted", "rounds"))
            assert run["tau"]["value"] == emitted / rounds
            passed, reached = (sum(s[name][0] for s in sums) for name in ("passed", "reached"))
            assert run["alpha_k"][0]["value"] == (passed / reached if reached else None)
            assert run["tau"]["low"] <= run["tau"]["value"] <= run["tau"]["high"]


def test_the_page_has_a_row_for_each_drafter_and_run(finished, comparison):
    page = (finished[0] / "compare.md").read_text()
    tau = comparison["drafters"][1]["runs"][0]["tau"]
    row = next(line for line in page.splitlines() if line.startswith("| eagle3") and "| greedy" in line)
    assert f"{tau['value']:.2f} [{tau['low']:.2f}, {tau['high']:.2f}]" in row and "| pass 2/2" in row
    rows = [line for line in page.splitlines() if line.startswith(("| eagle3", "| medusa", "| ngram"))]
    assert len(rows) == 3 * 2 + 3  # and tau by category
    assert "- eagle3: recipe=quickstart drafter.draft_vocab=0 drafter.taps=[1, 2]" in page


def test_the_same_command_again_decodes_and_trains_nothing(finished, words):
    folder = finished[0]
    before, table = times(folder), read_json(folder / "compare.json")["drafters"]
    stages.run(compose([*words, f"run_dir={folder}"]))
    assert times(folder) == before
    assert read_json(folder / "compare.json")["drafters"] == table


def test_a_cell_whose_text_is_not_the_targets_stays_in_the_table_and_ends_the_command(
    words, tmp_path, monkeypatch
):
    certify = evaluation.certify

    def fail_for_seed_4(target, drafters, questions, config, texts):
        found = certify(target, drafters, questions, config, texts)
        if config.seed == 4:
            found["pass"] = found["sampling"]["pass"] = False
        return found

    monkeypatch.setattr(evaluation, "certify", fail_for_seed_4)
    only = "compare.drafters={ngram: ['recipe=ngram_smollm2']}"
    with pytest.raises(CertificateFailed, match="^ngram, seed 4: the text is not the target's"):
        stages.run(compose([*words, f"run_dir={tmp_path}", only]))
    drafter = read_json(tmp_path / "compare.json")["drafters"][0]
    assert [cell["lossless"] for cell in drafter["cells"]] == [True, False]
    assert drafter["runs"][0]["eta"]["withheld"] == "certificate failed for seed 4"
    page = (tmp_path / "compare.md").read_text()
    assert "FAIL 1/2" in page and "withheld" in page


def test_a_cell_that_diverges_is_a_row_of_the_table_and_ends_the_command_after_the_others(
    words, tmp_path, monkeypatch
):
    backward = training._Loop._backward

    def diverge_for_seed_3(loop, *args):
        if loop.config.train.seed == 3:
            raise CheckFailed("step 1: the loss is not finite")
        return backward(loop, *args)

    monkeypatch.setattr(training._Loop, "_backward", diverge_for_seed_3)
    medusa = "medusa: ['recipe=medusa_smollm2', 'drafter.heads=2', 'drafter.draft_vocab=0']"
    command = compose([*words, f"run_dir={tmp_path}", f"compare.drafters={{{medusa}}}"])
    with pytest.raises(CheckFailed, match="^medusa, seed 3: step 1: the loss is not finite$"):
        stages.run(command)
    (drafter,) = read_json(tmp_path / "compare.json")["drafters"]
    assert [cell["seed"] for cell in drafter["cells"]] == [4] and drafter["lossless"]
    assert drafter["failed"] == [{"seed": 3, "folder": "medusa-3", "error": "step 1: the loss is not finite"}]
    page = (tmp_path / "compare.md").read_text()
    assert "| FAILED, seed 3 |" in page and "| pass 1/1" in page
    assert "- medusa, seed 3, failed: step 1: the loss is not finite" in page
    monkeypatch.setattr(training._Loop, "_backward", backward)
    stages.run(command)
    (drafter,) = read_json(tmp_path / "compare.json")["drafters"]
    assert [cell["seed"] for cell in drafter["cells"]] == [3, 4] and drafter["failed"] == []


def test_a_comparison_without_a_finished_cell_has_a_table_too(words, tmp_path, monkeypatch):
    def fail(*args):
        raise ValueError("no text")

    monkeypatch.setattr(evaluation, "certify", fail)
    only = "compare.drafters={ngram: ['recipe=ngram_smollm2']}"
    with pytest.raises(CheckFailed, match="^ngram, seed 3: no text; ngram, seed 4: no text$"):
        stages.run(compose([*words, f"run_dir={tmp_path}", only]))
    assert (tmp_path / "compare.md").read_text().count("| FAILED, seed") == 2
    assert not read_json(tmp_path / "compare.json")["lossless"]


@pytest.mark.parametrize(
    "word, message",
    [
        ("objective.slot_decay=0.5", "^objective: no effect on a comparison"),
        ("drafter.unroll=2", "^drafter: no effect on a comparison"),
        ("train.learning_rate=0.1", "^train.learning_rate: no effect on a comparison"),
        ("train.seed=1", "^train.seed: no effect on a comparison"),
        ("eval.seed=1", "^eval.seed: no effect on a comparison"),
        (
            "compare.drafters={a: ['recipe=quickstart', 'eval.seed=1']}",
            "drafters.a: 'eval.seed=1': the comparison",
        ),
        (
            "compare.drafters={a: ['recipe=quickstart', 'train.passes=2']}",
            "a: 'train.passes=2': the comparison",
        ),
        ("compare.drafters={a: ['recipe=quick']}", "^compare.drafters.a: recipe=quick: unknown"),
    ],
)
def test_a_setting_that_would_have_no_effect_is_refused(words, tmp_path, word, message):
    with pytest.raises(ValueError, match=message):
        plan_cells(compose([*words, word]), tmp_path)


@pytest.mark.parametrize(
    "word, message",
    [
        ("compare.drafters={}", "compare.drafters={}: expected at least one"),
        ("compare.seeds=[1,1]", r"compare.seeds=\[1, 1\]: expected different seeds"),
        ("compare.drafters={a/b: ['recipe=quickstart']}", "compare.drafters.a/b: expected letters"),
    ],
)
def test_a_comparison_of_nothing_is_refused(words, word, message):
    with pytest.raises(ValueError, match=message):
        compose([*words, word])

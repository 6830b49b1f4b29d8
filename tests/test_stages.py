"""The whole road on a tiny Qwen3-shaped target: what each stage leaves, what is reused, what is refused."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from spectrain import __main__ as command
from spectrain import stages
from spectrain.artifacts import alone, read_json, write_json
from spectrain.checkpoint import best
from spectrain.config import STAGES
from spectrain.eval.records import read_texts
from spectrain.testing import byte_tokenizer


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder with a target, a corpus of 40 conversations and 6 prompts of two categories."""
    folder = tmp_path_factory.mktemp("inputs")
    tokenizer = byte_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    with open(folder / "corpus.jsonl", "w") as file:
        for i in range(40):
            answer = " ".join(map(str, range(i % 12 + 2)))
            turns = [{"role": "user", "content": f"count to {i}"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}) + "\n")
    with open(folder / "prompts.jsonl", "w") as file:
        for i in range(6):
            file.write(json.dumps({"id": f"p{i}", "category": "ab"[i % 2], "turns": [f"say {i}"]}) + "\n")
    return folder


def spectrain(inputs, run_dir, *words):
    """The README's third command, made small; returns the exit code."""
    return command.main(
        [
            "recipe=eagle3_llama",
            f"target={inputs}/target",
            f"corpus.path={inputs}/corpus.jsonl",
            f"run_dir={run_dir}",
            "target.dtype=float32",
            "drafter.draft_vocab=200",
            "drafter.unroll=2",
            "train.dtype=float32",
            "train.features=stored",
            "train.max_steps=4",
            "train.batch_tokens=512",
            "train.micro_tokens=256",
            "train.eval_prompts=2",
            f"eval.prompts={inputs}/prompts.jsonl",
            "eval.max_new_tokens=12",
            "eval.greedy_prompts=4",
            "eval.greedy_tokens=12",
            "eval.sampling_tokens=60",
            "eval.bootstrap=50",
            "eval.runs=[{name: chain, length: 3, dtype: float32}]",
            "wandb.enabled=false",
            "device=cpu",
            *words,
        ]
    )


@pytest.fixture(scope="module")
def finished(inputs, tmp_path_factory):
    """The run folder after every stage."""
    run_dir = tmp_path_factory.mktemp("runs") / "mine"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "silence_libraries", lambda: None)
        assert spectrain(inputs, run_dir) == 0
    return run_dir


@pytest.fixture(autouse=True)
def loud(monkeypatch):
    """Leave the test process's warnings and loggers as they are."""
    monkeypatch.setattr(command, "silence_libraries", lambda: None)


def test_one_command_on_an_own_model_leaves_every_result(finished):
    names = {path.name for path in finished.iterdir()}
    expected = {
        "config.yaml",
        "provenance.json",
        "metrics.jsonl",
        "checkpoints",
        "export",
        "report.json",
        "report.html",
    }
    assert expected <= names
    assert read_json(finished / "report.json")["lossless"] is True


def test_the_exports_model_card_has_the_training_tau_and_the_certificate(finished):
    state = read_json(best(finished) / "state.json")
    card = (finished / "export" / "eagle3" / "README.md").read_text().splitlines()
    assert f"- training: 4 steps, {state['counters']['tokens']:,} tokens" in card
    assert state["tau"] >= 1
    assert f"- tau: {state['tau']:.3f} on held-out prompts at the end of training" in card
    assert "- certificate: passed" in card


def test_every_stage_leaves_its_seconds_beside_the_budget(finished):
    stages = read_json(finished / "stages.json")
    assert list(stages) == ["prepare", "capture", "train", "eval", "export", "report"]
    assert all(stage["seconds"] >= 0 and stage["budget_s"] is None for stage in stages.values())


def test_the_same_command_again_reuses_every_stage(finished, inputs):
    seconds = {name: stage["seconds"] for name, stage in read_json(finished / "stages.json").items()}
    assert spectrain(inputs, finished, "stages=[prepare,capture,train,eval,export]") == 0
    stages = read_json(finished / "stages.json")
    del stages["report"]
    assert all(stage["reused"] for stage in stages.values())
    assert all(stage["seconds"] == seconds[name] for name, stage in stages.items())


def test_each_invocation_leaves_its_provenance(finished, inputs):
    before = read_json(finished / "provenance.json")
    assert spectrain(inputs, finished, "stages=prepare") == 0
    entries = read_json(finished / "provenance.json")
    assert entries[:-1] == before
    assert entries[-1]["versions"]["torch"] == torch.__version__


def test_other_settings_in_a_trained_folder_are_refused_not_mixed(finished, inputs, capsys):
    assert spectrain(inputs, finished, "stages=train", "train.learning_rate=0.1") == 2
    message = capsys.readouterr().err
    assert "trained with other settings (train.learning_rate: 5e-05 there, 0.1 here)" in message


def test_a_stage_without_the_one_before_names_it(inputs, tmp_path, capsys):
    assert spectrain(inputs, tmp_path / "new", "stages=train") == 2
    folder = tmp_path / "new" / "features"
    expected = f"error: {folder}: no finished capture there; run the capture stage (stages=[capture])\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("key", ["corpus.path", "corpus.max_length"])
def test_rows_of_another_corpus_or_option_are_not_trained_on(finished, inputs, capsys, key):
    other = inputs / "other.jsonl"
    other.write_text("".join((inputs / "corpus.jsonl").read_text().splitlines(keepends=True)[:-1]))
    value = str(other) if key == "corpus.path" else 99
    assert spectrain(inputs, finished, "stages=[capture,train]", f"{key}={value}") == 2
    message = capsys.readouterr().err
    assert f"prepared with other settings (changed: {key}={value!r}); run the prepare stage" in message


def test_what_the_export_would_refuse_is_refused_before_capture(inputs, tmp_path, capsys):
    words = ("stages=[prepare,capture,train,export]", "drafter.taps=[0,1,4]")
    assert spectrain(inputs, tmp_path / "new", *words) == 2
    assert "layer 4 is tapped: engines capture 0 to 3" in capsys.readouterr().err
    assert not (tmp_path / "new" / "features").exists()


def test_online_training_captures_nothing(inputs, tmp_path):
    words = ("train.features=online", "stages=[prepare,capture]")
    assert spectrain(inputs, tmp_path / "online", *words) == 0
    assert not (tmp_path / "online" / "features").exists()


def test_doctor_shows_a_corpus_that_can_train(inputs, tmp_path, capsys):
    assert spectrain(inputs, tmp_path / "new", "stages=doctor", "doctor.samples=1") == 0
    page = capsys.readouterr().out
    assert "{+0 1" in page
    assert "FINDINGS" in page
    assert not (tmp_path / "new" / "features").exists()


def test_doctor_refuses_a_corpus_that_cannot_train(inputs, tmp_path, capsys):
    assert spectrain(inputs, tmp_path / "new", "stages=doctor", "train.micro_tokens=16") == 2
    found = capsys.readouterr()
    assert "ERROR  too_long: " in found.out
    assert "this corpus cannot train: too_long" in found.err


def killed_in(stage, inputs, run_dir, at_rename):
    """Run the command in a child that gets SIGKILL before the `at_rename`-th file of `stage` has its final
    name; returns whether it came to that."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    work, replace, rename, seen = stages.WORK[stage], os.replace, Path.rename, [0]

    def die_in_time():
        seen[0] += 1
        if seen[0] == at_rename:
            os.kill(os.getpid(), signal.SIGKILL)

    def armed(road):
        os.replace = lambda *args, **kwargs: (die_in_time(), replace(*args, **kwargs))[1]
        Path.rename = lambda path, target: (die_in_time(), rename(path, target))[1]
        try:
            work(road)
        finally:
            os.replace, Path.rename = replace, rename

    stages.WORK[stage] = armed
    code = 1
    try:
        code = spectrain(inputs, run_dir)
    finally:
        os._exit(code)


def learned(run_dir):
    """Everything of the newest checkpoint, and the metrics without the clock."""
    newest = sorted((run_dir / "checkpoints").glob("step-*"))[-1]
    clock = ("train/time_s", "train/throughput_tok_s")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    metrics = [{key: value for key, value in line.items() if key not in clock} for line in lines]
    return {f.name: f.read_bytes() for f in newest.iterdir()}, metrics


@pytest.mark.parametrize("at_rename", [1, 3])
def test_a_run_killed_in_every_stage_ends_as_if_it_had_not_been(finished, inputs, tmp_path, at_rename):
    run_dir = tmp_path / "mine"
    came = [stage for stage in STAGES if killed_in(stage, inputs, run_dir, at_rename)]
    assert came == list(STAGES) if at_rename == 1 else {"capture", "train"} <= set(came)
    assert spectrain(inputs, run_dir) == 0
    assert learned(run_dir) == learned(finished)
    exported = [load_file(folder / "export/eagle3/model.safetensors") for folder in (run_dir, finished)]
    assert exported[0].keys() == exported[1].keys()
    assert all(torch.equal(exported[0][name], exported[1][name]) for name in exported[0])
    assert (run_dir / "report.json").exists()


@pytest.mark.parametrize(
    "word, message",
    [
        (
            "eval.runs=[{name: a, length: 3}, {name: b, length: 3, graphs: true}]",
            "eval.runs.b: graphs=True (eval.runs.NAME.graphs): the target is on cpu",
        ),
        ("eval.baseline=standalone", "eval.baseline='standalone': it needs training"),
        ("eval.prompts=no/such.jsonl", "eval.prompts='no/such.jsonl': no such file"),
    ],
)
def test_what_the_evaluation_cannot_decode_is_refused_before_capture(inputs, tmp_path, capsys, word, message):
    assert spectrain(inputs, tmp_path / "run", "stages=[prepare,capture,train]", word) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert not (tmp_path / "run/features").exists()


def test_a_run_that_cannot_be_decoded_is_refused_before_online_training(inputs, tmp_path, capsys):
    words = ["stages=[prepare,train]", "train.features=online", "eval.runs=[{name: a, graphs: true}]"]
    assert spectrain(inputs, tmp_path / "run", *words) == 2
    assert capsys.readouterr().err.startswith("error: eval.runs.a: graphs=True")
    assert not (tmp_path / "run/metrics.jsonl").exists() and not (tmp_path / "run/checkpoints").exists()


def test_tokens_for_a_target_without_chat_template_are_refused_before_capture(inputs, tmp_path, capsys):
    target = shutil.copytree(inputs / "target", tmp_path / "target")
    (target / "chat_template.jinja").unlink()
    row = json.dumps({"input_ids": [72, 105, 97, 98, 99, 257], "loss_mask": [0, 0, 1, 1, 1, 1]})
    (tmp_path / "rows.jsonl").write_text(f"{row}\n" * 8)
    words = [f"target={target}", f"corpus.path={tmp_path}/rows.jsonl", "corpus.eval_fraction=0"]
    assert spectrain(inputs, tmp_path / "run", "stages=[prepare,capture]", *words) == 2
    assert "target.path: its tokenizer has no chat template, by which prompts" in capsys.readouterr().err
    assert not (tmp_path / "run/features").exists()


def test_the_exports_of_a_run_are_checked_and_a_folder_by_its_path(finished, inputs, capsys, tmp_path):
    assert spectrain(inputs, finished, "stages=check_export", "engine=[vllm,sglang]") == 0
    assert "PASS  9 numeric replay" in capsys.readouterr().out
    folder = shutil.copytree(finished / "export" / "eagle3", tmp_path / "served")
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert spectrain(inputs, finished, "stages=check_export", f"path={folder}") == 1
    assert "served: rule 11, values" in capsys.readouterr().err


def test_an_export_says_what_the_newest_evaluation_found(finished, inputs, tmp_path):
    run_dir = shutil.copytree(finished, tmp_path / "run")
    certificate = run_dir / "eval" / "certificate" / "certificate.json"
    card, passed = run_dir / "export" / "eagle3" / "README.md", read_json(certificate)
    assert "- certificate: passed\n" in card.read_text()
    certificate.unlink()
    assert spectrain(inputs, run_dir, "stages=export") == 0
    assert "- certificate:" not in card.read_text()
    write_json(certificate, passed | {"pass": False})
    assert spectrain(inputs, run_dir, "stages=export") == 0
    assert "- certificate: not passed: do not serve it\n" in card.read_text()


def test_two_commands_do_not_work_in_one_run_folder(finished, inputs, capsys, tmp_path):
    run_dir = shutil.copytree(finished, tmp_path / "run")
    settings = (run_dir / "config.yaml").read_text()
    with alone(run_dir / ".lock"):
        assert spectrain(inputs, run_dir, "stages=export", "export.dtype=float32") == 2
        assert "run/.lock: another command is at work in this folder" in capsys.readouterr().err
        assert (run_dir / "config.yaml").read_text() == settings
        assert spectrain(inputs, run_dir, "stages=report") == 0
    assert spectrain(inputs, run_dir, "stages=export") == 0


def test_an_export_of_weights_that_were_not_evaluated_says_so(finished, inputs, tmp_path):
    run_dir = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(run_dir / "checkpoints")
    assert spectrain(inputs, run_dir, "stages=[train,export]", "train.seed=1") == 0
    card = (run_dir / "export" / "eagle3" / "README.md").read_text()
    assert "- certificate: of other weights or none; evaluate these (stages=[eval,export])\n" in card
    assert spectrain(inputs, run_dir, "stages=[eval,export]", "train.seed=1") == 0
    assert "- certificate: passed\n" in (run_dir / "export" / "eagle3" / "README.md").read_text()


@pytest.mark.slow
def test_two_processes_evaluate_as_one_does(finished, inputs, tmp_path):
    run_dir = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(run_dir / "eval")
    assert spectrain(inputs, run_dir, "stages=[eval,report]", "processes=2") == 0
    one, two = (
        [
            (t.id, t.turn, t.unit, t.speculative.ids, t.plain.ids, t.speculative.rounds)
            for t in read_texts(file)
        ]
        for file in (folder / "eval" / "runs" / "chain" / "texts.jsonl" for folder in (finished, run_dir))
    )
    assert one == two
    certificates = [
        read_json(folder / "eval" / "certificate" / "certificate.json") for folder in (finished, run_dir)
    ]
    for certificate in certificates:
        del certificate["seconds"]
    assert certificates[0] == certificates[1]
    assert read_json(run_dir / "report.json")["provenance"]["processes"] == 2


@pytest.mark.slow
def test_the_exit_code_of_a_process_is_the_commands(inputs, tmp_path):
    assert spectrain(inputs, tmp_path, "stages=[train]", "processes=2") == 2

"""The serve check with a stand-in for vLLM: what it is asked, how its answer is judged, what failures say."""

import json
import stat
import sys
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from spectrain import __main__ as command
from spectrain.compose import compose
from spectrain.config import EvalConfig, RunConfig, TargetConfig
from spectrain.drafters import eagle3
from spectrain.serve_check import Disagreement, acceptance, compare_texts, run_engine, serve_check, verdict
from spectrain.serve_settings import ServeConfig
from spectrain.target import load_target
from spectrain.testing import byte_tokenizer

STAND_IN = """\
#!{python}
import json, sys
from pathlib import Path
worker, asked, answered = map(Path, sys.argv[1:])
assert worker.name == "vllm_decode.py"
request = json.loads(asked.read_text())
{body}
"""


def stand_in(folder, body):
    """A program in place of the environment's Python."""
    path = folder / "python"
    path.write_text(STAND_IN.format(python=sys.executable, body=body))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def plain(texts, likely):
    return {"texts": texts, "likely": likely}


def test_equal_texts_need_no_margin():
    found = compare_texts(["a"], plain([[1, 2]], [[]]), [[1, 2]], margin=0.25)
    assert (found["equal"], found["ties"], found["other"], found["differences"]) == (1, 0, 0, [])


@pytest.mark.case("O-X09")
@pytest.mark.parametrize(("gap", "tie"), [(0.03, True), (0.5, False)])
def test_a_first_difference_is_a_tie_within_the_step_of_bfloat16_alone(gap, tie):
    """Logits near 10: a step is 0.0625. Behind the first difference the texts are not compared."""
    likely = [[[1, -0.1]], [[5, -0.7], [6, -0.7 - gap]], [[7, 0.0]]]
    found = compare_texts(["a"], plain([[1, 5, 7]], [likely]), [[1, 6, 9]], margin=0.0625)
    assert (found["ties"], found["other"]) == (int(tie), int(not tie))
    [difference] = found["differences"]
    assert (difference["prompt"], difference["place"], difference["tie"]) == ("a", 1, tie)
    assert difference["margin"] == pytest.approx(gap)


@pytest.mark.parametrize("text", [[1, 8], [1]])
def test_a_token_that_plain_decoding_did_not_weigh_is_no_tie(text):
    likely = [[[1, -0.1]], [[5, -0.7], [6, -0.7]]]
    found = compare_texts(["a"], plain([[1, 5]], [likely]), [text], margin=0.25)
    assert (found["ties"], found["other"]) == (0, 1)
    assert found["differences"] == [{"prompt": "a", "place": 1, "margin": None, "tie": False}]


@pytest.mark.case("O-X02")
def test_acceptance_counts_the_bonus_and_joint_positions():
    """Four verifications that accept 3, 1, 0, 0 of three draft tokens."""
    found = acceptance(4, [2, 1, 1])
    assert found["mean_acceptance_length"] == 2.0
    assert found["joint_k"] == [0.5, 0.25, 0.25]


@pytest.mark.parametrize(("here", "agrees"), [(2.05, True), (2.07, False)])
def test_lengths_agree_within_the_bound(here, agrees):
    lengths = {"engine": {"mean_acceptance_length": 2.0}, "ours": {"mean_acceptance_length": here}}
    found = verdict({"texts": {"other": 0}, "acceptance": lengths}, 0.03)
    assert (found["reasons"] == []) == agrees
    assert found["ratio"] == here / 2


def test_an_engine_that_fails_is_told_by_the_cause_it_gave(tmp_path):
    python = stand_in(
        tmp_path,
        'print("(EngineCore pid=7) ERROR ValueError: no module named fc.bias")\n'
        'sys.exit("RuntimeError: Engine core initialization failed. See root cause above.")',
    )
    with pytest.raises(Disagreement, match="exit code 1: ValueError: no module named fc.bias"):
        run_engine(python, tmp_path / "out", "plain", {"prompts": []})


def test_a_python_that_is_not_there_is_wrong_input(tmp_path):
    with pytest.raises(ValueError, match="serve.python='/nowhere/python': cannot be run"):
        run_engine("/nowhere/python", tmp_path, "plain", {"prompts": []})


def having(monkeypatch, *modules):
    monkeypatch.setattr("spectrain.serve_settings.find_spec", lambda name: name if name in modules else None)


def test_without_serve_python_this_one_must_have_vllm(monkeypatch, capsys):
    having(monkeypatch)
    assert command.main(["recipe=quickstart", "stages=serve_check"]) == 2
    said = f"error: serve.python='': {sys.executable} has no vllm; expected a Python that has it\n"
    assert capsys.readouterr().err == said
    having(monkeypatch, "vllm")
    assert compose(["recipe=quickstart", "stages=serve_check"]).serve.python == ""


def test_an_engine_other_than_vllm_is_not_checked_with_vllm():
    words = ["recipe=quickstart", "serve.python=vllm-env/bin/python"]
    expected = r"export.engine=\['sglang'\]: stages=serve_check runs vllm; expected vllm among them"
    with pytest.raises(ValueError, match=expected):
        compose([*words, "stages=serve_check", "engine=sglang"])
    found = compose([*words, "stages=[export,serve_check]", "export.engine=[vllm,sglang]"])
    assert found.export.engine == ["vllm", "sglang"]
    assert compose([*words, "stages=export", "engine=sglang"]).export.engine == ["sglang"]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A target's folder, prompts and a config; an exported folder by name alone, since nothing reads it."""
    folder = tmp_path_factory.mktemp("served")
    tokenizer = byte_tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "initializer_range": 0.2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=260, **sizes, **heads)).save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    lines = [json.dumps({"id": f"p{i}", "turns": [f"say {i}", "again"]}) for i in range(3)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    (folder / "run" / "export" / "eagle3").mkdir(parents=True)
    (folder / "run" / "export" / "eagle3" / "config.json").write_text("{}")
    config = RunConfig(
        recipe="trial",
        target=TargetConfig(path=str(folder / "target"), dtype="float32"),
        drafter=eagle3.Config(taps=[0, 1, 2]),
        eval=EvalConfig(prompts=str(folder / "prompts.jsonl")),
        serve=ServeConfig(python="", prompts=2, tokens=8, length=2, batch=2),
    )
    return folder, config


def load_both(config):
    target = load_target(config.target)
    torch.manual_seed(0)
    return target, eagle3.build(config.drafter, target, torch.arange(260))


def answering(folder, config, *, verifications, per_position):
    """Answers with the target's own greedy text, from our decoder."""
    from spectrain.decode.engine import generate
    from spectrain.decode.sampling import Sampling
    from spectrain.eval.prompts import render

    target, _ = load_both(config)
    ids = [render(target.tokenizer, [{"role": "user", "content": f"say {i}"}], {}) for i in range(2)]
    greedy = Sampling(temperature=0.0)
    stops = target.stop_ids()
    found, _ = generate(target, ids, sampling=greedy, max_new_tokens=8, stop_ids=stops, batch_size=2)
    texts = [list(generation.ids) for generation in found]
    likely = [[[[token, 0.0]] for token in text] for text in texts]
    counts = {"verifications": verifications, "per_position": per_position}
    answer = {"version": "0.32.0", "texts": texts, "likely": likely, "seconds": 1.0, **counts}
    return stand_in(
        folder, f"assert request['prompts'] == {ids!r}\nanswered.write_text({json.dumps(answer)!r})"
    )


def test_agreement_is_written_with_both_engines_counts(served, tmp_path, capsys):
    folder, config = served
    _, drafter = load_both(config)
    python = answering(tmp_path, config, verifications=14, per_position=[0, 0])
    config = replace(config, serve=replace(config.serve, python=python, bound=1.0))
    result = serve_check(config, lambda: load_both(config), folder / "run")
    assert result == json.loads((folder / "run" / "serve_check.json").read_text())
    assert result["engine"] == "vllm 0.32.0"
    assert (result["texts"]["equal"], result["texts"]["other"]) == (2, 0)
    assert result["acceptance"]["ours"]["equal_texts"] == 2
    assert result["acceptance"]["engine"]["mean_acceptance_length"] == 1.0
    assert "texts: 2 of 2 as plain vLLM's" in capsys.readouterr().out
    requests = [
        json.loads((folder / "run" / "serve_check" / f"{name}.request.json").read_text())
        for name in ("plain", "speculative")
    ]
    assert "speculative_config" not in requests[0]["engine"]
    assert requests[1]["engine"]["speculative_config"] == {
        "method": "eagle3",
        "num_speculative_tokens": 2,
        "model": str((folder / "run" / "export" / "eagle3").resolve()),
    }


def test_another_acceptance_length_is_a_disagreement_and_still_written(served, tmp_path):
    folder, config = served
    python = answering(tmp_path, config, verifications=5, per_position=[5, 5])
    config = replace(config, serve=replace(config.serve, python=python))
    with pytest.raises(Disagreement, match="mean acceptance length 3.000 there"):
        serve_check(config, lambda: load_both(config), folder / "run")
    assert json.loads((folder / "run" / "serve_check.json").read_text())["reasons"]


def test_this_python_runs_the_engine_where_none_is_named(served, monkeypatch):
    folder, config = served
    started = []

    def run(python, *rest):
        started.append(python)
        raise Disagreement("seen")

    monkeypatch.setattr("spectrain.serve_check.run_engine", run)
    with pytest.raises(Disagreement, match="seen"):
        serve_check(config, lambda: load_both(config), folder / "run")
    assert started == [sys.executable]


def test_a_run_without_an_export_is_wrong_input(served, tmp_path):
    _, config = served
    with pytest.raises(ValueError, match="no exported drafter there; run the export stage"):
        serve_check(config, lambda: load_both(config), tmp_path)

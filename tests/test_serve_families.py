"""The benchmark of the served families, without vLLM: its target, its words, its exit code."""

import importlib.util
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from spectrain.compose import compose
from spectrain.config import TargetConfig
from spectrain.drafters.mtp_weights import names_of
from spectrain.target import load_target

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "serve_families.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("serve_families", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_target_is_made_the_same_each_time_and_engines_know_its_mtp_weights(script, tmp_path):
    targets = []
    for name in ("one", "two"):
        script.make_target(tmp_path / name)
        targets.append(load_target(TargetConfig(path=str(tmp_path / name), dtype="bfloat16")))
    one, two = targets
    assert one.fingerprint() == two.fingerprint()
    assert (one.vocab_size, one.hidden_size, one.num_layers, one.stop_ids()) == (260, 128, 3, (257,))
    assert names_of(one.config, 1) is not None


@pytest.mark.parametrize("family", ["eagle1", "medusa", "standalone", "mtp"])
def test_the_words_of_each_family_are_settings_of_it(script, family):
    args = Namespace(folder=Path("runs/f"), python="env/python", prompts=7, tokens=9, most=0.1)
    config = compose(script.words(family, args))
    assert (config.drafter.family, config.run_dir) == (family, f"runs/f/{family}")
    serve = config.serve
    assert (serve.python, serve.prompts, serve.tokens, serve.bound) == ("env/python", 7, 9, 0.1)
    assert config.train.max_steps == (60 if family == "mtp" else 40)
    assert config.target.path == ("runs/f/glm4_moe" if family == "mtp" else "smollm2")


@pytest.mark.parametrize(("failing", "code"), [("", 0), ("medusa", 1)])
def test_each_familys_table_is_printed_and_one_that_fails_fails_all(
    script, failing, code, tmp_path, monkeypatch, capsys
):
    counts = {"mean_acceptance_length": 1.25, "joint_k": [0.25], "verifications": 8, "equal_texts": 2}
    texts = {"prompts": 3, "equal": 2, "ties": 1, "other": 0}
    result = {"engine": "vllm 0.32.0", "acceptance": {"engine": counts, "ours": counts}, "texts": texts}

    def run(command, stdout, stderr):
        folder = Path(next(word for word in command if word.startswith("run_dir=")).partition("=")[2])
        assert not (folder / "serve_check.json").exists()
        folder.mkdir(exist_ok=True)
        if folder.name == failing:
            stdout.write(b"-- train\nerror: disk full\n")
            return subprocess.CompletedProcess(command, 1)
        (folder / "serve_check.json").write_text(json.dumps(result))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(script.subprocess, "run", run)
    (tmp_path / "medusa").mkdir()
    (tmp_path / "medusa" / "serve_check.json").write_text("of an older run")
    monkeypatch.setattr(sys, "argv", ["serve_families.py", "--python=p", f"--folder={tmp_path}"])
    assert script.main() == code
    said = capsys.readouterr().out
    assert said.count("mean acceptance length           1.250       1.250") == (3 if failing else 4)
    assert ("no result\nerror: disk full\n" in said) == bool(failing)

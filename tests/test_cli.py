"""The command as a user meets it: help, versions, one line per mistake, exit codes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spectrain import __main__ as command
from spectrain import __version__, stages
from spectrain.checks import CheckFailed
from spectrain.compose import recipe_names
from spectrain.config import STAGES
from spectrain.eval.certificate import CertificateFailed
from spectrain.serve_check import Disagreement

ROOT = Path(__file__).resolve().parents[1]


def spectrain(*words, cwd):
    """Run the command in another process, from folder `cwd`."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "spectrain", *words], cwd=cwd, env=environment, capture_output=True, text=True
    )


@pytest.fixture
def quiet(monkeypatch):
    """Leave the test process's warnings and loggers as they are."""
    monkeypatch.setattr(command, "silence_libraries", lambda: None)
    monkeypatch.delenv("SPECTRAIN_DEBUG", raising=False)


def fail_with(monkeypatch, error):
    def run(config):
        raise error

    monkeypatch.setattr(stages, "run", run)
    return command.main(["recipe=quickstart", "processes=1"])  # in this process, where `run` is replaced


def test_help_fits_one_screen_and_names_recipes_and_stages():
    lines = command.help_text().splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 80
    for word in (*recipe_names(), *STAGES, "regenerate"):
        assert any(word in line for line in lines), word


def test_help_needs_no_torch_and_works_from_any_folder(tmp_path):
    code = (
        "import sys; from spectrain.__main__ import main; code = main(['--help']); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)


def test_an_unknown_recipe_is_one_line_and_code_2(tmp_path):
    done = spectrain("recipe=quick", cwd=tmp_path)
    expected = f"error: recipe=quick: unknown; known recipes: {', '.join(recipe_names())}\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


def test_version_is_the_packages(capsys):
    assert command.main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


def test_an_unknown_key_names_the_closest_and_makes_no_folder(quiet, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command.main(["recipe=quickstart", "train.pases=1"]) == 2
    assert capsys.readouterr().err == "error: train.pases: no such key; did you mean train.passes?\n"
    assert list(tmp_path.iterdir()) == []


def test_wrong_input_found_on_the_way_is_code_2(quiet, capsys, monkeypatch):
    assert fail_with(monkeypatch, ValueError("corpus.jsonl:3: no turns")) == 2
    assert capsys.readouterr().err == "error: corpus.jsonl:3: no turns\n"


def test_a_full_disk_is_code_1(quiet, capsys, monkeypatch):
    assert fail_with(monkeypatch, OSError(28, "disk full", "x.safetensors")) == 1
    assert capsys.readouterr().err == "error: [Errno 28] disk full: 'x.safetensors'\n"


@pytest.mark.parametrize("error", [CheckFailed, Disagreement])
def test_a_failed_check_of_an_export_is_code_1(quiet, capsys, monkeypatch, error):
    assert fail_with(monkeypatch, error("eagle3: rule 11, values")) == 1
    assert capsys.readouterr().err == "error: eagle3: rule 11, values\n"


def test_a_failed_certificate_is_code_3(quiet, capsys, monkeypatch):
    assert fail_with(monkeypatch, CertificateFailed("greedy text differs")) == 3
    assert capsys.readouterr().err == "error: greedy text differs\n"


def test_debug_shows_the_traceback(quiet, capsys, monkeypatch):
    monkeypatch.setenv("SPECTRAIN_DEBUG", "1")
    assert fail_with(monkeypatch, ValueError("bad line")) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err

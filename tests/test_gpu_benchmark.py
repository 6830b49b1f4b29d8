"""benchmarks/gpu.py at toy sizes on the CPU: every section runs, and one that fails stops no other."""

import importlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
NAMES = [
    "ceilings", "tree_build", "tree_attention", "verify", "commit", "state_commit", "linear_divergence",
    "ttt_attention", "training", "decode",
]  # fmt: skip


@pytest.fixture
def script(monkeypatch):
    """A file of benchmarks/ as a module, able to import its neighbours."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module
    for path in BENCHMARKS.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's kernels take tensors of the CPU")
@pytest.mark.parametrize("name", NAMES)
def test_a_section_measures_something_and_finds_nothing_wrong(name, script):
    sections = script("gpu_sections")
    found = list(sections.SECTIONS[name](sections.Bench(small=True)))
    assert any(line.ms and line.ms[0] > 0 for line in found)
    kernels = set(NAMES) - {"ceilings", "training", "decode"}
    assert any(line.what.endswith(": right") for line in found) == (name in kernels)


def test_the_sections_take_less_than_eight_minutes(script):
    gpu = script("gpu")
    assert list(gpu.BUDGET) == NAMES and sum(gpu.BUDGET.values()) < 8 * 60
    assert list(script("gpu_sections").SECTIONS) == NAMES


def test_a_wrong_kernel_gets_no_time(script, monkeypatch):
    sections = script("gpu_sections")
    from spectrain.kernels import state_commit_triton

    monkeypatch.setattr(state_commit_triton, "launch", lambda *arguments: None)
    with pytest.raises(AssertionError, match="states: tensors .* differ from the reference"):
        list(sections.state_commit(sections.Bench(small=True)))


def test_a_section_that_fails_is_reported_and_stops_no_other(script, monkeypatch, tmp_path, capsys):
    gpu = script("gpu")
    line = {"what": "copy", "ms": [2.0, 1.0, 3.0], "gib": 4.0, "gflop": 0.0, "note": ""}

    def run_section(name, small, seconds):
        lines = [] if name == "verify" else [line]
        return lines, "RuntimeError: illegal address" if name == "verify" else ""

    monkeypatch.setattr(gpu, "run_section", run_section)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--small", "--json", str(tmp_path / "found.json")])
    assert gpu.main() == 1
    told = capsys.readouterr().out
    assert "| verify | FAILED | | | | | RuntimeError: illegal address |" in told
    assert "| decode | copy | 2.000 (1.000-3.000) | 2000.0 |  | 100% |  |" in told
    kept = json.loads((tmp_path / "found.json").read_text())["lines"]
    assert [entry["section"] for entry in kept] == NAMES
    assert kept[3] == {"section": "verify", "error": "RuntimeError: illegal address"}


def test_lines_before_an_error_are_kept(script, monkeypatch, tmp_path):
    gpu = script("gpu")
    broken = tmp_path / "broken.py"
    broken.write_text("""print('{"what": "first"}', flush=True)\nraise ValueError('no more')\n""")
    monkeypatch.setattr(gpu, "SECTIONS", broken)
    assert gpu.run_section("any", True, 60) == ([{"what": "first"}], "ValueError: no more")


def test_a_section_that_hangs_is_ended(script, monkeypatch, tmp_path):
    gpu = script("gpu")
    slow = tmp_path / "slow.py"
    slow.write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(gpu, "SECTIONS", slow)
    assert gpu.run_section("any", True, 1.0) == ([], "not done after 1 s")


def test_kernels_run_in_the_interpreter_here():
    assert torch.cuda.is_available() or os.environ["TRITON_INTERPRET"] == "1"

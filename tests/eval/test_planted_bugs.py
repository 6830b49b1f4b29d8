"""The certificate has power: it fails each bug planted in the real engine, and passes the engine without."""

import importlib.util
from contextlib import nullcontext
from pathlib import Path

import pytest

from spectrain.eval.certificate import LEVEL
from spectrain.testing import Bigram

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "planted_bugs.py"
TEXTS = 24


def load():
    spec = importlib.util.spec_from_file_location("planted_bugs", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


planted = load()
RUNS = {bug.run.name: bug.run for bug in planted.BUGS}


@pytest.fixture(scope="module")
def pair():
    target = planted.make_target()
    return target, Bigram(target)


@pytest.mark.parametrize("bug", planted.BUGS, ids=lambda bug: bug.plant.__name__)
def test_a_planted_bug_fails_the_certificate(pair, bug):
    found = planted.examined(*pair, bug.run, bug.plant(), TEXTS)
    assert found["tokens"] <= 20_000
    assert found["p_value"] < LEVEL
    assert not found["impossible"]  # the tests see it, no lucky token gives it away


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_the_engine_without_the_bug_passes(pair, run):
    found = planted.examined(*pair, run, nullcontext(), TEXTS)
    assert found["p_value"] > 0.01 and not found["impossible"]


def test_the_table_of_the_docs_holds_every_bug_caught():
    rows = (SCRIPT.parents[1] / "docs" / "planted_bugs.md").read_text().split("| --- |\n")[1].splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[0] for row in cells] == [bug.words for bug in planted.BUGS]
    assert all(int(row[2].replace(",", "")) <= 20_000 for row in cells)
    assert all(float(row[5]) < LEVEL and float(row[6]) > 0.01 for row in cells)

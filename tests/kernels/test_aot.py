"""Every kernel in every configuration, compiled for each target by a process whose kernels are not
interpreted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spectrain.kernels.aot import TARGETS, Compiled

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def compiled():
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "-m", "spectrain.kernels.aot", "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [Compiled(**json.loads(line)) for line in done.stdout.splitlines()]


def test_every_launch_compiles_for_every_target(compiled):
    found = {(c.kernel, c.label, c.num_warps, c.num_stages) for c in compiled}
    assert found and len(compiled) == len(found) * len(TARGETS)


def test_nothing_spills_and_everything_fits_on_sm_90(compiled):
    assert [c for c in compiled if c.target == "sm_90" and (c.spills or not c.fits)] == []


def test_every_kernel_fits_on_every_target_in_some_configuration(compiled):
    kernels = {(c.kernel, target) for c in compiled for target in TARGETS}
    assert kernels == {(c.kernel, c.target) for c in compiled if c.fits}


def test_the_committed_table_lists_every_launch(compiled):
    text = (ROOT / "docs" / "kernels.md").read_text()
    rows = {tuple(part.strip(" `") for part in line.split("|")[1:5]) for line in text.splitlines()[8:]}
    assert rows == {(c.kernel, c.label, str(c.num_warps), str(c.num_stages)) for c in compiled}

"""Two processes do what one does: gloo on the CPU, started by torchrun as a user would."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from spectrain import checkpoint

ROOT = Path(__file__).resolve().parents[1]


def launch(worker, folder, *arguments, processes=2):
    """The JSON values that tests/WORKER.py printed on that many processes, in the order of the ranks."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    program = [str(ROOT / "tests" / worker), str(folder), *arguments]
    logs = folder.parent / f"{folder.name}_logs"  # a file each: on one pipe lines can cut into each other
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command += ["--redirects=1", f"--log-dir={logs}"]
    done = subprocess.run(command + program, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    printed = [path.read_text() for path in sorted(logs.glob("*/attempt_0/*/stdout.log"))]
    assert len(printed) == processes
    return [json.loads(found) for text in printed for found in re.findall(r"^\{.*\}$", text, re.MULTILINE)]


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer, rel", [("adamw", 1e-5), ("muon", 1e-3)])  # Muon turns in bfloat16
def test_two_processes_follow_the_curve_of_one_over_twenty_steps(tmp_path, optimizer, rel):
    work = ("twenty_steps_on_uneven_shards", optimizer)
    launch("train_worker.py", tmp_path / "one", *work, processes=1)
    outs = launch("train_worker.py", tmp_path / "two", *work)
    one, two = lines(tmp_path / "one"), lines(tmp_path / "two")
    assert [line["step"] for line in two] == list(range(1, 21))
    for a, b in zip(one, two, strict=True):
        assert b["train/loss"] == pytest.approx(a["train/loss"], rel=rel)
        assert b["train/grad_norm"] == pytest.approx(a["train/grad_norm"], rel=10 * rel)
        assert b["train/alpha"] == pytest.approx(a["train/alpha"], rel=rel)
        assert (b["train/rows"], b["train/tokens"]) == (a["train/rows"], a["train/tokens"])
    assert outs[0] == outs[1]  # parameters bit for bit, counters, steps
    shards = [{p.name: p.read_bytes() for p in (tmp_path / n / "features").iterdir()} for n in ("one", "two")]
    assert shards[0] == shards[1]


@pytest.mark.slow
@pytest.mark.case("O-T06")
def test_a_masked_sample_on_one_process_and_files_listed_backwards_keep_the_processes_in_step(tmp_path):
    outs = launch("train_worker.py", tmp_path, "seven_samples_one_masked")
    assert len(outs) == 2 and outs[0] == outs[1]
    counters = outs[0]["counters"]
    assert outs[0]["step"] == 4
    assert [counters[f"samples_{what}"] for what in ("read", "trained", "skipped")] == [7, 6, 1]
    gain = checkpoint.read_checked(checkpoint.latest(tmp_path), "drafter.safetensors")["gain"].item()
    assert outs[0]["tau"] == pytest.approx(1 + gain, abs=1e-6)


@pytest.mark.slow
@pytest.mark.case("O-T04")
def test_the_loss_over_two_processes_is_the_sum_over_rows_by_their_number(tmp_path):
    outs = launch("train_worker.py", tmp_path, "loss_of_two_micro_batches")
    assert outs[0]["digest"] == outs[1]["digest"]
    assert lines(tmp_path)[0]["train/loss"] == pytest.approx(2.0, abs=1e-6)
    assert lines(tmp_path)[0]["train/grad_norm"] == pytest.approx(2.0, abs=1e-6)


@pytest.mark.slow
@pytest.mark.case("O-T03")
def test_nan_on_one_process_is_the_same_error_on_both(tmp_path):
    outs = launch("train_worker.py", tmp_path, "nan_on_one_process")
    assert outs == [{"error": "step 1: the loss is not finite on a row of the samples bad"}] * 2

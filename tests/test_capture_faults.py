"""Accidents during a capture: kills, full disks, damaged records; and several processes instead of one."""

import json
import os
import random
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spectrain import capture as module
from spectrain.artifacts import MANIFEST, read_json
from spectrain.checks import CheckFailed
from spectrain.features import FeatureStore
from spectrain.target import Target
from spectrain.testing import random_samples, tiny_llama

ROOT = Path(__file__).resolve().parents[1]
WORKER = str(ROOT / "tests" / "capture_worker.py")
worker = runpy.run_path(WORKER)
run, quarantined = worker["run"], worker["quarantined"]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def run_worker(*arguments, launch=()):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *launch, WORKER, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


@pytest.fixture
def one_thread():
    """As many threads as the worker has: sums of another split round otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_killed_capture_goes_on_with_the_missing_shards_and_ends_with_the_same_bytes(tmp_path, one_thread):
    target, samples = Target(tiny_llama()), random_samples(9)
    run(target, samples, tmp_path / "whole")
    folder = tmp_path / "killed"
    assert run_worker(folder, "die_after_two_shards").returncode == -9
    done = {path.name: path.stat().st_mtime_ns for path in folder.glob("shard-*.safetensors")}
    assert len(done) == 2 and not (folder / MANIFEST).exists()
    run(target, samples, folder)
    assert contents(folder) == contents(tmp_path / "whole")
    assert all((folder / name).stat().st_mtime_ns == time for name, time in done.items())


@pytest.mark.slow
def test_killed_at_ten_random_moments_the_same_command_ends_with_the_same_bytes(tmp_path):
    done = run_worker(tmp_path, "ten_random_kills", random.randrange(10**6))
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)["seen"]
    whole = contents(tmp_path / "whole")
    assert read_json(tmp_path / "whole" / MANIFEST)["rejected"] == [["s020b", "0"]]
    for name in map(str, range(10)):
        assert contents(tmp_path / name) == whole, (name, seen)
    assert any(shards and not finished for shards, finished in seen), seen  # some died in the middle


@pytest.mark.slow
def test_three_processes_write_what_one_writes(tmp_path, one_thread):
    run(*quarantined(), tmp_path / "one")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3")
    done = run_worker(tmp_path / "three", "all_processes", launch=launch)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "three") == contents(tmp_path / "one")
    assert read_json(tmp_path / "three" / MANIFEST)["rejected"] == [["s020b", "0"]]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 400 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a file system of its own can be mounted by root only")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.case("O-C07")
def test_a_disk_that_fills_up_on_the_way_leaves_whole_files_and_the_capture_goes_on_after_space_is_freed(
    tmp_path, small_disk, monkeypatch
):
    target, samples = Target(tiny_llama()), random_samples(9)
    run(target, samples, tmp_path / "whole")
    write, ballast = module.write_shard, small_disk / "ballast"

    def write_and_fill(path, *arguments, **settings):
        write(path, *arguments, **settings)
        with pytest.raises(OSError, match="No space left"), open(ballast, "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass

    monkeypatch.setattr(module, "write_shard", write_and_fill)
    folder = small_disk / "features"
    with pytest.raises(OSError, match=r"disk full: .* MiB do not fit; free space and run the same command"):
        run(target, samples, folder)
    monkeypatch.undo()
    left = ["capture.json", "shard-00000.json", "shard-00000.safetensors"]
    assert sorted(path.name for path in folder.iterdir()) == left
    with pytest.raises(OSError, match=r"disk full: the features need 0.00 GiB, 0.00 GiB are free"):
        run(target, samples, folder)
    assert sorted(path.name for path in folder.iterdir()) == left
    ballast.unlink()
    run(target, samples, folder)
    assert contents(folder) == contents(tmp_path / "whole")


@pytest.mark.parametrize("change", [(b'"s001"', b'"s0x1"'), (b"{", b"[")], ids=["another sample", "no JSON"])
def test_a_damaged_record_has_its_shard_written_again(tmp_path, change):
    target, samples = Target(tiny_llama()), random_samples(9)
    run(target, samples, tmp_path)
    before = contents(tmp_path)
    path = next(path for path in sorted(tmp_path.glob("shard-*.json")) if change[0] in path.read_bytes())
    path.write_bytes(path.read_bytes().replace(*change, 1))
    run(target, samples, tmp_path)
    assert contents(tmp_path) == before


def test_one_flipped_bit_anywhere_in_a_shard_or_the_manifest_is_found_by_name(tmp_path):
    run(Target(tiny_llama()), random_samples(9), tmp_path)
    draw = random.Random(0)
    for path in (*sorted(tmp_path.glob("*.safetensors")), tmp_path / MANIFEST):
        whole = path.read_bytes()
        for place in (0, len(whole) // 2, len(whole) - 3, *(draw.randrange(len(whole)) for _ in range(5))):
            flipped = bytearray(whole)
            flipped[place] ^= 1 << draw.randrange(7)
            path.write_bytes(flipped)
            with pytest.raises((ValueError, CheckFailed), match=path.name):
                FeatureStore.load(tmp_path)
        path.write_bytes(whole)
    assert len(FeatureStore.load(tmp_path).lengths) == 9

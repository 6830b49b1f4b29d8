"""The loop: exact losses, exact resumption, counters that add up."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from spectrain import checkpoint
from spectrain import train as module
from spectrain.capture import capture, capture_batch
from spectrain.checks import CheckFailed
from spectrain.config import RunConfig, TrainConfig, WandbConfig
from spectrain.drafters.eagle3 import Config
from spectrain.features import FeatureStore
from spectrain.objectives import Objective
from spectrain.target import Target
from spectrain.testing import GainConfig, GainDrafter, TableObjective, make_sample, random_samples, tiny_llama
from spectrain.train import train

ROOT = Path(__file__).resolve().parents[1]
KEPT = torch.arange(0, 260, 3)


def run_config(drafter=None, **settings):
    defaults = {"batch_tokens": 160, "micro_tokens": 80, "passes": 2, "dtype": "float32", "save_every": 3}
    return RunConfig(
        recipe="test",
        device="cpu",
        drafter=drafter or Config(unroll=2),
        train=TrainConfig(**(defaults | settings)),
        wandb=WandbConfig(enabled=False),
    )


@pytest.fixture(scope="module")
def target():
    return Target(tiny_llama())


@pytest.fixture
def one_thread():
    """As many threads as a worker has: sums of another split round otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def train_eagle(target, folder, samples=None, *, evaluate=None, **settings):
    """Train an EAGLE-3 drafter on stored or online features; features are captured where they are stored."""
    config, samples = run_config(**settings), samples or random_samples(20)
    drafter = checkpoint.build_drafter(config.drafter, target, KEPT)
    store = None
    if config.train.features == "stored":
        where = folder.parent / "features"
        capture(target, samples, drafter.taps, where, micro_tokens=80, progress=False)
        store = FeatureStore.load(where, skip_bad=config.train.skip_bad)
    result = train(config, target, SimpleNamespace(train=samples), store, drafter, folder, evaluate)
    return result, drafter


def train_gain(target, folder, samples, monkeypatch, *, evaluate=None, drafter=None, **settings):
    """Train the scalar stand-in on losses read from a table."""
    monkeypatch.setattr(module, "Objective", TableObjective)
    config = run_config(GainConfig(), features="online", **settings)
    drafter = drafter or GainDrafter()
    result = train(config, target, SimpleNamespace(train=samples), None, drafter, folder, evaluate)
    return result, drafter


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def timeless(folder):
    dropped = ("train/time_s", "train/throughput_tok_s")
    return [{key: value for key, value in line.items() if key not in dropped} for line in lines(folder)]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# Losses


@pytest.mark.case("O-T04")
@pytest.mark.parametrize("micro_tokens", [5, 8])
def test_the_loss_is_the_sum_over_rows_by_their_number_whatever_the_split(
    target, tmp_path, monkeypatch, micro_tokens
):
    samples = [make_sample("a", [9, 9, 1, 1, 1], ".SSSS"), make_sample("b", [9, 9, 5], ".SS")]
    train_gain(
        target, tmp_path, samples, monkeypatch, batch_tokens=8, micro_tokens=micro_tokens, passes=1, clip=100,
    )  # fmt: skip
    seen = lines(tmp_path)
    assert [line["train/loss"] for line in seen] == [pytest.approx(2.0, abs=1e-6)]
    assert seen[0]["train/grad_norm"] == pytest.approx(2.0, abs=1e-6)
    assert seen[0]["train/rows"] == [4]


@pytest.mark.case("O-T03")
def test_a_step_without_supervised_rows_changes_nothing_and_is_counted(target, tmp_path, monkeypatch):
    samples = [make_sample("a", [9, 2, 4, 6], "....")]
    result, drafter = train_gain(target, tmp_path, samples, monkeypatch, passes=2)
    assert drafter.gain.item() == 1.0
    assert [line["train/loss"] for line in lines(tmp_path)] == [0.0, 0.0]
    assert [line["train/skipped"] for line in lines(tmp_path)] == [1, 1]
    assert result.counters["steps_empty"] == 2
    state = checkpoint.read_checked(checkpoint.latest(tmp_path), "optimizer.safetensors")
    assert all(not tensor.any() for tensor in state.values())


@pytest.mark.case("O-T03")
def test_nan_under_the_mask_does_not_reach_the_loss(target, tmp_path, monkeypatch):
    samples = [make_sample("a", [9, 9, 2, 4, 9, 6], ".SS.TT")]
    result, drafter = train_gain(target, tmp_path, samples, monkeypatch, passes=1)
    assert lines(tmp_path)[0]["train/loss"] == 4.0
    assert result.counters["samples_trained"] == 1


@pytest.mark.case("O-T03")
def test_a_loss_of_nan_is_an_error_that_names_the_samples(target, tmp_path, monkeypatch):
    samples = [make_sample("bad", [9, 9, 2, 4, 6], ".SSSS"), make_sample("good", [9, 9, 2, 6], ".SSS")]
    with pytest.raises(CheckFailed, match="step 1: the loss is not finite on a row of the samples bad$"):
        train_gain(target, tmp_path, samples, monkeypatch, passes=1, batch_tokens=9, micro_tokens=5)


class Overflowing(GainDrafter):
    """A drafter whose gradient is `value` in the steps named."""

    def __init__(self, steps, value=float("inf")):
        super().__init__()
        self.calls, self.steps, self.value = 0, steps, value
        self.gain.register_hook(self.change)

    def change(self, gradient):
        self.calls += 1
        return torch.full_like(gradient, self.value) if self.calls in self.steps else gradient


@pytest.mark.case("O-T03")
def test_an_infinite_gradient_skips_the_step_and_is_counted(target, tmp_path, monkeypatch, caplog):
    samples = [make_sample("a", [9, 9, 2], ".SS")]
    drafter = Overflowing({2})
    gains = []
    result, _ = train_gain(
        target, tmp_path, samples, monkeypatch, passes=3, drafter=drafter, eval_every=1,
        evaluate=lambda drafter: gains.append(drafter.gain.item()) or {"tau": 1.0},
    )  # fmt: skip
    assert gains[0] == gains[1] != gains[2]
    assert [line["train/skipped"] for line in lines(tmp_path)] == [0, 1, 0]
    assert result.counters["steps_overflowed"] == 1
    assert (result.counters["samples_trained"], result.counters["samples_skipped"]) == (2, 1)
    assert "step 2 skipped: the gradient is infinite; samples a" in caplog.text


@pytest.mark.parametrize(
    ("steps", "value", "message"),
    [
        ({2, 3, 4}, float("inf"), r"step 4: the gradient is inf \(3 in a row\)"),
        ({2}, float("nan"), "step 2: the gradient is nan"),
    ],
)
def test_a_diverged_run_stops_and_names_the_samples(target, tmp_path, monkeypatch, steps, value, message):
    samples = [make_sample("a", [9, 9, 2], ".SS")]
    with pytest.raises(CheckFailed, match=f"{message}.*samples a"):
        train_gain(target, tmp_path, samples, monkeypatch, passes=9, drafter=Overflowing(steps, value))


def test_online_samples_with_non_finite_states_are_left_out_and_counted(tmp_path, monkeypatch):
    target = Target(tiny_llama())
    with torch.no_grad():
        target.embedding.weight[250] = float("inf")
    samples = [make_sample("a", [9, 9, 2], ".SS"), make_sample("bad", [250, 9, 6], ".SS")]
    result, _ = train_gain(target, tmp_path, samples, monkeypatch, passes=1, max_bad_fraction=0.5)
    assert lines(tmp_path)[0]["train/loss"] == 2.0
    assert (result.counters["samples_trained"], result.counters["samples_rejected"]) == (1, 1)
    with pytest.raises(ValueError, match=r"1 of 2 samples .*max_bad_fraction=0.4: bad \(layer 0\)"):
        train_gain(target, tmp_path / "b", samples, monkeypatch, passes=1, max_bad_fraction=0.4)


@pytest.mark.case("O-T06")
def test_counters_tell_samples_read_trained_and_skipped(target, tmp_path, monkeypatch):
    samples = [make_sample(f"{i}", [9, 9, 2], "..." if i == 4 else ".SS") for i in range(7)]
    result, _ = train_gain(target, tmp_path, samples, monkeypatch, passes=1, batch_tokens=3, micro_tokens=3)
    counters = result.counters
    assert [counters[f"samples_{what}"] for what in ("read", "trained", "skipped", "rejected")] == [
        7,
        6,
        1,
        0,
    ]
    assert (result.step, counters["steps_empty"], counters["tokens"]) == (7, 1, 21)


@pytest.mark.case("O-T10")
def test_the_teacher_receives_no_gradient(target):
    drafter = checkpoint.build_drafter(Config(unroll=2), target, KEPT)
    batch = capture_batch(target, random_samples(3), drafter.taps)
    target.head.weight.requires_grad_(True)
    try:
        objective = Objective(run_config().objective, drafter, target)
        index = drafter.index(batch.tokens)
        rows = drafter.rows(batch)
        objective.loss(rows, batch, drafter.head_weight(), objective.count(index, batch)).loss.backward()
        assert target.head.weight.grad is None
        assert drafter.lm_head.weight.grad.abs().sum() > 0
    finally:
        target.head.weight.requires_grad_(False)


# Real drafter


def test_the_loss_falls_when_ten_steps_repeat_one_batch(target, tmp_path):
    samples = random_samples(4)
    train_eagle(target, tmp_path / "run", samples, passes=10, learning_rate=3e-3)
    losses = [line["train/loss"] for line in lines(tmp_path / "run")]
    assert len(losses) == 10
    assert losses[-1] < 0.8 * losses[0]


def test_online_and_stored_features_give_the_same_losses(target, tmp_path):
    train_eagle(target, tmp_path / "stored")
    train_eagle(target, tmp_path / "online", features="online")
    for a, b in zip(lines(tmp_path / "stored"), lines(tmp_path / "online"), strict=True):
        assert a["train/loss"] == pytest.approx(b["train/loss"], rel=1e-5)
        assert a["train/rows"] == b["train/rows"]


@pytest.mark.case("O-T05")
def test_bfloat16_compute_moves_float32_norms(target, tmp_path, caplog, monkeypatch):
    samples = [make_sample("a", [9, 9, 2, 5], ".SSS")]
    with caplog.at_level(logging.INFO):
        result, drafter = train_gain(target, tmp_path, samples, monkeypatch, passes=3, dtype="bfloat16")
    assert drafter.gain.dtype == torch.float32
    assert 0.99 < drafter.gain.item() < 1.0
    assert (result.norms_unchanged, result.norms_total) == (0, 1)
    assert "norm entries that still equal their initial value: 0 of 1" in caplog.text


@pytest.mark.case("O-T05")
def test_bfloat16_and_float32_compute_start_from_the_same_loss_and_train_every_norm(tmp_path):
    target = Target(tiny_llama().bfloat16())
    half, _ = train_eagle(target, tmp_path / "half", dtype="bfloat16", features="online")
    full, _ = train_eagle(target, tmp_path / "full", dtype="float32", features="online")
    first = [lines(tmp_path / name)[0]["train/loss"] for name in ("half", "full")]
    assert first[0] == pytest.approx(first[1], rel=1e-2)
    assert (half.norms_unchanged, half.norms_total) == (0, 128)
    assert torch.backends.mkldnn.matmul.fp32_precision != "bf16"


def test_a_run_of_the_same_settings_gives_the_same_bytes(target, tmp_path):
    for name in ("a", "b"):
        train_eagle(target, tmp_path / name)
    assert contents(checkpoint.latest(tmp_path / "a")) == contents(checkpoint.latest(tmp_path / "b"))


class Stop(Exception):
    pass


@pytest.mark.parametrize("stop_at", [1, 4, 5])
def test_stop_and_resume_equal_the_uninterrupted_run_bit_for_bit(target, tmp_path, stop_at):
    settings = {"eval_every": 1, "save_every": 2, "features": "online"}

    def scores(drafter):
        return {"tau": round(float(drafter.fc.weight.sum()), 3)}

    train_eagle(target, tmp_path / "whole", evaluate=scores, **settings)

    def stopping(drafter):
        stopping.calls += 1
        if stopping.calls == stop_at:
            raise Stop
        return scores(drafter)

    stopping.calls = 0
    with pytest.raises(Stop):
        train_eagle(target, tmp_path / "stopped", evaluate=stopping, **settings)
    train_eagle(target, tmp_path / "stopped", evaluate=scores, **settings)
    assert timeless(tmp_path / "stopped") == timeless(tmp_path / "whole")
    whole, stopped = (checkpoint.latest(tmp_path / name) for name in ("whole", "stopped"))
    assert contents(stopped) == contents(whole)


def run_worker(folder, *arguments, processes=1):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tests" / "train_worker.py"), str(folder), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.case("O-T10")
def test_a_run_killed_between_tensors_and_marker_goes_on_bit_for_bit(target, tmp_path, one_thread, caplog):
    train_eagle(target, tmp_path / "whole", features="online")
    killed = run_worker(tmp_path / "killed", "kill_before_marker_of_step_6")
    assert killed.returncode == -9, killed.stderr
    broken = checkpoint.step_folder(tmp_path / "killed", 6)
    assert broken.exists()
    with caplog.at_level(logging.INFO):
        train_eagle(target, tmp_path / "killed", features="online")
    assert f"{broken}: ignored, the checkpoint was not finished" in caplog.text
    assert "step-000003: step 3 of" in caplog.text
    whole, again = (checkpoint.latest(tmp_path / name) for name in ("whole", "killed"))
    assert contents(again) == contents(whole)
    assert timeless(tmp_path / "killed") == timeless(tmp_path / "whole")


def test_a_line_cut_by_a_kill_is_written_again(target, tmp_path):
    train_eagle(target, tmp_path / "run", max_steps=4)
    path = tmp_path / "run" / "metrics.jsonl"
    whole = timeless(tmp_path / "run")
    checkpoint.latest(tmp_path / "run").joinpath("manifest.json").unlink()
    path.write_text(path.read_text()[:-20])
    train_eagle(target, tmp_path / "run", max_steps=4)
    assert timeless(tmp_path / "run") == whole


def test_a_finished_run_does_nothing_more(target, tmp_path):
    first, _ = train_eagle(target, tmp_path / "run")
    before = contents(checkpoint.latest(tmp_path / "run"))
    again, drafter = train_eagle(target, tmp_path / "run")
    assert again == first
    assert contents(checkpoint.latest(tmp_path / "run")) == before
    trained = checkpoint.read_checked(checkpoint.latest(tmp_path / "run"), "drafter.safetensors")
    assert torch.equal(drafter.fc.weight, trained["fc.weight"])


def test_checkpoints_of_other_settings_are_not_mixed_in(target, tmp_path):
    train_eagle(target, tmp_path / "run", features="online")
    message = "trained with other settings .train.learning_rate: 0.001 there, 0.002 here"
    with pytest.raises(ValueError, match=message):
        train_eagle(target, tmp_path / "run", features="online", learning_rate=2e-3)


@pytest.mark.case("O-T07")
def test_intervals_count_optimizer_steps_and_evaluation_restores_the_mode(target, tmp_path, monkeypatch):
    samples = [make_sample(f"{i}", [9, 9, 2], ".SS") for i in range(4)]
    modes, saved = [], []
    save = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda *a, **k: saved.append(a[3]["step"]) or save(*a, **k))

    class Watched(GainDrafter):
        def rows(self, batch):
            modes.append(self.training)
            return super().rows(batch)

    train_gain(  # four rows of one sample in every step
        target, tmp_path, samples, monkeypatch, drafter=Watched(), passes=25, batch_tokens=12, micro_tokens=3,
        save_every=10, eval_every=5,
        evaluate=lambda drafter: {"tau": float(not drafter.training) - 0.001 * len(modes)},
    )  # fmt: skip
    assert saved == [5, 10, 20, 25]  # 5: the first evaluation is the best one
    assert modes == [True] * 100
    assert [line["eval/tau"] for line in lines(tmp_path) if "eval/tau" in line] == pytest.approx(
        [0.98, 0.96, 0.94, 0.92, 0.9]
    )


def test_the_mode_comes_back_when_an_evaluation_fails(target, tmp_path, monkeypatch):
    drafter = GainDrafter()

    def evaluate(drafter):
        raise Stop

    samples = [make_sample("a", [9, 9, 2], ".SS")]
    with pytest.raises(Stop):
        train_gain(target, tmp_path, samples, monkeypatch, passes=1, drafter=drafter, evaluate=evaluate)
    assert drafter.training


def test_the_best_checkpoint_by_tau_is_kept_and_loaded(target, tmp_path):
    taus = iter([1.2, 1.9, 1.4, 1.5, 1.3, 1.1])
    result, _ = train_eagle(
        target, tmp_path / "run", evaluate=lambda drafter: {"tau": next(taus)},
        eval_every=1, keep=1, max_steps=6,
    )  # fmt: skip
    assert result.tau == 1.9
    assert checkpoint.best(tmp_path / "run") == checkpoint.step_folder(tmp_path / "run", 2)
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-000002", "step-000006"]


def test_samples_of_damaged_shards_are_left_out_on_request(target, tmp_path, caplog):
    train_eagle(target, tmp_path / "a", max_steps=1)
    path = tmp_path / "features" / "shard-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    config, samples = run_config(passes=1, skip_bad=True), random_samples(20)
    store = FeatureStore.load(tmp_path / "features", skip_bad=True)
    drafter = checkpoint.build_drafter(config.drafter, target, KEPT)
    result = train(config, target, SimpleNamespace(train=samples), store, drafter, tmp_path / "b")
    assert result.counters["samples_read"] == len(store.lengths) < 20
    assert f"{20 - len(store.lengths)} samples left out with damaged shard-00001.safetensors" in caplog.text


def test_features_of_another_target_stop_training_before_the_first_step(target, tmp_path):
    train_eagle(target, tmp_path / "a", max_steps=1)
    other = Target(tiny_llama(seed=1))
    config = run_config()
    drafter = checkpoint.build_drafter(config.drafter, other, KEPT)
    store = FeatureStore.load(tmp_path / "features")
    with pytest.raises(ValueError, match="captured from another target"):
        train(config, other, SimpleNamespace(train=random_samples(20)), store, drafter, tmp_path / "b")


def test_stored_states_that_the_target_does_not_compute_stop_training(target, tmp_path, monkeypatch):
    train_eagle(target, tmp_path / "a", max_steps=1)
    store = FeatureStore.load(tmp_path / "features")
    monkeypatch.setattr(type(target.decoder.norm), "forward", lambda self, x: 1.1 * x)
    drafter = checkpoint.build_drafter(run_config().drafter, target, KEPT)
    with pytest.raises(ValueError, match="stored states of sample s.* differ from the target's by"):
        train(run_config(), target, SimpleNamespace(train=random_samples(20)), store, drafter, tmp_path / "b")


def test_stored_features_must_be_given_and_online_ones_not(target, tmp_path, monkeypatch):
    drafter = checkpoint.build_drafter(run_config().drafter, target, KEPT)
    with pytest.raises(ValueError, match="train.features='stored': no captured features given"):
        train(run_config(), target, SimpleNamespace(train=random_samples(2)), None, drafter, tmp_path)

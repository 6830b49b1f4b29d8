"""Checkpoints: whole or ignored, of this target or refused."""

import logging
import shutil

import pytest
import torch

from spectrain import checkpoint
from spectrain.artifacts import MANIFEST, read_json
from spectrain.checks import CheckFailed
from spectrain.compose import compose
from spectrain.config import TrainConfig
from spectrain.drafters.eagle3 import Config
from spectrain.optim import build_optimizer
from spectrain.target import Target
from spectrain.testing import GainConfig, GainDrafter, tiny_llama

FINGERPRINT = {"config": "c", "weights": "w", "tokenizer": "t", "dtype": "float32"}


def stepped(drafter):
    """An optimizer of `drafter` after one step."""
    optimizer = build_optimizer(drafter, TrainConfig())
    for parameter in drafter.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def save(folder, step, *, tau=None, drafter=None, keep=2):
    drafter = drafter or GainDrafter()
    state = {"step": step, "tau": tau}
    return checkpoint.save(folder, drafter, stepped(drafter), state, target=FINGERPRINT, keep=keep)


def steps(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def target():
    return Target(tiny_llama())


@pytest.fixture
def eagle(target, tmp_path):
    """A run folder with one checkpoint of an EAGLE-3 drafter, and that drafter."""
    kept_ids = torch.arange(3, 250, 7)
    drafter = checkpoint.build_drafter(Config(unroll=2), target, kept_ids)
    state = {"step": 1, "tau": None}
    checkpoint.save(tmp_path, drafter, stepped(drafter), state, target=target.fingerprint(), keep=1)
    return tmp_path, drafter


def test_a_loaded_drafter_equals_the_saved_one_bit_for_bit(eagle, target):
    folder, drafter = eagle
    loaded = checkpoint.load_drafter(folder, target)
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert torch.equal(loaded.kept_ids, drafter.kept_ids)
    assert (loaded.config, loaded.taps, loaded.training) == (drafter.config, drafter.taps, False)


def test_what_is_not_trained_is_not_stored_and_comes_back_from_the_target(target, tmp_path):
    kept_ids = torch.arange(3, 250, 7)
    drafter = checkpoint.build_drafter(Config(unroll=2, head="frozen"), target, kept_ids)
    state = {"step": 1, "tau": None}
    checkpoint.save(tmp_path, drafter, stepped(drafter), state, target=target.fingerprint(), keep=1)
    loaded = checkpoint.load_drafter(tmp_path, target)
    assert torch.equal(loaded.lm_head.weight, target.head.weight[kept_ids])
    assert torch.equal(loaded.fc.weight, drafter.fc.weight)


def test_a_folder_holds_only_tensors_and_json(eagle):
    folder = checkpoint.latest(eagle[0])
    assert sorted(path.name for path in folder.iterdir()) == sorted((*checkpoint.FILES, MANIFEST))
    assert read_json(folder / "config.json")["tap_ids"] == [0, 1]
    assert read_json(folder / "config.json")["drafter"]["family"] == "eagle3"


def test_a_drafter_of_another_target_is_refused_and_both_are_named(eagle, target):
    other = Target(tiny_llama(seed=1))
    with pytest.raises(ValueError) as error:
        checkpoint.load_drafter(eagle[0], other)
    assert "trained on another target (different weights)" in str(error.value)
    assert target.fingerprint()["weights"] in str(error.value)
    assert other.fingerprint()["weights"] in str(error.value)


def test_the_target_may_come_in_another_dtype(eagle):
    loaded = checkpoint.load_drafter(eagle[0], Target(tiny_llama().bfloat16()))
    assert next(loaded.parameters()).dtype == torch.float32


def test_restoring_gives_back_weights_moments_and_state(tmp_path):
    drafter = GainDrafter()
    optimizer = stepped(drafter)
    folder = checkpoint.save(
        tmp_path, drafter, optimizer, {"step": 5, "tau": None}, target=FINGERPRINT, keep=1
    )
    again = GainDrafter()
    fresh = build_optimizer(again, TrainConfig())
    assert checkpoint.restore(folder, again, fresh) == {"step": 5, "tau": None}
    assert torch.equal(again.gain, drafter.gain)
    for key, value in optimizer.state[drafter.gain].items():
        assert torch.equal(fresh.state[again.gain][key], value), key


def test_another_draft_vocabulary_of_the_same_size_is_not_resumed(eagle, target):
    folder, drafter = eagle
    other = checkpoint.build_drafter(Config(unroll=2), target, drafter.kept_ids + 1)
    with pytest.raises(ValueError, match=r"another draft vocabulary .*36 of those there are not kept here"):
        checkpoint.restore(checkpoint.latest(folder), other, build_optimizer(other, TrainConfig()))


class Broken(GainDrafter):
    """A drafter whose saved state is not its own."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def state_dict(self, *arguments, **settings):
        state = super().state_dict(*arguments, **settings)
        self.change(state)
        return state


@pytest.mark.case("O-T10")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.update(gain=torch.empty(0)), "tensor gain is empty"),
        (lambda state: state.update(other=state.pop("gain")), "tensor gain is missing"),
        (
            lambda state: state.update(gain=torch.tensor([float("nan")])),
            "tensor gain holds values that are not",
        ),
        (lambda state: state.update(gain=torch.ones(2)), r"tensor gain has shape \[2\]: expected \[1\]"),
        (lambda state: state.update(other=torch.ones(1)), "tensor other is not one of the drafter's"),
    ],
)
def test_a_state_that_is_not_the_drafters_is_never_marked_complete(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        save(tmp_path, 3, drafter=Broken(change))
    assert checkpoint.latest(tmp_path) is None
    assert not list(tmp_path.rglob(MANIFEST))


@pytest.mark.case("O-T10")
def test_a_folder_without_the_marker_is_ignored_and_named(tmp_path, caplog):
    save(tmp_path, 1)
    newer = save(tmp_path, 2)
    (newer / MANIFEST).unlink()
    with caplog.at_level(logging.WARNING):
        assert checkpoint.latest(tmp_path) == checkpoint.step_folder(tmp_path, 1)
    assert f"{newer}: ignored, the checkpoint was not finished" in caplog.text


def test_a_folder_without_the_marker_is_not_loaded_by_name(eagle, target):
    folder = checkpoint.latest(eagle[0])
    (folder / MANIFEST).unlink()
    with pytest.raises(ValueError, match="not a finished checkpoint"):
        checkpoint.load_drafter(folder, target)
    with pytest.raises(ValueError, match="no finished checkpoint; run the train stage"):
        checkpoint.load_drafter(eagle[0], target)


def test_the_newest_and_the_best_are_kept(tmp_path):
    for step, tau in ((1, 1.5), (2, 2.5), (3, 2.0), (4, None), (5, None)):
        save(tmp_path, step, tau=tau, keep=2)
    assert steps(tmp_path) == ["step-000002", "step-000004", "step-000005"]
    assert checkpoint.best(tmp_path) == checkpoint.step_folder(tmp_path, 2)
    assert checkpoint.latest(tmp_path) == checkpoint.step_folder(tmp_path, 5)


def test_without_evaluations_the_newest_counts_as_best(tmp_path):
    save(tmp_path, 9)
    save(tmp_path, 10)
    assert checkpoint.best(tmp_path) == checkpoint.step_folder(tmp_path, 10)


def test_leftovers_of_a_kill_are_cleared_by_the_next_save(tmp_path):
    first = save(tmp_path, 1)
    shutil.copytree(first, checkpoint.step_folder(tmp_path, 2))
    (checkpoint.step_folder(tmp_path, 2) / MANIFEST).unlink()
    (tmp_path / "checkpoints" / ".step-000002.tmp").mkdir()
    save(tmp_path, 3)
    assert steps(tmp_path) == ["step-000001", "step-000003"]


def test_a_damaged_file_is_named(eagle, target):
    path = checkpoint.latest(eagle[0]) / "drafter.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckFailed, match=r"drafter.safetensors: content hash .* the file is damaged"):
        checkpoint.load_drafter(eagle[0], target)


def test_the_same_seed_builds_the_same_drafter_and_leaves_the_random_state_alone(target):
    before = torch.get_rng_state()
    config, kept_ids = Config(), torch.arange(9)
    one, two, other = (checkpoint.build_drafter(config, target, kept_ids, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.fc.weight, two.fc.weight)
    assert not torch.equal(one.fc.weight, other.fc.weight)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_unknown_family_is_refused_with_the_known_ones(target):
    with pytest.raises(ValueError, match="drafter.family='gain': expected one of .*eagle3"):
        checkpoint.build_drafter(GainConfig(), target, torch.arange(4))


def test_a_setting_newer_than_the_checkpoint_counts_as_its_default_there(tmp_path):
    def settings(*words):
        config = compose(["recipe=quickstart", *words])
        return config, checkpoint.settings(config, {}, "samples")

    newer = ("objective.dpace", "train.taps_bits", "drafter.fc_norm", "joint.weight")
    for words in (("joint.rank=4", "train.features=online"), ()):
        config, here = settings(*words)
        there = {key: value for key, value in here.items() if key not in newer}
        checkpoint.check_settings(tmp_path, there, here, config)
    config, here = settings("objective.dpace=0.5", "train.taps_bits=8")
    message = r"settings \(objective.dpace: 0.0 there, 0.5 here; train.taps_bits: 0 there, 8 here\)"
    with pytest.raises(ValueError, match=message):
        checkpoint.check_settings(tmp_path, there, here, config)

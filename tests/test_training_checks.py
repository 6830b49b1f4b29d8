"""Settings of the training that do not fit the drafter are refused before anything is captured."""

import pytest
import torch

from spectrain import checkpoint
from spectrain.config import ObjectiveConfig, RunConfig, TrainConfig
from spectrain.drafters import eagle1, eagle3, ngram, standalone, suffix
from spectrain.target import Target
from spectrain.testing import tiny_llama
from spectrain.training_checks import check_training

V = 260


@pytest.fixture(scope="module")
def target():
    return Target(tiny_llama(layers=4))


def check(target, drafter, *, objective=None, **train):
    config = RunConfig(
        recipe="trial",
        drafter=drafter,
        objective=ObjectiveConfig() if objective is None else objective,
        train=TrainConfig(**train),
    )
    check_training(config, checkpoint.build_drafter(drafter, target, torch.arange(V)), target)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "smooth_l1: family eagle3 trains its head"),
        (
            {"width": 16, "head": "frozen"},
            "smooth_l1: the states of family eagle3 are 16 wide: expected 32, as",
        ),
    ],
)
def test_a_regression_is_refused_where_the_states_are_not_the_targets(target, settings, message):
    with pytest.raises(ValueError, match=f"objective.terms.{message}"):
        check(target, eagle3.Config(**settings), objective=ObjectiveConfig(terms={"smooth_l1": 1.0}))


def test_a_regression_is_no_fault_of_a_drafter_that_is_not_trained(target):
    check(target, eagle3.Config(), objective=ObjectiveConfig(terms={"smooth_l1": 1.0}), passes=0)


def test_a_regression_to_the_targets_states_is_taken(target):
    check(target, eagle1.Config(), objective=ObjectiveConfig(terms={"smooth_l1": 1.0, "kl": 0.1}))


@pytest.mark.parametrize("family", [ngram, suffix])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"objective": ObjectiveConfig(slot_decay=1.0)},
            "^objective=.*slot_decay=1.0.*: no effect on drafter",
        ),
        ({"learning_rate": 0.1}, "^train.learning_rate=0.1: no effect on drafter .*, which has no weights"),
        ({"betas": [0.9, 0.99]}, r"^train.betas=\[0.9, 0.99\]: no effect on drafter"),
    ],
)
def test_a_drafter_without_weights_takes_no_settings_of_weights(target, family, settings, message):
    with pytest.raises(ValueError, match=message):
        check(target, family.Config(), passes=0, **settings)


@pytest.mark.parametrize("family", [ngram, suffix])
def test_a_drafter_without_weights_fits_what_says_how_much_is_trained(target, family):
    check(target, family.Config(), passes=0, batch_tokens=128, micro_tokens=128, seed=4)


def test_a_drafter_with_weights_may_keep_its_settings_untrained(target):
    settings = {"objective": ObjectiveConfig(slot_decay=1.0), "learning_rate": 0.1, "passes": 0}
    check(target, standalone.Config(), **settings)
    check(target, standalone.Config(frozen=True), **settings)

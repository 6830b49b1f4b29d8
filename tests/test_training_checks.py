"""Settings of the training that do not fit the drafter are refused before anything is captured."""

import pytest
import torch

from spectrain import checkpoint
from spectrain.config import ObjectiveConfig, RunConfig, TrainConfig
from spectrain.drafters import eagle1, eagle3
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

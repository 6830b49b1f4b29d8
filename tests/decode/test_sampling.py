"""From logits to laws, and random numbers that depend on their key alone."""

import math

import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from spectrain.decode.sampling import BONUS, COIN, DRAFT, RESIDUAL, Sampling, Streams, argmax, invert, law


@pytest.mark.case("O-X09")
def test_argmax_takes_the_lowest_id_among_ties():
    logits = torch.tensor([[10.0, 10.03]])
    assert argmax(logits).tolist() == [1]
    assert argmax(logits.bfloat16()).tolist() == [0]  # both are 10.0 there
    assert law(torch.tensor([[1.0, 5.0, 5.0]]), temperature=0).tolist() == [[0, 1, 0]]


@pytest.mark.case("O-X03")
@pytest.mark.parametrize("settings", [(1.0, 0, 1.0), (0.7, 3, 1.0), (1.3, 0, 0.8), (0.5, 5, 0.6)])
def test_law_equals_the_filters_of_transformers(settings):
    temperature, top_k, top_p = settings
    logits = 3 * torch.randn(6, 50)
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    ours = law(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    torch.testing.assert_close(ours, torch.softmax(scores, -1))


@pytest.mark.case("O-X03")
def test_top_k_2_of_the_field_case():
    p = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    kept = law(p.log(), temperature=1.0, top_k=2)
    torch.testing.assert_close(kept, torch.tensor([[0.625, 0.375, 0, 0]]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(bad, temperature):
    logits = torch.zeros(3, 5)
    logits[1, 2] = bad
    with pytest.raises(ValueError, match="not finite"):
        law(logits, temperature=temperature)


def test_a_row_of_nothing_but_minus_infinity_is_refused():
    for temperature in (0.0, 1.0):
        with pytest.raises(ValueError, match="not finite"):
            law(torch.full((1, 4), -math.inf), temperature=temperature)


def test_the_edges_of_the_uniform_never_choose_an_id_without_mass():
    laws = torch.tensor([[0, 0.25, 0, 0.75, 0]] * 5)
    last = 1 - 2.0**-53
    assert invert(laws, [0.0, 0.25 - 2.0**-54, 0.25, 0.5, last]) == [1, 1, 3, 3, 3]


def test_inversion_equals_the_plain_cumulative_sum():
    laws = torch.rand(40, 1000, dtype=torch.float64) ** 8
    uniforms = np.random.rand(40)
    cumulative = laws.cumsum(-1).numpy()
    expected = [
        int(np.searchsorted(c, u * c[-1], side="right")) for c, u in zip(cumulative, uniforms, strict=True)
    ]
    assert invert(laws, uniforms.tolist()) == expected


def test_inversion_follows_the_law():
    p = torch.tensor([0.1, 0.0, 0.6, 0.3])
    draws = invert(p.expand(20000, 4), [(i + 0.5) / 20000 for i in range(20000)])
    assert np.bincount(draws).tolist() == [2000, 0, 12000, 6000]


@pytest.mark.case("O-X04")
def test_every_part_of_the_key_changes_the_number_and_nothing_else_does():
    streams = Streams(Sampling(temperature=1.0, seed=3), keys=[7, 8])
    keys = [(0, 5, 0, COIN), (1, 5, 0, COIN), (0, 6, 0, COIN), (0, 5, 1, COIN)]
    keys += [(0, 5, 0, purpose) for purpose in (DRAFT, RESIDUAL, BONUS)]
    numbers = [streams.uniform(*key) for key in keys]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= u < 1 for u in numbers)
    elsewhere = Streams(Sampling(temperature=0.5, seed=3), keys=[1, 2, 7])
    assert elsewhere.uniform(2, 5, 0, COIN) == numbers[0]
    assert Streams(Sampling(temperature=1.0, seed=4), keys=[7]).uniform(0, 5, 0, COIN) != numbers[0]


def test_random_numbers_are_uniform():
    streams = Streams(Sampling(temperature=1.0), keys=[0])
    numbers = [streams.uniform(0, position, 0, BONUS) for position in range(20000)]
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees of freedom, 0.1%
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02


def test_greedy_draws_are_the_largest_entry():
    streams = Streams(Sampling(), keys=[0])
    assert streams.pick(torch.tensor([[0.2, 0.5, 0.3]]), [0], [0], [0], BONUS) == [1]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"top_k": -1},
        {"draft_temperature": 0.5},
    ],
)
def test_settings_outside_their_range_are_refused(settings):
    (key,) = settings
    with pytest.raises(ValueError, match=f"sampling.{key}="):
        Sampling(**settings)

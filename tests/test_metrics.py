"""Acceptance and speed numbers from counters, with exact values."""

import json
from dataclasses import asdict, dataclass

import numpy as np
import pytest

from spectrain.metrics import (
    TIMING,
    Counters,
    Number,
    count,
    estimate,
    leviathan,
    prefix_length,
    ratios,
    tau_from_alphas,
)


@dataclass(frozen=True)
class Round:
    drafted: int
    emitted: int
    alphas: tuple[float, ...]
    bonus_cut: bool = False


def chain_round(accepted: int, length: int = 4, *, keep: int | None = None, alpha: float = 0.5) -> Round:
    """A chain's round; `keep`: tokens left by a stop or length cut."""
    emitted = accepted + 1 if keep is None else min(keep, accepted + 1)
    reached = min(accepted + 1, length)
    return Round(length, emitted, (alpha,) * reached, bonus_cut=emitted <= accepted)


def counters(texts: list[list[Round]], slots: int = 4, **timing: list[float]) -> Counters:
    return count(texts, slots=slots, timing={name: timing.get(name, [1.0] * len(texts)) for name in TIMING})


def numbers(texts: list[list[Round]], slots: int = 4, **timing: list[float]) -> dict[str, np.ndarray]:
    found = counters(texts, slots, **timing)
    return {k: v[0] for k, v in ratios(found.pooled(), length=slots, limit_cost=1.5).items()}


@pytest.mark.case("O-X02")
def test_acceptance_numbers_of_four_steps():
    found = numbers([[chain_round(a) for a in (3, 0, 4, 1)]])
    assert found["tau"] == 3.0
    assert found["joint_k"].sum() == 2.0  # mean accepted
    assert found["rate"] == 0.5
    np.testing.assert_allclose(found["alpha_k"], [0.75, 2 / 3, 1.0, 0.5], rtol=1e-12)
    np.testing.assert_allclose(found["joint_k"], [0.75, 0.5, 0.5, 0.25], rtol=1e-12)


def test_numbers_stay_right_where_rounds_draft_different_lengths():
    """Lengths 0, 1, 4, 2, 3 with 0, 1, 2, 0 and 3 accepted; the last loses its bonus and its third draft to a
    stop. Slot 0 is reached by the four rounds that drafted, slot 1 by two, slot 2 by one, slot 3 by none."""
    rounds = [
        chain_round(0, 0),
        chain_round(1, 1, alpha=0.9),
        chain_round(2, 4, alpha=0.6),
        chain_round(0, 2, alpha=0.2),
        chain_round(3, 3, keep=2, alpha=0.7),
    ]
    found = numbers([rounds])
    assert found["tau"] == (1 + 2 + 3 + 1 + 2) / 5
    np.testing.assert_allclose(found["alpha_k"], [3 / 4, 2 / 2, 0 / 1, np.nan], rtol=1e-12)
    np.testing.assert_allclose(found["joint_k"], [3 / 5, 2 / 5, 0, 0], rtol=1e-12)
    assert found["tau"] == pytest.approx(1 + found["joint_k"].sum() - 1 / 5, rel=1e-12)
    assert found["alpha"] == pytest.approx((0.9 + 3 * 0.6 + 0.2 + 2 * 0.7) / 7, rel=1e-12)
    assert found["alpha_empirical"] == 5 / 7
    assert found["rate"] == 5 / 10


@pytest.mark.case("O-X02")
def test_drafts_after_a_rejection_do_not_count():
    matches = np.array([[1, 0, 1, 1], [1, 1, 1, 0], [0, 1, 1, 1]], dtype=bool)
    assert prefix_length(matches).tolist() == [1, 3, 0]


@pytest.mark.case("O-X02")
def test_batches_are_pooled_before_the_division():
    first = [chain_round(2, 2)] * 6 + [chain_round(1, 2)] * 2 + [chain_round(0, 2)] * 2
    second = [chain_round(1, 2), chain_round(0, 2)]
    pooled = numbers([first, second], slots=2)["alpha_k"]
    np.testing.assert_allclose(pooled, [0.75, 2 / 3], rtol=1e-12)
    assert tau_from_alphas(pooled) == pytest.approx(2.25, rel=1e-12)
    means = np.mean([numbers([t], slots=2)["alpha_k"] for t in (first, second)], axis=0)
    np.testing.assert_allclose(means, [0.65, 0.375], rtol=1e-12)  # the wrong way


def test_tau_is_one_plus_joint_acceptance_minus_cut_bonuses():
    rng = np.random.default_rng(0)
    texts = []
    for _ in range(20):
        accepted = rng.integers(0, 5, size=rng.integers(1, 9))
        rounds = [chain_round(int(a)) for a in accepted[:-1]]
        texts.append([*rounds, chain_round(int(accepted[-1]), keep=int(rng.integers(1, 6)))])
    found = numbers(texts)
    assert found["bonus_cut"] > 0
    assert found["tau"] == pytest.approx(1 + found["joint_k"].sum() - found["bonus_cut"], rel=1e-12)


def test_a_stop_inside_the_block_counts_what_was_emitted_and_reached():
    found = numbers([[chain_round(3, keep=2)]])
    assert found["tau"] == 2.0
    assert found["bonus_cut"] == 1.0
    assert found["joint_k"].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert found["alpha_k"][:2].tolist() == [1.0, 1.0]
    assert np.isnan(found["alpha_k"][2:]).all()


def test_a_stop_on_the_last_accepted_draft_cuts_the_bonus_alone():
    found = numbers([[chain_round(3, keep=3)]])
    assert (found["tau"], found["bonus_cut"], found["joint_k"].sum()) == (3.0, 1.0, 3.0)


def test_alpha_is_the_analytic_mean_over_reached_slots():
    rounds = [Round(4, 2, (0.9, 0.2)), Round(4, 5, (0.8, 0.7, 0.6, 0.5)), Round(4, 1, (0.1,))]
    found = numbers([rounds])
    assert found["alpha"] == pytest.approx((0.9 + 0.2 + 0.8 + 0.7 + 0.6 + 0.5 + 0.1) / 7, rel=1e-12)
    assert found["alpha_empirical"] == pytest.approx(5 / 7, rel=1e-12)


def test_costs_add_up_to_the_time_of_a_round():
    found = numbers(
        [[chain_round(2)] * 10], decode_s=[6.0], draft_s=[1.0], verify_s=[4.0], steps=[10], draft_steps=[50],
        plain_s=[9.0], plain_steps=[30], plain_tokens=[30],
    )  # fmt: skip
    assert found["c"] == pytest.approx(1 / 50 / 0.3, rel=1e-12)
    assert found["r"] == pytest.approx(4 / 3, rel=1e-12)
    assert found["gamma"] == 5.0
    assert found["overhead"] == pytest.approx(1 / 3, rel=1e-12)
    assert found["eta"] == pytest.approx(1.5, rel=1e-12)  # 30 tokens in 6 s against 30 in 9 s
    assert found["eta_model"] == pytest.approx(1.5, rel=1e-12)  # one text at a time: the model is exact


def test_eta_compares_rates_where_texts_differ_in_length():
    found = numbers([[chain_round(3)] * 5], decode_s=[4.0], plain_s=[3.0], plain_tokens=[15])
    assert found["throughput_tok_s"] == 5.0
    assert found["plain_throughput_tok_s"] == 5.0
    assert found["eta"] == 1.0


def test_the_limit_is_tau_over_the_least_cost_of_a_round():
    found = numbers([[chain_round(2)] * 10], decode_s=[6.0], plain_s=[9.0], plain_tokens=[30])
    assert found["eta_limit"] == 2.0  # 3 tokens a round that costs 1.5 plain steps
    assert found["limit_share"] == pytest.approx(0.75, rel=1e-12)  # eta 1.5


def test_leviathan_formula():
    expected = (1 - 0.8**6) / (0.2 * 1.25)
    assert leviathan(np.array(0.8), 5, np.array(0.05)) == pytest.approx(expected, rel=1e-12)
    assert leviathan(np.array(1.0), 5, np.array(0.0)) == 6.0


def interval(texts: list[list[Round]], *, prompts=None, units=None, resamples: int = 200, seed: int = 0):
    prompts = range(len(texts)) if prompts is None else prompts
    given = {"prompts": prompts, "units": prompts if units is None else units, "length": 4}
    return estimate(counters(texts), **given, resamples=resamples, seed=seed)


def sample_texts() -> list[list[Round]]:
    rng = np.random.default_rng(1)
    return [[chain_round(int(a)) for a in rng.integers(0, 5, size=8)] for _ in range(30)]


def test_bootstrap_is_the_same_for_the_same_seed():
    first, again, other = (interval(sample_texts(), seed=seed) for seed in (7, 7, 8))
    assert first == again
    assert first["tau"] != other["tau"]


def test_interval_holds_the_value_and_has_the_width_of_the_sampling_error():
    texts = sample_texts()
    tau = interval(texts, resamples=4000)["tau"]
    assert isinstance(tau, Number) and tau.low < tau.value < tau.high
    per_text = [np.mean([r.emitted for r in t]) for t in texts]
    assert tau.high - tau.low == pytest.approx(2 * 1.96 * np.std(per_text) / 30**0.5, rel=0.1)


def test_texts_of_one_prompt_are_drawn_together():
    texts = [[chain_round(4)], [chain_round(0)]] * 10
    paired = interval(texts, prompts=[f"q{i // 2}" for i in range(20)])["tau"]
    assert paired == Number(3.0, 3.0, 3.0)


def test_of_several_trainings_each_is_drawn_as_a_whole():
    """Two trainings that always keep 4 and 0 drafts on ten prompts: drawn twice, once each, or twice."""
    texts = [[chain_round(4)], [chain_round(0)]] * 10
    given = {"prompts": [i // 2 for i in range(20)], "units": [0] * 20, "length": 4, "seed": 0}
    tau = estimate(counters(texts), **given, resamples=400, trainings=[0, 1] * 10)["tau"]
    assert tau == Number(3.0, 1.0, 5.0)


def test_prompts_are_drawn_beside_the_trainings():
    texts = sample_texts()
    given = {"prompts": range(30), "units": range(30), "length": 4, "resamples": 400, "seed": 3}
    alone = estimate(counters(texts), **given)["tau"]
    doubled = {**given, "prompts": [*range(30)] * 2, "units": [*range(30)] * 2}
    both = estimate(counters(texts * 2), **doubled, trainings=[0] * 30 + [1] * 30)["tau"]
    assert both == alone  # two trainings that gave the same texts


def test_seconds_are_drawn_by_the_batch_that_they_were_measured_on():
    texts = [[chain_round(4)], [chain_round(0)]] * 10  # a batch of both emits 6 tokens in 2 s, against 2
    found = interval(texts, units=[i // 2 for i in range(20)])
    assert found["eta"] == Number(3.0, 3.0, 3.0)
    assert found["tau"].low < 2.5 and found["tau"].high > 3.5


def test_undefined_numbers_are_none_and_one_unit_has_no_interval():
    found = interval([[chain_round(0)]])
    assert found["tau"] == Number(1.0, None, None)
    assert found["alpha_k"][1:] == [Number(None, None, None)] * 3
    assert json.loads(json.dumps(asdict(found["alpha_k"][1])))["value"] is None

"""The transform of sampled tokens is uniform for the right law and bends for wrong ones."""

import numpy as np
import pytest
import torch

from spectrain.decode.generation import Generation, Round
from spectrain.eval.pit import Outcome, acceptance, chi_square_tail, serial_correlation, transform, uniformity

P = (0.4, 0.1, 0.3, 0.2)
Q = (0.1, 0.5, 0.2, 0.2)
BY_Q = torch.tensor([1, 2, 3, 0])  # descending q, ties by id


def test_worked_example():
    p = torch.tensor([[0.5, 0.3, 0.2]] * 3)
    u = transform(p, [0, 2, 1], [torch.tensor([2])] * 3, np.array([0.0, 0.5, 1.0]))
    np.testing.assert_allclose(u, [0.2, 0.1, 1.0], atol=1e-7)


def test_without_a_drafter_the_order_is_by_descending_p_then_id():
    p = torch.tensor([[0.2, 0.4, 0.2, 0.2]] * 4)
    u = transform(p, [0, 1, 2, 3], [None] * 4, np.zeros(4))
    np.testing.assert_allclose(u, [0.4, 0.0, 0.6, 0.8], atol=1e-7)


def test_the_intervals_of_all_tokens_tile_zero_to_one():
    p = torch.softmax(torch.randn(1, 50, dtype=torch.float64), -1)
    for order in (None, torch.randperm(50)[:7], torch.randperm(50)):
        low = transform(p.expand(50, -1), range(50), [order] * 50, np.zeros(50))
        high = transform(p.expand(50, -1), range(50), [order] * 50, np.ones(50))
        ranks = np.argsort(low)
        np.testing.assert_allclose(low[ranks], [0, *high[ranks][:-1]], atol=1e-12)
        assert high.max() == pytest.approx(1)


def transformed(emitted, n: int = 20_000):
    rng = np.random.default_rng(0)
    ids = rng.choice(len(emitted), size=n, p=emitted)
    return transform(torch.tensor(P).expand(n, -1), ids.tolist(), [BY_Q] * n, rng.random(n))


def test_the_right_law_is_uniform():
    assert uniformity(transformed(P)).p_value > 0.01


@pytest.mark.case("O-X04")
def test_a_residual_that_reuses_the_coin_is_caught():
    found = uniformity(transformed((0.375, 0.1, 0.325, 0.2)))
    assert found.statistic == pytest.approx(0.025, abs=0.01)
    assert found.p_value < 1e-4


@pytest.mark.case("O-X03")
@pytest.mark.parametrize(
    ("emitted", "is_right"),
    [
        ((0.625, 0.375, 0, 0), True),
        ((0.75, 0.25, 0, 0), False),
        ((0.5, 0.3, 0.15, 0.05), False),
        ((0.71, 0.225, 0.045, 0.02), False),
        ((0.71, 0.29, 0, 0), False),
    ],
)
def test_a_filter_on_one_side_is_caught(emitted, is_right):
    rng = np.random.default_rng(0)
    n = 4_000
    ids = rng.choice(4, size=n, p=emitted).tolist()
    p = torch.tensor([0.625, 0.375, 0.0, 0.0]).expand(n, -1)
    u = transform(p, ids, [torch.tensor([3, 2, 1, 0])] * n, rng.random(n))
    assert (uniformity(u).p_value > 1e-4) == is_right


def test_kolmogorov_smirnov_agrees_with_tables():
    u = np.array([0.1, 0.2, 0.25, 0.6, 0.61, 0.7, 0.72, 0.9, 0.95, 0.99] * 20)
    assert uniformity(u) == Outcome(pytest.approx(0.3), pytest.approx(1.8e-16, rel=0.5))
    v = np.random.default_rng(0).random(1000)
    assert uniformity(v) == Outcome(pytest.approx(0.0378193, abs=1e-6), pytest.approx(0.1116, abs=1e-3))


def test_chi_square_tail_agrees_with_tables():
    assert chi_square_tail(18.3, 10) == pytest.approx(0.0501091, abs=1e-6)
    assert chi_square_tail(528, 26) == pytest.approx(5.56e-95, rel=1e-2)
    assert chi_square_tail(0.0, 0) == 1.0


def test_correlated_neighbours_are_caught_and_independent_ones_pass():
    rng = np.random.default_rng(0)
    texts = [rng.random(100) for _ in range(50)]
    assert serial_correlation(texts).p_value > 0.01
    echoed = [(np.roll(u, 1) + 0.3 * u) % 1 for u in texts]
    assert serial_correlation([np.repeat(u[::2], 2) for u in echoed]).p_value < 1e-4


def coin_rounds(
    chances: list[float], bias: float = 0.0, n: int = 3000, cut: bool = False
) -> list[Generation]:
    """Rounds of a chain whose slot k is accepted with chances[k] + bias; `cut`: a stop may end a round at
    slot 1."""
    rng = np.random.default_rng(0)
    rounds = []
    for _ in range(n):
        kept = 0
        while kept < len(chances) and rng.random() < chances[kept] + bias:
            kept += 1
        alphas = tuple(chances[: kept + 1])
        if cut and kept >= 1 and rng.random() < 0.3:
            rounds.append(Round(len(chances), len(chances), kept, 1, alphas, bonus_cut=True))
        else:
            rounds.append(Round(len(chances), len(chances), kept, kept + 1, alphas, bonus_cut=False))
    return [Generation((1,), (2,), "length", tuple(rounds))]


def test_acceptance_as_expected_passes_with_and_without_cuts():
    chances = [0.7, 0.5, 0.9]
    for cut in (False, True):
        assert acceptance(coin_rounds(chances, cut=cut)).p_value > 0.01


def test_acceptance_above_the_analytic_one_is_caught():
    assert acceptance(coin_rounds([0.7, 0.5, 0.9], bias=0.05)).p_value < 1e-4


def test_greedy_acceptance_has_no_freedom_and_no_excuse():
    right = Round(2, 2, accepted=1, emitted=2, alphas=(1.0, 0.0), bonus_cut=False)
    wrong = Round(2, 2, accepted=1, emitted=2, alphas=(0.0, 0.0), bonus_cut=False)
    assert acceptance([Generation((1,), (2,), "length", (right,))]) == Outcome(0.0, 1.0)
    assert acceptance([Generation((1,), (2,), "length", (wrong,))]).p_value == 0.0


def block_rounds(p: np.ndarray, q: np.ndarray, length: int, n: int, *, weighted: bool) -> list[Generation]:
    """Rounds of block verification (Sun et al. 2024, algorithm 2), p and q the same at every slot."""
    rng = np.random.default_rng(0)
    rounds = []
    for _ in range(n):
        w, weights, kept = 1.0, [1.0], 0
        for slot, x in enumerate(rng.choice(len(q), size=length, p=q), 1):
            w = min(1.0, w * p[x] / q[x])
            weights.append(w)
            more = np.maximum(w * p - q, 0).sum()
            chance = w if slot == length else more / (more + 1 - w) if w < 1 else 1.0
            kept = slot if rng.random() < chance else kept
        seen = weights[: min(kept + 1, length)]
        alphas = tuple(float(np.minimum(p, q / (w if weighted else 1.0)).sum()) for w in seen)
        rounds.append(Round(length, length, kept, kept + 1, alphas, bonus_cut=False))
    return [Generation((1,), (2,), "length", tuple(rounds))]


def test_block_verification_is_expected_to_accept_by_its_running_weight():
    """Slot k is accepted, given the tokens before it, with probability sum min(p, q / w), w their weight."""
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.3, 0.5, 0.2])
    assert acceptance(block_rounds(p, q, 3, 6000, weighted=True)).p_value > 0.01
    assert acceptance(block_rounds(p, q, 3, 6000, weighted=False)).p_value < 1e-4

"""Laws of rows straight from logits, against decode/sampling.py's with sorts."""

import numpy as np
import pytest
import torch

from spectrain.decode.sampling import law
from spectrain.kernels.row_laws_triton import Filters, row_laws

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where the kernels run


def dense(logits, filters, block):
    """The laws [M, V] that top, mass, bar and edge mean."""
    top, mass, bar, edge, best = (t.cpu() for t in row_laws(logits.to(DEVICE), filters, block=block))
    if filters.temperature == 0:
        return torch.nn.functional.one_hot(best.long(), logits.shape[1]).float()
    s, ids = logits.float() / filters.temperature, torch.arange(logits.shape[1])
    kept = (s > bar[:, None]) | ((s == bar[:, None]) & (ids <= edge[:, None]))
    return ((s - top[:, None]).exp() * kept).double() / mass[:, None]


@pytest.mark.parametrize(
    "filters",
    [
        Filters(0.0),
        Filters(0.7),
        Filters(1.3, top_k=5),
        Filters(1.0, top_p=0.8),
        Filters(0.9, min_p=0.1),
        Filters(0.5, top_k=20, top_p=0.6, min_p=0.01),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_filters_equal_those_with_a_sort(filters, dtype):
    """bfloat16 logits tie at every edge."""
    logits = (3 * torch.randn(2, 63)).to(dtype)
    expected = law(logits, **vars(filters))
    torch.testing.assert_close(dense(logits, filters, 32).float(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("vocab", "block"), [(1, 16), (63, 128), (1000, 256)])
def test_odd_vocabularies_equal_the_softmax(vocab, block):
    logits = torch.randn(2, vocab)
    torch.testing.assert_close(
        dense(logits, Filters(1.0), block), torch.softmax(logits.double(), -1), atol=1e-7, rtol=1e-6
    )


def test_ties_at_the_edge_of_top_p_go_to_the_lowest_ids():
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 0.0, 1.0, 1.0]])
    filters = Filters(1.0, top_p=0.75)  # e^2 / 20.26 = .36 and three of the four with e / 20.26 = .13
    assert (dense(logits, filters, 4) > 0).tolist() == [[False, True, True, True, False, True, False]]


def test_all_that_equals_the_kth_is_kept_whatever_the_sign_of_zero():
    logits = torch.tensor([[-0.0, 1.0, 0.0, -1.0, -0.0]])
    assert (dense(logits, Filters(1.0, top_k=2), 16) > 0).tolist() == [[True, True, True, False, True]]


def test_the_lowest_id_wins_a_tie_of_the_largest():
    logits = torch.tensor([[1.0, 5.0, 0.0, 5.0], [-torch.inf, -2.0, -2.0, -torch.inf]])
    assert row_laws(logits.to(DEVICE), Filters(0.0), block=2)[4].tolist() == [1, 1]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rows_without_a_law_have_no_finite_mass_above_zero(bad):
    logits = torch.zeros(2, 40)
    logits[1, 3] = bad
    if bad == -torch.inf:
        logits[1] = bad
    with np.errstate(invalid="ignore"):
        mass = row_laws(logits.to(DEVICE), Filters(1.0), block=16)[1]
    assert mass[0] == 40 and not 0 < mass[1] < torch.inf

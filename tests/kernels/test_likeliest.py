"""The likeliest ids equal those of a full sort."""

import pytest
import torch

from spectrain.kernels.likeliest import in_cache, likeliest


@pytest.mark.parametrize(
    ("rows", "width", "count"), [(1, 3, 3), (5, 1000, 4), (3, 1000, 1), (33, 49152, 8), (2, 5000, 64)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ids_and_log_probabilities_equal_a_full_sort(rows, width, count, dtype):
    logits = torch.randn(rows, width).to(dtype)
    ids, logq = likeliest(logits, count)
    expected = torch.log_softmax(logits.double(), -1)
    assert torch.equal(logits.gather(1, ids), logits.sort(dim=-1, descending=True).values[:, :count])
    assert all(len(set(row)) == count for row in ids.tolist())
    torch.testing.assert_close(logq.double(), expected.gather(1, ids), atol=1e-5, rtol=1e-5)


def test_a_certain_id_has_log_probability_0():
    logits = torch.full((1, 300), -torch.inf)
    logits[0, 299] = 7.0
    assert likeliest(logits, 1)[0].tolist() == [[299]]
    assert likeliest(logits, 1)[1].tolist() == [[0.0]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused(bad):
    logits = torch.zeros(2, 600)
    logits[1, 3] = bad
    with pytest.raises(ValueError, match="not finite"):
        likeliest(logits, 2)


def test_pieces_cover_all_rows_in_order():
    rows = torch.arange(25)[:, None].expand(25, 2**17)
    assert [len(part) for part in in_cache(rows)] == [4] * 6 + [1]
    assert torch.cat(in_cache(rows))[:, 0].tolist() == list(range(25))

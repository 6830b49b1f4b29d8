"""The unroll's attention against a dense softmax under a mask drawn by hand, in float64."""

import pytest
import torch

from spectrain.kernels.ttt_attention import Own, Run, reference, ttt_attention

K = 8
SCALE = 0.3
HEADS = [(2, 2), (4, 1), (9, 3)]  # query heads, key/value heads
FORMS = pytest.mark.parametrize("form", [ttt_attention, reference])


def draw(heads, queries, keys, steps):
    """Random (q, k, v, own), float32 with gradients; each later step has a row more than there are queries,
    and the queries' rows are the last ones."""
    H, G = heads

    def normal(*shape):
        return torch.randn(shape, requires_grad=True)

    places = torch.arange(1, queries + 1)
    own = [Own(normal(G, queries + 1, K), normal(G, queries + 1, K), places) for _ in range(steps)]
    return normal(H, queries, K), normal(G, keys, K), normal(G, keys, K), own


def leaves(tensors):
    q, k, v, own = tensors
    return [q, k, v, *(t for step in own for t in (step.keys, step.values))]


def dense(tensors, mask):
    """Softmax over all columns that `mask` [queries, keys + steps x queries] shows, in float64."""
    q, k, v, own = tensors
    k = torch.cat([k, *(step.keys[:, step.places] for step in own)], 1)
    v = torch.cat([v, *(step.values[:, step.places] for step in own)], 1)
    k, v = (t.double().repeat_interleave(len(q) // len(k), 0) for t in (k, v))
    scores = (q.double() @ k.transpose(1, 2) * SCALE).masked_fill(~mask, -torch.inf)
    return torch.softmax(scores, -1) @ v


def drawn(text):
    """A mask from rows of 0 and 1; blanks are for the eye."""
    rows = [line.replace(" ", "") for line in text.split("\n") if line.strip()]
    return torch.tensor([[mark == "1" for mark in row] for row in rows])


def assert_equal_to_dense(form, tensors, runs, mask):
    out = form(*tensors, runs, SCALE)
    expected = dense(tensors, mask)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    above = torch.randn(out.shape)
    ours = torch.autograd.grad(out, leaves(tensors), above)
    theirs = torch.autograd.grad(expected, leaves(tensors), above.double())
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@FORMS
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.case("O-T02")
def test_the_third_step_of_four_rows_sees_what_the_mask_shows(form, heads):
    mask = drawn("""
        1000 1000 1000
        1100 0100 0100
        1110 0010 0010
        1111 0001 0001
    """)
    runs = (Run(first=0, count=4, row=0, begin=0),)
    assert_equal_to_dense(form, draw(heads, 4, 4, 2), runs, mask)


@FORMS
@pytest.mark.parametrize("heads", HEADS)
def test_the_first_step_is_causal(form, heads):
    mask = drawn("""
        1000
        1100
        1110
        1111
    """)
    assert_equal_to_dense(form, draw(heads, 4, 4, 0), (Run(first=0, count=4, row=0, begin=0),), mask)


@FORMS
@pytest.mark.parametrize("heads", HEADS)
def test_documents_are_apart_and_runs_may_begin_in_their_middle(form, heads):
    """Documents at rows 0 to 4 and 5 to 8; queries are rows 1, 2, 4 of the first and 7, 8 of the second."""
    mask = drawn("""
        11000 0000  10000
        11100 0000  01000
        11111 0000  00100
        00000 1110  00010
        00000 1111  00001
    """)
    runs = (
        Run(first=0, count=2, row=1, begin=0),
        Run(first=2, count=1, row=4, begin=0),
        Run(first=3, count=2, row=7, begin=5),
    )
    assert_equal_to_dense(form, draw(heads, 5, 9, 1), runs, mask)


@pytest.mark.parametrize(("count", "row"), [(1, 0), (63, 37), (1000, 5)])
def test_odd_lengths_equal_the_dense_form(count, row):
    keys = row + count + 2
    mask = torch.arange(keys) <= row + torch.arange(count)[:, None]
    mask = torch.cat((mask, torch.eye(count, dtype=torch.bool), torch.eye(count, dtype=torch.bool)), 1)
    runs = (Run(first=0, count=count, row=row, begin=0),)
    assert_equal_to_dense(ttt_attention, draw((2, 1), count, keys, 2), runs, mask)


def test_keys_that_no_query_sees_get_no_gradient():
    tensors = draw((4, 2), 2, 6, 1)
    runs = (Run(first=0, count=2, row=3, begin=2),)
    ttt_attention(*tensors, runs, SCALE).sum().backward()
    for t in tensors[1:3]:
        assert t.grad[:, [0, 1, 5]].abs().max() == 0
        assert t.grad[:, 2:5].abs().amin((0, 2)).min() > 0


def test_runs_that_do_not_cover_the_queries_are_a_mistake():
    with pytest.raises(AssertionError, match="cover"):
        ttt_attention(*draw((2, 2), 3, 4, 0), (Run(first=0, count=2, row=0, begin=0),), SCALE)


@pytest.fixture
def bfloat16_products():
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    yield matmul
    matmul.fp32_precision = before


def test_bfloat16_products_are_off_inside_and_on_again_after(bfloat16_products, monkeypatch):
    seen = []
    for name in ("forward", "backward"):
        suffix = "" if name == "forward" else "_backward"
        op = f"_scaled_dot_product_flash_attention_for_cpu{suffix}"
        kernel = getattr(torch.ops.aten, op)

        def noted(*args, kernel=kernel, **kwargs):
            seen.append((kernel.__name__, bfloat16_products.fp32_precision))
            return kernel(*args, **kwargs)

        monkeypatch.setattr(torch.ops.aten, op, noted)
    tensors = draw((2, 1), 2, 4, 0)
    ttt_attention(*tensors, (Run(first=0, count=2, row=2, begin=0),), SCALE).sum().backward()
    names = ["_scaled_dot_product_flash_attention_for_cpu"] * 2
    names += [
        "_scaled_dot_product_flash_attention_for_cpu_backward"
    ] * 2  # keys before the run, then its square
    assert seen == [(name, "ieee") for name in names]
    assert bfloat16_products.fp32_precision == "bf16"

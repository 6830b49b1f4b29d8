"""The unroll's attention against a dense softmax under a mask drawn by hand, in float64; the CPU's form, the
plain one, and Triton's on a GPU or, without one, in the interpreter."""

import pytest
import torch

from spectrain.kernels import ttt_attention as module
from spectrain.kernels.ttt_attention import Own, Run, reference, ttt_attention
from spectrain.kernels.ttt_attention_triton import TTTAttention

K = 8
SCALE = 0.3
HEADS = [(2, 2), (4, 1), (9, 3)]  # query heads, key/value heads
FORMS = pytest.mark.parametrize("form", ["cpu", "reference", "triton"], indirect=True)


@pytest.fixture
def triton(monkeypatch):
    """Triton's form, on tensors of the GPU if there is one."""
    monkeypatch.setattr(module, "form", lambda device: TTTAttention)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield ttt_attention


@pytest.fixture
def form(request):
    if request.param == "triton":
        return request.getfixturevalue("triton")
    return reference if request.param == "reference" else ttt_attention


def draw(heads, queries, keys, steps, *, head_dim=K, dtype=torch.float32):
    """Random (q, k, v, own) with gradients; each later step has a row more than there are queries, and the
    queries' rows are the last ones."""
    H, G = heads

    def normal(*shape):
        return torch.randn(shape).to(dtype).requires_grad_()

    K = head_dim

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


def assert_equal_to_dense(form, tensors, runs, mask, *, bound=1e-5):
    out = form(*tensors, runs, SCALE)
    expected = dense(tensors, mask)
    close(out, expected, bound)
    above = torch.randn(out.shape).to(out.dtype)
    ours = torch.autograd.grad(out, leaves(tensors), above)
    theirs = torch.autograd.grad(expected, leaves(tensors), above.double())
    for a, b in zip(ours, theirs, strict=True):
        close(a, b, bound)


def close(ours, expected, bound):
    """Equal up to `bound` of the largest expected entry (of 1 if that is smaller)."""
    worst = (ours.double() - expected.double()).abs().max().item()
    assert worst <= bound * max(1.0, expected.abs().max().item()), worst


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


def one_run(count, row, steps):
    """(runs, mask) of `count` queries from row `row` of a document on, with two keys behind them."""
    mask = torch.arange(row + count + 2) <= row + torch.arange(count)[:, None]
    mask = torch.cat([mask] + [torch.eye(count, dtype=torch.bool)] * steps, 1)
    return (Run(first=0, count=count, row=row, begin=0),), mask


@pytest.mark.parametrize(("count", "row"), [(1, 0), (63, 37), (1000, 5)])
def test_odd_lengths_equal_the_dense_form(count, row):
    assert_equal_to_dense(ttt_attention, draw((2, 1), count, row + count + 2, 2), *one_run(count, row, 2))


@FORMS
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("more", [0, 1])
def test_the_queries_rows_may_be_the_first_the_last_or_all_of_a_step(form, offset, more):
    q, k, v, own = draw((4, 2), 5, 5, 2)
    rows = 5 + offset + more
    places = torch.arange(5) + offset
    own = [Own(*(torch.randn(2, rows, K).requires_grad_() for _ in "kv"), places) for _ in own]
    assert_equal_to_dense(form, (q, k, v, own), *cut_to(5, one_run(5, 0, 2)))


def cut_to(keys, run_and_mask):
    """Without the two keys behind the run."""
    runs, mask = run_and_mask
    return runs, torch.cat((mask[:, :keys], mask[:, keys + 2 :]), 1)


@pytest.mark.parametrize("cached", [1, 2**11, 2**30])
def test_the_number_of_heads_at_a_time_changes_nothing(cached, monkeypatch):
    tensors, args = draw((9, 3), 63, 102, 1), one_run(63, 37, 1)
    monkeypatch.setattr(module, "BLOCK", 16)
    monkeypatch.setattr(module, "CACHED", cached)
    assert_equal_to_dense(ttt_attention, tensors, *args)


@pytest.mark.parametrize(("count", "row"), [(1, 0), (63, 37), (37, 963)])  # the last with 1000 keys seen
def test_odd_lengths_equal_the_dense_form_in_triton(triton, count, row):
    assert_equal_to_dense(triton, draw((2, 1), count, row + count + 2, 2), *one_run(count, row, 2))


@pytest.mark.parametrize(
    ("head_dim", "heads", "dtype", "bound"),
    [
        (64, (4, 1), torch.float32, 1e-5),
        (64, (2, 2), torch.bfloat16, 2e-2),
        (80, (9, 3), torch.bfloat16, 2e-2),
        (128, (4, 1), torch.bfloat16, 2e-2),
        (256, (2, 1), torch.float32, 1e-5),
    ],
)
def test_triton_equals_the_dense_form_at_every_head_dim(triton, head_dim, heads, dtype, bound):
    tensors = draw(heads, 35, 41, 1, head_dim=head_dim, dtype=dtype)
    assert_equal_to_dense(triton, tensors, *one_run(35, 4, 1), bound=bound)


def test_triton_reads_views_whose_heads_lie_inside_a_row(triton):
    """As the projections give them: [N, 5 H K] seen as five times [H, N, K]."""
    parts = torch.randn(6, 5 * 2 * K).chunk(5, -1)
    q, k, v, *own = (t.view(6, 2, K).transpose(0, 1).detach().requires_grad_() for t in parts)
    assert v.stride() == (K, 10 * K, 1)
    runs = (Run(first=0, count=6, row=0, begin=0),)
    mask = torch.cat((torch.ones(6, 6).tril(), torch.eye(6)), 1).bool()
    assert_equal_to_dense(triton, (q, k, v, [Own(*own, torch.arange(6))]), runs, mask)


@pytest.mark.case("O-S05")
@FORMS
def test_the_gradient_equals_finite_differences_in_float64(form):
    q, k, v, own = draw((2, 1), 3, 5, 2, dtype=torch.float64)
    runs = (Run(first=0, count=2, row=1, begin=0), Run(first=2, count=1, row=4, begin=3))
    places = own[0].places

    def attention(q, k, v, *own):
        return form(q, k, v, [Own(own[0], own[1], places), Own(own[2], own[3], places)], runs, 0.5)

    assert torch.autograd.gradcheck(attention, leaves((q, k, v, own)), fast_mode=True)


def test_runs_out_of_order_are_a_mistake(triton):
    runs = (Run(first=0, count=1, row=3, begin=0), Run(first=1, count=1, row=1, begin=0))
    with pytest.raises(AssertionError, match="order"):
        triton(*draw((2, 2), 2, 4, 0), runs, SCALE)


def test_a_gpu_takes_the_kernels():
    assert module.form(torch.device("cuda")) is TTTAttention
    assert module.form(torch.device("cpu")) is not TTTAttention


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
    seen, bmm = [], torch.bmm

    def noted(a, b):
        seen.append(bfloat16_products.fp32_precision)
        return bmm(a, b)

    monkeypatch.setattr(torch, "bmm", noted)
    tensors = draw((2, 1), 2, 4, 0)
    ttt_attention(*tensors, (Run(first=0, count=2, row=2, begin=0),), SCALE).sum().backward()
    assert seen == ["ieee"] * 7  # scores and output, then scores again and four gradients
    assert bfloat16_products.fp32_precision == "bf16"

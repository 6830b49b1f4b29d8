"""Tree attention against a softmax under a dense mask, in float64."""

import pytest
import torch

from spectrain.cache import ancestors
from spectrain.kernels.tree_attention import Form, TreeRows, reference
from spectrain.kernels.tree_attention_triton import launch, splits_of
from spectrain.kernels.tree_build import reference as tree_build

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where the kernels run
CHAIN = [-1, 0, 1]
SMALL = [-1, -1, 0, 1, 1, 4]
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


class Case:
    """Random keys of requests whose texts are `lengths` long, each with the tree `parents` behind its text,
    of which the last `new` nodes ask; NaN wherever nothing was written."""

    def __init__(self, *, heads=(4, 2), dim=64, lengths=(63,), parents=SMALL, new=None, dtype=torch.float32):
        H, G = heads
        self.R, self.lengths, self.parents = len(lengths), lengths, parents
        N = len(parents)
        self.new = N if new is None else new
        shape = (self.R + 1, max(lengths) + N + 2, G, dim)
        self.keys, self.values = (torch.full(shape, torch.nan) for _ in range(2))
        self.requests = list(range(self.R, 0, -1))  # row 0 is of a request that does not take part
        for request, length in zip(self.requests, lengths, strict=True):
            self.keys[request, : length + N] = torch.randn(length + N, G, dim)
            self.values[request, : length + N] = torch.randn(length + N, G, dim)
        self.q = torch.randn(H, self.R * self.new, dim)
        self.q, self.keys, self.values = (t.to(DEVICE, dtype) for t in (self.q, self.keys, self.values))

    def rows(self):
        tree = tree_build(
            ints([self.parents] * self.R), ints([len(self.parents)] * self.R), ints(self.lengths)
        )
        starts = [i * self.new for i in range(self.R)]
        counts, nodes = [self.new] * self.R, [len(self.parents)] * self.R
        lists = (self.requests, starts, counts, self.lengths, nodes)
        return TreeRows(*map(ints, lists), tree.depths, tree.bits, most=self.new)

    def run(self, form, splits=3):
        return launch(self.q, self.keys, self.values, self.rows(), form, splits=splits)

    def dense(self, form):
        outs = []
        for i, (request, length) in enumerate(zip(self.requests, self.lengths, strict=True)):
            N = len(self.parents)
            seen = torch.ones(N, length + N, dtype=torch.bool, device=DEVICE)
            seen[:, length:] = torch.from_numpy(ancestors(self.parents)).to(DEVICE)
            depth = seen[:, length:].sum(1) - 1
            places = torch.cat((torch.arange(length, device=DEVICE), length + depth))
            if form.window is not None:
                seen &= (length + depth)[:, None] - places < form.window
            q = self.q[:, i * self.new : (i + 1) * self.new].double()
            k, v = (t[request, : length + N].transpose(0, 1).double() for t in (self.keys, self.values))
            k, v = (t.repeat_interleave(len(q) // len(t), 0) for t in (k, v))
            scores = q @ k.transpose(1, 2) * form.scale
            if form.softcap is not None:
                scores = form.softcap * torch.tanh(scores / form.softcap)
            scores = scores.masked_fill(~seen[N - self.new :], -torch.inf).exp()
            sink = 0 if form.sinks is None else form.sinks.double().exp()[:, None, None]
            outs.append(scores @ v / (scores.sum(-1, keepdim=True) + sink))
        return torch.cat(outs, 1)

    def check(self, form, **settings):
        expected, bound = self.dense(form), CLOSE[self.q.dtype]
        for out in (self.run(form, **settings), reference(self.q, self.keys, self.values, self.rows(), form)):
            torch.testing.assert_close(out.double(), expected, atol=bound, rtol=bound)


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(
    ("heads", "dim", "dtype"),  # tolerance: 1e-5 in float32, 2e-2 in bfloat16
    [
        ((1, 1), 64, torch.float32),
        ((4, 1), 80, torch.float32),
        ((9, 3), 128, torch.float32),
        ((4, 1), 256, torch.float32),
        ((1, 1), 128, torch.bfloat16),
        ((9, 3), 80, torch.bfloat16),
    ],
)
def test_heads_and_dims_equal_the_dense_form(heads, dim, dtype):
    Case(heads=heads, dim=dim, dtype=dtype, lengths=(63, 1)).check(Form(scale=dim**-0.5))


@pytest.mark.parametrize("length", [0, 1, 64, 200])
def test_text_lengths_equal_the_dense_form(length):
    Case(lengths=(length,)).check(Form(scale=0.2))


@pytest.mark.parametrize(
    ("window", "softcap", "sinks"), [(20, None, False), (3, None, False), (None, 2.0, False), (90, 1.0, True)]
)
def test_windows_caps_and_sinks_equal_the_dense_form(window, softcap, sinks):
    form = Form(0.3, window, softcap, torch.randn(4, device=DEVICE) if sinks else None)
    Case(lengths=(150, 2)).check(form)


def test_a_window_shorter_than_the_tree_hides_ancestors():
    Case(lengths=(5,), parents=list(range(-1, 9))).check(Form(0.3, window=4))


def test_a_tree_of_63_nodes_takes_several_words_and_tiles():
    parents = [int(torch.randint(-1, i, (1,))) if i else -1 for i in range(63)]
    Case(parents=parents, lengths=(30,)).check(Form(0.2), splits=1)


def test_the_newest_level_sees_the_levels_before_it():
    Case(new=2, lengths=(40, 7)).check(Form(0.2, window=30))


@pytest.mark.parametrize("splits", [1, 2, 16])
def test_the_number_of_splits_changes_rounding_alone(splits):
    Case(lengths=(130,)).check(Form(0.2), splits=splits)


def test_a_changed_node_changes_its_descendants_alone_in_every_bit():
    case, form = Case(lengths=(70,)), Form(0.2)
    before = case.run(form)
    case.keys[1, 70 + 1] = torch.randn(2, 64, device=DEVICE)
    case.values[1, 70 + 1] = torch.randn(2, 64, device=DEVICE)
    after = case.run(form)
    same = [torch.equal(before[:, i], after[:, i]) for i in range(len(SMALL))]
    assert same == [True, False, True, False, False, False]


def test_requests_with_fewer_new_nodes_than_the_bound_leave_no_gap():
    """Two nodes of one request and one of another, in five places each."""
    case = Case(lengths=(9, 33), parents=CHAIN, new=2)
    rows = case.rows()
    ragged = TreeRows(
        rows.requests, ints([0, 2]), ints([2, 1]), rows.lengths, rows.nodes, rows.depths, rows.bits, most=5
    )
    q = case.q[:, [0, 1, 3]]
    out = launch(q, case.keys, case.values, ragged, Form(0.2), splits=2)
    torch.testing.assert_close(out.double(), case.dense(Form(0.2))[:, [0, 1, 3]], atol=1e-5, rtol=1e-5)


def test_splits_follow_from_shapes_alone():
    """8 key heads, 132 processors: 264 programs wanted, at most one per 64 keys and 16 in all."""
    q, rows = torch.empty(32, 8, 128, dtype=torch.bfloat16), Case(new=6).rows()
    keys = {S: torch.empty(1, S, 8, 128, dtype=torch.bfloat16) for S in (128, 4096)}
    assert splits_of(q, keys[128], rows, 132) == 2
    assert splits_of(q, keys[4096], rows, 132) == 16
    assert splits_of(q, keys[4096], rows, 4) == 1

"""Replayed calls of a round, without a GPU: what a graph would replay is recorded operation by operation.

`recorded` stands for a CUDA graph: it runs a function once, keeps its operations on tensors with the very
tensors that they read, and replays these alone. A value that the host read while recording would be frozen
in, a read of the device raises; both are as in a capture. Attention and tree_build count as one operation
each.
"""

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from spectrain import graphs
from spectrain.cache import KVCache
from spectrain.decode.engine import generate
from spectrain.decode.sampling import Sampling
from spectrain.drafters import eagle3, standalone
from spectrain.graphs import Graphs, bucket, run
from spectrain.kernels.tree_attention import Form, TreeRows
from spectrain.kernels.tree_attention import reference as attention_reference
from spectrain.kernels.tree_build import Tree
from spectrain.kernels.tree_build import reference as build_reference
from spectrain.proposal import Plan
from spectrain.target import Target
from spectrain.testing import Bigram, KnowingDrafter, tiny_llama

V = 64
KEPT = torch.arange(0, V, 2)
PROMPTS = [[5, 9, 13, 7, 3, 22, 41, 8, 30], [7, 3, 22, 41], [17], [2, 60, 11, 12, 50]]
SETTINGS = {"max_new_tokens": 9, "stop_ids": (), "batch_size": 3}


@torch.library.custom_op("spectrain_tests::tree_attention", mutates_args=())
def attention_op(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: list[torch.Tensor],
    most: int,
    scale: float,
) -> torch.Tensor:
    return attention_reference(q, keys, values, TreeRows(*rows, most=most), Form(scale))


@torch.library.custom_op("spectrain_tests::tree_build", mutates_args=())
def build_op(parents: torch.Tensor, counts: torch.Tensor, lengths: torch.Tensor) -> list[torch.Tensor]:
    return list(vars(build_reference(parents, counts, lengths)).values())


def attention(q, keys, values, rows: TreeRows, form: Form):
    assert form.window is None and form.softcap is None and form.sinks is None
    *tensors, most = vars(rows).values()
    return attention_op(q, keys, values, tensors, most, form.scale)


class Recorded:
    """A capture; captures: how many there were, replays: how often any of them ran again."""

    def __init__(self):
        self.captures, self.replays = 0, 0

    def __call__(self, function: Callable):
        self.captures += 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)  # transformers asks
            operations = make_fx(function)()
        out = tuple(torch.full_like(x, -1) for x in function())

        def replay():
            self.replays += 1
            for held, new in zip(out, operations(), strict=True):
                held.copy_(new)

        return replay, out


@pytest.fixture
def recorded(monkeypatch):
    capture = Recorded()
    monkeypatch.setattr(graphs, "DEVICES", ("cpu",))
    monkeypatch.setattr(graphs, "CudaCapture", lambda: capture)
    monkeypatch.setattr(graphs, "tree_attention", attention)
    monkeypatch.setattr(graphs, "tree_build", lambda *lists: Tree(*build_op(*lists)))
    return capture


@pytest.fixture(scope="module")
def target():
    return Target(tiny_llama(layers=1, vocab=V))


def texts(target, **settings):
    found, timings = generate(target, PROMPTS, **SETTINGS | settings)
    return [list(g.ids) for g in found], [g.rounds for g in found], timings


PLANS = {
    "chain": Plan("chain", 3),
    "tree": Plan("tree", 3, nodes=6, top_k=2),
    "static": Plan("static", 2, nodes=3, paths=((0,), (1,), (0, 0))),
}


@pytest.mark.parametrize("name", ["plain", *PLANS])
def test_replayed_greedy_text_is_that_of_eager_calls(name, target, recorded):
    """Four prompts of different lengths in three places; 0, 1, 2 or all draft tokens are right."""
    plain, _, _ = texts(target, sampling=Sampling())
    plan = PLANS.get(name)
    known = [prompt + text for prompt, text in zip(PROMPTS, plain, strict=True)]
    drafter = KnowingDrafter(known, lambda n: (0, 2, 1, 9, 1)[n % 5], vocab=V) if name != "plain" else None
    if name == "static":
        drafter = eagle3.build(eagle3.Config(taps=[0]), target, torch.arange(V))
    found, rounds, _ = texts(target, sampling=Sampling(), drafter=drafter, plan=plan, graphs=True)
    assert found == plain
    assert recorded.replays > recorded.captures > 0
    if name in ("chain", "tree"):
        assert {0, 1, 2} <= {round.accepted for some in rounds for round in some}


@pytest.mark.parametrize(("family", "name"), [*(("eagle3", name) for name in PLANS), ("standalone", "chain")])
def test_a_drafter_proposes_the_same_with_its_steps_replayed(family, name, target, recorded):
    torch.manual_seed(0)
    if family == "eagle3":
        drafter = eagle3.build(eagle3.Config(taps=[0]), target, KEPT)
    else:
        drafter = standalone.build(standalone.Config(), target, torch.arange(V))
    settings = SETTINGS | {"sampling": Sampling(), "drafter": drafter, "plan": PLANS[name]}
    settings |= {"record_events": True, "max_new_tokens": 6}
    eager, _ = generate(target, PROMPTS[:3], **settings)
    found, _ = generate(target, PROMPTS[:3], **settings, graphs=True)
    assert [[e.tokens for e in g.events] for g in found] == [[e.tokens for e in g.events] for g in eager]
    assert [[e.path for e in g.events] for g in found] == [[e.path for e in g.events] for g in eager]


def test_replayed_sampled_text_is_that_of_eager_calls(target, recorded):
    settings = {"sampling": Sampling(temperature=0.7), "drafter": Bigram(target), "plan": Plan("chain", 3)}
    eager, rounds, _ = texts(target, **settings, law="rejection")
    found, replayed, _ = texts(target, **settings, law="rejection", graphs=True)
    assert found == eager
    assert [[r.accepted for r in some] for some in replayed] == [
        [r.accepted for r in some] for some in rounds
    ]


def test_each_shape_is_captured_once(target, recorded):
    """Plain decoding of one prompt in one place is one shape: 8 tokens behind the prefill's."""
    generate(target, PROMPTS[:1], **SETTINGS, sampling=Sampling(), graphs=True)
    assert (recorded.captures, recorded.replays) == (1, 8)


def test_capturing_is_in_no_timing(target, recorded, monkeypatch):
    now = [0.0]

    def slow(function):
        now[0] += 100.0
        return recorded(function)

    monkeypatch.setattr(graphs, "CudaCapture", lambda: slow)
    monkeypatch.setattr(graphs.time, "perf_counter", lambda: now[0])
    _, (timing,) = generate(target, PROMPTS[:1], **SETTINGS, sampling=Sampling(), graphs=True)
    assert now[0] == 100.0 * recorded.captures > 0
    assert (timing.prefill_s, timing.decode_s, timing.verify_s) == (0, 0, 0)


def double(layout, x):
    return (2 * x + layout.positions[:, None],)


def cache_of(committed, capacity=24):
    cache = KVCache(len(committed), capacity)
    cache.layers[0] = (
        torch.zeros(len(committed), capacity, 1, 4),
        torch.zeros(len(committed), capacity, 1, 4),
    )
    cache.committed[:] = committed
    return cache


def test_a_replay_reads_the_new_inputs_and_spoils_no_earlier_output(recorded):
    """Two calls of one shape: 3 and 2 new nodes, positions 9 10 11 and 5 6, then one token further."""
    held, cache = Graphs(Recorded(), 4), cache_of([9, 5, 7])
    nodes = [0, 0, 0, 1, 1], [-1, 0, 1, -1, 0]
    (first,) = run(held, cache, *nodes, double, torch.ones(5, 1))
    cache.commit_all([0, 1], [[0], [0]])
    (second,) = run(held, cache, *nodes, double, torch.full((5, 1), 10.0))
    assert first[:, 0].tolist() == [11, 12, 13, 7, 8]
    assert second[:, 0].tolist() == [30, 31, 32, 26, 27]
    assert (held.capture.captures, held.capture.replays) == (1, 2)


def test_what_fills_a_call_up_lies_behind_all_that_the_places_hold(recorded):
    """The example of spectrain/graphs.py."""
    cache, slots = cache_of([9, 5, 4, 7]), []

    def call(layout, x):
        slots.append(layout._slots)
        layout.attend(0, *[torch.ones(1, 16, 4)] * 3, scale=1.0, window=None, softcap=None, sinks_H=None)
        return (x,)

    held = Graphs(lambda function: (lambda: None, function()), 4)
    (out,) = run(held, cache, [0, 0, 0, 1, 1, 2], [-1, 0, 1, -1, 0, -1], call, torch.arange(6.0)[:, None])
    assert (slots[0] % 24).tolist() == [9, 10, 11, 12, 5, 6, 7, 8, 4, 5, 6, 7, 7, 8, 9, 10]
    assert (slots[0] // 24).tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert [int(keys.sum()) // 4 for keys in cache.layers[0][0]] == [4, 4, 4, 4]
    assert out[:, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_tree_sees_its_earlier_nodes_and_a_chain_takes_them_as_text():
    cache = cache_of([9, 5, 7])
    cache.append([0, 0], [-1, -1])
    cache.append([0], [1])
    # requests, lengths, nodes, parents: of request 0 three nodes, the last being new; M = 6
    assert graphs._table(cache, [[0, 1]], 1, 1, 6) == [0, 9, 3, -1, -1, 1, -1, -1, -1]
    chain = cache_of([9, 5, 7])
    chain.append([0, 0], [-1, 0])
    assert graphs._table(chain, [[0, 1]], 1, 1, 6) == [0, 10, 1, -1]


def test_sizes_are_rounded_up_to_powers_of_two_or_the_largest():
    assert [bucket(n, 6) for n in range(1, 7)] == [1, 2, 4, 4, 6, 6]


def test_a_prompt_longer_than_a_round_and_the_first_call_of_all_are_not_captured():
    held, cache = Graphs(Recorded(), 4), KVCache(2, 16)
    assert not held.fit(cache, [0])
    assert held.fit(cache_of([0, 0]), [0, 0, 0, 0, 1])
    assert not held.fit(cache_of([0, 0]), [0, 0, 0, 0, 0, 1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there they are not refused")
def test_graphs_are_refused_on_a_cpu(target):
    with pytest.raises(ValueError, match=r"graphs=True .*target is on cpu.*expected False"):
        generate(target, PROMPTS, **SETTINGS, sampling=Sampling(), graphs=True)


def test_graphs_are_refused_with_recurrent_layers(target, recorded, monkeypatch):
    monkeypatch.setattr(target, "recurrent", True)
    with pytest.raises(ValueError, match=r"graphs=True .*recurrent layers.*expected False"):
        generate(target, PROMPTS, **SETTINGS, sampling=Sampling(), graphs=True)


@pytest.mark.gpu
def test_replayed_text_on_a_gpu_is_that_of_eager_calls():
    target = Target(tiny_llama(layers=1, vocab=V).to("cuda"))
    drafter = eagle3.build(eagle3.Config(taps=[0]), target, torch.arange(V))
    for plan in PLANS.values():
        settings = {"sampling": Sampling(), "drafter": drafter, "plan": plan}
        assert texts(target, **settings, graphs=True)[0] == texts(target, **settings)[0]

"""Calls of a round of decoding in fixed shapes, each shape captured once as a CUDA graph and replayed.

A call runs R requests with N new nodes each. Both vary from round to round (requests end, proposals are
clamped, verification accepts more or less), so both are rounded up to a power of two or their largest value.
What fills them up is harmless by its place: a further node sees its request's text and itself and lies behind
all that the request holds; a further request is another place of the cache, whose new nodes lie behind all
that it holds. The host knows where everything lies and sends it as one table of integers; slots, positions
and ancestors are worked out from it inside the call, so that nothing in it depends on lengths but numbers.
Without graphs the same function is called on a `spectrain.cache.CacheLayout` with the rows as they are.

Three requests of four places with 3, 2 and 1 new nodes behind 9, 5 and 4 tokens, 7 in place 3; R = 4, N = 4:
    requests 0 1 2 3   lengths 9 5 4 7   nodes 4 4 4 4   slots 9 .. 12, 5 .. 8, 4 .. 7, 7 .. 10
    rows kept 0 1 2, 4 5, 8

Not captured: prompts, and what the host decides between two calls (choice of draft tokens, verification).
Knows no model. Legend: T tokens of a call, R requests, N new nodes of each, M places for nodes, H query
heads, G key/value heads, K head dim.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from spectrain.cache import KVCache
from spectrain.kernels.tree_attention import Form, TreeRows, tree_attention
from spectrain.kernels.tree_build import tree_build
from spectrain.target import Target

DEVICES = ("cuda",)
WARM_UPS = 2  # kernels are compiled and libraries make their work space before a capture

Tensors = tuple[torch.Tensor, ...]
Call = Callable[..., Tensors]
"""call(layout, *rows): tensors with T rows each, from others with T rows."""
Capture = Callable[[Callable[[], Tensors]], tuple[Callable[[], None], Tensors]]
"""capture(function): what runs it again, and the tensors that a run fills."""


@runtime_checkable
class Replaying(Protocol):
    """A `spectrain.proposal.Drafting` whose calls go through `run`."""

    graphs: "Graphs | None"


def run(graphs: "Graphs | None", cache: Any, requests_T: Sequence[int], parents_T: Sequence[int],
        call: Call, *rows_T: torch.Tensor) -> Tensors:  # fmt: skip
    """`call` on new nodes of the cache (see `KVCache.grow`): replayed where there are graphs and the call is
    no prompt, else called. Its tensors are the caller's own, not overwritten by a later replay."""
    if graphs is None or not graphs.fit(cache, requests_T):
        return call(cache.grow(requests_T, parents_T), *rows_T)
    return graphs.run(cache, requests_T, parents_T, call, *rows_T)


def cuda_graphs(target: Target, longest: int) -> "Graphs":
    """Graphs for calls of at most `longest` new nodes per request. Raises ValueError for a target that is not
    on a CUDA device, or whose recurrent state lies outside the cache."""
    if target.device.type not in DEVICES:
        raise _refused(f"the target is on {target.device.type}, and only a CUDA device has graphs")
    if target.recurrent:
        raise _refused("the target's recurrent layers make a new state in each call")
    return Graphs(CudaCapture(), longest)


def _refused(why: str) -> ValueError:
    return ValueError(f"graphs=True (eval.runs.NAME.graphs): {why}; expected False")


class CudaCapture:
    """Captures on the current device; all graphs share one pool of memory, since they never run at once."""

    def __init__(self):
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                function()
        main.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                out = function()
        except RuntimeError as error:
            raise _refused(f"the model cannot be captured, as if it read the device ({error})") from error
        torch.cuda.synchronize()
        return graph.replay, out


class Graphs:
    """The captured calls of one engine. seconds: spent on capturing, which no clock of a decoding counts."""

    def __init__(self, capture: Capture, longest: int):
        self.capture, self.longest = capture, longest
        self.seconds = 0.0
        self._captured: dict[tuple, tuple[Tensors, Callable[[], None], Tensors]] = {}

    def fit(self, cache: KVCache, requests_T: Sequence[int]) -> bool:
        """Whether a call is one of a round; the first one of all allocates the cache and is none."""
        return bool(cache.layers) and max(Counter(requests_T).values()) <= self.longest

    def run(self, cache: KVCache, requests_T, parents_T, call: Call, *rows_T: torch.Tensor) -> Tensors:
        """See the function `run`."""
        runs, _, _ = cache.append(requests_T, parents_T)
        N = bucket(max(new for _, new in runs), self.longest)
        R = bucket(len(runs), cache.num_requests)
        device = rows_T[0].device
        table = torch.tensor(_table(cache, runs, R, N, self.longest), dtype=torch.int32, device=device)
        places = [r * N + node for r, (_, new) in enumerate(runs) for node in range(new)]
        places_T = torch.tensor(places, device=device)
        rows = [x.new_zeros(R * N, *x.shape[1:]).index_copy_(0, places_T, x) for x in rows_T]

        def fixed(table: torch.Tensor, *rows: torch.Tensor) -> Tensors:
            return call(FixedLayout(cache, table, R, N), *rows)

        key = (call, cache, R, N, len(table), *((x.shape, x.dtype) for x in rows))
        out = self._replay(key, fixed, (table, *rows))
        return tuple(x.index_select(0, places_T) for x in out)

    def _replay(self, key: tuple, function: Call, inputs: Tensors) -> Tensors:
        if key not in self._captured:
            began = time.perf_counter()
            held = tuple(x.clone() for x in inputs)
            self._captured[key] = (held, *self.capture(lambda: function(*held)))
            self.seconds += time.perf_counter() - began
        held, replay, out = self._captured[key]
        for buffer, new in zip(held, inputs, strict=True):
            buffer.copy_(new)
        replay()
        return out

    def release(self) -> None:
        """Let go of all graphs with their memory, and of the caches that they write to."""
        self._captured.clear()


class FixedLayout:
    """A `spectrain.cache.CacheLayout` whose every shape follows from R, N and the length of the table.

    table: int32, R requests, lengths and numbers of nodes, then the parents [R, M] of the nodes: of request r
    the last N of nodes[r] are new and the slots before lengths[r] are text to them. positions: int64 [R * N].
    """

    def __init__(self, cache: KVCache, table: torch.Tensor, R: int, N: int):
        self.cache = cache
        requests, lengths, nodes, parents = table.split([R, R, R, len(table) - 3 * R])
        tree = tree_build(parents.view(R, -1), nodes, lengths)
        new_RN = nodes[:, None] - N + torch.arange(N, device=table.device)
        first_R = requests.long() * cache.capacity + lengths
        self.positions = tree.positions.gather(1, new_RN).flatten().long()
        self._slots = (first_R[:, None] + new_RN).flatten()
        starts = torch.arange(R, dtype=torch.int32, device=table.device) * N
        counts = torch.full_like(starts, N)
        self._rows = TreeRows(requests, starts, counts, lengths, nodes, tree.depths, tree.bits, most=N)

    def attend(self, layer, q_HTK, k_GTK, v_GTK, *, scale, window, softcap, sinks_H):
        """See `spectrain.target.Layout`."""
        keys, values = self.cache.layers[layer]
        for cached, new in ((keys, k_GTK), (values, v_GTK)):
            cached.flatten(0, 1).index_copy_(0, self._slots, new.transpose(0, 1))
        return tree_attention(q_HTK, keys, values, self._rows, Form(scale, window, softcap, sinks_H))

    def calls(self, ids_T, positions_T):
        raise AssertionError("a target with recurrent layers is not captured")


def bucket(number: int, largest: int) -> int:
    """The next power of two, but no more than `largest`, which `number` may exceed: 3 of 6 is 4, 5 is 6."""
    return max(number, min(1 << (number - 1).bit_length(), largest))


def _table(cache: KVCache, runs: Sequence[Sequence[int]], R: int, N: int, longest: int) -> list[int]:
    """FixedLayout's table of `runs`, pairs of request and number of new nodes, filled up to R.

    Where all are chains, earlier nodes are text to the new ones; else all uncommitted ones are in the tree.
    """
    requests = [request for request, _ in runs]
    chains = all(cache.is_chain(request) for request in requests)
    lengths, trees = [], []
    for request, new in runs:
        pending = cache.pending[request]
        tree = range(-1, new - 1) if chains else pending
        lengths.append(cache.committed[request] + len(pending) - len(tree))
        trees.append([*tree, *[-1] * (N - new)])
    others = [place for place in range(cache.num_requests) if place not in requests][: R - len(runs)]
    for place in others:
        lengths.append(cache.committed[place] + len(cache.pending[place]))
        trees.append([-1] * N)
    nodes = [len(tree) for tree in trees]
    last = max(length + count for length, count in zip(lengths, nodes, strict=True))
    assert last <= cache.capacity, f"{last} slots of {cache.capacity}"
    M = N if chains else max(*nodes, longest)
    parents = [parent for tree in trees for parent in [*tree, *[-1] * (M - len(tree))]]
    return [*requests, *others, *lengths, *nodes, *parents]

"""Chains of draft tokens on targets with recurrent layers: their state is saved, and replayed after a
rejection.

A recurrent layer keeps no slot per token, so that a rejected token cannot be taken out of it again. Each
request therefore runs in a call of its own, on a copy of its saved state. Where all tokens of the call are
committed, the copy becomes the saved state; else the saved state stays, and the tokens that were committed
wait and run once more in front of the request's next call, until more than `REPLAY` wait: then they run
alone and the state after them is saved. Keys and values of attention layers lie in the slots of a `KVCache`,
where a replayed token writes its own again. Knows the state only as an object of transformers' cache classes;
`check_state` tries it out.

A chain of 4 of which 1 is accepted, state saved after position 9, root 10: the call runs 10 11 12 13 14,
keeps 10 11, and the next one runs 10 11 (replayed) and 12 .. (new).
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy

import torch
from transformers import DynamicCache

from spectrain.cache import CacheLayout, KVCache
from spectrain.target import Call, Target, packed_layout

REPLAY = 16  # most waiting tokens: as many again as a verification, which reads the weights once in any case


def target_cache(target: Target, num_requests: int, capacity: int) -> "KVCache | RecurrentCache":
    """The cache that decoding with `target` needs.

    Raises ValueError for a target whose recurrent state cannot be carried from one call to the next.
    """
    if not target.recurrent:
        return KVCache(num_requests, capacity)
    check_state(target)
    return RecurrentCache(target, num_requests, capacity)


class State(DynamicCache):
    """The state of a model's recurrent layers; keys and values go on to attention, which keeps them."""

    def update(self, key_states, value_states, *args, **kwargs):
        return key_states, value_states


class RecurrentCache:
    """`KVCache` for targets with recurrent layers: the same calls, chains only, one call between commits."""

    def __init__(self, target: Target, num_requests: int, capacity: int):
        self.config = target.config
        self.slots = KVCache(num_requests, capacity)
        self.committed, self.layers = self.slots.committed, self.slots.layers
        self.saved = [State(config=self.config) for _ in range(num_requests)]
        self.waiting: list[list[int]] = [[] for _ in range(num_requests)]
        self.ran: dict[int, tuple[list[int], State]] = {}

    def grow(self, requests_T: Sequence[int], parents_T: Sequence[int]) -> "RecurrentLayout":
        """Layout of T new tokens, those of one request next to each other, each behind the one before it."""
        counts = {request: 0 for request in requests_T}
        for request, parent in zip(requests_T, parents_T, strict=True):
            assert parent == counts[request] - 1, f"request {request}: no chain, parents {tuple(parents_T)}"
            counts[request] += 1
        assert not any(self.slots.pending[request] for request in counts), "one call between two commits"
        replays = {r: self.behind(r, 0) for r in counts if len(self.waiting[r]) > REPLAY}
        positions = self.slots.grow(requests_T, parents_T).positions
        return RecurrentLayout(self, counts, replays, positions)

    def behind(self, request: int, new: int) -> CacheLayout:
        """Layout of the tokens that wait and of `new` ones behind them."""
        first = self.committed[request] - len(self.waiting[request])
        positions = list(range(first, self.committed[request] + new))
        slots = [request * self.slots.capacity + position for position in positions]
        return CacheLayout(self.slots, [[request, len(slots)]], slots, positions)

    def commit_all(self, requests: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Keep the tokens of each path, which are the first ones of the call, as text; forget the others."""
        for request, path in zip(requests, paths, strict=True):
            ids, state = self.ran.pop(request)
            if len(path) == len(ids):
                self.saved[request], self.waiting[request] = state, []
            else:
                self.waiting[request] += ids[: len(path)]
        self.slots.commit_all(requests, paths)

    def truncate(self, request: int, length: int) -> None:
        """Forget the request; a part of its text cannot be kept."""
        assert length == 0, f"request {request}: truncated to {length} tokens"
        self.slots.truncate(request, 0)
        self.saved[request], self.waiting[request] = State(config=self.config), []
        self.ran.pop(request, None)


class RecurrentLayout:
    """The calls of one flat row, a request each. positions: int64 [T]."""

    def __init__(
        self,
        cache: RecurrentCache,
        counts: dict[int, int],
        replays: dict[int, CacheLayout],
        positions: torch.Tensor,
    ):
        self.cache, self.counts, self.replays, self.positions = cache, counts, replays, positions

    def attend(self, layer, q_HTK, k_GTK, v_GTK, *, scale, window, softcap, sinks_H):
        raise AssertionError("each request attends by the layout of its own call")

    def calls(self, ids_T: torch.Tensor, positions_T: torch.Tensor) -> Iterator[Call]:
        """See `spectrain.target.Layout`; the state after each call is kept until the commit."""
        cache, start = self.cache, 0
        for request, count in self.counts.items():
            rows = slice(start, start + count)
            waiting = ids_T.new_tensor(cache.waiting[request])
            old = torch.arange(len(waiting), device=ids_T.device) - len(waiting) + positions_T[start]
            if request in self.replays:
                yield Call(waiting, old, self.replays[request], cache.saved[request], len(waiting))
                cache.waiting[request], waiting, old = [], waiting[:0], old[:0]
            state = deepcopy(cache.saved[request])
            yield Call(
                torch.cat((waiting, ids_T[rows])),
                torch.cat((old, positions_T[rows])),
                cache.behind(request, count),
                state,
                len(waiting),
            )
            cache.ran[request] = (ids_T[rows].tolist(), state)
            start += count


def check_state(target: Target) -> None:
    """Raise ValueError unless a text of eight tokens in three calls, with a rejected draft in between, gives
    the states of the same text in one call."""
    ids = torch.arange(1, 9, device=target.device) % target.vocab_size
    whole = target.states(ids, torch.arange(8, device=target.device), packed_layout((0, 8))).final
    cache = RecurrentCache(target, 1, 16)
    found = []
    for text, kept in ((ids[:5], 5), (ids[:3], 0), (ids[5:6], 1), (ids[6:], 2)):
        layout = cache.grow([0] * len(text), range(-1, len(text) - 1))
        states = target.states(text, layout.positions.to(target.device), layout)
        found.append(states.final[:kept])
        cache.commit_all([0], [range(kept)])
    drift = ((torch.cat(found) - whole).norm() / whole.norm()).item()
    bound = 1e-3 if target.dtype == torch.float32 else 5e-2
    if not drift <= bound:
        raise ValueError(
            f"target {target.path or type(target.model).__name__}: states differ by {drift:.3g} (bound "
            f"{bound:.3g}) when the text runs in several calls: its recurrent state cannot be saved and "
            "replayed"
        )

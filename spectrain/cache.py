"""Keys and values of B requests in preallocated slots, with tree nodes written behind the committed tokens.

One cache serves the target (a whole tree in one call) and drafters (a tree level by level). Each request owns
`capacity` slots per layer; slots below `committed` hold its text, slot == position; `pending` nodes lie
behind them in order of arrival. `commit` moves the nodes of the accepted path down in place; nothing is freed
or allocated again. A call runs one flat row: the new tokens of several requests end to end. Knows no model: a
`CacheLayout` is what `Target.states` and drafters hand to attention.

A request with committed = 5 takes nodes with parents (-1, 0, 0): slots 5 6 7, positions 5 6 6; committing
path (0, 2) moves slot 7 to 6 and leaves committed = 7.

Legend: T tokens of the call, B requests of a group, N new tokens of each, S keys, H query heads, G key/value
heads, K head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from spectrain.kernels.attention import additive, attend, attend_batch
from spectrain.kernels.commit import Table, commit
from spectrain.kernels.tree_attention import Form, TreeRows, tree_attention
from spectrain.kernels.tree_build import tree_build

KERNEL_DEVICES = ("cuda",)  # attention to trees and verification run by kernels here, by torch elsewhere


@dataclass(frozen=True)
class _Group:
    """Neighbouring requests, first .. first + size - 1, with `new` tokens each, from row `start` on.

    keys: the most slots that one of them sees; simple: the newest token sees exactly slots 0 .. keys - 1 and
    each earlier one of the group one less, so that size 1 needs no mask but the causal one.
    """

    first: int
    size: int
    new: int
    start: int
    keys: int
    simple: bool

    @property
    def prompt(self) -> bool:
        """Whether it is one text from its first token on."""
        return self.simple and self.new == self.keys


class KVCache:
    """Slots for `num_requests` requests of at most `capacity` tokens, uncommitted nodes included.

    committed[r]: tokens of request r; pending[r]: parents of its uncommitted nodes. written[r]: how many of
    its leading slots hold numbers; memory behind them is never read. Layers are allocated at their first use,
    in the dtype and on the device of the keys; each call runs all of them.
    """

    def __init__(self, num_requests: int, capacity: int):
        self.num_requests, self.capacity = num_requests, capacity
        self.committed = [0] * num_requests
        self.written = [0] * num_requests
        self.pending: list[list[int]] = [[] for _ in range(num_requests)]
        self._depths: list[list[int]] = [[] for _ in range(num_requests)]
        self._is_chain = [True] * num_requests
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._tables: list[Table] = []

    def extend(self, requests: Sequence[int], counts: Sequence[int]) -> "CacheLayout":
        """Layout of counts[i] new tokens of requests[i], one after the other behind its newest token."""
        return self.grow(*self.behind(requests, counts))

    def behind(self, requests: Sequence[int], counts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Request and parent of each of counts[i] tokens of requests[i], one after the other behind its
        newest."""
        flat: list[int] = []
        parents: list[int] = []
        for request, count in zip(requests, counts, strict=True):
            tip = len(self.pending[request]) - 1
            flat += [request] * count
            parents += range(tip, tip + count)
        return flat, parents

    def grow(self, requests_T: Sequence[int], parents_T: Sequence[int]) -> "CacheLayout":
        """Layout of T new nodes, those of one request next to each other.

        parents_T: -1 (the text so far) or the number of an earlier uncommitted node of the same request.
        Raises ValueError where a request has no room left.
        """
        return CacheLayout(self, *self.append(requests_T, parents_T))

    def append(
        self, requests_T: Sequence[int], parents_T: Sequence[int]
    ) -> tuple[list[list[int]], list[int], list[int]]:
        """Count the nodes of `grow`: its requests with their number of nodes, slots [T] over all requests,
        positions [T]."""
        slots: list[int] = []
        positions: list[int] = []
        runs: list[list[int]] = []  # request, number of nodes
        for request, parent in zip(requests_T, parents_T, strict=True):
            pending, depths = self.pending[request], self._depths[request]
            assert -1 <= parent < len(pending), f"node {len(pending)} has parent {parent}"
            self._is_chain[request] &= parent == len(pending) - 1
            slots.append(self.committed[request] + len(pending))
            if slots[-1] >= self.capacity:
                raise ValueError(f"request {request}: its cache of {self.capacity} slots is full")
            pending.append(parent)
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
            positions.append(self.committed[request] + depths[-1])
            slots[-1] += request * self.capacity
            if runs and runs[-1][0] == request:
                runs[-1][1] += 1
            else:
                runs.append([request, 1])
        return runs, slots, positions

    def is_chain(self, request: int) -> bool:
        """Whether each uncommitted node of a request is the child of the one before it."""
        return self._is_chain[request]

    def commit(self, request: int, path: Sequence[int]) -> None:
        """Keep the uncommitted nodes of `path`, root's child first, as text; forget the others."""
        self.commit_all([request], [path])

    def commit_all(self, requests: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """`commit` for several requests, moving all their slots in one step per layer."""
        moves: list[tuple[int, int, Sequence[int]]] = []  # request, length, path
        for request, path in zip(requests, paths, strict=True):
            parents = [self.pending[request][node] for node in path]
            assert parents == [-1, *path][: len(path)], f"path {tuple(path)} has parents {parents}"
            if any(node != i for i, node in enumerate(path)):
                moves.append((request, self.committed[request], path))
            self.committed[request] += len(path)
            self._forget(request)
        if not moves or not self.layers:
            return
        tensors = [tensor for layer in self.layers.values() for tensor in layer]
        if len(tensors) != sum(len(table.tensors) for table in self._tables):
            self._tables = Table.of(tensors)
        most = max(len(path) for _, _, path in moves)
        lists = (
            [request for request, _, _ in moves],
            [length for _, length, _ in moves],
            [[*path, *[0] * (most - len(path))] for _, _, path in moves],
            [len(path) for _, _, path in moves],
        )
        commit(self._tables, *(_int32(values, tensors[0].device) for values in lists))

    def truncate(self, request: int, length: int) -> None:
        """Forget uncommitted nodes and all text from position `length` on."""
        assert length <= self.committed[request], f"{length} of {self.committed[request]} tokens"
        self.committed[request] = length
        self._forget(request)

    def _forget(self, request: int) -> None:
        self.pending[request], self._depths[request], self._is_chain[request] = [], [], True

    def layer(self, layer: int, like_GTK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [requests, capacity, G, K], not initialised."""
        if layer not in self.layers:
            G, _, K = like_GTK.shape
            shape = (self.num_requests, self.capacity, G, K)
            self.layers[layer] = (like_GTK.new_empty(shape), like_GTK.new_empty(shape))
        return self.layers[layer]


class CacheLayout:
    """Where the new tokens of one call are kept and what they see; valid for that call only.

    positions: int64 [T], committed + depth of each token. Masks are made once per window and shared by the
    layers.
    """

    def __init__(self, cache: KVCache, runs: list[list[int]], slots: list[int], positions: list[int]):
        self.cache = cache
        self.positions = torch.tensor(positions)
        self._slots = torch.tensor(slots)
        one_run = slots[-1] - slots[0] == len(slots) - 1
        self._run = slice(slots[0], slots[-1] + 1) if one_run else None
        self._positions = positions
        self._groups = self._grouped(runs)
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}
        self._blank: torch.Tensor | None = None
        self._rows: TreeRows | None = None

    def _grouped(self, runs: list[list[int]]) -> list[_Group]:
        cache, start = self.cache, 0
        groups: list[_Group] = []
        for request, new in runs:
            keys = cache.committed[request] + len(cache.pending[request])
            simple = cache._is_chain[request]
            last = groups[-1] if groups else None
            prompts = new == keys or (last is not None and last.new == last.keys)
            if last and request == last.first + last.size and new == last.new and not prompts:
                groups[-1] = _Group(last.first, last.size + 1, new, last.start, max(last.keys, keys), False)
            else:
                groups.append(_Group(request, 1, new, start, keys, simple))
            start += new
        return groups

    def attend(self, layer, q_HTK, k_GTK, v_GTK, *, scale, window, softcap, sinks_H):
        """Write the new keys and values to their slots, then attend (see `spectrain.target.Layout`)."""
        keys, values = self.cache.layer(layer, k_GTK)
        if self._blank is None:
            self._slots = self._slots.to(keys.device)
            self._blank = self._unwritten().to(keys.device)
        for cached, new in ((keys, k_GTK), (values, v_GTK)):
            rows = cached.flatten(0, 1)
            if len(self._blank):
                rows.index_fill_(0, self._blank, 0)
            if self._run is not None:
                rows[self._run] = new.transpose(0, 1)
            else:
                rows.index_copy_(0, self._slots, new.transpose(0, 1))
        forms = {"scale": scale, "softcap": softcap, "sinks_H": sinks_H}
        if keys.device.type in KERNEL_DEVICES and not all(group.prompt for group in self._groups):
            return self._attend_by_kernel(q_HTK, keys, values, window, forms)
        out = [self._attend_group(i, q_HTK, keys, values, window, forms) for i in range(len(self._groups))]
        return out[0] if len(out) == 1 else torch.cat(out, 1)

    def _attend_by_kernel(self, q_HTK, keys, values, window, forms) -> torch.Tensor:
        """Output [H, T, K]: one kernel call for all trees and texts that go on, prompts apart."""
        if self._rows is None:
            self._rows = self._tree_rows(keys.device)
        form = Form(forms["scale"], window, forms["softcap"], forms["sinks_H"])
        out = tree_attention(q_HTK, keys, values, self._rows, form)
        for i, group in enumerate(self._groups):
            if group.prompt:
                rows = slice(group.start, group.start + group.new)
                out[:, rows] = self._attend_group(i, q_HTK, keys, values, window, forms)
        return out

    def _tree_rows(self, device: torch.device) -> TreeRows:
        """All requests but prompts; of a chain only the new tokens are nodes, the rest is text to them."""
        cache = self.cache
        rows: list[tuple[int, int, int, int, int]] = []  # request, start, new, length, nodes
        trees: list[Sequence[int]] = []
        for group in self._groups:
            for i in range(0 if group.prompt else group.size):
                r = group.first + i
                pending = range(-1, group.new - 1) if cache._is_chain[r] else cache.pending[r]
                length = cache.committed[r] + len(cache.pending[r]) - len(pending)
                rows.append((r, group.start + i * group.new, group.new, length, len(pending)))
                trees.append(pending)
        requests, starts, counts, lengths, nodes = _int32(list(zip(*rows, strict=True)), device)
        most = max(map(len, trees))
        tree = tree_build(_int32([[*t, *[-1] * (most - len(t))] for t in trees], device), nodes, lengths)
        new = max(new for _, _, new, _, _ in rows)
        return TreeRows(requests, starts, counts, lengths, nodes, tree.depths, tree.bits, most=new)

    def calls(self, ids_T, positions_T):
        raise AssertionError("a target with recurrent layers needs a RecurrentCache (see target_cache)")

    def _unwritten(self) -> torch.Tensor:
        """Slots in the key range of a group that hold no numbers yet; marks them and the new ones as written.

        A masked key has weight 0, and 0 * NaN is NaN. Rejected and former tokens are numbers, so that each
        slot is cleared at most once, not in every call.
        """
        cache = self.cache
        blank: list[int] = []
        for group in self._groups:
            for r in range(group.first, group.first + group.size):
                first = max(cache.written[r], cache.committed[r] + len(cache.pending[r]))
                blank += range(r * cache.capacity + first, r * cache.capacity + group.keys)
                cache.written[r] = max(first, group.keys)
        return torch.tensor(blank, dtype=torch.int64)

    def _attend_group(self, index: int, q_HTK, keys, values, window, forms) -> torch.Tensor:
        """Output [H, size * new, K] of one group."""
        group = self._groups[index]
        H, _, K = q_HTK.shape
        rows = group.size * group.new
        q = q_HTK[:, group.start : group.start + rows]
        k = keys[group.first : group.first + group.size, : group.keys].transpose(1, 2)
        v = values[group.first : group.first + group.size, : group.keys].transpose(1, 2)
        if window is not None and window >= group.keys:
            window = None
        if group.prompt and group.new > 1:
            return attend(q, k[0], v[0], mask=None, causal=True, window=window, **forms)
        if group.simple and group.new == 1:
            low = 0 if window is None else group.keys - window
            return attend_batch(q[None], k[:, :, low:], v[:, :, low:], None, **forms)[0]
        if (index, window) not in self._masks:
            self._masks[index, window] = additive(self._seen(group, window).to(q.device), q.dtype)
        q = q.view(H, group.size, group.new, K).transpose(0, 1)
        out = attend_batch(q, k, v, self._masks[index, window], **forms)
        return out.transpose(0, 1).reshape(H, rows, K)

    def _seen(self, group: _Group, window: int | None) -> torch.Tensor:
        """Bool [B, 1, N, S]: committed tokens, ancestors and the token itself, within the window."""
        cache = self.cache
        requests = range(group.first, group.first + group.size)
        committed = np.array([cache.committed[r] for r in requests])[:, None, None]
        rows = slice(group.start, group.start + group.size * group.new)
        position = np.array(self._positions[rows]).reshape(group.size, group.new, 1)
        slot = np.arange(group.keys)[None, None]
        if all(cache._is_chain[r] for r in requests):
            seen, key_position = slot <= position, slot
        else:
            seen = np.repeat(slot < committed, group.new, 1)
            key_position = np.repeat(slot, group.size, 0)
            for i, r in enumerate(requests):
                nodes = slice(cache.committed[r], cache.committed[r] + len(cache.pending[r]))
                seen[i, :, nodes] = ancestors(cache.pending[r])[-group.new :]
                key_position[i, 0, nodes] = cache.committed[r] + np.array(cache._depths[r])
        if window is not None:
            seen &= position - key_position < window
        return torch.from_numpy(seen)[:, None]


def _int32(values: Sequence, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def ancestors(parents: Sequence[int]) -> np.ndarray:
    """Bool [N, N]: row i marks node i and its ancestors. Parents (-1, 0, 0) give 100, 110, 101."""
    seen = np.eye(len(parents), dtype=bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            seen[i] |= seen[parent]
    return seen

"""One call of the target in the engine: states and logits of new tokens, eager or replayed. Knows no drafter.

Legend: T new tokens, M rows that are judged, L taps, D hidden, V vocabulary.
"""

from collections.abc import Sequence

import torch

from spectrain.cache import CacheLayout, KVCache
from spectrain.graphs import FixedLayout, Graphs, Tensors, run
from spectrain.recurrent import RecurrentCache, RecurrentLayout
from spectrain.target import Target

Placed = CacheLayout | FixedLayout | RecurrentLayout


class TargetCall:
    """taps: layer ids whose states are wanted; graphs: see `spectrain.graphs`, None without."""

    def __init__(
        self, target: Target, cache: KVCache | RecurrentCache, taps: Sequence[int], graphs: Graphs | None
    ):
        self.target, self.cache, self.taps, self.graphs = target, cache, taps, graphs

    def __call__(
        self, requests_T: Sequence[int], parents_T: Sequence[int], ids: list[int], judged: list[int]
    ) -> Tensors:
        """Taps [T, L, D], final states [T, D] and the logits [M, V] of rows `judged` for new nodes of the
        cache (see `KVCache.grow`). Raises ValueError for a target that keeps no keys and values there."""
        ids_T = torch.tensor(ids, device=self.target.device)
        if len(judged) == len(ids):
            taps, final, logits = run(self.graphs, self.cache, requests_T, parents_T, self._judged, ids_T)
        else:
            taps, final = self._states(self.cache.grow(requests_T, parents_T), ids_T)
            logits = self.target.logits(final[judged])
        if unkept := self.target.attention_layers - self.cache.layers.keys():
            raise ValueError(
                f"target: its layers {sorted(unkept)} kept no keys and values: their attention does not go "
                "through transformers' attention interface or does not tell its layer"
            )
        return taps, final, logits

    def _states(self, layout: Placed, ids_T: torch.Tensor) -> Tensors:
        positions = layout.positions.to(ids_T.device)
        states = self.target.states(ids_T, positions, layout, taps=self.taps)
        return states.taps, states.final

    def _judged(self, layout: Placed, ids_T: torch.Tensor) -> Tensors:
        taps, final = self._states(layout, ids_T)
        return taps, final, self.target.logits(final)

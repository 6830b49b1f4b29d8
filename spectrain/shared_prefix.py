"""What the samples of a packed row begin with alike, such as the template's system turn, run once for all.

    ab|CDE  ab|F    row run      a b C D E F     F sees a, b and itself, as in a document of its own
                    positions    0 1 2 3 4 2
                    places       0 1 2 3 4  0 1 5   of the packed row's tokens in the row run

Knows no model and no file. Legend: T tokens of the packed row, P of the prefix, H query heads, G key/value
heads, K head dim.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch

from spectrain.data.packing import Sample, TokenBatch
from spectrain.kernels.attention import attend
from spectrain.target import Call, packed_layout

LEAST = 8
"""Tokens of a prefix that is worth a row of its own: such a row's attention is masked block by block, which
costs more than a causal one."""


def prefix_length(samples: Sequence[Sample]) -> int:
    """Tokens that all samples begin with, less than the shortest sample; 0 for one sample or below LEAST."""
    if len(samples) < 2:
        return 0
    shortest = min(len(sample.ids) for sample in samples)
    first = torch.stack([sample.ids[:shortest] for sample in samples])
    same = (first == first[0]).all(0).long().cumprod(0).sum()
    length = min(int(same), shortest - 1)
    return length if length >= LEAST else 0


def share(tokens: TokenBatch, prefix: int) -> tuple[torch.Tensor, torch.Tensor, "shared_prefix_layout"]:
    """The row to run, as places [R] in the packed row; where each packed token is in it [T]; its layout."""
    rest = tokens.positions >= prefix
    run = rest.clone()
    run[:prefix] = True
    places = torch.where(rest, torch.cumsum(run, 0) - 1, tokens.positions)
    lengths = [b - a - prefix for a, b in pairwise(tokens.offsets)]
    offsets = (prefix, *(prefix + torch.tensor(lengths).cumsum(0)).tolist())
    return run.nonzero()[:, 0], places, shared_prefix_layout(offsets)


class shared_prefix_layout:
    """The prefix, then what follows it in each document, end to end: each token sees the prefix and its own
    document up to itself. Nothing is kept.

    offsets: D + 1 boundaries of the documents' rests; the first is the prefix's length.
    """

    def __init__(self, offsets: Sequence[int]):
        self.offsets = tuple(offsets)

    def attend(self, layer, q_HTK, k_GTK, v_GTK, *, scale, window, softcap, sinks_H):
        P = self.offsets[0]
        out = torch.empty_like(q_HTK)
        settings = {"scale": scale, "window": window, "softcap": softcap, "sinks_H": sinks_H}
        for a, b in pairwise((0, *self.offsets)):
            k, v = k_GTK[:, a:b], v_GTK[:, a:b]
            if a:
                k, v = torch.cat((k_GTK[:, :P], k), 1), torch.cat((v_GTK[:, :P], v), 1)
            out[:, a:b] = attend(q_HTK[:, a:b], k, v, mask=None, causal=True, **settings)
        return out

    def calls(self, ids_T, positions_T):
        """The prefix, then each document with it: what is run one by one shares nothing."""
        prefix = torch.arange(self.offsets[0], device=ids_T.device)
        for a, b in pairwise((0, *self.offsets)):
            rows = torch.arange(a, b, device=ids_T.device)
            rows = torch.cat((prefix, rows)) if a else rows
            replayed = len(prefix) if a else 0
            yield Call(ids_T[rows], positions_T[rows], packed_layout((0, len(rows))), replayed=replayed)

"""Training of a drafter that feeds on its own states: the steps of the unroll.

For families whose layers are called as a target's are, with a layout that does the attention (EAGLE-1, MTP);
EAGLE-3 shares the rows. Row t starts from the target's state at token t; step k takes the token x_{t+1+k} and
the state of step k - 1, lies at position t + k and predicts x_{t+2+k}. Step 0 runs every token of the packed
row, since each is context for those behind it; later steps run supervised rows only.
Knows no family. Source: EAGLE-3's training-time test (Li et al. 2025, section 3.1), which is HASS's aligned
context (Zhang et al. 2024, section 3.2) for any number of steps.
Legend: T tokens, N rows of a step, D state, H heads, G key/value heads, K head dim.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from spectrain.data.packing import TokenBatch
from spectrain.kernels.ttt_attention import Own, Run, ttt_attention
from spectrain.objectives import RowIndex
from spectrain.target import Layout

# (step, states [N, D], ids [N], positions [N], layout) -> states [N, D]
Advance = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, Layout], torch.Tensor]


def document_begins(tokens: TokenBatch) -> torch.Tensor:
    """int64 [T]: where each token's document begins in the packed row."""
    return torch.tensor(tokens.offsets, device=tokens.ids.device)[tokens.document_ids]


def runs(rows: torch.Tensor, begins: torch.Tensor) -> tuple[Run, ...]:
    """Consecutive rows as runs for the attention, each within one document; begins: int64 [T]."""
    edge = torch.ones(len(rows) + 1, dtype=torch.bool, device=rows.device)
    edge[1:-1] = (rows[1:] != rows[:-1] + 1) | (begins[rows[1:]] != begins[rows[:-1]])
    bounds = edge.nonzero()[:, 0].tolist()
    firsts, docs = rows[bounds[:-1]].tolist(), begins[rows[bounds[:-1]]].tolist()
    return tuple(
        Run(first=a, count=b - a, row=row, begin=doc)
        for a, b, row, doc in zip(bounds, bounds[1:], firsts, docs, strict=False)
    )


class UnrollLayout:
    """The unroll as a `spectrain.target.Layout`: the first call of a layer gives the context, a later one
    adds the rows' own keys (kernels/ttt_attention.py). rows: of the step that runs."""

    def __init__(self, tokens: TokenBatch):
        self.begins = document_begins(tokens)
        self.rows = torch.arange(len(tokens), device=tokens.ids.device)
        self._context: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._own: dict[int, list[Own]] = {}

    def attend(self, layer, q_HTK, k_GTK, v_GTK, *, scale, window, softcap, sinks_H):
        assert window is None and softcap is None and sinks_H is None, "full attention only: see plain_layer"
        own = self._own.setdefault(layer, [])
        if layer in self._context:
            own.append(Own(k_GTK, v_GTK.contiguous(), self.rows))
        keys, values = self._context.setdefault(layer, (k_GTK, v_GTK))
        seen = [replace(step, places=torch.searchsorted(step.places, self.rows)) for step in own]
        return ttt_attention(q_HTK, keys, values, seen, runs(self.rows, self.begins), scale)

    def calls(self, ids_T, positions_T):
        raise AssertionError("a draft layer is not recurrent")


def unrolled(
    tokens: TokenBatch, index: RowIndex, state_TD: torch.Tensor, advance: Advance
) -> list[torch.Tensor]:
    """States of the supervised rows after each step, [rows of the step, D]; steps without rows are left out,
    but for the first."""
    layout = UnrollLayout(tokens)
    before = layout.rows
    found = []
    for k in range(index.slots):
        rows = index.row[index.slot == k]
        if k:
            if not len(rows):
                break
            layout.rows = rows
            state_TD = state_TD[torch.searchsorted(before, rows)]
            before = rows
        # behind a document's end the token is another one's; no supervised row sees that row
        ids = tokens.ids[(layout.rows + 1 + k).clamp(max=len(tokens) - 1)]
        state_TD = advance(k, state_TD, ids, tokens.positions[layout.rows] + k, layout)
        found.append(state_TD if k else state_TD[rows])
    return found

"""From rows to a loss: which divergences, which weight per slot, divided by the global count of each (term, slot).

A family says which rows exist (`RowIndex`, from masks alone) and computes the drafter's state on them (`Rows`); the fused
op `kernels/linear_divergence.py` does the rest. Knows no family.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowIndex:
    """The supervised (row, slot) pairs of a batch. All int64 [R].

    row: token position t of the feature that the drafter starts from; slot: k; source: token position whose target law
    p is learnt (its next token is the label); slots: the number K of slots.
    """

    row: torch.Tensor
    slot: torch.Tensor
    source: torch.Tensor
    slots: int


@dataclass(frozen=True)
class Rows:
    """index: the R pairs; state [R, D]: the drafter's state after its final norm, ready for its head."""

    index: RowIndex
    state: torch.Tensor

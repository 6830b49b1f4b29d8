"""Verification of token trees on a GPU straight from logits; decode/verify.py is the same walk in torch.

At each level, with p the target's law at the last accepted node (kernels/row_laws_triton.py):
    target_only  the children in order take p(child) of one uniform each
    rejection    the one child, drawn from q, is kept with probability min(1, p / q)   (Leviathan et al. 2023)
Behind the last accepted node a token is drawn: from p where it has no children, else from p without them or
(p - q)+. With the same uniforms the verdicts are those of decode/verify.py, but for the rounding of float32
sums. Temperature 0 is the arg-max, the lowest id among ties.
Legend: M rows of logits, V vocabulary, B requests, N places for nodes, D places of a path (longest + 1).
"""

from dataclasses import dataclass

import torch

NOT_FINITE, NOT_DRAWN = 1, 2


@dataclass(frozen=True)
class Trees:
    """int32. starts [B]: the root's row of logits, node n's being starts + 1 + n; counts [B]: nodes; parents,
    tokens [B, N], siblings different, a parent before its children."""

    starts: torch.Tensor
    counts: torch.Tensor
    parents: torch.Tensor
    tokens: torch.Tensor


@dataclass(frozen=True)
class Drawn:
    """q [Mq, V], float32, need not sum to 1: node n of request b was drawn from row starts_b + n (int32)."""

    q: torch.Tensor
    starts: torch.Tensor


@dataclass(frozen=True)
class Outcome:
    """path int32 [B, D], of which the first accepted [B] count; bonus int32 [B]; refused int32 [B]: 1 where
    children were offered and none was taken; status int32 [B]: 0, or NOT_FINITE or NOT_DRAWN behind the
    accepted path; alphas float64 [B, D], of which accepted + refused count."""

    path: torch.Tensor
    accepted: torch.Tensor
    bonus: torch.Tensor
    refused: torch.Tensor
    status: torch.Tensor
    alphas: torch.Tensor

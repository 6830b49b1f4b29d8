"""FeatureBatch: a TokenBatch with the target's states, and the shards that hold them on disk.

Layer id k is the output of the 0-based decoder layer k, the raw residual stream; `final` is the state after the final norm,
what feeds lm_head. Knows no drafter.
"""

from dataclasses import dataclass

import torch

from spectrain.data.packing import TokenBatch


@dataclass(frozen=True)
class FeatureBatch:
    """tokens: the TokenBatch of T tokens.

    taps [T, L, Dt]: states at the layer ids of `tap_ids`, in the target's dtype; final [T, Dt].
    lse [T] float32, argmax [T] int64: log-sum-exp and arg-max of the target's logits over its full vocabulary at the
    positions whose next token is supervised; 0 and -1 elsewhere.
    """

    tokens: TokenBatch
    tap_ids: tuple[int, ...]
    taps: torch.Tensor
    final: torch.Tensor
    lse: torch.Tensor
    argmax: torch.Tensor

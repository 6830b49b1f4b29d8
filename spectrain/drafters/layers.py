"""Pieces that drafter families share: norm, rotary embedding, gated MLP, and the spans of a batch.

Knows no family. Legend: T tokens, D hidden, H heads, K head dim.
"""

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spectrain.data.packing import TokenBatch
from spectrain.kernels.gated_mlp import gated_mlp
from spectrain.kernels.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32; x [N, D]."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), no biases; x [N, D]."""

    def __init__(self, size: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gated_mlp(x, self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)


class Rotary(nn.Module):
    """Rotary position embedding as the draft's Llama config says (all types that transformers knows)."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.table = LlamaRotaryEmbedding(config)

    def forward(self, positions_T: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin), each [T, K] in the dtype of `like`."""
        cos, sin = self.table(like, positions_T[None])
        return cos[0], sin[0]


def rotate(x_NTK: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate each head of x_NTK by its token's angle (halves form)."""
    cos, sin = cos_sin
    first, second = x_NTK.chunk(2, -1)
    return x_NTK * cos + torch.cat((-second, first), -1) * sin


def spans(tokens: TokenBatch) -> list[tuple[int, int, int]]:
    """(document begin, span begin, span end) of each span, as token positions of the packed row."""
    ids = tokens.span_ids
    edge = torch.ones(len(ids) + 1, dtype=torch.bool, device=ids.device)
    edge[1:-1] = ids[1:] != ids[:-1]
    bounds = edge.nonzero()[:, 0].tolist()
    inside = (ids[bounds[:-1]] >= 0).tolist()
    begins = torch.tensor(tokens.offsets)[tokens.document_ids[bounds[:-1]].cpu()].tolist()
    return [(d, a, b) for d, a, b, keep in zip(begins, bounds, bounds[1:], inside, strict=False) if keep]


def share_tensor(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` into the parameter `target`; shapes must agree."""
    assert target.shape == source.shape, f"{tuple(target.shape)} from {tuple(source.shape)}"
    with torch.no_grad():
        target.copy_(source)

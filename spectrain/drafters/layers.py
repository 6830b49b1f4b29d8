"""Pieces that drafter families share: norm, rotary embedding, MLPs, and the rows of a batch.

Knows no family. Legend: T tokens, D hidden, H heads, K head dim.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spectrain.checks import choose
from spectrain.data.packing import TokenBatch
from spectrain.kernels.gated_mlp import gated_mlp
from spectrain.kernels.rms_norm import rms_norm
from spectrain.objectives import RowIndex
from spectrain.target import Target

SHAPE_KEYS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias",
    "max_position_embeddings", "rope_parameters",
)  # fmt: skip
OWN_SHAPE = (  # of SHAPE_KEYS, those in which a drafter may differ from its target
    "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
    "rope_parameters",
)  # fmt: skip

# (q [H, N, K], k and v [G, N, K]) -> [H, N, K]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


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


class ResBlocks(nn.Module):
    """`depth` times x + SiLU(W x + b), each with weights of its own, on x [N, D].

    Starts as the identity: every W and b is zero. With `extra` the first block reads [N, D + extra] and its
    x is a linear map to D, which starts as the first D channels.
    """

    def __init__(self, size: int, depth: int, *, extra: int = 0):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size + (0 if i else extra), size) for i in range(depth))
        for parameter in self.layers.parameters():
            nn.init.zeros_(parameter)
        skip = nn.Linear(size + extra, size, bias=False)
        share_tensor(skip.weight, torch.eye(size, size + extra))
        self.skip = skip if extra else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = (x if i else self.skip(x)) + F.silu(layer(x))
        return x


class Rotary(nn.Module):
    """Rotary position embedding as the draft's Llama config says (all types that transformers knows)."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        # in a tuple, so that it is no submodule: its frequencies stay float32 whatever the drafter is cast to
        self._table = (LlamaRotaryEmbedding(config),)

    def forward(self, positions_T: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin), each [T, K] in the dtype of `like`."""
        cos, sin = self._table[0].to(like.device)(like, positions_T[None])
        return cos[0], sin[0]


def rotate(x_NTK: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate each head of x_NTK by its token's angle (halves form)."""
    cos, sin = cos_sin
    first, second = x_NTK.chunk(2, -1)
    return x_NTK * cos + torch.cat((-second, first), -1) * sin


def draft_config(target: Target, width: int = 0, shape: Mapping[str, Any] | None = None) -> LlamaConfig:
    """The shape of one Llama layer, derived from the target: width, heads, MLP, rotary embedding, epsilon.

    width: another hidden size, 0 for the target's; heads keep their size, MLP and number of heads shrink or
    grow in proportion. shape: what is not derived, by OWN_SHAPE key. Raises ValueError where the numbers of
    heads do not stay whole, and for another key.
    """
    for key in shape or {}:
        choose("drafter.shape", key, OWN_SHAPE)
    c = target.config.to_dict()
    named = target.config  # its attributes have the common names, its dict may have the model's own (GPT-2)
    rope = c.get("rope_parameters") or {"rope_type": "default", "rope_theta": 10000.0}
    rope = rope.get("full_attention", rope)
    D, heads = target.hidden_size, named.num_attention_heads
    groups = c.get("num_key_value_heads") or heads
    size = width or D
    if size * groups % D or size * heads % D:
        step = D // math.gcd(heads, groups)
        raise ValueError(
            f"drafter.width={width}: expected 0 or a multiple of {step}, which keeps heads whole"
        )
    inner = c.get("intermediate_size") or c.get("n_inner") or 4 * D
    sizes: dict[str, Any] = {
        "intermediate_size": inner * size // D,
        "num_attention_heads": heads * size // D,
        "num_key_value_heads": groups * size // D,
        "head_dim": c.get("head_dim") or D // heads,
        "rms_norm_eps": c.get("rms_norm_eps") or 1e-6,
        "rope_parameters": rope,
    }
    return LlamaConfig(
        **{**sizes, **(shape or {})},
        hidden_size=size,
        num_hidden_layers=1,
        max_position_embeddings=named.max_position_embeddings,
        vocab_size=target.vocab_size,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )


def spans(tokens: TokenBatch) -> list[tuple[int, int, int]]:
    """(document begin, span begin, span end) of each span, as token positions of the packed row."""
    ids = tokens.span_ids
    edge = torch.ones(len(ids) + 1, dtype=torch.bool, device=ids.device)
    edge[1:-1] = ids[1:] != ids[:-1]
    bounds = edge.nonzero()[:, 0].tolist()
    inside = (ids[bounds[:-1]] >= 0).tolist()
    begins = torch.tensor(tokens.offsets)[tokens.document_ids[bounds[:-1]].cpu()].tolist()
    return [(d, a, b) for d, a, b, keep in zip(begins, bounds, bounds[1:], inside, strict=False) if keep]


def supervised_rows(tokens: TokenBatch, slots: int) -> RowIndex:
    """The supervised (row, slot) pairs of drafters that start from the target's states at token t = n - 1.

    Row t counts at slot k iff tokens t + 1 and t + 2 + k lie in one span. Slot after slot; within a slot in
    the order of the tokens; the rows of a slot are rows of the one before. Span {3, 4, 5} of 8 tokens: slot 0
    rows 2, 3; slot 1 row 2; slot 2 none.
    """
    found = spans(tokens)
    rows, numbers = [], []
    for k in range(slots):
        step = [torch.arange(max(a - 1, d), b - 2 - k) for d, a, b in found if b - 2 - k > max(a - 1, d)]
        rows += step
        numbers.append(torch.full((sum(map(len, step)),), k))
    row = torch.cat(rows) if rows else torch.empty(0, dtype=torch.long)
    row, slot = row.to(tokens.ids.device), torch.cat(numbers).long().to(tokens.ids.device)
    return RowIndex(row=row, slot=slot, source=row + 1 + slot, slots=slots)


def share_tensor(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` into the parameter `target`; shapes must agree."""
    assert target.shape == source.shape, f"{tuple(target.shape)} from {tuple(source.shape)}"
    with torch.no_grad():
        target.copy_(source)


def default_taps(num_layers: int) -> tuple[int, ...]:
    """EAGLE-3's layer ids: one low, one middle, one high.

    Below seven layers, as only targets of tests have, some of the three coincide or do not exist and fewer
    are left; `drafter.taps` names others.
    """
    found = {1, num_layers // 2 - 1, num_layers - 4} & set(range(num_layers))
    return tuple(sorted(found)) or (num_layers - 1,)


def has_plain_head(target: Target) -> bool:
    """Whether the target's logits are the product of state and head and nothing else."""
    probe = torch.tensor([-100.0, 1.0])
    return target.head.bias is None and torch.equal(target.adjust(probe), probe)


def own_head(target: Target, kept_ids: torch.Tensor, family: str) -> torch.Tensor:
    """The target's head rows at the kept ids, float32 [W, D], for a family that drafts through them.

    Raises ValueError for a target that does more than that product to make its logits.
    """
    if not has_plain_head(target):
        raise ValueError(
            f"drafter.family={family}: the target scales, caps or shifts its logits, which a drafter "
            "behind its head does not know"
        )
    return target.head.weight[kept_ids.to(target.device)].float()

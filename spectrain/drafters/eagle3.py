"""EAGLE-3: a decoder layer over fused target states, unrolled on its own outputs (Li et al. 2025, sec. 3).

Row t pairs the target's states at token t (taps fused by `fc`) with the embedding of token t + 1; step k
(slot k) uses token t + 1 + k, its own output of step k - 1 as state, rotary position t + k, and predicts
token t + 2 + k. The root of decoding is x_n with n = t + 1. Row t counts at step k iff tokens t + 1 and
t + 2 + k lie in one span. One document of 8 tokens with span {3, 4, 5} and 3 steps:
    step 0: rows 2, 3 (predict tokens 4, 5)   step 1: row 2 (token 5)   step 2: none
With drafter.layers > 1 plain Llama layers follow, which read the state alone and attend as the first does.
The state fed back is the last layer's output before `norm`, after it with norm_output (EAGLE-3.1); `norm`
and `lm_head` give logits over the kept ids.
Legend: T tokens, R rows, D hidden, H heads, G key/value heads, K head dim, W kept ids, L taps.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig

from spectrain.cache import CacheLayout
from spectrain.checks import at_least, choose
from spectrain.data.packing import TokenBatch
from spectrain.drafters import copying
from spectrain.drafters.eagle3_forms import ADDS_ONE_AFTER_ONE, check_served
from spectrain.drafters.eagle3_forms import imported as imported
from spectrain.drafters.feature_drafting import Advance, FeatureDrafting
from spectrain.drafters.layers import (
    SHAPE_KEYS,
    Attend,
    GatedMLP,
    RMSNorm,
    Rotary,
    default_taps,
    draft_config,
    rotate,
    share_tensor,
    supervised_rows,
)
from spectrain.drafters.speculators_form import speculators_config
from spectrain.drafters.unroll import UnrollLayout, runs
from spectrain.drafters.vocab import vocabulary_maps
from spectrain.features import FeatureBatch
from spectrain.kernels.ttt_attention import Own, ttt_attention
from spectrain.objectives import RowIndex, Rows
from spectrain.target import Layout, Target

SERVED = {
    "vllm": ("eagle3", "eagle3"),
    "sglang": ("eagle3", "EAGLE3"),
    "speculators": ("eagle3-speculators", "eagle3"),
    "trtllm": ("eagle3", "Eagle3"),
    "reference": ("eagle3", "EaModel, use_eagle3=True"),
}
NOT_SERVED: dict[str, str] = {}


@dataclass(frozen=True, kw_only=True)
class Config:
    family: str = "eagle3"
    draft_vocab: int = 32000
    """Kept ids of the draft vocabulary; 0 keeps the target's whole vocabulary."""
    unroll: int = 7
    """Steps of the training-time test, K."""
    layers: int = 1
    """Decoder layers; those behind the first read the state alone. vLLM alone serves more than one."""
    taps: list[int] = field(default_factory=list)
    """Layer ids of the target's states, strictly increasing; empty: 1, n//2 - 1, n - 4."""
    fc_norm: bool = False
    """A norm of its own for each tap before `fc`, as in EAGLE-3.1."""
    norm_output: bool = False
    """Feed back the state after the final norm, as in EAGLE-3.1, not the one before it."""
    norm_before_residual: bool = False
    """Attention adds to the normed state; vLLM knows it, SGLang does not."""
    width: int = 0
    """Hidden size of the drafter; 0: the target's. Another one brings a trained embedding, and no export."""
    head: str = "trained"
    """trained, or frozen: the target's rows as they are, without the products of their gradient."""
    start: str = "random"
    """random, or copying: some heads begin as induction heads (drafters/copying.py)."""
    shape: dict[str, Any] = field(default_factory=dict)
    """Sizes of the layer that are not the target's, by key of its config; `init_from` fills them in."""
    init_from: str = ""
    """Folder or hub id of a published drafter whose weights training starts from; "": new ones."""

    def __post_init__(self):
        choose("drafter.head", self.head, ("trained", "frozen"))
        choose("drafter.start", self.start, ("random", "copying"))
        if self.start == "copying" and self.init_from:
            raise ValueError(f"drafter.start=copying: no effect with drafter.init_from={self.init_from!r}")
        at_least("drafter.unroll", self.unroll, 1)
        at_least("drafter.layers", self.layers, 1)
        if sorted(set(self.taps)) != list(self.taps):
            raise ValueError(f"drafter.taps={self.taps}: expected strictly increasing layer ids")


class Attention(nn.Module):
    """Projections over [norm(embedding), norm(state)], whose two halves training applies apart, so that a
    token's embedding half is computed once for all steps; or over the state alone (inputs=1)."""

    def __init__(self, config: LlamaConfig, *, inputs: int):
        super().__init__()
        D, K = config.hidden_size, config.head_dim
        H, G = config.num_attention_heads, config.num_key_value_heads
        assert D and H and G and K, config
        self.q_proj = nn.Linear(inputs * D, H * K, bias=False)
        self.k_proj = nn.Linear(inputs * D, G * K, bias=False)
        self.v_proj = nn.Linear(inputs * D, G * K, bias=False)
        self.o_proj = nn.Linear(H * K, D, bias=False)
        self.sizes = [p.out_features for p in (self.q_proj, self.k_proj, self.v_proj)]
        self.head_dim = K
        self.scale = K**-0.5

    def stacked(self) -> torch.Tensor:
        """q, k and v weights [(H + 2G) K, inputs D]."""
        return torch.cat((self.q_proj.weight, self.k_proj.weight, self.v_proj.weight))

    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Stacked weights of the embedding half and of the state half, each [(H + 2G) K, D]."""
        stacked = self.stacked()
        D = stacked.shape[1] // 2
        return stacked[:, :D], stacked[:, D:]

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[N, (H + 2G) K] -> q [H, N, K], k and v [G, N, K]."""
        return tuple(x.view(len(x), -1, self.head_dim).transpose(0, 1) for x in qkv.split(self.sizes, -1))


class Layer(nn.Module):
    """A decoder layer. The first one reads embedding and state; its residual is the state before
    `hidden_norm`, or after it."""

    def __init__(self, config: LlamaConfig, *, first: bool, norm_before_residual: bool = False):
        super().__init__()
        self.norm_before_residual = norm_before_residual
        D, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(D, eps)
        if first:
            self.hidden_norm = RMSNorm(D, eps)
        self.self_attn = Attention(config, inputs=2 if first else 1)
        self.post_attention_layernorm = RMSNorm(D, eps)
        self.mlp = GatedMLP(D, config.intermediate_size)

    def residual(self, state_ND: torch.Tensor, normed_ND: torch.Tensor) -> torch.Tensor:
        """What attention adds to; normed: the state after `hidden_norm`."""
        return normed_ND if self.norm_before_residual else state_ND

    def finish(self, state_ND: torch.Tensor, mixed_HNK: torch.Tensor) -> torch.Tensor:
        """State after attention output and MLP."""
        state = state_ND + self.self_attn.o_proj(mixed_HNK.transpose(0, 1).flatten(1))
        return state + self.mlp(self.post_attention_layernorm(state))

    def follow(
        self, state_ND: torch.Tensor, angle: tuple[torch.Tensor, torch.Tensor], attend: Attend
    ) -> torch.Tensor:
        """A layer behind the first, on the state of the one before it."""
        normed, attn = self.input_layernorm(state_ND), self.self_attn
        q, k, v = (
            projection(normed).view(len(normed), -1, attn.head_dim).transpose(0, 1)
            for projection in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
        return self.finish(state_ND, attend(rotate(q, angle), rotate(k, angle), v))


class Eagle3(nn.Module):
    """The network. state_dict() holds the trained tensors under the names that engines read; the embedding
    is the target's."""

    kept_ids: torch.Tensor

    def __init__(self, config: Config, target: Target, kept_ids: torch.Tensor):
        super().__init__()
        self.config = config
        self.taps = tuple(config.taps) or default_taps(target.num_layers)
        if self.taps[-1] >= target.num_layers or self.taps[0] < 0:
            layers = f"the target has layers 0 to {target.num_layers - 1}"
            raise ValueError(f"drafter.taps={list(self.taps)}: {layers}")
        self.draft_config = draft_config(target, config.width, config.shape)
        self.vocab_size = target.vocab_size
        D, Dt, eps = self.draft_config.hidden_size, target.hidden_size, self.draft_config.rms_norm_eps
        self.fc_norm = nn.ModuleList(RMSNorm(Dt, eps) for _ in self.taps if config.fc_norm)
        self.fc = nn.Linear(len(self.taps) * Dt, D, bias=False)
        self.midlayer = Layer(self.draft_config, first=True, norm_before_residual=config.norm_before_residual)
        behind = {str(i): Layer(self.draft_config, first=False) for i in range(1, config.layers)}
        self.layers = nn.ModuleDict(behind)  # by the number of the layer, as engines name it
        self.norm = RMSNorm(D, eps)
        self.lm_head = nn.Linear(D, len(kept_ids), bias=False)
        self.rotary = Rotary(self.draft_config)
        self.register_buffer("kept_ids", kept_ids.long(), persistent=False)
        self.embed_tokens = nn.Embedding(target.vocab_size, D) if Dt != D else None
        self._embedding = (target.embedding,)  # in a tuple, so that it is no submodule

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        """The target's own embedding of tokens (its scale included), in the drafter's dtype; or the drafter's
        own, where widths differ."""
        return (self.embed_tokens or self._embedding[0])(ids_T).to(self.fc.weight.dtype)

    def fc_input(self, taps_TLD: torch.Tensor) -> torch.Tensor:
        """What `fc` reads [T, L Dt]."""
        taps = taps_TLD.to(self.fc.weight.dtype)
        if len(self.fc_norm):
            taps = torch.stack([norm(taps[:, i]) for i, norm in enumerate(self.fc_norm)], 1)
        return taps.flatten(1)

    def fuse(self, taps_TLD: torch.Tensor) -> torch.Tensor:
        """The state [T, D] that step 0 starts from."""
        return self.fc(self.fc_input(taps_TLD))

    def start_from(self, batches: Iterable[FeatureBatch]) -> None:
        """Told before the first step of a training, with the features of its samples."""
        if self.config.start == "copying":
            copying.start_copying(self, batches)

    def slow_rows(self) -> dict[str, int]:
        """Of matrices by name, how many leading rows learn slowly."""
        return copying.slow_rows(self) if self.config.start == "copying" else {}

    def head_weight(self) -> torch.Tensor:
        return self.lm_head.weight

    def index(self, tokens: TokenBatch) -> RowIndex:
        """The supervised (row, slot) pairs."""
        return supervised_rows(tokens, self.config.unroll)

    def rows(self, batch: FeatureBatch) -> Rows:
        """Unroll K steps over the packed row; the state after the final norm for every supervised pair."""
        tokens = batch.tokens
        index = self.index(tokens)
        steps = [index.row[index.slot == k] for k in range(index.slots)]
        behind = UnrollLayout(tokens)
        layer, attn = self.midlayer, self.midlayer.self_attn
        w_embed, w_state = attn.halves()
        embed = F.linear(layer.input_layernorm(self.embed(tokens.ids)), w_embed)
        fused = self.fuse(batch.taps)
        key_size = attn.sizes[0]
        # keys and values of step 0: every token is context for the rows after it
        normed = layer.hidden_norm(fused)
        kv = F.linear(normed[:-1], w_state[key_size:]) + embed[1:, key_size:]
        k0, v0 = (x.view(len(x), -1, attn.head_dim).transpose(0, 1) for x in kv.chunk(2, -1))
        k0 = rotate(k0, self.rotary(tokens.positions[:-1], kv))
        state, outs = fused, []
        own: list[Own] = []  # steps 1 .., places: their rows
        before = torch.arange(len(tokens), device=tokens.ids.device)
        for k, supervised in enumerate(steps):
            if not len(supervised):
                break
            # every token of step 0 is context for the later layers too
            rows = before[:-1] if k == 0 and len(self.layers) else supervised
            state = state[torch.searchsorted(before, rows)]
            angle = self.rotary(tokens.positions[rows] + k, state)
            normed = layer.hidden_norm(state)
            if k == 0:
                q = F.linear(normed, w_state[:key_size]) + embed[rows + 1, :key_size]
                q = q.view(len(q), -1, attn.head_dim).transpose(0, 1)
            else:
                q, key, value = attn.split(F.linear(normed, w_state) + embed[rows + 1 + k])
                # a view of the values would keep all of q, k and v in memory
                own.append(Own(rotate(key, angle), value.contiguous(), rows))
            seen = [replace(step, places=torch.searchsorted(step.places, rows)) for step in own]
            mixed = ttt_attention(rotate(q, angle), k0, v0, seen, runs(rows, behind.begins), attn.scale)
            state = layer.finish(layer.residual(state, normed), mixed)
            behind.rows = rows
            state = self._behind(state, angle, behind)
            state = state if rows is supervised else state[supervised]
            outs.append(self.norm(state))
            state = outs[-1] if self.config.norm_output else state
            before = supervised
        return Rows(index=index, state=torch.cat(outs) if outs else fused[:0])

    def later(self) -> list[tuple[int, Layer]]:
        """The layers behind the first with their numbers."""
        return [(int(number), cast(Layer, layer)) for number, layer in self.layers.items()]

    def _behind(
        self, state_ND: torch.Tensor, angle: tuple[torch.Tensor, torch.Tensor], layout: Layout
    ) -> torch.Tensor:
        """The layers behind the first, on its state."""
        for number, layer in self.later():
            scale = layer.self_attn.scale
            attend = partial(layout.attend, number, scale=scale, window=None, softcap=None, sinks_H=None)
            state_ND = layer.follow(state_ND, angle, attend)
        return state_ND

    def start(self, num_requests: int, capacity: int) -> FeatureDrafting:
        """Decoding state for `num_requests` requests of at most `capacity` tokens, draft tokens included."""
        return FeatureDrafting(self, num_requests, capacity)

    def entry(self, taps_NLD: torch.Tensor, final_ND: torch.Tensor) -> torch.Tensor:
        return self.fuse(taps_NLD)

    def advancing(self, capacity: int) -> Advance:
        """The layers on rows: their states and the tokens that follow them; states [N, D] out."""
        layer, attn = self.midlayer, self.midlayer.self_attn
        stacked = attn.stacked().detach()
        cos, sin = self.rotary(torch.arange(capacity, device=stacked.device), stacked)

        def advance(state_ND: torch.Tensor, ids_N: torch.Tensor, layout: CacheLayout) -> torch.Tensor:
            embedded = layer.input_layernorm(self.embed(ids_N))
            normed = layer.hidden_norm(state_ND)
            q, k, v = attn.split(F.linear(torch.cat((embedded, normed), -1), stacked))
            angle = (cos[layout.positions], sin[layout.positions])
            q, k = rotate(q, angle), rotate(k, angle)
            mixed = layout.attend(0, q, k, v, scale=attn.scale, window=None, softcap=None, sinks_H=None)
            state = self._behind(layer.finish(layer.residual(state_ND, normed), mixed), angle, layout)
            return self.norm(state) if self.config.norm_output else state

        return advance

    def logits(self, state_ND: torch.Tensor) -> torch.Tensor:
        return self.lm_head(state_ND if self.config.norm_output else self.norm(state_ND))

    def weights_read(self) -> tuple[int, int]:
        """Layers and head at each step; `fc` once a round, on what the verification committed."""
        once = self.fc.weight.numel()
        return sum(p.numel() for p in self.parameters()) - once, once

    def export_tensors(self, engine: str) -> dict[str, torch.Tensor]:
        """The file's tensors by names that all engines share, but for speculators, whose folders call the
        layer layers.0 and bring the embedding along."""
        tensors = {**self.state_dict(), **vocabulary_maps(self.kept_ids.cpu(), self.vocab_size)}
        if engine != "speculators":
            return tensors
        every = torch.arange(self.vocab_size, device=self.kept_ids.device)
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        return {**tensors, "embed_tokens.weight": self.embed(every)}

    def engine_config(self, target: Target, engine: str) -> dict[str, Any]:
        """config.json's keys of this family, for speculators or for all other engines at once.

        An engine's capture point is the input of a layer, k + 1 for our tap k. vLLM and speculators read them
        from the top level. SGLang reads the nested list and adds 1; for ADDS_ONE_AFTER_ONE only if the first
        id is 1. TensorRT-LLM is told at its start; the authors' code has three points of its own.
        """
        points = [k + 1 for k in self.taps]
        as_is = target.config.model_type in ADDS_ONE_AFTER_ONE and points[0] != 2
        shape = self.draft_config.to_dict()
        check_served(self.config, self.taps, shape, target, engine)
        if engine != "speculators" and as_is and points[0] == 1:
            raise ValueError(f"drafter.taps={list(self.taps)}: SGLang needs a first tap above 0 here")
        if self.config.width:
            raise ValueError(
                f"drafter.width={self.config.width}: expected 0 for the export; its check knows no other"
            )
        layer = {**{key: shape[key] for key in SHAPE_KEYS}, "num_hidden_layers": self.config.layers}
        own = {
            "draft_vocab_size": len(self.kept_ids),
            "eagle_aux_hidden_state_layer_ids": points,
            "norm_before_residual": self.config.norm_before_residual,
            "norm_before_fc": False,
            "fc_norm": self.config.fc_norm,
            "norm_output": self.config.norm_output,
        }
        if engine == "speculators":
            return {
                **speculators_config("eagle3", "Eagle3DraftModel", target, layer, self.config.unroll),
                **own,
            }
        nested = {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": points if as_is else list(self.taps),
        }
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            **layer,
            **own,
            "num_aux_hidden_states": len(points),
            "eagle_config": nested,
        }


def build(config: Config, target: Target, kept_ids: torch.Tensor) -> Eagle3:
    """An initialised drafter on the target's device. kept_ids: int64 [W], the draft vocabulary, ascending.

    The head starts as the target's rows, the rest at random, but queries as half of their own keys: attention
    begins on the token itself, whose value alone brings the embedding of the next token to the state.
    """
    drafter = Eagle3(config, target, kept_ids)
    drafter.slow_rows()  # refuses what cannot copy
    for module in drafter.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=drafter.draft_config.hidden_size**-0.5)
    for layer in (drafter.midlayer, *(layer for _, layer in drafter.later())):
        attn = layer.self_attn
        keys = attn.k_proj.weight.detach().unflatten(0, (-1, attn.head_dim))
        shared = attn.q_proj.out_features // attn.k_proj.out_features
        share_tensor(attn.q_proj.weight, keys.repeat_interleave(shared, 0).flatten(0, 1) / 2)
    head = target.head.weight[kept_ids.to(target.device)].float()
    if drafter.embed_tokens is not None:
        # the same directions of the target's space for both ends, so that lengths and angles nearly stay
        D, Dt = drafter.draft_config.hidden_size, target.hidden_size
        onto = (torch.randn(Dt, D) / D**0.5).to(head)
        every = torch.arange(target.vocab_size, device=target.device)
        share_tensor(drafter.embed_tokens.weight, target.embedding(every).float() @ onto)
        head = head @ onto
    share_tensor(drafter.lm_head.weight, head)
    drafter.lm_head.weight.requires_grad_(config.head == "trained")
    return drafter.to(target.device)

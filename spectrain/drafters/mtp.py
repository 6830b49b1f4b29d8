"""Multi-token prediction: a decoder layer of the target's own kind behind norms of state and embedding.

    z = eh_proj [enorm(embedding of x_{t+1+k}), hnorm(h_{k-1})]   h_k = block(z)   q = softmax(head norm(h_k))

h_{-1} is the target's state after its final norm (`final`), as in every engine. Layer and norms are of the
target's own classes, so that norms on queries and keys, gates, experts and (1 + w) norms are as in its
checkpoints; embedding and head are the target's. Two forms:
- blocks=1: one block for every step, which reads its own output (FastMTP); rows and context as in EAGLE-3
  (`unroll.py`), so that training sees what drafting meets.
- blocks=unroll: a block for each step (DeepSeek-V3). Block k runs on every row t, with token x_{t+1+k} and
  block k - 1's output there, and sees its own rows before; decoding does the same (`depth_drafting.py`).
FastMTP trains hard labels with objective.terms={ce: 1} and objective.slot_decay=0.6.
Knows full attention only: no window, no sinks. Experts get no balancing loss.
Sources: DeepSeek-V3 (arXiv 2412.19437), section 2.2; FastMTP (arXiv 2509.18362), section 3; names and orders:
`mtp_weights.py`. Legend: T tokens, N rows, D hidden, W kept ids, K steps.
"""

import inspect
import json
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from spectrain.cache import CacheLayout
from spectrain.checks import choose
from spectrain.data.packing import TokenBatch
from spectrain.drafters.depth_drafting import DepthDrafting
from spectrain.drafters.feature_drafting import Advance, FeatureDrafting
from spectrain.drafters.layers import own_head, supervised_rows
from spectrain.drafters.mtp_forms import imported as imported
from spectrain.drafters.mtp_weights import load_own, own_tensors, served_names
from spectrain.drafters.speculators_form import speculators_config
from spectrain.drafters.unroll import UnrollLayout, unrolled
from spectrain.features import FeatureBatch
from spectrain.objectives import RowIndex, Rows
from spectrain.target import Layout, Target

SERVED = {
    "vllm": ("mtp", "mtp"),
    "sglang": ("mtp", "NEXTN"),
    "speculators": ("mtp-speculators", "mtp"),
    "trtllm": ("mtp", "MTP"),
}
NOT_SERVED = {"reference": "its form is the target's own files, which `engine=[vllm]` writes"}


@dataclass(frozen=True, kw_only=True)
class Config:
    family: str = "mtp"
    draft_vocab: int = 0
    """Kept ids of the draft vocabulary; 0 keeps the target's whole vocabulary."""
    unroll: int = 3
    """Steps of training, K."""
    blocks: int = 1
    """1: one block for every step; K: one for each, which then drafts at most K tokens."""
    order: str = "embedding_first"
    """Halves of eh_proj's input: embedding_first (DeepSeek, GLM, Qwen) or hidden_first (MiMo)."""
    feedback: str = "post"
    """What the next step reads: the state after the block's last norm (post; transformers, SGLang, most of
    vLLM), or before it (pre; vLLM's GLM-4-MoE)."""
    weights: str = "new"
    """new: from scratch; target: the MTP weights in the target's own files."""
    init_from: str = ""
    """Folder or hub id of a published drafter whose weights training starts from; "": new ones."""

    def __post_init__(self):
        choose("drafter.order", self.order, ("embedding_first", "hidden_first"))
        choose("drafter.feedback", self.feedback, ("post", "pre"))
        choose("drafter.weights", self.weights, ("new", "target"))
        if self.unroll < 1:
            raise ValueError(f"drafter.unroll={self.unroll}: expected at least 1")
        if self.blocks not in (1, self.unroll):
            raise ValueError(f"drafter.blocks={self.blocks}: expected 1 or drafter.unroll={self.unroll}")


class Block(nn.Module):
    """One step's network; `layer` is the target's own class."""

    def __init__(self, config: Config, target: Target):
        super().__init__()
        self.config = config
        model, number = plain_layer(target)
        D, eps = target.hidden_size, target.config.rms_norm_eps
        norm = type(model.input_layernorm)
        self.enorm, self.hnorm, self.norm = norm(D, eps=eps), norm(D, eps=eps), norm(D, eps=eps)
        self.eh_proj = nn.Linear(2 * D, D, bias=False)
        self.layer = type(model)(target.config, number)

    def forward(
        self,
        state_ND: torch.Tensor,
        embedded_ND: torch.Tensor,
        angle: tuple[torch.Tensor, ...],
        positions_N: torch.Tensor,
        layout: Layout,
    ) -> torch.Tensor:
        """What the next step reads, [N, D]."""
        parts = [self.enorm(embedded_ND), self.hnorm(state_ND)]
        if self.config.order == "hidden_first":
            parts.reverse()
        x = self.eh_proj(torch.cat(parts, -1))[None]
        out = self.layer(x, position_embeddings=angle, position_ids=positions_N[None], layout=layout)
        out = (out[0] if isinstance(out, tuple) else out)[0]
        return self.norm(out) if self.config.feedback == "post" else out

    def ready(self, state_ND: torch.Tensor) -> torch.Tensor:
        """A state of `forward` made ready for the head."""
        return state_ND if self.config.feedback == "post" else self.norm(state_ND)


class Mtp(nn.Module):
    """The network; state_dict() holds the blocks."""

    kept_ids: torch.Tensor
    head: torch.Tensor
    taps: tuple[int, ...] = ()

    def __init__(self, config: Config, target: Target, kept_ids: torch.Tensor):
        super().__init__()
        self.config = config
        self.vocab_size = target.vocab_size
        self.blocks = nn.ModuleList(Block(config, target) for _ in range(config.blocks))
        self.register_buffer("kept_ids", kept_ids.long(), persistent=False)
        self.register_buffer("head", own_head(target, kept_ids, config.family), persistent=False)
        # in a tuple, so that they are no submodules
        self._own: tuple[Any, Any] = (target.embedding, target.decoder.rotary_emb)
        self._target_config = target.config

    def head_weight(self) -> torch.Tensor:
        return self.head

    def index(self, tokens: TokenBatch) -> RowIndex:
        """The supervised (row, slot) pairs."""
        return supervised_rows(tokens, self.config.unroll)

    def rows(self, batch: FeatureBatch) -> Rows:
        """The state, ready for the head, of every supervised pair."""
        tokens, index = batch.tokens, self.index(batch.tokens)
        state = self.entry(batch.taps, batch.final)
        if len(self.blocks) > 1:
            states = self._by_depth(tokens, index, state)
        else:
            states = unrolled(tokens, index, state, self._step)
        ready = [self.block(k).ready(state) for k, state in enumerate(states)]
        return Rows(index, torch.cat(ready))

    def _step(self, k, state_ND, ids_N, positions_N, layout) -> torch.Tensor:
        angle = self.angle(positions_N[None])
        return self.run(k, state_ND, ids_N, angle, positions_N, layout)

    def _by_depth(self, tokens: TokenBatch, index: RowIndex, state_TD: torch.Tensor) -> list[torch.Tensor]:
        """Each block on every row; the last k rows of a document have no token of their own at step k, and no
        supervised row sees them."""
        found = []
        for k in range(index.slots):
            ids = tokens.ids.roll(-1 - k)
            state_TD = self._step(k, state_TD, ids, tokens.positions, UnrollLayout(tokens))
            found.append(state_TD[index.row[index.slot == k]])
        return found

    def block(self, k: int) -> Block:
        """The block of step k."""
        return cast(Block, self.blocks[k % len(self.blocks)])

    def embed(self, ids_N: torch.Tensor) -> torch.Tensor:
        """The target's own embedding of tokens (its scale included), in the drafter's dtype."""
        return self._own[0](ids_N).to(self.head.dtype)

    def angle(self, positions_1N: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The target's own rotary embedding, each [1, N, K]."""
        return self._own[1](self.head, positions_1N)

    def run(self, k: int, state_ND, ids_N, angle, positions_N, layout: Layout) -> torch.Tensor:
        """Step k's block on N rows."""
        return self.block(k)(state_ND, self.embed(ids_N), angle, positions_N, layout)

    def start(self, num_requests: int, capacity: int) -> FeatureDrafting | DepthDrafting:
        """Decoding state for `num_requests` requests of at most `capacity` tokens, draft tokens included."""
        if len(self.blocks) == 1:
            return FeatureDrafting(self, num_requests, capacity)
        return DepthDrafting(self, num_requests, capacity)

    def entry(self, taps_NLD: torch.Tensor, final_ND: torch.Tensor) -> torch.Tensor:
        return final_ND.to(self.head.dtype)

    def stepping(self, k: int, capacity: int) -> Advance:
        """Block k on rows at positions below `capacity`: states and ids in, states [N, D] out."""
        cos, sin = self.angle(torch.arange(capacity, device=self.head.device)[None])

        def advance(state_ND: torch.Tensor, ids_N: torch.Tensor, layout: CacheLayout) -> torch.Tensor:
            positions = layout.positions.to(ids_N.device)
            return self.run(k, state_ND, ids_N, (cos[:, positions], sin[:, positions]), positions, layout)

        return advance

    def advancing(self, capacity: int) -> Advance:
        return self.stepping(0, capacity)

    def logits(self, state_ND: torch.Tensor, k: int = 0) -> torch.Tensor:
        return F.linear(self.block(k).ready(state_ND), self.head)

    def weights_read(self) -> tuple[int, int]:
        """One block, all of its experts, and the head at each step."""
        return sum(p.numel() for p in self.block(0).parameters()) + self.head.numel(), 0

    def export_tensors(self, engine: str) -> dict[str, torch.Tensor]:
        """The tensors by their names in the target's checkpoint, where engines look for MTP weights, or by
        those of speculators, which leaves embedding and head to the target and experts stacked.

        Raises ValueError for a kind of target that has none.
        """
        names = served_names(self._target_config, len(self.blocks), engine)
        if engine == "speculators":
            return {names.name(name): tensor for name, tensor in self.state_dict().items()}
        return own_tensors(names, self.state_dict(), self._own[0].weight, self.head)

    def engine_config(self, target: Target, engine: str) -> dict[str, Any]:
        """The keys that change in the target's own config.json: an engine finds the blocks in its files. For
        speculators all of config.json.

        Raises ValueError where the engine computes another network: order of halves, state fed back,
        vocabulary, number of blocks.
        """
        if engine not in SERVED:
            raise ValueError(f"export.engine={engine}: no export of mtp: {NOT_SERVED[engine]}")
        config, names = self.config, served_names(target.config, len(self.blocks), engine)
        feedback = names.feedback[engine]
        if config.order != names.order:
            raise ValueError(f"drafter.order={config.order}: expected {names.order} for this kind of target")
        if config.unroll > 1 and config.feedback != feedback:
            raise ValueError(
                f"drafter.feedback={config.feedback}: expected {feedback}, which {engine} has for this "
                "kind of target"
            )
        if len(self.kept_ids) != self.vocab_size:
            raise ValueError(f"drafter.draft_vocab={len(self.kept_ids)}: expected 0 for the export of MTP")
        if engine != "vllm" and config.blocks > 1:
            raise ValueError(f"drafter.blocks={config.blocks}: expected 1 for {engine}")
        count = {names.count_key: len(self.blocks)}
        if engine != "speculators":
            return count
        layer = json.loads(target.config.to_json_string(use_diff=False))
        layer = {key: value for key, value in layer.items() if value is not None}
        return {**speculators_config("mtp", "MTPDraftModel", target, layer, config.unroll), **count}


def plain_layer(target: Target) -> tuple[Any, int]:
    """The target's last layer of full attention, and its number.

    Raises ValueError naming what of the target a block cannot be made of.
    """
    config = target.config
    kinds = getattr(config, "layer_types", None)
    windowed = getattr(config, "sliding_window", None) if kinds is None else None
    kinds = kinds or ["full_attention"] * target.num_layers
    full = [i for i, kind in enumerate(kinds) if kind == "full_attention" and i in target.attention_layers]
    rotary = dict(target.decoder.named_children()).get("rotary_emb")
    layer: Any = target.layers[full[-1] if full else -1]
    reasons = {
        "no layer of full attention": not full,
        f"a sliding window of {windowed}": windowed is not None,
        "sinks in its attention": any(name.endswith("sinks") for name, _ in layer.named_parameters()),
        "a soft cap in its attention": getattr(config, "attn_logit_softcapping", None) is not None,
        "no rotary embedding": rotary is None,
        "a rotary embedding for each kind of layer": (
            rotary is not None and "layer_type" in inspect.signature(rotary.forward).parameters
        ),
        "no norm in front of a layer": not hasattr(layer, "input_layernorm"),
        "no RMS norms": not hasattr(config, "rms_norm_eps"),
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise ValueError(
            f"drafter.family=mtp: target {type(target.model).__name__} has {' and '.join(found)}; expected a "
            "kind such as Llama, Qwen3 or GLM-4"
        )
    return layer, full[-1]


def build(config: Config, target: Target, kept_ids: torch.Tensor) -> Mtp:
    """A drafter on the target's device, initialised or with the target's own weights. kept_ids: int64 [W],
    the draft vocabulary, ascending."""
    drafter = Mtp(config, target, kept_ids)
    for name, parameter in drafter.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=target.hidden_size**-0.5)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    if config.weights == "target":
        load_own(drafter.blocks, target, config.order)
    return drafter.to(target.device)

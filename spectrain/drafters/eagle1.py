"""EAGLE-1: the next feature from this one and the next token, read by the target's own head (Li et al. 2024).

    f'_{t+1} = layers(fc [embedding of x_{t+1}, f_t])        q(x_{t+2}) = softmax(head f'_{t+1})

A feature f_t is the target's state after its final norm (`final`), as in the reference code, vLLM and SGLang;
the drafter has no norm behind its last layer and none in front of its first attention. It learns the feature
and the law: objective.terms={smooth_l1: 1.0, kl: 0.1} (0.1 times the cross-entropy with the target's law has
the gradient of 0.1 kl). EAGLE-2 is these weights with a dynamic tree: eval.runs with proposal=tree.
unroll=1 trains on the target's features; unroll=K is HASS's aligned context: step k reads features of step
k - 1, without gradient through them, and sees the context that it meets when it drafts (`unroll.py`).
Knows no scaling and no cap of the target's logits: such a target is refused.
Sources: Li et al. 2024 (arXiv 2401.15077), section 3; HASS, Zhang et al. 2024 (arXiv 2408.15766).
Legend: T tokens, N rows, D hidden, W kept ids, L taps.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from spectrain.cache import CacheLayout
from spectrain.data.packing import TokenBatch
from spectrain.drafters.eagle1_forms import imported as imported
from spectrain.drafters.feature_drafting import Advance, FeatureDrafting
from spectrain.drafters.layers import SHAPE_KEYS, Rotary, draft_config, own_head, supervised_rows
from spectrain.drafters.published import check_authors_layer
from spectrain.drafters.unroll import unrolled
from spectrain.features import FeatureBatch
from spectrain.objectives import RowIndex, Rows
from spectrain.target import ATTENTION, Layout, Target

SERVED = {
    "vllm": ("eagle1", "eagle"),
    "sglang": ("eagle1-sglang", "EAGLE"),
    "reference": ("eagle1", "EaModel, use_eagle3=False"),
}
NOT_SERVED = {
    "speculators": "0.9 has no EAGLE-1",
    "trtllm": "its PyTorch backend drafts with EAGLE-3's layer only",
}
# The reference scales its noise by 512 / n without a cap; ours stops at the configured width, a deviation: a
# document of 64 tokens would get eight times the noise.
NOISE_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class Config:
    family: str = "eagle1"
    draft_vocab: int = 0
    """Kept ids of the draft vocabulary; 0 keeps the target's whole vocabulary, as published."""
    unroll: int = 1
    """Steps on its own features, K; above 1 as in HASS, which has 3."""
    layers: int = 1
    """Decoder layers."""
    noise: float = 0.1
    """Half width of the uniform noise on the features that training reads; times 512 / n in a document of n
    tokens above 512. Unlike the reference's it is not widened in shorter ones."""
    bias: bool = False
    """A bias of `fc`, as the authors' files have and vLLM leaves out."""
    shape: dict[str, Any] = field(default_factory=dict)
    """Sizes of the layer that are not the target's, by key of its config; `init_from` fills them in."""
    init_from: str = ""
    """Folder or hub id of a published drafter whose weights training starts from; "": new ones."""

    def __post_init__(self):
        for name in ("unroll", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"drafter.{name}={getattr(self, name)}: expected at least 1")
        if self.noise < 0:
            raise ValueError(f"drafter.noise={self.noise}: expected at least 0")


class Eagle1(nn.Module):
    """The network; state_dict() holds the trained tensors under the names that engines read. Embedding and
    head are the target's."""

    kept_ids: torch.Tensor
    head: torch.Tensor
    taps: tuple[int, ...] = ()

    def __init__(self, config: Config, target: Target, kept_ids: torch.Tensor):
        super().__init__()
        self.config = config
        self.vocab_size = target.vocab_size
        self.draft_config = draft_config(target, shape=config.shape)
        self.draft_config._attn_implementation = ATTENTION
        D = target.hidden_size
        self.fc = nn.Linear(2 * D, D, bias=config.bias)
        self.layers = nn.ModuleList(LlamaDecoderLayer(self.draft_config, i) for i in range(config.layers))
        self.layers[0].input_layernorm = nn.Identity()
        self.rotary = Rotary(self.draft_config)
        self.register_buffer("kept_ids", kept_ids.long(), persistent=False)
        self.register_buffer("head", own_head(target, kept_ids, config.family), persistent=False)
        self._embedding = (target.embedding,)  # in a tuple, so that it is no submodule

    def head_weight(self) -> torch.Tensor:
        return self.head

    def index(self, tokens: TokenBatch) -> RowIndex:
        """The supervised (row, slot) pairs."""
        return supervised_rows(tokens, self.config.unroll)

    def rows(self, batch: FeatureBatch) -> Rows:
        """The predicted feature of every supervised pair."""
        features = batch.final.to(self.fc.weight.dtype)
        if self.training and self.config.noise:
            features = features + self._noise(batch.tokens, features)

        def advance(k, state_ND, ids_N, positions_N, layout):
            angle = tuple(x[None] for x in self.rotary(positions_N, state_ND))
            return self._advance(state_ND.detach(), ids_N, angle, layout)

        index = self.index(batch.tokens)
        return Rows(index, torch.cat(unrolled(batch.tokens, index, features, advance)))

    def _noise(self, tokens: TokenBatch, like_TD: torch.Tensor) -> torch.Tensor:
        lengths = torch.tensor(tokens.offsets).diff().to(like_TD.device)[tokens.document_ids]
        width = self.config.noise * (NOISE_TOKENS / lengths).clamp(max=1)
        return (2 * torch.rand_like(like_TD) - 1) * width[:, None]

    def _advance(
        self, state_ND: torch.Tensor, ids_N: torch.Tensor, angle: tuple[torch.Tensor, ...], layout: Layout
    ) -> torch.Tensor:
        embedded = self._embedding[0](ids_N).to(self.fc.weight.dtype)
        x = self.fc(torch.cat((embedded, state_ND), -1))[None]
        for layer in self.layers:
            x = layer(x, position_embeddings=angle, layout=layout)
        return x[0]

    def start(self, num_requests: int, capacity: int) -> FeatureDrafting:
        """Decoding state for `num_requests` requests of at most `capacity` tokens, draft tokens included."""
        return FeatureDrafting(self, num_requests, capacity)

    def entry(self, taps_NLD: torch.Tensor, final_ND: torch.Tensor) -> torch.Tensor:
        return final_ND.to(self.fc.weight.dtype)

    def advancing(self, capacity: int) -> Advance:
        """The layers on rows: their features and the tokens that follow them; next features [N, D] out."""
        cos, sin = self.rotary(torch.arange(capacity, device=self.head.device), self.fc.weight)

        def advance(state_ND: torch.Tensor, ids_N: torch.Tensor, layout: CacheLayout) -> torch.Tensor:
            angle = (cos[None, layout.positions], sin[None, layout.positions])
            return self._advance(state_ND, ids_N, angle, layout)

        return advance

    def logits(self, state_ND: torch.Tensor) -> torch.Tensor:
        return F.linear(state_ND, self.head)

    def weights_read(self) -> tuple[int, int]:
        """fc, layers and head at each step."""
        return sum(p.numel() for p in self.parameters()) + self.head.numel(), 0

    def export_tensors(self, engine: str) -> dict[str, torch.Tensor]:
        """The file's tensors by names that all engines share. SGLang's fc has a bias, which stays random
        where the file has none; vLLM's has none."""
        bias = {"fc.bias": torch.zeros(len(self.fc.weight))} if engine == "sglang" else {}
        return {**bias, **self.state_dict()}

    def engine_config(self, target: Target, engine: str) -> dict[str, Any]:
        """config.json's keys of this family. Raises ValueError for a reduced draft vocabulary: engines draft
        through the target's whole head."""
        if len(self.kept_ids) != self.vocab_size:
            raise ValueError(
                f"drafter.draft_vocab={len(self.kept_ids)}: expected 0 for the export of EAGLE-1, "
                "which engines draft through the target's whole head"
            )
        if self.config.bias and engine == "vllm":
            raise ValueError(
                "drafter.bias=true: vLLM leaves the bias out; expected false, or export.engine=[sglang]"
            )
        shape = self.draft_config.to_dict()
        if engine == "reference":
            check_authors_layer(shape)
        own = {**{key: shape[key] for key in SHAPE_KEYS}, "num_hidden_layers": self.config.layers}
        if engine == "sglang":
            return {"architectures": ["LlamaForCausalLMEagle"], **own}
        # a missing key gives the authors' fc a bias; a true one gives the engines' attention some
        bias = {} if self.config.bias else {"bias": False}
        return {"architectures": ["EagleLlamaForCausalLM"], **own, **bias}


def build(config: Config, target: Target, kept_ids: torch.Tensor) -> Eagle1:
    """An initialised drafter on the target's device. kept_ids: int64 [W], the draft vocabulary, ascending.

    Attention and MLP start without output, since no norm bounds the states that are fed back.
    """
    drafter = Eagle1(config, target, kept_ids)
    for module in drafter.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=target.hidden_size**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for name, parameter in drafter.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(parameter)
    return drafter.to(target.device)

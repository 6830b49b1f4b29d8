"""A smaller language model as drafter (Leviathan et al. 2023, section 2): it reads tokens, no state of the
target.

Any Hugging Face causal LM with the target's tokenizer, as it is (`frozen`) or trained to the target's law
(distillation, Zhou et al. 2024, DistillSpec); or one of `layers` layers from scratch, shaped after the
target with input and output embedding tied, the baseline of the same size. Its one slot at root x_n learns
p_n from the tokens x_0 .. x_n; its row is t = n - 1, as in every family. One document of 6 tokens with span
{2, 3, 4}:
    row 1 (root 2, predicts token 3)   row 2 (root 3, predicts token 4)
Rows of one document are one causal pass over it. Knows no taps.
Legend: T tokens, N new tokens, D hidden of the draft model, W ids that it knows.
"""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from spectrain.cache import CacheLayout, KVCache
from spectrain.config import TargetConfig
from spectrain.data.packing import TokenBatch
from spectrain.drafters.autoregressive import grow
from spectrain.drafters.layers import spans
from spectrain.drafters.lookup import new_tokens
from spectrain.features import FeatureBatch
from spectrain.graphs import FixedLayout, Graphs, Tensors, run
from spectrain.objectives import RowIndex, Rows
from spectrain.proposal import Observation, Plan, Proposal, Sampler
from spectrain.target import Layout, Target, load_target, packed_layout

SERVED = {
    "vllm": ("standalone", "draft_model"),
    "sglang": ("standalone", "STANDALONE"),
    "trtllm": ("standalone", "Draft_Target"),
    "reference": ("standalone", "generate, assistant_model=FOLDER"),
}
NOT_SERVED = {"speculators": "0.9 has no drafter that is an ordinary model"}
HEAD_DIM = 64


@dataclass(frozen=True, kw_only=True)
class Config:
    family: str = "standalone"
    path: str = ""
    """Folder or hub id of the draft model; empty: one from scratch, shaped by `layers` and `hidden`."""
    layers: int = 1
    """Decoder layers of a model from scratch."""
    hidden: int = 0
    """Width of a model from scratch, a multiple of 64; 0: the target's, rounded down to one."""
    frozen: bool = False
    """Leave the weights as they are, with train.passes=0: the baseline without distillation."""
    draft_vocab: ClassVar[int] = 0

    def __post_init__(self):
        if self.path and (self.layers, self.hidden) != (1, 0):
            raise ValueError(
                f"drafter.layers={self.layers}, drafter.hidden={self.hidden}: no effect with "
                f"drafter.path={self.path!r}; leave them out"
            )
        if self.layers < 1:
            raise ValueError(f"drafter.layers={self.layers}: expected at least 1")
        if self.hidden < 0 or self.hidden % HEAD_DIM:
            raise ValueError(f"drafter.hidden={self.hidden}: expected a multiple of {HEAD_DIM}, or 0")


class Standalone(nn.Module):
    """The draft model. state_dict() holds its tensors once, a tied head under the embedding's name."""

    taps: tuple[int, ...] = ()
    kept_ids: torch.Tensor

    def __init__(self, config: Config, model: Target, vocab_size: int):
        super().__init__()
        name = f"drafter.path={config.path!r}"
        if model.recurrent:
            raise ValueError(f"{name}: it has recurrent layers, whose state cannot give a draft token back")
        if model.head.bias is not None or getattr(model.config, "final_logit_softcapping", None):
            raise ValueError(f"{name}: its head has a bias or a soft cap, which the losses do not know")
        self.config, self.vocab_size = config, vocab_size
        self._model = (model.model,)  # in a tuple, so that it is no submodule
        self.context = model.config.max_position_embeddings
        self.decoder = model.decoder
        self.head = model.head if model.head.weight is not model.embedding.weight else None
        self._tied: tuple[Any] = (model.embedding,)  # in a tuple, so that it is no submodule
        self.scale = model.adjust(torch.ones(())).item()
        self.requires_grad_(not config.frozen)
        known = torch.arange(min(vocab_size, model.vocab_size), device=model.device)
        self.register_buffer("kept_ids", known, persistent=False)

    def head_weight(self) -> torch.Tensor:
        weight = self._tied[0].weight if self.head is None else self.head.weight
        return weight[: len(self.kept_ids)]

    def states(self, ids_N: torch.Tensor, positions_N: torch.Tensor, layout: Layout) -> torch.Tensor:
        """States [N, D] ready for the head, with a graph where weights are trained."""
        out = self.decoder(
            input_ids=ids_N[None], position_ids=positions_N[None], use_cache=False, layout=layout
        )
        return out.last_hidden_state[0] * self.scale

    def index(self, tokens: TokenBatch) -> RowIndex:
        """Rows t whose root t + 1 and label t + 2 lie in one span, the root not first in its document."""
        pieces = [torch.arange(max(a, d + 1), b - 1) for d, a, b in spans(tokens)]
        source = torch.cat([torch.empty(0, dtype=torch.int64), *pieces]).to(tokens.ids.device)
        return RowIndex(row=source - 1, slot=torch.zeros_like(source), source=source, slots=1)

    def rows(self, batch: FeatureBatch) -> Rows:
        tokens = batch.tokens
        index = self.index(tokens)
        states = self.states(tokens.ids, tokens.positions, packed_layout(tokens.offsets))
        return Rows(index=index, state=states[index.source])

    def start(self, num_requests: int, capacity: int) -> "StandaloneDrafting":
        """Decoding state for `num_requests` requests of at most `capacity` tokens, draft tokens included."""
        if capacity > self.context:
            raise ValueError(
                f"drafter.path={self.config.path!r}: decoding needs {capacity} positions, it has "
                f"{self.context}; expected shorter prompts or eval.max_new_tokens"
            )
        return StandaloneDrafting(self, num_requests, capacity)

    def weights_read(self) -> tuple[int, int]:
        """All weights at each step but the input embedding, a lookup unless it is the head too."""
        lookup = 0 if self.head is None else self._tied[0].weight.numel()
        return sum(p.numel() for p in self.parameters()) - lookup, 0

    def engine_config(self, target: Target, engine: str) -> dict[str, Any]:
        """The draft model's own config. Raises ValueError where it knows other ids than the target."""
        own = self._model[0].config.to_dict()
        if own["vocab_size"] != target.vocab_size:
            raise ValueError(
                f"drafter.path={self.config.path!r}: engines need equal vocabularies, it has "
                f"{own['vocab_size']} ids and the target {target.vocab_size}"
            )
        return own

    def written_model(self, dtype: torch.dtype) -> PreTrainedModel:
        """A copy of the whole draft model in `dtype`, as `save_pretrained` wants it."""
        return copy.deepcopy(self._model[0]).to(dtype)

    def _apply(self, fn, recurse=True):
        """Moves and casts all but the rotary frequencies, which are moved only: rounded to bfloat16 they
        turn a token far away by a wrong angle."""
        exact = {name: b for name, b in self.decoder.named_buffers() if b.is_floating_point()}
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            owner, _, last = name.rpartition(".")
            self.decoder.get_submodule(owner)._buffers[last] = buffer.to(self.kept_ids.device)
        return self


class StandaloneDrafting:
    """The draft model at work on several requests (`spectrain.proposal.Drafting`).

    The token at position t lies at slot t of the cache, the root included. `states` [requests, D]: those of
    the roots, which predict their successors.
    """

    def __init__(self, drafter: Standalone, num_requests: int, capacity: int):
        weight = drafter.head_weight()
        self.drafter = drafter
        self.kept_ids, self.vocab_size = drafter.kept_ids, drafter.vocab_size
        self.cache = KVCache(num_requests, capacity)
        self.states = weight.new_zeros(num_requests, weight.shape[1])
        self.steps = 0
        self.graphs: Graphs | None = None

    @torch.no_grad()
    def observe(self, observations: Sequence[Observation]) -> None:
        requests, texts = [o.request for o in observations], [new_tokens(o) for o in observations]
        for o in observations:
            assert o.start or o.first_id >= 0, f"request {o.request}: the first token is not known"
            if o.start == 0:
                self.cache.truncate(o.request, 0)
            committed = self.cache.committed[o.request]
            assert committed == (o.start and o.start + 1), f"row {o.start} follows {committed} tokens"
        counts = [len(text) for text in texts]
        ids = torch.tensor([token for text in texts for token in text], device=self.kept_ids.device)
        self.steps += 1
        (new,) = run(self.graphs, self.cache, *self.cache.behind(requests, counts), self._states, ids)
        self.cache.commit_all(requests, [range(count) for count in counts])
        self.states[requests] = new[torch.tensor(counts).cumsum(0) - 1]

    @torch.no_grad()
    def propose(self, requests: Sequence[int], plan: Plan, sampler: Sampler) -> list[Proposal]:
        proposals = grow(self, requests, plan, sampler)
        self.cache.commit_all(requests, [()] * len(requests))
        return proposals

    def root_positions(self, requests: Sequence[int]) -> list[int]:
        return [self.cache.committed[request] - 1 for request in requests]

    def root_logits(self, requests: Sequence[int]) -> torch.Tensor:
        return self._logits(self.states[requests])

    def step(self, requests: Sequence[int], parents: Sequence[int], tokens: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return run(self.graphs, self.cache, requests, parents, self._states_and_logits, tokens)[1]

    def _states(self, layout: CacheLayout | FixedLayout, ids_N: torch.Tensor) -> Tensors:
        return (self.drafter.states(ids_N, layout.positions.to(ids_N.device), layout),)

    def _states_and_logits(self, layout: CacheLayout | FixedLayout, ids_N: torch.Tensor) -> Tensors:
        (new,) = self._states(layout, ids_N)
        return new, self._logits(new)

    def _logits(self, state_ND: torch.Tensor) -> torch.Tensor:
        return state_ND @ self.drafter.head_weight().t()


def build(config: Config, target: Target, kept_ids: torch.Tensor) -> Standalone:
    """The draft model on the target's device, float32; kept_ids plays no part: it knows what its head knows.

    Raises ValueError naming drafter.path for a model that cannot be read or has another tokenizer.
    """
    if config.path:
        model = load_target(
            TargetConfig(path=config.path, dtype="float32"), device=str(target.device), key="drafter.path"
        )
        check_tokenizer(config.path, model.tokenizer, target.tokenizer)
    else:
        network = LlamaForCausalLM(scratch_config(config, target)).float()
        model = Target(network.to(target.device), path="from scratch")
    return Standalone(config, model, target.vocab_size)


def scratch_config(config: Config, target: Target) -> LlamaConfig:
    """A small Llama of the target's vocabulary and context, with an MLP of 8/3 its width."""
    hidden = config.hidden or max(HEAD_DIM, target.hidden_size // HEAD_DIM * HEAD_DIM)
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=hidden,
        intermediate_size=-(-hidden * 8 // (3 * HEAD_DIM)) * HEAD_DIM,
        num_hidden_layers=config.layers,
        num_attention_heads=hidden // HEAD_DIM,
        max_position_embeddings=target.config.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )


def check_tokenizer(path: str, ours: Any, targets: Any) -> None:
    """Raise ValueError naming the first difference in vocabulary, special tokens or merges: draft tokens are
    ids, so both models must read and write the same ones."""
    if targets is None:
        raise ValueError(f"drafter.path={path!r}: the target has no tokenizer to compare with")
    for what, a, b in (
        ("vocabulary", ours.get_vocab(), targets.get_vocab()),
        ("special tokens", _specials(ours), _specials(targets)),
        ("merges", _merges(ours), _merges(targets)),
    ):
        if a != b:
            key = next(k for k in sorted({*a, *b}, key=str) if a.get(k) != b.get(k))
            raise ValueError(
                f"drafter.path={path!r}: another {what} than the target's: {key!r} is {a.get(key)} there, "
                f"{b.get(key)} in the target; a drafter needs the target's tokenizer"
            )


def _specials(tokenizer: Any) -> dict[int, str]:
    return {
        token_id: str(token) for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
    }


def _merges(tokenizer: Any) -> dict[int, Any]:
    """By rank; empty where the tokenizer is no pair encoding."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    return dict(enumerate(model.get("merges") or ()))

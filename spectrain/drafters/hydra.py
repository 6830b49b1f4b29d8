"""Hydra: heads that see the draft tokens before them (Ankner et al. 2024, section 3).

Head k reads the target's state after its final norm at token t and the embeddings of the root x_n, n = t + 1,
and of the k draft tokens behind it: x_{t+1} .. x_{t+1+k}. It predicts token t + 2 + k, slot k of the root,
and is trained on the text's own tokens. Row t counts at slot k iff tokens t + 1 and t + 2 + k lie in one
span. One document of 6 tokens with span {2, 3, 4} and 2 heads:
    slot 0: row 1 (state 1, token 2; predicts 3), row 2 (state 2, token 3; predicts 4)
    slot 1: row 1 (state 1, tokens 2, 3; predicts 4)
The paper's best loss compares with the target's law, unweighted: objective kl with slot_decay 1. Hydra++'s
decoder layer over the text (its "prefix" layer) and its dropout are not here.

The first block of a head maps [state, embeddings] to the state's width, also on its skip, which starts as
the state alone: an untrained head says what the target's head says at token t. Blocks have weights of their
own (the reference uses one module several times).
Legend: T tokens, R rows, N states, K heads, S tokens seen, D hidden, W kept ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from spectrain.checks import at_least, choose
from spectrain.data.packing import TokenBatch
from spectrain.drafters.autoregressive import grow
from spectrain.drafters.hydra_forms import authors_tensors
from spectrain.drafters.hydra_forms import imported as imported
from spectrain.drafters.layers import ResBlocks, supervised_rows
from spectrain.drafters.newest_row import NewestRows, check_reach, slot_heads
from spectrain.features import FeatureBatch
from spectrain.objectives import RowIndex, Rows
from spectrain.proposal import Observation, Plan, Proposal, Sampler
from spectrain.target import Target, resolve_path

SERVED = {"reference": ("hydra-reference", "HydraModel")}
NOT_SERVED = {
    "vllm": "it has no Hydra",
    "sglang": "it has no Hydra",
    "speculators": "0.9 has no Hydra",
    "trtllm": "it has no Hydra",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    family: str = "hydra"
    draft_vocab: int = 0
    """Kept ids of the draft vocabulary; 0 keeps the target's whole vocabulary."""
    heads: int = 4
    """K, draft tokens in a row."""
    blocks: int = 1
    """Residual blocks of a head; 4 in Hydra++."""
    head: str = "trained"
    """trained: each head's own, copied from the target; frozen: the target's rows as they are for all."""
    init_from: str = ""
    """Folder or hub id of a published drafter whose weights training starts from; "": new ones."""

    def __post_init__(self):
        at_least("drafter.heads", self.heads, 1)
        at_least("drafter.blocks", self.blocks, 1)
        choose("drafter.head", self.head, ("trained", "frozen"))


class Hydra(nn.Module):
    """The network. state_dict() holds the trained tensors; the embedding is the target's."""

    kept_ids: torch.Tensor
    rows_of_target: torch.Tensor
    taps: tuple[int, ...] = ()

    def __init__(self, config: Config, target: Target, kept_ids: torch.Tensor):
        super().__init__()
        self.config = config
        self.vocab_size = target.vocab_size
        D, own = target.hidden_size, config.heads if config.head == "trained" else 0
        self.blocks = nn.ModuleList(
            ResBlocks(D, config.blocks, extra=(k + 1) * D) for k in range(config.heads)
        )
        self.lm_heads, rows = slot_heads(target, kept_ids, own)
        self.register_buffer("kept_ids", kept_ids.long(), persistent=False)
        self.register_buffer("rows_of_target", rows, persistent=False)
        self._embedding = (target.embedding,)  # in a tuple, so that it is no submodule

    def state(self, slot: int, final_ND: torch.Tensor, seen_NS: torch.Tensor) -> torch.Tensor:
        """The state [N, D] of head `slot` at target states and the S = slot + 1 tokens behind each."""
        embedded = self._embedding[0](seen_NS).flatten(1)
        dtype = next(self.parameters()).dtype
        return self.blocks[slot](torch.cat((final_ND.to(dtype), embedded.to(dtype)), -1))

    def head_weight(self) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """The head [W, D] of all slots, or that of each slot."""
        own = tuple(self.lm_heads.parameters())
        return own or self.rows_of_target

    def index(self, tokens: TokenBatch) -> RowIndex:
        """The supervised (row, slot) pairs, slot after slot."""
        return supervised_rows(tokens, self.config.heads)

    def rows(self, batch: FeatureBatch) -> Rows:
        """The state of head k, behind the text's own tokens, for every supervised pair of slot k."""
        index, ids = self.index(batch.tokens), batch.tokens.ids
        states = []
        for k in range(index.slots):
            row = index.row[index.slot == k]
            seen = ids[row[:, None] + torch.arange(1, k + 2, device=ids.device)]
            states.append(self.state(k, batch.final[row], seen))
        return Rows(index=index, state=torch.cat(states))

    def start(self, num_requests: int, capacity: int) -> "HydraDrafting":
        """Decoding state for `num_requests` requests."""
        return HydraDrafting(self, num_requests)

    def weights_read(self) -> tuple[int, int]:
        """A head at each step, their mean."""
        every = sum(p.numel() for p in self.parameters()) // self.config.heads
        return every + self.rows_of_target.numel(), 0

    def export_tensors(self, engine: str) -> dict[str, torch.Tensor]:
        """The file's tensors by the authors' names."""
        trained = bool(len(self.lm_heads))
        return authors_tensors(self.state_dict(), self.config.heads, self.rows_of_target, trained)

    def engine_config(self, target: Target, engine: str) -> dict[str, Any]:
        """config.json's keys of the authors' code. Raises ValueError for an engine, since none has Hydra's
        heads, and for what that code builds otherwise."""
        if engine != "reference":
            raise ValueError(f"export.engine={engine}: no export of hydra: {NOT_SERVED[engine]}")
        if self.config.blocks != 1:
            raise ValueError(f"drafter.blocks={self.config.blocks}: expected 1 for the authors' code")
        if len(self.kept_ids) != self.vocab_size:
            raise ValueError(f"drafter.draft_vocab={len(self.kept_ids)}: expected 0 for the authors' code")
        return {
            "architectures": ["HydraModel"],
            "hydra_num_heads": self.config.heads,
            "hydra_num_layers": self.config.blocks,
            "hydra_head_arch": "mlp",
            "grounded_heads": True,
            "hidden_state_offset": 0,
            "base_model_name_or_path": resolve_path(target.path),
            "hidden_size": target.hidden_size,
        }


class HydraDrafting:
    """The drafter at work on several requests (`spectrain.proposal.Drafting`).

    paths: of each request asked, the tokens from its root on: the root's own, then each node's in order of
    arrival.
    """

    def __init__(self, drafter: Hydra, num_requests: int):
        self.drafter = drafter
        self.kept_ids, self.vocab_size = drafter.kept_ids, drafter.vocab_size
        self.newest = NewestRows(num_requests, drafter)
        self.paths: dict[int, list[list[int]]] = {}
        self.steps = 0

    def observe(self, observations: Sequence[Observation]) -> None:
        self.newest.observe(observations)

    @torch.no_grad()
    def propose(self, requests: Sequence[int], plan: Plan, sampler: Sampler) -> list[Proposal]:
        check_reach(plan, self.drafter.config.heads)
        return grow(self, requests, plan, sampler)

    def root_positions(self, requests: Sequence[int]) -> list[int]:
        return [self.newest.positions[request] for request in requests]

    def root_logits(self, requests: Sequence[int]) -> torch.Tensor:
        roots = [[root] for root in self.newest.roots[requests].tolist()]
        self.paths = {request: [root] for request, root in zip(requests, roots, strict=True)}
        return self._logits(requests, roots)

    def step(self, requests: Sequence[int], parents: Sequence[int], tokens: torch.Tensor) -> torch.Tensor:
        """All M nodes lie at the same depth."""
        paths = []
        for request, parent, token in zip(requests, parents, tokens.tolist(), strict=True):
            paths.append([*self.paths[request][parent + 1], token])
            self.paths[request].append(paths[-1])
        return self._logits(requests, paths)

    def _logits(self, requests: Sequence[int], paths: Sequence[list[int]]) -> torch.Tensor:
        self.steps += 1
        slot, head = len(paths[0]) - 1, self.drafter.head_weight()
        seen = torch.tensor(paths, device=self.kept_ids.device)
        state = self.drafter.state(slot, self.newest.final[requests], seen)
        return F.linear(state, head if isinstance(head, torch.Tensor) else head[slot])


def build(config: Config, target: Target, kept_ids: torch.Tensor) -> Hydra:
    """An initialised drafter on the target's device. kept_ids: int64 [W], the draft vocabulary, ascending."""
    return Hydra(config, target, kept_ids).to(target.device)

"""Medusa: parallel heads on the target's last state (Cai et al. 2024, sections 2.1.1 and 2.2.1).

Head k is a stack of residual blocks and a head over the kept ids, on the target's state after its final norm
at token t alone: it sees neither the root x_n, n = t + 1, nor any draft token. It predicts token t + 2 + k,
slot k of the root; the paper's head k + 1, whose head 0 is the target's own. Row t counts at slot k iff
tokens t + 1 and t + 2 + k lie in one span. One document of 6 tokens with span {2, 3, 4} and 2 heads:
    slot 0: rows 1, 2 (predict tokens 3, 4)   slot 1: row 1 (token 4)
The paper's weight 0.8^k of head k is objective.slot_decay. All heads run once a round, so a deeper draft
costs no step (an adaptive run should be told so: eval.runs.N.costs=[root, 0, node]), and their ranks do not
depend on the parent: a tree is a product of ranks.

Trained on the target as it is, it is Medusa-1; with `joint.rank` the target is trained too, and it is
Medusa-2 (`spectrain/joint.py`).

The reference builds its blocks as one module used several times; here each has weights of its own, and the
blocks start at zero, so that an untrained head says what the target's head says.
Legend: T tokens, R rows, N states, M requests, K heads, D hidden, W kept ids.
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
from spectrain.drafters.layers import ResBlocks, supervised_rows
from spectrain.drafters.medusa_forms import authors_tensors
from spectrain.drafters.medusa_forms import imported as imported
from spectrain.drafters.newest_row import NewestRows, check_reach, slot_heads
from spectrain.features import FeatureBatch
from spectrain.objectives import RowIndex, Rows
from spectrain.proposal import Observation, Plan, Proposal, Sampler
from spectrain.target import Target, resolve_path

SERVED = {"vllm": ("medusa", "medusa"), "reference": ("medusa-reference", "MedusaModel")}
NOT_SERVED = {
    "sglang": "it has no Medusa",
    "speculators": "0.9 has no Medusa",
    "trtllm": "its PyTorch backend has no Medusa",
}
AUTHORS_HEADS = 5  # that their code builds whatever a file of heads says


@dataclass(frozen=True, kw_only=True)
class Config:
    family: str = "medusa"
    draft_vocab: int = 0
    """Kept ids of the draft vocabulary; 0 keeps the target's whole vocabulary."""
    heads: int = 5
    """K, draft tokens in a row."""
    blocks: int = 1
    """Residual blocks of a head."""
    head: str = "trained"
    """trained: each head's own, copied from the target; frozen: the target's rows as they are for all."""
    init_from: str = ""
    """Folder or hub id of a published drafter whose weights training starts from; "": new ones."""

    def __post_init__(self):
        at_least("drafter.heads", self.heads, 1)
        at_least("drafter.blocks", self.blocks, 1)
        choose("drafter.head", self.head, ("trained", "frozen"))


class Medusa(nn.Module):
    """The network. state_dict() holds the trained tensors under the names that vLLM reads."""

    kept_ids: torch.Tensor
    rows_of_target: torch.Tensor
    taps: tuple[int, ...] = ()

    def __init__(self, config: Config, target: Target, kept_ids: torch.Tensor):
        super().__init__()
        self.config = config
        self.vocab_size = target.vocab_size
        D, own = target.hidden_size, config.heads if config.head == "trained" else 0
        self.blocks = nn.ModuleList(ResBlocks(D, config.blocks) for _ in range(config.heads))
        self.lm_heads, rows = slot_heads(target, kept_ids, own)
        self.register_buffer("kept_ids", kept_ids.long(), persistent=False)
        self.register_buffer("rows_of_target", rows, persistent=False)

    def head_weight(self) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """The head [W, D] of all slots, or that of each slot."""
        own = tuple(self.lm_heads.parameters())
        return own or self.rows_of_target

    def index(self, tokens: TokenBatch) -> RowIndex:
        """The supervised (row, slot) pairs, slot after slot."""
        return supervised_rows(tokens, self.config.heads)

    def rows(self, batch: FeatureBatch) -> Rows:
        """The state behind the blocks of head k for every supervised pair of slot k."""
        index = self.index(batch.tokens)
        states = []
        for k, blocks in enumerate(self.blocks):
            final = batch.final[index.row[index.slot == k]]
            states.append(blocks(final.to(next(self.parameters()).dtype)))
        return Rows(index=index, state=torch.cat(states))

    def logits(self, final_MD: torch.Tensor, slots: int) -> torch.Tensor:
        """Logits [slots, M, W] of the first heads."""
        states = torch.stack([blocks(final_MD) for blocks in self.blocks[:slots]])
        if not len(self.lm_heads):
            return F.linear(states, self.rows_of_target)
        return torch.stack([head(state) for head, state in zip(self.lm_heads, states, strict=False)])

    def start(self, num_requests: int, capacity: int) -> "MedusaDrafting":
        """Decoding state for `num_requests` requests."""
        return MedusaDrafting(self, num_requests)

    def weights_read(self) -> tuple[int, int]:
        """All once a round."""
        return 0, sum(p.numel() for p in self.parameters()) + self.rows_of_target.numel()

    def export_tensors(self, engine: str) -> dict[str, torch.Tensor]:
        """The file's tensors by vLLM's names, where the target's rows are lm_heads.0 if they are all heads';
        or by the authors', where each head has its own."""
        if engine == "reference":
            return authors_tensors(self.state_dict(), self.config, self.rows_of_target)
        shared = {} if len(self.lm_heads) else {"lm_heads.0.weight": self.rows_of_target}
        return {**self.state_dict(), **shared}

    def engine_config(self, target: Target, engine: str) -> dict[str, Any]:
        """config.json's keys of this family. Raises ValueError for a reduced vocabulary, which vLLM 0.32 has
        no way to load (it ends at "weights were not initialized from checkpoint: {'token_map'}"), and for
        what the authors' code builds otherwise."""
        if len(self.kept_ids) != self.vocab_size:
            raise ValueError(
                f"drafter.draft_vocab={len(self.kept_ids)}: expected 0 for the export of Medusa: vLLM's "
                "loader refuses the map of a reduced vocabulary, the authors' code has none"
            )
        authors = {}
        if engine == "reference":
            for key, value, known in (
                ("heads", self.config.heads, AUTHORS_HEADS),
                ("blocks", self.config.blocks, 1),
            ):
                if value != known:
                    raise ValueError(f"drafter.{key}={value}: expected {known} for the authors' code")
            authors = {
                "medusa_num_heads": self.config.heads,
                "medusa_num_layers": self.config.blocks,
                "base_model_name_or_path": resolve_path(target.path),
            }
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": target.hidden_size,
            "num_heads": self.config.heads,
            "num_hidden_layers": self.config.blocks,
            "truncated_vocab_size": self.vocab_size,
            "medusa_fc_bias": True,
            "original_lm_head": engine == "vllm" and not len(self.lm_heads),
            "max_position_embeddings": target.config.max_position_embeddings,
            **authors,
        }


class MedusaDrafting:
    """The drafter at work on several requests (`spectrain.proposal.Drafting`).

    logits_KMW: of all heads at the requests of one `propose`, whose rows are `row`; depth: of each node of a
    request in order of arrival.
    """

    def __init__(self, drafter: Medusa, num_requests: int):
        self.drafter = drafter
        self.kept_ids, self.vocab_size = drafter.kept_ids, drafter.vocab_size
        self.newest = NewestRows(num_requests, drafter)
        self.steps = 0

    def observe(self, observations: Sequence[Observation]) -> None:
        self.newest.observe(observations)

    @torch.no_grad()
    def propose(self, requests: Sequence[int], plan: Plan, sampler: Sampler) -> list[Proposal]:
        check_reach(plan, self.drafter.config.heads)
        self.steps += 1
        self.logits_KMW = self.drafter.logits(self.newest.final[requests], plan.length)
        self.row = {request: row for row, request in enumerate(requests)}
        self.depth: dict[int, list[int]] = {request: [] for request in requests}
        return grow(self, requests, plan, sampler)

    def root_positions(self, requests: Sequence[int]) -> list[int]:
        return [self.newest.positions[request] for request in requests]

    def root_logits(self, requests: Sequence[int]) -> torch.Tensor:
        return self.logits_KMW[0, [self.row[request] for request in requests]]

    def step(self, requests: Sequence[int], parents: Sequence[int], tokens: torch.Tensor) -> torch.Tensor:
        depths = []
        for request, parent in zip(requests, parents, strict=True):
            known = self.depth[request]
            depths.append(1 if parent < 0 else known[parent] + 1)
            known.append(depths[-1])
        return self.logits_KMW[depths, [self.row[request] for request in requests]]


def build(config: Config, target: Target, kept_ids: torch.Tensor) -> Medusa:
    """An initialised drafter on the target's device. kept_ids: int64 [W], the draft vocabulary, ascending."""
    return Medusa(config, target, kept_ids).to(target.device)

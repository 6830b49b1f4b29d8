"""From rows to a loss: which divergences, which weight per slot, divided by the global count of each (term,
slot).

A family says which rows exist (`RowIndex`, from masks alone) and computes the drafter's state on them
(`Rows`); the fused op `kernels/linear_divergence.py` does the rest. One term is no divergence: smooth_l1
compares the state itself with the target's (EAGLE-1), which makes sense under the target's own head only.
Knows no family.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy, smooth_l1_loss

from spectrain.config import ObjectiveConfig
from spectrain.data.packing import Sample, pack
from spectrain.features import FeatureBatch
from spectrain.kernels.linear_divergence import Teacher, linear_divergence
from spectrain.target import Target

# Rows of all slots: enough that passing over the head's gradient once per chunk is cheap. At 800 TFLOP/s and
# 4.8 TB/s it takes, by arithmetic, a twentieth of the time of the chunk's products for 4096 rows.
CHUNK = {"cpu": 512, "cuda": 4096}


@dataclass(frozen=True)
class RowIndex:
    """The supervised (row, slot) pairs of a batch. All int64 [R].

    row: token position t of the feature that the drafter starts from; slot: k; source: token position whose
    target law p is learnt (its next token is the label); slots: the number K of slots.
    """

    row: torch.Tensor
    slot: torch.Tensor
    source: torch.Tensor
    slots: int


@dataclass(frozen=True)
class Rows:
    """index: the R pairs; state [R, D]: the drafter's state after its final norm, ready for its head."""

    index: RowIndex
    state: torch.Tensor


@dataclass(frozen=True)
class ObjectiveResult:
    """loss: scalar with graph, this batch's share of the step's loss; stats: sums per slot, float64 [K], not
    divided: "loss" (weighted share), "alpha" (exact sum min(p, q)), "agree" (same arg-max), "count"
    (supervised rows)."""

    loss: torch.Tensor
    stats: dict[str, torch.Tensor]


# Terms that compare with the target's law renormalised on the kept ids, where its arg-max is kept (field case
# O-V03).
RENORMALISED = ("kl", "reverse_kl", "jsd")


def check_terms(config: ObjectiveConfig, drafter, target: Target) -> None:
    """Raise ValueError for smooth_l1 with a drafter whose states are not to equal the target's, and for
    D-PACE with one that learns a single slot."""
    if config.dpace and num_slots(drafter) == 1:
        raise ValueError(
            f"objective.dpace={config.dpace}: drafter {drafter.config.family} learns one slot here; D-PACE "
            "weighs slots against each other"
        )
    if "smooth_l1" not in config.terms:
        return
    head, family = drafter.head_weight(), drafter.config.family
    if not isinstance(head, torch.Tensor) or head.requires_grad:
        raise ValueError(
            f"objective.terms.smooth_l1: family {family} trains its head; the term compares states, which "
            "only says something under the target's own head"
        )
    if head.shape[1] != target.hidden_size:
        raise ValueError(
            f"objective.terms.smooth_l1: the states of family {family} are {head.shape[1]} wide: expected "
            f"{target.hidden_size}, as the target's"
        )


def num_slots(drafter) -> int:
    """How many slots a drafter learns, asked with a text of one token."""
    ids = torch.zeros(1, dtype=torch.int32)
    return drafter.index(pack([Sample("", ids, torch.zeros(1, dtype=torch.bool), ids - 1)])).slots


class Objective:
    """Weighted sum of divergences, each divided by its own global count per slot.

    loss = sum_term w_term sum_k decay^k / N(term, k) sum_rows term(row), N over all processes and micro-steps
    of the step. With D-PACE w_term / N(term, 0) sum_rows pace(row) term(row).
    """

    def __init__(self, config: ObjectiveConfig, drafter, target: Target):
        check_terms(config, drafter, target)
        self.config = config
        kept = drafter.kept_ids
        self.kept_ids = kept
        self.teacher_head = target.head.weight[kept].float()
        self.teacher_bias = None if target.head.bias is None else target.head.bias[kept].float()
        self.adjust = target.adjust
        self.position = torch.full((target.vocab_size,), -1, device=kept.device)
        self.position[kept] = torch.arange(len(kept), device=kept.device)

    def _counted(self, term: str, index: RowIndex, batch: FeatureBatch) -> torch.Tensor:
        """bool [R]: rows that the term counts."""
        if term == "ce":
            return self.position[batch.tokens.ids[index.source + 1]] >= 0
        if term in RENORMALISED:
            return self.position[batch.argmax[index.source]] >= 0
        return torch.ones_like(index.row, dtype=torch.bool)

    def count(self, index: RowIndex, batch: FeatureBatch) -> torch.Tensor:
        """Rows per (term, slot), float64 [terms, K]; sum over micro-batches and processes, then pass to
        `loss`."""
        counts = torch.zeros(
            len(self.config.terms), index.slots, dtype=torch.float64, device=index.row.device
        )
        for i, term in enumerate(self.config.terms):
            counted = self._counted(term, index, batch)
            counts[i] = torch.bincount(index.slot[counted], minlength=index.slots)
        return counts

    def loss(
        self,
        rows: Rows,
        batch: FeatureBatch,
        head_WD: torch.Tensor | Sequence[torch.Tensor],
        counts: torch.Tensor,
    ) -> ObjectiveResult:
        """This batch's share of the loss of the optimizer step whose global counts are `counts` [terms, K].

        head_WD: the drafter's head, or one for each slot.
        """
        index = rows.index
        if not len(index.row):
            zeros = torch.zeros(index.slots, dtype=torch.float64)
            heads = (head_WD,) if isinstance(head_WD, torch.Tensor) else head_WD
            zero = rows.state.sum() + sum(head[:0].sum() for head in heads)
            return ObjectiveResult(
                zero, {name: zeros.clone() for name in ("loss", "alpha", "agree", "count")}
            )
        label = self.position[batch.tokens.ids[index.source + 1]]
        chunk = self.config.chunk or max(1, CHUNK[rows.state.device.type] // index.slots)
        if self.config.dpace:
            counts = counts[:, :1].expand_as(counts)
            probability = label_probability(rows.state, head_WD, index.slot, label, chunk * index.slots)
            of_slot = pace(index, probability, self.config.dpace)
        else:
            of_slot = self.config.slot_decay ** index.slot.double()
        weights = {}
        for i, (term, weight) in enumerate(self.config.terms.items()):
            of_row = weight * of_slot / counts[i].clamp(min=1)[index.slot]
            counted = self._counted(term, index, batch)
            weights[term] = torch.where(counted, of_row, 0.0).float()
        regression = weights.pop("smooth_l1", None)
        sources, local = torch.unique(index.source, return_inverse=True)
        state, lse = batch.final[sources], batch.lse[sources]
        teacher = Teacher(state, lse, self.teacher_head, self.adjust, self.teacher_bias)
        loss, per_row = linear_divergence(
            rows.state.float(),
            head_WD,
            teacher,
            local,
            index.slot,
            weights,
            label_R=label if "ce" in weights else None,
            top1_M=self.position[batch.argmax[sources]],
            lambda_decay=self.config.lambda_decay,
            chunk=chunk,
        )
        if regression is not None:
            distance = smooth_l1_loss(rows.state.float(), batch.final[index.source].float(), reduction="none")
            share = distance.mean(-1) * regression
            loss, per_row["loss"] = loss + share.sum(), per_row["loss"] + share.detach()
        stats = {name: self._per_slot(index, value) for name, value in per_row.items()}
        stats["count"] = torch.bincount(index.slot, minlength=index.slots).double()
        return ObjectiveResult(loss, stats)

    @staticmethod
    def _per_slot(index: RowIndex, value_R: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(index.slots, dtype=torch.float64, device=value_R.device)
        return zeros.index_add_(0, index.slot, value_R.double())


@torch.no_grad()
def label_probability(
    state_RD: torch.Tensor,
    head_WD: torch.Tensor | Sequence[torch.Tensor],
    slot_R: torch.Tensor,
    label_R: torch.Tensor,
    chunk: int,
) -> torch.Tensor:
    """The drafter's probability of each row's label, float32 [R], 0 where the label is not kept (-1), logits
    of `chunk` rows at a time."""
    probability = torch.zeros_like(state_RD[:, 0], dtype=torch.float32)
    for slot in slot_R.unique().tolist():
        head = head_WD if isinstance(head_WD, torch.Tensor) else head_WD[slot]
        kept = ((slot_R == slot) & (label_R >= 0)).nonzero()[:, 0]
        for rows in kept.split(chunk):
            with torch.autocast(state_RD.device.type, enabled=False):  # bfloat16 logits would be too coarse
                logits = state_RD[rows].float() @ head.float().t()
            probability[rows] = cross_entropy(logits, label_R[rows], reduction="none").neg().exp()
    return probability


def pace(index: RowIndex, probability_R: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Weights of D-PACE (arXiv 2605.18810), float64 [R]: sum_{m >= k} prod_{i <= m} ((1 - smoothing) q_i +
    smoothing), over the slots that the row has. With smoothing 0 it is d E[accepted] / d log q_k."""
    _, start = torch.unique(index.row, return_inverse=True)
    chance = torch.zeros(int(start.max()) + 1, index.slots, dtype=torch.float64, device=index.row.device)
    chance[start, index.slot] = (1 - smoothing) * probability_R.double() + smoothing
    reached = chance.cumprod(1)  # ends at the first slot that a row does not have
    return reached.flip(1).cumsum(1).flip(1)[start, index.slot]

"""What a drafter without a memory of the text keeps of each request: its newest observed row.

Such a family (Medusa, Hydra) drafts from the target's state at position t = n - 1 and the root x_n, with one
head per slot. Knows no head. Legend: M requests asked, D hidden.
"""

from collections.abc import Sequence

import torch
from torch import nn

from spectrain.drafters.layers import share_tensor
from spectrain.proposal import Observation, Plan
from spectrain.target import Target


class NewestRows:
    """For a drafter whose heads are `layers.ResBlocks` named `blocks`.

    final [requests, D]: the target's state after its final norm at the newest row of each request; roots
    int64 [requests]: the token x_n behind it; positions: n, 0 where nothing was observed.
    """

    def __init__(self, num_requests: int, drafter: nn.Module):
        like_D = drafter.get_parameter("blocks.0.layers.0.bias")
        self.final = like_D.new_zeros(num_requests, len(like_D))
        self.roots = torch.full((num_requests,), -1, device=like_D.device)
        self.positions = [0] * num_requests

    def observe(self, observations: Sequence[Observation]) -> None:
        for o in observations:
            known = self.positions[o.request]
            assert o.start in (0, known), f"request {o.request}: row {o.start} follows {known} rows"
            self.final[o.request] = o.final[-1]
            self.roots[o.request] = o.next_ids[-1]
            self.positions[o.request] = o.start + len(o.next_ids)


def slot_heads(target: Target, kept_ids: torch.Tensor, count: int) -> tuple[nn.ModuleList, torch.Tensor]:
    """`count` heads that start as the target's rows at the kept ids, and, if there are none, those rows
    themselves, float32 [W, D] (else [0, D])."""
    rows = target.head.weight[kept_ids.to(target.device)].float()
    heads = [nn.Linear(rows.shape[1], len(rows), bias=False) for _ in range(count)]
    for head in heads:
        share_tensor(head.weight, rows)
    return nn.ModuleList(heads), rows[: 0 if count else None]


def check_reach(plan: Plan, heads: int) -> None:
    """Raise ValueError unless a drafter with `heads` heads can draft as deep as the plan says."""
    if plan.length > heads:
        raise ValueError(
            f"{plan.shape} of length {plan.length}: the drafter has {heads} heads (drafter.heads), one per "
            f"draft token in a row; expected a length of at most {heads} (eval.runs)"
        )

"""Recursive rejection of siblings that were drawn one after the other without replacement.

With p_1 = p and q_1 = q, sibling x_j was drawn from q_j, which is q without the earlier siblings. It is kept
with probability min(1, p_j(x_j) / q_j(x_j)); otherwise p_{j+1} = (p_j - q_j)+ / sum (p_j - q_j)+ faces the
next one. After the last a token is drawn from what is left (Jeon et al. 2024).
The level emits a token of law p: what follows the refusal of x_j has the law p_{j+1}, for every j. How many
siblings are drawn may depend on anything known before the first of them. One sibling gives `rejection`.

    p = .5 .3 .2, q = .2 .2 .6, siblings 2, 0: the first is kept with .2/.6 = 1/3, p_2 = .75 .25 0 faces
    q_2 = .5 .5 0, so the second is kept for certain and has the share 2/3

Knows no model and no streams. Legend: R walks, V vocabulary.
"""

from collections.abc import Sequence

import torch

from spectrain.decode.walk import normal, not_drawn


def siblings(
    p_RV: torch.Tensor, q_RV: torch.Tensor, offered: Sequence[Sequence[int]]
) -> tuple[list[list[float]], torch.Tensor]:
    """Each row's shares of one uniform for its siblings in order, and the law [R, V] after all were refused.

    The refusals of a row's siblings depend on nothing but its coins, so one uniform may decide them all:
    sibling j has the share chance_j * product of (1 - chance_i) over the earlier ones. Raises ValueError for
    a sibling of q 0.
    """
    p, q = normal(p_RV), normal(q_RV)
    R, width = len(offered), max(map(len, offered))
    shares = p.new_zeros(R, width)
    drawn_from = p.new_zeros(R, width)
    reach = p.new_ones(R)
    for j in range(width):
        rows = torch.tensor([row for row in range(R) if len(offered[row]) > j], device=p.device)
        tokens = torch.tensor([row[j] for row in offered if len(row) > j], device=p.device)
        p_j, q_j = p[rows], q[rows] / q[rows].sum(-1, keepdim=True)
        drawn_from[rows, j] = q[rows, tokens]
        q_x = q_j.gather(1, tokens[:, None])[:, 0]
        chance = (p_j.gather(1, tokens[:, None])[:, 0] / q_x).clamp(max=1)
        shares[rows, j] = reach[rows] * chance
        reach[rows] *= 1 - chance
        rest = (p_j - q_j).clamp_(min=0)
        mass = rest.sum(-1, keepdim=True)
        p[rows] = torch.where(mass > 0, rest / mass, p_j)
        q[rows, tokens] = 0
    for row, q_x in zip(offered, drawn_from.tolist(), strict=True):
        for token, value in zip(row, q_x, strict=False):
            if not value > 0:
                raise not_drawn(token, value)
    return [row[: len(some)] for row, some in zip(shares.tolist(), offered, strict=True)], p

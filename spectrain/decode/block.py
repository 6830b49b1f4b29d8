"""Block verification: how much of a drawn chain to keep, decided jointly (Sun et al. 2024, algorithm 2).

With x_1 .. x_g drawn from q_1 .. q_g and p_{i+1} the target's law after x_i:

    w_0 = 1, w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i))                 the chance that i or more are kept
    S_i = sum (w_i p_{i+1} - q_{i+1})+                                 what the law still owes after x_i
    h_i = S_i / (S_i + 1 - w_i) for i < g, h_g = w_g

The longest i whose own coin falls below h_i is kept; the next token is drawn from (w_i p_{i+1} - q_{i+1})+,
or from p_{g+1} if all are kept. The expected number kept is the largest of all laws for chains, so never
below that of `rejection`. Lossless if whether x_k is drafted depends on no token from x_k on. Given
x_1 .. x_k and that they are kept, slot k is kept with probability sum min(p_{k+1}, q_{k+1} / w_k), which is
1 - S_k / w_k.

    p = .75 .25, q = .25 .75 at both places, x = 1 1: w = 1, 1/3, 1/9; S_1 = 0, so nothing is kept where x_2
    is refused

Knows no model. Legend: R walks, V vocabulary.
"""

from collections.abc import Sequence

import torch

from spectrain.decode.sampling import BONUS, RESIDUAL, Streams
from spectrain.decode.walk import Laws, Walk, end, normal, not_drawn, or_target


def block(walks: Sequence[Walk], live: list[int], laws: Laws, streams: Streams) -> None:
    """Take the walks numbered `live`, chains with a q, to their ends."""
    weights = {i: [1.0] for i in live}  # w_0 ..
    owed: dict[int, list[float]] = {i: [] for i in live}  # S_0 ..
    going = live
    while going:
        depth = len(owed[going[0]])
        w_R = torch.tensor([weights[i][-1] for i in going], dtype=torch.float64)
        p_RV, q_RV, surplus_RV = _surplus(walks, going, [depth - 1] * len(going), w_R, laws)
        tokens = torch.tensor([[walks[i].tokens[depth]] for i in going], device=p_RV.device)
        values = (surplus_RV.sum(-1), p_RV.gather(1, tokens)[:, 0], q_RV.gather(1, tokens)[:, 0])
        for i, S, p, q in zip(going, *torch.stack(values).tolist(), strict=True):
            if not q > 0:
                raise not_drawn(walks[i].tokens[depth], q)
            owed[i].append(S)
            weights[i].append(min(1.0, weights[i][-1] * p / q))
        # Behind a token of weight 0 nothing can be kept.
        going = [i for i in going if weights[i][-1] > 0 and depth + 1 < len(walks[i].tokens)]
    for i in live:
        kept = walks[i].choose(_chances(weights[i], owed[i]), streams)
        walks[i].path = list(range(kept))
        alphas = [1 - S / w for S, w in zip(owed[i], weights[i], strict=False)]
        walks[i].alphas = [min(1.0, max(0.0, alpha)) for alpha in alphas[: kept + 1]]
    whole = [i for i in live if len(walks[i].path) == len(walks[i].tokens)]
    if whole:
        end([walks[i] for i in whole], laws(whole, [walks[i].node for i in whole]), streams, BONUS)
    if part := [i for i in live if i not in whole]:
        w_R = torch.tensor([weights[i][len(walks[i].path)] for i in part], dtype=torch.float64)
        p_RV, _, surplus_RV = _surplus(walks, part, [walks[i].node for i in part], w_R, laws)
        end([walks[i] for i in part], or_target(surplus_RV, p_RV), streams, RESIDUAL)


def _surplus(
    walks: Sequence[Walk], which: list[int], nodes: list[int], w_R: torch.Tensor, laws: Laws
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """p, q and (w p - q)+ at a node of each walk, float64 [R, V]."""
    p_RV = normal(laws(which, nodes))
    q_RV = normal(torch.stack([walks[i].q_V(node) for i, node in zip(which, nodes, strict=True)]))
    return p_RV, q_RV, (w_R[:, None].to(p_RV.device) * p_RV - q_RV).clamp_(min=0)


def _chances(weights: Sequence[float], owed: Sequence[float]) -> list[float]:
    """Probability of keeping exactly 0 .. g - 1 tokens, the rest being that of g: one coin for all of h."""
    bars = [1.0 if w >= 1 else S / (S + 1 - w) for S, w in zip(owed, weights, strict=False)]
    chances, left = [], 1.0 - weights[-1]
    for bar in reversed(bars):
        chances.append(left * bar)
        left *= 1 - bar
    return chances[::-1]

"""Which draft tokens the target keeps: one walk from the root for every law, greedy being its limit.

At each level, with p the target's law at the last accepted node:
    target_only  the children in order take p(child) of one uniform each, else a token outside them is drawn
                 from p. Lossless for any distinct siblings chosen without looking at the coins.
    rejection    the one child x, drawn from q, is kept with probability min(1, p(x) / q(x)), else a token is
                 drawn from (p - q)+ (Leviathan et al. 2023, algorithm 1).
    recursive    siblings drawn one after the other without replacement, the same for each in turn: see
                 `decode/recursive.py`.
    thresholds   `target_only` with wider shares: see `lenient`. Lossy.
After a node without children the bonus token is drawn from p. Two laws look at the whole proposal instead:
`block` (`decode/block.py`) and the lossy `typical` (`decode/typical.py`). A chosen (not drawn) child has a
one-hot q, for which `rejection`, `block` and `recursive` are `target_only`. Knows no model and no text
limits. Legend: R live requests, V vocabulary.
"""

from collections.abc import Sequence

import torch

from spectrain.decode.block import block
from spectrain.decode.recursive import siblings
from spectrain.decode.sampling import BONUS, RESIDUAL, Streams
from spectrain.decode.typical import typical
from spectrain.decode.walk import Laws, Walk, end, gather, not_drawn, or_target
from spectrain.laws import CHAIN_LAWS, TREE_LAWS, Leniency
from spectrain.proposal import Proposal, Verdict

DEFAULT = Leniency()


def check_proposal(proposal: Proposal, vocab_size: int, law: str) -> None:
    """Raise ValueError for a proposal that `law` does not cover.

    That is twins among siblings, a parent after its child, a tree for a law of chains, an id outside the
    vocabulary.
    """
    tokens, parents = proposal.tokens.tolist(), proposal.parents
    if len(tokens) != len(parents):
        raise ValueError(f"proposal: {len(tokens)} tokens but {len(parents)} parents")
    seen = set()
    for i, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
        if not -1 <= parent < i:
            raise ValueError(f"proposal: node {i} has parent {parent}, expected -1 to {i - 1}")
        if not 0 <= token < vocab_size:
            raise ValueError(f"proposal: node {i} has token {token}, expected 0 to {vocab_size - 1}")
        if (parent, token) in seen:
            raise ValueError(f"proposal: node {parent} has child token {token} twice; siblings must differ")
        seen.add((parent, token))
    if law in CHAIN_LAWS and any(parent != i - 1 for i, parent in enumerate(parents)):
        raise ValueError(f"law={law}: the proposal is a tree, expected law={' or '.join(TREE_LAWS)}")


def verify(
    proposals: Sequence[Proposal],
    laws: Laws,
    *,
    law: str,
    streams: Streams,
    requests: Sequence[int],
    root_positions: Sequence[int],
    leniency: Leniency = DEFAULT,
    at_once: int | None = None,
) -> list[Verdict]:
    """One verdict per proposal, all checked by `check_proposal`.

    laws: see `walk.Laws`; `block` asks for the whole chain, `typical` for every node whose path it accepts,
    the others for reached nodes only. requests and root_positions key the random numbers. leniency: of the
    lossy laws. at_once: requests that walk together (None: all), a matter of memory and speed alone.
    """
    walks = [Walk(*each) for each in zip(proposals, requests, root_positions, strict=True)]
    size = at_once or len(walks)
    for first in range(0, len(walks), size):
        live = list(range(first, min(first + size, len(walks))))
        if law == "typical":
            typical(walks, live, laws, leniency, streams)
            continue
        if law == "block":
            drawn = [i for i in live if walks[i].q is not None and walks[i].tokens]
            block(walks, drawn, laws, streams)
            live = [i for i in live if i not in drawn]
        _run(walks, live, laws, law, leniency, streams)
    return [Verdict(tuple(walk.path), walk.bonus, tuple(walk.alphas)) for walk in walks]


def lenient(chances: Sequence[float], leniency: Leniency) -> list[float]:
    """Shares of one uniform u by SGLang's two thresholds, from the children's p in order.

    The first child with p > 0 and (u < P / threshold_acc or p >= threshold_single) is accepted, P being the
    sum of p up to it. Both at 1 give back `chances`.

        p = .2 .3, threshold_acc .5: u < .4, then u < 1: shares .4 .6
    """
    shares, mass, taken = [], 0.0, 0.0
    for p in chances:
        mass += p
        reach = 1.0 if p >= leniency.threshold_single else min(1.0, mass / leniency.threshold_acc)
        upper = max(taken, reach) if p > 0 else taken
        shares.append(upper - taken)
        taken = upper
    return shares


def _run(
    walks: Sequence[Walk], live: list[int], laws: Laws, law: str, leniency: Leniency, streams: Streams
) -> None:
    """Take the walks numbered `live` to their ends, level by level."""
    while live:
        p_RV = laws(live, [walks[i].node for i in live])
        leaves = [row for row, i in enumerate(live) if not walks[i].offered]
        inner = [row for row, i in enumerate(live) if walks[i].offered]
        if leaves:
            end([walks[live[row]] for row in leaves], p_RV[leaves] if inner else p_RV, streams, BONUS)
        moved: list[bool] = []
        if inner:
            offered_RV = p_RV[inner] if leaves else p_RV
            moved = _descend([walks[live[row]] for row in inner], offered_RV, law, leniency, streams)
        live = [live[row] for row, went_on in zip(inner, moved, strict=True) if went_on]


def _descend(
    walks: Sequence[Walk], p_RV: torch.Tensor, law: str, leniency: Leniency, streams: Streams
) -> list[bool]:
    """One level: accept a child of each walk or end it with a draw from the residual; says who goes on."""
    offered = [walk.offered for walk in walks]
    q_RV = rest_RV = None
    if law in ("rejection", "recursive") and any(walk.q is not None for walk in walks):
        q_RV = torch.stack([walk.q_V(walk.node) for walk in walks])
    if q_RV is not None and law == "recursive":
        chances, rest_RV = siblings(p_RV, q_RV, offered)
        alphas = [sum(row) for row in chances]
    elif q_RV is not None:
        chances, alphas = _ratios(p_RV, q_RV, offered)
    else:
        chances = gather(p_RV, p_RV.sum(-1, dtype=torch.float64), offered)
        if law == "thresholds":
            chances = [lenient(row, leniency) for row in chances]
        alphas = [sum(row) for row in chances]
    moved = []
    for walk, shares, alpha in zip(walks, chances, alphas, strict=True):
        walk.alphas.append(min(1.0, alpha))
        child = walk.choose(shares, streams)
        moved.append(child < len(shares))
        walk.path += walk.children[walk.node][child : child + 1]
    rows = [row for row, went_on in enumerate(moved) if not went_on]
    if rows:
        if rest_RV is not None:
            residual_RV = rest_RV[rows]
        elif q_RV is not None:
            residual_RV = _excess(p_RV[rows], q_RV[rows])
        else:
            residual_RV = p_RV[rows]
            for row, i in enumerate(rows):
                residual_RV[row, offered[i]] = 0
        end([walks[row] for row in rows], or_target(residual_RV, p_RV[rows]), streams, RESIDUAL)
    return moved


def _ratios(
    p_RV: torch.Tensor, q_RV: torch.Tensor, offered: Sequence[list[int]]
) -> tuple[list[list[float]], list[float]]:
    """min(1, p(x) / q(x)) of each row's one token, and sum min(p, q)."""
    p_x = gather(p_RV, p_RV.sum(-1, dtype=torch.float64), offered)
    q_x = gather(q_RV, q_RV.sum(-1, dtype=torch.float64), offered)
    for tokens, (q,) in zip(offered, q_x, strict=True):
        if not q > 0:
            raise not_drawn(tokens[0], q)
    chances = [[min(1.0, p / q)] for (p,), (q,) in zip(p_x, q_x, strict=True)]
    return chances, torch.minimum(p_RV, q_RV).sum(-1).tolist()


def _excess(p_RV: torch.Tensor, q_RV: torch.Tensor) -> torch.Tensor:
    """(p - q)+ of the normalised rows, float64."""
    p_sums, q_sums = (law.sum(-1, keepdim=True, dtype=torch.float64) for law in (p_RV, q_RV))
    return p_RV.double().div_(p_sums).sub_(q_RV.double().div_(q_sums)).clamp_(min=0)

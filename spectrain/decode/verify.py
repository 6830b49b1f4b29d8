"""Which draft tokens the target keeps: one walk from the root for every lossless law, greedy being its limit.

At each level, with p the target's law at the last accepted node:
    target_only  the children in order take p(child) of one uniform each, else a token outside them is drawn
    from p.
                 Lossless for any distinct siblings chosen without looking at the coins.
    rejection    the one child x, drawn from q, is kept with probability min(1, p(x) / q(x)), else a token is
    drawn
                 from (p - q)+ (Leviathan et al. 2023, algorithm 1).
After a node without children the bonus token is drawn from p. A chosen (not drawn) child has q one-hot, for
which `rejection` is `target_only`. Knows no model and no text limits. Legend: R live requests, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch

from spectrain.decode.sampling import BONUS, RESIDUAL, Streams
from spectrain.proposal import Proposal, Verdict

LAWS = ("rejection", "target_only")
Laws = Callable[[Sequence[int], Sequence[int]], torch.Tensor]
ROUNDING = 1e-13  # a smaller rest beside the children's mass is rounding: they hold all of it


def check_proposal(proposal: Proposal, vocab_size: int, law: str) -> None:
    """Raise ValueError for a proposal that no lossless law covers.

    That is twins among siblings, a parent after its child, a tree for `rejection`, an id outside the
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
    if law == "rejection" and any(parent != i - 1 for i, parent in enumerate(parents)):
        raise ValueError("law=rejection: the proposal is a tree, which needs law=target_only")


class _Walk:
    """The way of one request down its proposal."""

    def __init__(self, proposal: Proposal, request: int, root_position: int):
        self.request, self.root_position = request, root_position
        self.q = proposal.q
        self.tokens = proposal.tokens.tolist()
        self.children: dict[int, list[int]] = {}
        for node, parent in enumerate(proposal.parents):
            self.children.setdefault(parent, []).append(node)
        self.path: list[int] = []
        self.alphas: list[float] = []
        self.bonus = -1

    @property
    def node(self) -> int:
        return self.path[-1] if self.path else -1

    @property
    def q_V(self) -> torch.Tensor:
        """The law that the one child was drawn from."""
        assert self.q is not None, "a proposal with q beside one without"
        return self.q[self.children[self.node][0]]

    @property
    def offered(self) -> list[int]:
        """Tokens of the children of the last accepted node."""
        return [self.tokens[child] for child in self.children.get(self.node, ())]

    def choose(self, chances: Sequence[float], streams: Streams) -> bool:
        """Toss the coin of this level: accept a child with its share of `chances`, or none with the rest."""
        rest = 1.0 - sum(chances)
        weights = [*chances, rest if rest > ROUNDING else 0.0]
        chosen = streams.choose(weights, self.request, self.root_position, len(self.path))
        if chosen == len(chances):
            return False
        self.path.append(self.children[self.node][chosen])
        return True


def verify(
    proposals: Sequence[Proposal],
    laws: Laws,
    *,
    law: str,
    streams: Streams,
    requests: Sequence[int],
    root_positions: Sequence[int],
    at_once: int | None = None,
) -> list[Verdict]:
    """One verdict per proposal, all checked by `check_proposal`.

    laws(indices, nodes) gives p, float32 [R, V], of proposals `indices` at `nodes` (-1: the root); only
    reached nodes are asked for. requests and root_positions key the random numbers. at_once: requests that
    walk together (None: all), a matter of memory and speed alone.
    """
    walks = [_Walk(*each) for each in zip(proposals, requests, root_positions, strict=True)]
    size = at_once or len(walks)
    for first in range(0, len(walks), size):
        _run(walks, list(range(first, min(first + size, len(walks)))), laws, law, streams)
    return [Verdict(tuple(walk.path), walk.bonus, tuple(walk.alphas)) for walk in walks]


def _run(walks: Sequence[_Walk], live: list[int], laws: Laws, law: str, streams: Streams) -> None:
    """Take the walks numbered `live` to their ends, level by level."""
    while live:
        p_RV = laws(live, [walks[i].node for i in live])
        leaves = [row for row, i in enumerate(live) if not walks[i].offered]
        inner = [row for row, i in enumerate(live) if walks[i].offered]
        if leaves:
            _draw([walks[live[row]] for row in leaves], p_RV[leaves] if inner else p_RV, streams, BONUS)
        moved: list[bool] = []
        if inner:
            offered_RV = p_RV[inner] if leaves else p_RV
            moved = _descend([walks[live[row]] for row in inner], offered_RV, law, streams)
        live = [live[row] for row, went_on in zip(inner, moved, strict=True) if went_on]


def _draw(walks: Sequence[_Walk], law_RV: torch.Tensor, streams: Streams, purpose: int) -> None:
    """End the walks with a token each, drawn from the rows of `law_RV`."""
    requests = [walk.request for walk in walks]
    roots, slots = [walk.root_position for walk in walks], [len(walk.path) for walk in walks]
    drawn = streams.pick(law_RV, requests, roots, slots, purpose)
    for walk, token in zip(walks, drawn, strict=True):
        walk.bonus = token


def _descend(walks: Sequence[_Walk], p_RV: torch.Tensor, law: str, streams: Streams) -> list[bool]:
    """One level: accept a child of each walk or end it with a draw from the residual; says who goes on."""
    offered = [walk.offered for walk in walks]
    p_sums = p_RV.sum(-1, dtype=torch.float64)
    chances = _gather(p_RV, p_sums, offered)
    q_RV = None
    if law == "rejection" and any(walk.q is not None for walk in walks):
        q_RV = torch.stack([walk.q_V for walk in walks])
        q_sums = q_RV.sum(-1, dtype=torch.float64)
        drawn_from = [row[0] for row in _gather(q_RV, q_sums, offered)]
        alphas = torch.minimum(p_RV, q_RV).sum(-1).tolist()
        for tokens, q in zip(offered, drawn_from, strict=True):
            if not q > 0:
                raise ValueError(f"proposal: draft token {tokens[0]} has q={q}: it was not drawn from this q")
        chances = [[min(1.0, row[0] / q)] for row, q in zip(chances, drawn_from, strict=True)]
    else:
        alphas = [sum(row) for row in chances]
    for walk, alpha in zip(walks, alphas, strict=True):
        walk.alphas.append(min(1.0, alpha))
    moved = [walk.choose(row, streams) for walk, row in zip(walks, chances, strict=True)]
    rows = [row for row, went_on in enumerate(moved) if not went_on]
    if rows:
        residual_RV = p_RV[rows]
        if q_RV is None:
            for row, i in enumerate(rows):
                residual_RV[row, offered[i]] = 0
        else:
            q_RV = q_RV[rows].double().div_(q_sums[rows, None])
            residual_RV = residual_RV.double().div_(p_sums[rows, None]).sub_(q_RV).clamp_(min=0)
        empty = residual_RV.sum(-1, keepdim=True) <= 0
        if empty.any():  # the coin's refusal was rounding, so any draw from p will do
            residual_RV = torch.where(empty, p_RV[rows], residual_RV)
        _draw([walks[row] for row in rows], residual_RV, streams, RESIDUAL)
    return moved


def _gather(law_RV: torch.Tensor, sums_R: torch.Tensor, tokens: Sequence[list[int]]) -> list[list[float]]:
    """Probability of each row's tokens in float64, by one read of the device."""
    width = max(map(len, tokens))
    index = torch.tensor([row + row[:1] * (width - len(row)) for row in tokens], device=law_RV.device)
    values = (law_RV.gather(1, index).double() / sums_R[:, None]).tolist()
    return [row[: len(some)] for row, some in zip(values, tokens, strict=True)]

"""Which draft tokens the target keeps: one walk from the root for every lossless law, greedy being its limit.

At each level, with p the target's law at the last accepted node:
    target_only  the children in order take p(child) of one uniform each; else a token outside them is drawn from p. Lossless for
                 any set of distinct siblings chosen without looking at the coins (SGLang's tree rule with thresholds 1).
    rejection    the one child x, drawn from q, is kept with probability min(1, p(x) / q(x)); else a token is drawn from
                 (p - q)+ (Leviathan et al. 2023, algorithm 1).
After a node without children the bonus token is drawn from p. A chosen (not drawn) child has q one-hot, for which `rejection`
is `target_only`. Knows no model and no text limits. Legend: R live requests, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch

from spectrain.decode.sampling import BONUS, RESIDUAL, Streams
from spectrain.proposal import Proposal, Verdict

LAWS = ("rejection", "target_only")


def check_proposal(proposal: Proposal, vocab_size: int, law: str) -> None:
    """Raise ValueError for a proposal that no lossless law covers: twins among siblings, a parent after its child, a tree for
    `rejection`, ids outside the vocabulary."""
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
            raise ValueError(f"proposal: two children of node {parent} carry token {token}; siblings must be distinct")
        seen.add((parent, token))
    if law == "rejection" and list(parents) != list(range(-1, len(parents) - 1)):
        raise ValueError("law=rejection: the proposal is a tree; a tree needs law=target_only")


class _Walk:
    """The way of one request down its proposal."""

    def __init__(self, proposal: Proposal, request: int, root_position: int):
        self.key = (request, root_position)
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
    def offered(self) -> list[int]:
        """Tokens of the children of the last accepted node."""
        return [self.tokens[child] for child in self.children.get(self.node, ())]

    def descend(self, p_V: torch.Tensor, chances: list[float], law: str, streams: Streams) -> bool:
        """Accept a child of the last accepted node, or turn p_V into the residual law in place.

        chances: p of the children.
        """
        offered, level, q_V = self.offered, len(self.path), None
        if law == "rejection" and self.q is not None:
            q_V = _normalised(self.q[self.children[self.node][0]])
            q = q_V[offered[0]].item()
            if not q > 0:
                raise ValueError(f"proposal: draft token {offered[0]} has q={q}, so it was not drawn from this q")
            self.alphas.append(torch.minimum(p_V, q_V).sum().item())
            chances = [min(1.0, chances[0] / q)]
        else:
            self.alphas.append(min(1.0, sum(chances)))
        # A rest below 1e-13 is rounding: the children hold all of the mass.
        rest = 1.0 - sum(chances)
        chosen = streams.choose([*chances, rest if rest > 1e-13 else 0.0], *self.key, level)
        if chosen < len(chances):
            self.path.append(self.children[self.node][chosen])
            return True
        residual = p_V.index_fill(0, torch.tensor(offered, device=p_V.device), 0) if q_V is None else (p_V - q_V).clamp_(min=0)
        if residual.sum() > 0:
            p_V.copy_(residual)
        return False


def verify(
    proposals: Sequence[Proposal],
    laws: Callable[[Sequence[int], Sequence[int]], torch.Tensor],
    *,
    law: str,
    streams: Streams,
    requests: Sequence[int],
    root_positions: Sequence[int],
) -> list[Verdict]:
    """One verdict per proposal, all checked by `check_proposal`.

    laws(indices, nodes) gives p, float32 [R, V], of proposals `indices` at `nodes` (-1: the root); only reached nodes are asked
    for. requests and root_positions key the random numbers.
    """
    walks = [_Walk(*each) for each in zip(proposals, requests, root_positions, strict=True)]
    live = list(range(len(walks)))
    while live:
        p_RV = laws(live, [walks[i].node for i in live])
        if not streams.greedy:
            p_RV = _normalised(p_RV)
        offered = [walks[i].offered for i in live]
        chances = _gather(p_RV, offered)
        leaves = [row for row, tokens in enumerate(offered) if not tokens]
        inner = [row for row, tokens in enumerate(offered) if tokens]
        moved = {row for row in inner if walks[live[row]].descend(p_RV[row], chances[row], law, streams)}
        for purpose, rows in ((BONUS, leaves), (RESIDUAL, [row for row in inner if row not in moved])):
            stopped = [walks[live[row]] for row in rows]
            if not stopped:
                continue
            keys = [*zip(*(walk.key for walk in stopped), strict=True), [len(walk.path) for walk in stopped]]
            drawn = streams.pick(p_RV if len(rows) == len(live) else p_RV[rows], *keys, purpose)
            for walk, token in zip(stopped, drawn, strict=True):
                walk.bonus = token
        live = [live[row] for row in inner if row in moved]
    return [Verdict(tuple(walk.path), walk.bonus, tuple(walk.alphas)) for walk in walks]


def _normalised(law: torch.Tensor) -> torch.Tensor:
    """float64 with sum 1, so that coin, residual and bonus follow one law exactly."""
    law = law.double()
    return law / law.sum(-1, keepdim=True)


def _gather(p_RV: torch.Tensor, tokens: Sequence[list[int]]) -> list[list[float]]:
    """p of each row's tokens, by one read of the device."""
    width = max(map(len, tokens))
    if width == 0:
        return [[] for _ in tokens]
    index = torch.tensor([row + [0] * (width - len(row)) for row in tokens], device=p_RV.device)
    values = p_RV.gather(1, index).tolist()
    return [row[: len(some)] for row, some in zip(values, tokens, strict=True)]

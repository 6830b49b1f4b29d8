"""One request's way down its proposal, and the reads, coins and draws that every verification law shares.

Knows no law. Legend: R walks taken together, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch

from spectrain.decode.sampling import Streams
from spectrain.proposal import Proposal

Laws = Callable[[Sequence[int], Sequence[int]], torch.Tensor]
"""laws(indices, nodes): p, float32 [R, V], of proposals `indices` at `nodes` (-1: the root); an index may
come more than once."""
ROUNDING = 1e-13  # a smaller rest beside the children's mass is rounding: they hold all of it


class Walk:
    """The way of one request: path and alphas grow from the root on, the bonus token ends it."""

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
        """The last accepted node, -1 for the root."""
        return self.path[-1] if self.path else -1

    @property
    def offered(self) -> list[int]:
        """Tokens of the children of the last accepted node."""
        return [self.tokens[child] for child in self.children.get(self.node, ())]

    def q_V(self, node: int) -> torch.Tensor:
        """The law that the first child of `node` was drawn from."""
        assert self.q is not None, "a proposal with q beside one without"
        return self.q[self.children[node][0]]

    def choose(self, chances: Sequence[float], streams: Streams) -> int:
        """Toss the one coin of this place: an index of `chances`, each with its share of 1, or len(chances)
        with the rest."""
        rest = 1.0 - sum(chances)
        weights = [*chances, rest if rest > ROUNDING else 0.0]
        return streams.choose(weights, self.request, self.root_position, len(self.path))


def end(walks: Sequence[Walk], law_RV: torch.Tensor, streams: Streams, purpose: int) -> None:
    """End the walks with a token each, drawn from the rows of `law_RV`, which need not sum to 1."""
    requests = [walk.request for walk in walks]
    roots, slots = [walk.root_position for walk in walks], [len(walk.path) for walk in walks]
    drawn = streams.pick(law_RV, requests, roots, slots, purpose)
    for walk, token in zip(walks, drawn, strict=True):
        walk.bonus = token


def or_target(residual_RV: torch.Tensor, p_RV: torch.Tensor) -> torch.Tensor:
    """The residual, but p where it is empty: the coin's refusal was rounding there, so any draw will do."""
    empty = residual_RV.sum(-1, keepdim=True) <= 0
    return torch.where(empty, p_RV.to(residual_RV.dtype), residual_RV) if empty.any() else residual_RV


def gather(law_RV: torch.Tensor, sums_R: torch.Tensor, tokens: Sequence[list[int]]) -> list[list[float]]:
    """Probability of each row's tokens in float64, by one read of the device."""
    width = max(map(len, tokens))
    index = torch.tensor([row + row[:1] * (width - len(row)) for row in tokens], device=law_RV.device)
    values = (law_RV.gather(1, index).double() / sums_R[:, None]).tolist()
    return [row[: len(some)] for row, some in zip(values, tokens, strict=True)]


def normal(law_RV: torch.Tensor) -> torch.Tensor:
    """The rows in float64, each divided by its sum."""
    return law_RV.double() / law_RV.sum(-1, keepdim=True, dtype=torch.float64)


def not_drawn(token: int, q: float) -> ValueError:
    """The error for a draft token that its law cannot draw."""
    return ValueError(f"proposal: draft token {token} has q={q}: it was not drawn from this q")

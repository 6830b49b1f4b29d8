"""What passes between a drafter and the decode engine: `Observation` in, `Proposal` out, `Verdict` back.

Knows no model. Conventions (docs/architecture.md): p is the target's law, q the drafter's. The root x_n is
the newest committed token, on which the target has not run yet. A draft token at depth d (root's children:
depth 1) proposes x_{n+d}; slot k = d - 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Observation:
    """Newly committed tokens of one request, with the target's states on them.

    request: index of the request; start: position of the first row. Row i is position t = start + i and
    carries taps [n, L, Dt] (the target's states at t at the family's taps), final [n, Dt] (after the final
    norm) and next_ids [n] int64: the token x_{t+1}. The last next_id is the root.
    """

    request: int
    start: int
    next_ids: torch.Tensor
    taps: torch.Tensor
    final: torch.Tensor


@dataclass(frozen=True)
class Plan:
    """How much to draft: a chain of `length`, or a tree of `nodes` tokens grown `length` deep with `top_k`
    children each.

    sampled: a tree whose siblings are drawn from q without replacement, at most `top_k` of them, in a shape
    that looks at no drawn token; else its nodes are chosen. A chain is drawn whenever sampling is not greedy.
    ranked: ids per row that `Proposal.ranked` should hold; 0: it is not needed.
    """

    shape: str  # "chain" or "tree"
    length: int
    nodes: int = 0
    top_k: int = 0
    sampled: bool = False
    ranked: int = 0


@dataclass(frozen=True)
class Proposal:
    """A tree of draft tokens of one request; a chain has parents (-1, 0, 1, ..).

    tokens: int64 [N]; parents: N ints, -1 for a child of the root, always parents[i] < i; siblings are
    distinct. q: float32 [N, V] or N rows [V], row i = the law that token i was drawn from, for a later
    sibling the one that the first was drawn from (it was drawn from that law without the earlier ones); None
    where tokens were chosen, not drawn.
    ranked: int64 [N + 1, M], row 0 for the root and row i + 1 for node i: the drafter's M likeliest next
    tokens there by descending q, or -1 where the drafter was not asked. It orders the certificate's test and
    never depends on a draw.
    """

    tokens: torch.Tensor
    parents: tuple[int, ...]
    q: torch.Tensor | Sequence[torch.Tensor] | None = None
    ranked: torch.Tensor | None = None

    def path(self, node: int) -> list[int]:
        """Tokens from the root's child down to `node`; none for -1, the root."""
        found: list[int] = []
        while node >= 0:
            found.append(int(self.tokens[node]))
            node = self.parents[node]
        return found[::-1]


@dataclass(frozen=True)
class Verdict:
    """What verification of one proposal decided.

    path: accepted node indices, root's child first; bonus: the token after the last accepted one (correction
    or bonus); alphas: for each reached level, the analytic acceptance (sum min(p, q), or sum of p over the
    children).
    """

    path: tuple[int, ...]
    bonus: int
    alphas: tuple[float, ...]


class Sampler(Protocol):
    """The one function from logits to laws, and the counter-based random streams (see decode/sampling.py)."""

    def best(self, logits_MV: torch.Tensor) -> torch.Tensor:
        """Ids [M] of the largest logit of each row, the lowest id among ties: the draft of a greedy chain."""

    def draft_law(self, logits_MV: torch.Tensor) -> torch.Tensor:
        """q, float32 [M, V], from the drafter's logits over the target vocabulary."""

    def draw(
        self,
        law_MV: torch.Tensor,
        *,
        requests: Sequence[int],
        root_positions: Sequence[int],
        slots: Sequence[int],
    ) -> list[int]:
        """A token from each row of `law_MV` by the draft stream of its (request, root position, slot)."""

    @property
    def greedy(self) -> bool:
        """True where the draft law is the one-hot limit."""

    @property
    def penalised(self) -> bool:
        """True where repeated tokens are penalised: logits go through `penalise` before anything else."""

    def penalise(
        self,
        logits_MW: torch.Tensor,
        requests: Sequence[int],
        paths: Sequence[Sequence[int]],
        kept_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits, float32 [M, W], less the penalties of the request's text and the draft tokens paths[i]
        before row i. kept_ids: int64 [W], the columns' target ids, where they are not 0 .. W - 1."""


class Drafting(Protocol):
    """A drafter at work on a batch of requests; `Drafter.start` makes one.

    steps: sequential calls of its network so far (one `observe` is one call). An observation with start 0
    begins a new request at that index and forgets the old one.
    """

    steps: int

    def observe(self, observations: Sequence[Observation]) -> None:
        """Take in committed tokens: the prompt at first, then what each verification accepted."""

    def propose(self, requests: Sequence[int], plan: Plan, sampler: Sampler) -> list[Proposal]:
        """One proposal per request, all from the newest observed root."""


class Drafter(Protocol):
    """A family's network (an nn.Module) with what the engine needs of it."""

    taps: tuple[int, ...]

    def start(self, num_requests: int, capacity: int) -> Drafting:
        """State for `num_requests` requests of at most `capacity` tokens each, draft tokens included."""

    def weights_read(self) -> tuple[int, int]:
        """Weights that each draft step reads, and those that are read once a round besides; the limit of
        eval/limit.py prices drafting by them."""

"""What passes between a drafter and the decode engine: `Observation` in, `Proposal` out, `Verdict` back.

Knows no model. Conventions (docs/architecture.md): p is the target's law, q the drafter's. The root x_n is
the newest committed token, on which the target has not run yet. A draft token at depth d (root's children:
depth 1) proposes x_{n+d}; slot k = d - 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from spectrain.trees import Paths, check_paths


@dataclass(frozen=True)
class Observation:
    """Newly committed tokens of one request, with the target's states on them.

    request: index of the request; start: position of the first row. Row i is position t = start + i and
    carries taps [n, L, Dt] (the target's states at t at the family's taps), final [n, Dt] (after the final
    norm) and next_ids [n] int64: the token x_{t+1}. The last next_id is the root. first_id: x_start, which no
    next_id holds where start is 0; -1 where the maker does not know it.
    """

    request: int
    start: int
    next_ids: torch.Tensor
    taps: torch.Tensor
    final: torch.Tensor
    first_id: int = -1


@dataclass(frozen=True)
class Budget:
    """The price of drafting, in time units of one plain target step.

    root: a round without draft tokens; step: one sequential draft step; node: one more token to verify.
    rates: for each request of a `propose` call the tokens per unit that decoding earns without the node in
    question; the engine fills it in from earlier rounds. A node that is accepted with probability s (its
    survival: the product of the drafter's confidences along its path) raises tokens per second iff
    s > rate * cost (the derivative of a ratio of sums; docs/math.md).

    With draws (`rejection`, `block` above temperature 0) the decision on slot k may use what was known before
    its token was drawn: confidences are then the largest entry of each law, never the drawn token's own.
    """

    root: float
    step: float
    node: float
    rates: tuple[float, ...] = ()

    def rate(self, *, tokens: int, rounds: int, steps: int, nodes: int) -> float:
        """Tokens per unit of one request so far, one plain step (1 token, 1 unit) counted in."""
        return (1 + tokens) / (1 + self.root * rounds + self.step * steps + self.node * nodes)

    def keeps(self, request: int, survival: float) -> bool:
        """Whether a node pays for its verification; request: index into `rates`."""
        return survival > self.rates[request] * self.node

    def steps_on(self, request: int, survivals: Sequence[float], depth: int) -> bool:
        """Whether one more draft step pays for itself and for what it adds.

        survivals: of the nodes at `depth` that it would expand. Each is taken to have one child as likely as
        its ancestors were on average; a node at depth 2 with survival 0.64 promises one of 0.64 * 0.8.
        """
        rate = self.rates[request]
        gains = [s ** ((depth + 1) / depth) - rate * self.node for s in survivals]
        return sum(gain for gain in gains if gain > 0) > rate * self.step


@dataclass(frozen=True)
class Plan:
    """How much to draft: a chain of `length`, a tree of `nodes` tokens grown `length` deep with `top_k`
    children each, or the static tree `paths` (`spectrain.trees`) down to depth `length`.

    sampled: a tree whose siblings are drawn from q without replacement, at most `top_k` of them, in a shape
    that looks at no drawn token; else its nodes are chosen. A chain is drawn whenever sampling is not greedy.
    budget: draft less where more does not pay; None: always as much as the plan says. ranked: ids per row
    that `Proposal.ranked` should hold; 0: it is not needed. Raises ValueError for paths that are no tree.
    """

    shape: str  # "chain", "tree" or "static"
    length: int
    nodes: int = 0
    top_k: int = 0
    sampled: bool = False
    paths: Paths = ()
    budget: Budget | None = None
    ranked: int = 0

    def __post_init__(self):
        if self.shape == "static":
            object.__setattr__(self, "paths", check_paths("plan.paths", self.paths))

    @property
    def room(self) -> int:
        """Most nodes that drafting or verifying one proposal needs a place for."""
        return max(self.length, self.nodes, self.top_k * self.length, len(self.paths))


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

"""A start of attention that copies: some heads look for the next token where it stood before and bring what
followed it there.

Row j of EAGLE-3 holds the target's states at token j and the embedding of token j + 1:

    j         0    1    2   3    4    5     row 4 looks for "cat" (the token after its own), finds it in the
    states    the  cat  sat .    the  cat   states of row 1, whose value, the embedding after it, says "sat"
    next      cat  sat  .   the  cat  ?     to row 4, which is to predict it

What states say of their own token and of the one before it are linear maps, fitted to embeddings by ridge
regression on states of the target. Both are compared, so that two tokens in a row count for more than one.
A drafter that learns from a few hundred thousand tokens finds no such induction heads (Olsson et al. 2022,
"In-context learning and induction heads") by itself (docs/log.md). The rows of weights that make them learn
slowly: at the rate that suits the rest they are gone after a few steps. Knows EAGLE-3's weights, no data and
no loop. Legend: M rows, D hidden, Dt hidden of the target, K head dim.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from spectrain.features import FeatureBatch

TOKENS = 32
"""Tokens that the maps are fitted on, per channel of the states; fewer where there are no more."""
RIDGE = 1e-2
SKIPPED, SPANNED = 4, 0.7
"""Principal directions of the embedding that tokens are compared in: all but so many leading ones, which say
how frequent a token is and whether it is a digit, as many as this share of the channels."""
REACH = 48
"""Tokens within which a match is seen: rotary channels that turn by more than a quarter over them are not
used."""
MATCH, MATCH_BEFORE = 15.0, 7.0
"""Attention logits, about, of the same token and of the same one before it."""
NOISE = 0.1
"""Standard deviation of what tells one copying query from the next, in units of the random start's."""
MARK = 1.5
"""Size of the marked channels, in units of the state's."""


@dataclass(frozen=True)
class Marks:
    """What the leading channels of the fused state say: `own` of them of the token, `before` of the token
    before it, and `before` more of the token in the terms of the one before, for the query.

    heads: query heads that copy, those of the first key/value head; rotary [own + before]: the channels of
    the head dim that compare them.
    """

    own: int
    before: int
    heads: int
    rotary: torch.Tensor

    @property
    def channels(self) -> int:
        return self.own + 2 * self.before


def marks(drafter: Any) -> Marks:
    """Raises ValueError where attention has a single key/value head, which cannot copy and do the rest, or no
    rotary channel that turns slowly."""
    attn = drafter.midlayer.self_attn
    groups = attn.sizes[1] // attn.head_dim
    if groups < 2:
        raise ValueError(
            "drafter.start=copying: needs a key/value head of its own, and the drafter has one in all "
            "(drafter.shape.num_key_value_heads); expected drafter.start=random"
        )
    cos, sin = drafter.rotary(torch.ones(1, dtype=torch.long), torch.ones(1))
    slow = torch.atan2(sin[0], cos[0]).abs() * REACH < torch.pi / 2
    rotary = torch.arange(len(slow)).view(2, -1).T[slow.view(2, -1)[0]].flatten()  # pair by pair
    if len(rotary) < 2:
        raise ValueError(
            f"drafter.start=copying: every rotary channel turns by more than a quarter over {REACH} tokens; "
            "expected drafter.start=random"
        )
    before = len(rotary) // 6 * 2
    return Marks(len(rotary) - before, before, attn.sizes[0] // attn.sizes[1], rotary)


def slow_rows(drafter: Any) -> dict[str, int]:
    """Leading rows of each matrix, by name, that hold the copying heads."""
    found, attn = marks(drafter), drafter.midlayer.self_attn
    return {
        "fc.weight": found.channels,
        "midlayer.self_attn.q_proj.weight": found.heads * attn.head_dim,
        "midlayer.self_attn.k_proj.weight": attn.head_dim,
        "midlayer.self_attn.v_proj.weight": attn.head_dim,
    }


@torch.no_grad()
def start_copying(drafter: Any, batches: Iterable[FeatureBatch]) -> None:
    """Write the copying heads into an untrained drafter; batches: text with the target's states, of which no
    more is read than the maps need. Raises ValueError if it has too few different tokens."""
    found, attn = marks(drafter), drafter.midlayer.self_attn
    states = _States(drafter)
    for batch in batches:
        states.add(batch)
        if states.count >= TOKENS * states.gram.shape[0]:
            break
    # tokens of the text, each once
    seen = torch.isin(drafter.kept_ids, torch.cat([drafter.kept_ids[:0], *states.seen]))
    count = max(found.own + found.before, attn.head_dim)
    if seen.sum() <= SKIPPED + count:
        raise ValueError(
            f"drafter.start=copying: the first pass has {int(seen.sum())} different tokens of the draft "
            f"vocabulary; expected more than {SKIPPED + count}, or drafter.start=random"
        )
    known, mean = _centred(drafter.midlayer.input_layernorm(drafter.embed(drafter.kept_ids[seen])).float())
    look = _whitening(known, count)
    own, before = look[: found.own], look[found.own : found.own + found.before]

    D, K, n = drafter.draft_config.hidden_size, attn.head_dim, found.channels
    size = states.size()
    to_own, to_before = states.maps(mean)
    fc = drafter.fc.weight
    fc[:n] = 0
    said = torch.cat((own @ to_own, before @ to_before, before @ to_own))
    fc[:n, : said.shape[1]] = MARK * size * said

    rows, marked = found.rotary, found.own + found.before
    channel = torch.arange(n, device=fc.device) + D  # in the second half of the layer's input
    attn.k_proj.weight[:K] = 0
    attn.k_proj.weight[rows, channel[:marked]] = 1
    attn.v_proj.weight[:K] = 0
    attn.v_proj.weight[:K, :D] = look[:K]
    # the guess: from the value to the direction of the head's row, in the size of what it is added to
    value = known @ look[:K].T
    head = drafter.lm_head.weight[seen].float()
    onto = _centred(head / head.norm(dim=1, keepdim=True))[0].T @ value / len(value)
    added_to = 1.0 if drafter.config.norm_before_residual else size
    onto *= added_to / (value @ onto.T).pow(2).mean().sqrt()
    for h in range(found.heads):
        query = torch.randn(K, 2 * D).to(fc) * NOISE * D**-0.5
        query[rows[: found.own], :D] += MATCH * K**0.5 / found.own * own
        query[rows[found.own :], channel[marked:]] += MATCH_BEFORE * K**0.5 / max(found.before, 1)
        attn.q_proj.weight[h * K : (h + 1) * K] = query
        attn.o_proj.weight[:, h * K : (h + 1) * K] = onto / found.heads


class _States:
    """Sums over tokens: products of the first tap with itself and with the embeddings of its token and of the
    one before it, and the size of the fused state. The first two tokens of a text are left out: their states
    are a thousand times as large."""

    def __init__(self, drafter: Any):
        self.drafter = drafter
        Dt = drafter.fc.weight.shape[1] // len(drafter.taps)
        D = drafter.draft_config.hidden_size
        self.gram = drafter.fc.weight.new_zeros(Dt, Dt, dtype=torch.float64)
        self.own, self.before, self.plain = (self.gram.new_zeros(Dt, D) for _ in range(3))
        self.seen: list[torch.Tensor] = []
        self.count, self.squares = 0, 0.0

    def add(self, batch: FeatureBatch) -> None:
        drafter, tokens = self.drafter, batch.tokens
        rows = (tokens.positions > 1).nonzero()[:, 0]
        taps = batch.taps[rows]
        first = drafter.fc_input(taps)[:, : self.gram.shape[0]].float()
        self.gram += first.T @ first
        for total, ids in ((self.own, tokens.ids[rows]), (self.before, tokens.ids[rows - 1])):
            total += first.T @ drafter.midlayer.input_layernorm(drafter.embed(ids)).float()
        self.plain += first.sum(0)[:, None].double()
        self.seen.append(tokens.ids[rows].unique())
        self.count += len(rows)
        self.squares += float(drafter.fuse(taps).float().pow(2).mean(1).sum())

    def size(self) -> float:
        """Root mean square of the fused state."""
        return (self.squares / max(self.count, 1)) ** 0.5

    def maps(self, mean_D: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[D, Dt] from the first tap to the embedding, less `mean_D`, of the token and of the one before."""
        scale = (self.gram.diagonal() / self.count).sqrt().clamp(min=1e-6)
        gram = self.gram / scale[:, None] / scale
        gram.diagonal().add_(RIDGE * self.count)
        found = []
        for total in (self.own, self.before):
            cross = (total - self.plain * mean_D.double()) / scale[:, None]
            found.append((torch.linalg.solve(gram, cross) / scale[:, None]).T.float())
        return found[0], found[1]


def _centred(rows_MD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows without their mean's direction, less the mean that is left; and what was taken from the mean
    row, [D]."""
    mean = rows_MD.mean(0)
    unit = mean / mean.norm()
    across = rows_MD - (rows_MD @ unit)[:, None] * unit
    return across - across.mean(0), mean


def _whitening(centred_MD: torch.Tensor, count: int) -> torch.Tensor:
    """[count, D]: random directions in which the rows are uncorrelated and of unit variance, among the
    principal ones but for the first and the last: in the first a few tokens, such as digits, stand out."""
    values, vectors = torch.linalg.eigh((centred_MD.T @ centred_MD / len(centred_MD)).double())
    last = len(values) - SKIPPED
    first = last - max(count, int(SPANNED * len(values)))
    least = max(RIDGE * values.mean().item(), 1e-12)  # where there are fewer tokens than directions
    white = vectors[:, first:last] / values[first:last].clamp(min=least).sqrt()
    mixed = torch.linalg.qr(torch.randn(last - first, count, dtype=white.dtype).to(white))[0]
    return (white @ mixed).T.float()

"""Penalties on tokens that a text holds already, counted along each draft token's own path.

With s the logit of a token, in float32 and in this order:

    repetition   s / repetition if s >= 0, else s * repetition     where prompt, text or path hold the token
    frequency    s - frequency * n                                 n: how often text and path hold it
    presence     s - presence                                      where n > 0

Repetition is that of transformers (Keskar et al. 2019, section 4.1), which counts the prompt; frequency and
presence are OpenAI's, as vLLM has them, which count generated tokens alone. The order is vLLM's. The path of
a draft token runs from the root's child down to it, so each node of a tree has penalties of its own. Knows no
law and no random number. Repetition 2, frequency 0.25, presence 0.5 at a node with path (2):

    prompt 0 1   text 1 2       logits       4     -1     3     1
    token        0     1     2     3         n     0      1     2     0
    repeated     2    -2     1.5   1         out   2  -2.75     0.5   1

Legend: R rows, V vocabulary, B requests of the batch, W ids that a drafter knows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Penalties:
    """Strengths; repetition 1, presence 0 and frequency 0 change nothing."""

    repetition: float
    presence: float
    frequency: float


class History:
    """Which tokens each request of a batch holds: set at its prompt, grown by what it emits."""

    def __init__(self, penalties: Penalties, num_requests: int, vocab_size: int, device: torch.device):
        self.penalties = penalties
        self.seen_BV = torch.zeros(num_requests, vocab_size, dtype=torch.bool, device=device)
        self.emitted_BV = torch.zeros(num_requests, vocab_size, dtype=torch.int32, device=device)

    def begin(self, request: int, prompt: Sequence[int]) -> None:
        """Forget the request that had this place; `prompt` counts for repetition alone."""
        self.emitted_BV[request] = 0
        self.seen_BV[request] = False
        # An embedding may have more rows than the head; what cannot be emitted needs no penalty.
        known = [token for token in set(prompt) if token < self.seen_BV.shape[1]]
        self.seen_BV[request, torch.tensor(known, dtype=torch.int64, device=self.seen_BV.device)] = True

    def extend(self, requests: Sequence[int], texts: Sequence[Sequence[int]]) -> None:
        """Count newly emitted tokens, one list per request."""
        _count(self.seen_BV, self.emitted_BV, requests, texts)

    def penalise(
        self,
        logits_RW: torch.Tensor,
        requests: Sequence[int],
        paths: Iterable[Sequence[int]],
        kept_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Penalised logits, float32 [R, W]: row i stands behind the text of requests[i] and the draft tokens
        paths[i].

        kept_ids: int64 [W], the token of each column; None: column v is token v.
        """
        rows = torch.tensor(requests, device=self.seen_BV.device)
        seen, emitted = self.seen_BV[rows], self.emitted_BV[rows]
        _count(seen, emitted, range(len(rows)), paths)
        if kept_ids is not None:
            seen, emitted = seen[:, kept_ids], emitted[:, kept_ids]
        return penalise(logits_RW, seen, emitted, self.penalties)


def penalise(
    logits_RV: torch.Tensor, seen_RV: torch.Tensor, emitted_RV: torch.Tensor, penalties: Penalties
) -> torch.Tensor:
    """Penalised logits, float32 [R, V]. seen: bool, it occurs; emitted: int, times it was generated."""
    scores = logits_RV.float()
    if penalties.repetition != 1:
        repeated = torch.where(scores < 0, scores * penalties.repetition, scores / penalties.repetition)
        scores = torch.where(seen_RV, repeated, scores)
    if penalties.frequency:
        scores = scores - penalties.frequency * emitted_RV
    if penalties.presence:
        scores = scores - penalties.presence * (emitted_RV > 0)
    return scores


def along_text(
    logits_MV: torch.Tensor, prompt: Sequence[int], ids: Sequence[int], first: int, penalties: Penalties
) -> torch.Tensor:
    """Penalised logits, float32 [M, V], along one emitted text: row i predicts ids[first + i]."""
    M, V = logits_MV.shape
    history = History(penalties, 1, V, logits_MV.device)
    history.begin(0, prompt)
    return history.penalise(logits_MV, [0] * M, [ids[: first + i] for i in range(M)])


def _count(
    seen_RV: torch.Tensor, emitted_RV: torch.Tensor, rows: Sequence[int], texts: Iterable[Sequence[int]]
) -> None:
    """Add the tokens texts[i] to row rows[i], in place."""
    flat = [(row, token) for row, text in zip(rows, texts, strict=True) for token in text]
    if flat:
        row, token = torch.tensor(flat, device=seen_RV.device).unbind(1)
        seen_RV[row, token] = True
        emitted_RV.index_put_((row, token), torch.ones_like(row, dtype=torch.int32), accumulate=True)

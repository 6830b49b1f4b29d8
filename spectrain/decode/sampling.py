"""From logits to laws, and the counter-based random numbers that draw from them.

One function, `law`, behind `penalties.penalise` where penalties are on, serves drawing, acceptance, residual
and the plain baseline. The order is that of transformers' generate: repetition (then frequency and presence)
penalty, temperature, top-k, top-p, min-p, then a softmax, all in float32. Every random number is a
hash of (seed, request key, root position, slot, purpose): it depends on nothing else, so the same seed gives
the same text whatever batch a request is in, and no number is read twice (Leviathan et al. 2023 need
independent ones). Knows no model and no tree. Legend: R rows, V vocabulary.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch

from spectrain.checks import above_zero, at_least, within
from spectrain.decode.penalties import History, Penalties
from spectrain.kernels.likeliest import in_cache

DRAFT, COIN, RESIDUAL, BONUS = range(4)
BLOCK = 256
NOT_FINITE = "logits are not finite: NaN, inf, or nothing but -inf in a row"


def argmax(logits_RV: torch.Tensor) -> torch.Tensor:
    """Ids [R] of the largest logit, the lowest among ties; raises ValueError if it is not finite."""
    if logits_RV.device.type == "cpu":
        # numpy's argmax is vectorised, torch's is not: 0.8 against 3.8 ms for 64 x 49,152 (2 cores, 2026-11).
        found = [torch.from_numpy(part.float().numpy().argmax(-1)) for part in in_cache(logits_RV)]
        ids = torch.cat(found)
    else:
        ids = logits_RV.argmax(-1)
    if not logits_RV.gather(-1, ids[:, None]).isfinite().all():
        raise ValueError(NOT_FINITE)
    return ids


def law(
    logits_RV: torch.Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """Probabilities, float32 [R, V]: temperature, then top-k, top-p and min-p, each as transformers' generate
    does.

    Temperature 0 is the one-hot law of the largest logit (lowest id among ties). top_k 0, top_p 1 and min_p 0
    keep everything; logits equal to the k-th are kept, ties at the edge of top-p go to the lowest ids. min_p
    keeps what has at least this share of the largest probability. Raises ValueError if a row holds NaN or
    +inf.
    """
    if temperature == 0:
        ids = argmax(logits_RV)
        return torch.zeros(logits_RV.shape, device=logits_RV.device).scatter_(-1, ids[:, None], 1.0)
    scores = logits_RV.float() / temperature
    if 0 < top_k < scores.shape[-1]:
        kth = scores.topk(top_k, -1).values[:, -1:]
        scores = scores.masked_fill(scores < kth, float("-inf"))
    if top_p < 1:
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        mass = torch.softmax(ordered, -1)
        ordered[mass.cumsum(-1) - mass >= top_p] = float("-inf")
        scores = torch.full_like(scores, float("-inf")).scatter_(-1, order, ordered)
    probabilities = torch.softmax(scores, -1)
    if min_p > 0:
        small = probabilities < min_p * probabilities.amax(-1, keepdim=True)
        probabilities = torch.softmax(scores.masked_fill(small, float("-inf")), -1)
    if probabilities[:, 0].isnan().any():  # one bad logit spoils its whole row
        raise ValueError(NOT_FINITE)
    return probabilities


def invert(law_RV: torch.Tensor, uniforms_R: Sequence[float]) -> list[int]:
    """For each row the first id at which the cumulative mass exceeds uniform * total mass, in float64.

    Rows need not sum to 1; an id of mass 0 is never returned. Blocks are summed first, then one block is
    searched, so that no cumulative sum over V is formed.
    """
    V, device = law_RV.shape[-1], law_RV.device
    whole = V // BLOCK * BLOCK
    sums = [law_RV[:, :whole].unflatten(-1, (-1, BLOCK)).sum(-1, dtype=torch.float64)] if whole else []
    if whole < V:
        sums.append(law_RV[:, whole:].sum(-1, keepdim=True, dtype=torch.float64))
    below = torch.cat(sums, -1).cumsum(-1)
    wanted = torch.tensor(uniforms_R, dtype=torch.float64, device=device)[:, None] * below[:, -1:]
    block = torch.searchsorted(below, wanted, right=True)
    ids = block * BLOCK + torch.arange(BLOCK, device=device)
    inside = law_RV.gather(-1, ids.clamp(max=V - 1)).double().where(ids < V, 0.0).cumsum(-1)
    start = torch.where(block > 0, below.gather(-1, (block - 1).clamp(min=0)), 0.0)
    # Rounding of the two sums may leave the wanted mass a hair above the block's own.
    wanted = torch.minimum(wanted - start, torch.nextafter(inside[:, -1:], inside.new_zeros(())))
    return (block * BLOCK + torch.searchsorted(inside, wanted, right=True))[:, 0].tolist()


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen from logits, and the seed.

    temperature 0 is greedy; top_k 0, top_p 1, min_p 0, repetition_penalty 1 and the other penalties 0 are
    off; draft_temperature 0 means as `temperature`. The penalties: `decode/penalties.py`.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    draft_temperature: float = 0.0

    def __post_init__(self):
        for key, value in (("temperature", self.temperature), ("draft_temperature", self.draft_temperature)):
            if not 0 <= value < float("inf"):
                raise ValueError(f"sampling.{key}={value!r}: expected a finite value >= 0")
        at_least("sampling.top_k", self.top_k, 0)
        above_zero("sampling.top_p", self.top_p, 1.0)
        within("sampling.min_p", self.min_p, 0.0, 1.0)
        above_zero("sampling.repetition_penalty", self.repetition_penalty)
        within("sampling.presence_penalty", self.presence_penalty, -2.0, 2.0)
        within("sampling.frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.temperature == 0 and self.draft_temperature:
            key = f"sampling.draft_temperature={self.draft_temperature!r}"
            raise ValueError(f"{key}: has no effect at temperature 0, expected 0")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalties(self) -> Penalties | None:
        """None where all are off."""
        found = Penalties(self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return None if found == Penalties(1.0, 0.0, 0.0) else found

    def law(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """The target's law p, float32 [R, V], from penalised logits."""
        return self._law(logits_RV, self.temperature)

    def draft_law(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """The drafter's law q, float32 [R, V]: the same filters at the draft temperature."""
        return self._law(logits_RV, self.draft_temperature or self.temperature)

    def _law(self, logits_RV: torch.Tensor, temperature: float) -> torch.Tensor:
        return law(logits_RV, temperature=temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)


class Streams:
    """Random choices of a batch: request i of the batch draws with the stable key keys[i] (see
    `proposal.Sampler`). history: the batch's texts, where penalties need them."""

    def __init__(self, sampling: Sampling, keys: Sequence[int], history: History | None = None):
        self.sampling = sampling
        self.keys = list(keys)
        self.history = history

    @property
    def greedy(self) -> bool:
        return self.sampling.greedy

    @property
    def penalised(self) -> bool:
        return self.history is not None

    def penalise(self, logits_MW: torch.Tensor, requests, paths, kept_ids=None) -> torch.Tensor:
        assert self.history is not None
        return self.history.penalise(logits_MW, requests, paths, kept_ids)

    def uniform(self, request: int, root_position: int, slot: int, purpose: int) -> float:
        """A number in [0, 1) with 53 random bits."""
        counter = struct.pack("<5q", self.sampling.seed, self.keys[request], root_position, slot, purpose)
        return (int.from_bytes(blake2b(counter, digest_size=8).digest(), "little") >> 11) * 2.0**-53

    def best(self, logits_MV: torch.Tensor) -> torch.Tensor:
        return argmax(logits_MV)

    def draft_law(self, logits_MV: torch.Tensor) -> torch.Tensor:
        return self.sampling.draft_law(logits_MV)

    def draw(self, law_MV: torch.Tensor, *, requests, root_positions, slots) -> list[int]:
        return self.pick(law_MV, requests, root_positions, slots, DRAFT)

    def pick(self, law_MV, requests, root_positions, slots, purpose: int) -> list[int]:
        """One id per row of `law_MV` (which need not sum to 1) by the stream of `purpose`."""
        if self.greedy:
            return argmax(law_MV).tolist()
        keys = zip(requests, root_positions, slots, strict=True)
        return invert(law_MV, [self.uniform(*key, purpose) for key in keys])

    def choose(self, weights: Sequence[float], request: int, root_position: int, slot: int) -> int:
        """The acceptance coin of one level: an index of `weights`, each with its share of the sum."""
        bounds = np.cumsum(np.asarray(weights, np.float64))
        u = self.uniform(request, root_position, slot, COIN)
        return int(np.searchsorted(bounds, u * bounds[-1], side="right"))

"""What decoding returns: the text of each request, the record of each round, the seconds of each batch."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Round:
    """One verification of one request.

    drafted: draft tokens proposed; depth: longest path in the proposal; accepted: draft tokens accepted
    before any cut; emitted: tokens that reached the text after stop and length cuts (bonus included if it
    stayed); alphas: analytic acceptance of each reached level (accepted + 1 of them, or `depth` if all were
    accepted); bonus_cut: whether the bonus token was cut.
    """

    drafted: int
    depth: int
    accepted: int
    emitted: int
    alphas: tuple[float, ...]
    bonus_cut: bool


@dataclass(frozen=True)
class Generation:
    """The text of one request.

    ids: emitted tokens, the first (from the prefill) included, the stop token included; finish_reason: "stop"
    or "length". rounds: empty for plain decoding. orders: one entry per emitted token when recorded: int64
    [M] ids by descending draft probability at that place, or None where no drafter was asked (prefill's
    token, tokens after a leaf). text: the decoded ids, filled in by `spectrain.generate` alone. lossless:
    False where the law of verification does not keep the target's law (`typical`, `thresholds`).
    """

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    finish_reason: str
    rounds: tuple[Round, ...] = ()
    orders: tuple[torch.Tensor | None, ...] = ()
    text: str = ""
    lossless: bool = True


@dataclass(frozen=True)
class Timing:
    """Wall-clock seconds of one batch: prefill apart from decode; decode = draft + verify + other.

    steps: target calls after the prefill; draft_steps: sequential drafter calls (observe counts as one).
    """

    prefill_s: float
    decode_s: float
    draft_s: float
    verify_s: float
    steps: int
    draft_steps: int

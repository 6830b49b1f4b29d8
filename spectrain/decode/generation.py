"""What decoding returns: the text of each request, the record of each round, the seconds of each batch."""

from dataclasses import dataclass

import torch

from spectrain.proposal import Proposal, Verdict


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
class Event:
    """All that one verification of one request decided, kept on request alone.

    root_position: place of the root in prompt and text; tokens, parents: the proposal (see
    `proposal.Proposal`); path: accepted nodes before any cut, root's child first; bonus: the token after
    them; alphas and emitted as in `Round`: the first `emitted` of the accepted tokens and the bonus reached
    the text.
    """

    root_position: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    path: tuple[int, ...]
    bonus: int
    alphas: tuple[float, ...]
    emitted: int

    @classmethod
    def of(cls, root_position: int, proposal: Proposal, verdict: Verdict, emitted: int) -> "Event":
        return cls(
            root_position=root_position,
            tokens=tuple(proposal.tokens.tolist()),
            parents=tuple(proposal.parents),
            path=verdict.path,
            bonus=verdict.bonus,
            alphas=verdict.alphas,
            emitted=emitted,
        )


@dataclass(frozen=True)
class Generation:
    """The text of one request.

    ids: emitted tokens, the first (from the prefill) and the stop token included; finish_reason: "stop",
    "stop_string" (the last token completes it) or "length". rounds: empty for plain decoding. orders: one
    entry per emitted token when recorded: int64 [M] ids by descending draft probability at that place, or
    None where no drafter was asked (prefill's token, tokens after a leaf). text: the decoded ids, cut to end
    with the stop string, filled in by `spectrain.generate` alone. lossless: False where the law of
    verification does not keep the target's law (`typical`, `thresholds`). events: one per round, when
    recorded.
    """

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    finish_reason: str
    rounds: tuple[Round, ...] = ()
    orders: tuple[torch.Tensor | None, ...] = ()
    text: str = ""
    lossless: bool = True
    events: tuple[Event, ...] = ()


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

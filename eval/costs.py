"""What drafting costs in units of one plain target step: the prices of an adaptive run (`proposal.Budget`).

Measured on the run's own plan without adaptation, in the same process and at the same batch size as plain
decoding. Knows no drafter's insides and no file.
"""

from collections.abc import Sequence
from dataclasses import replace

from spectrain.decode.generation import Timing
from spectrain.eval.speed import EngineArm, total


def measure_costs(
    plain: EngineArm, fast: EngineArm, prompts: Sequence[Sequence[int]], keys: Sequence[int]
) -> list[float]:
    """[root, step, node] of `fast`'s plan, from decoding `prompts` once with each arm after one warm-up."""
    fixed = replace(fast, run=replace(fast.run, adaptive=False, costs=[]))
    for arm in (plain, fixed):
        arm.warm_up(prompts, keys)
    _, plain_timings = plain.decode(prompts, keys)
    texts, timings = fixed.decode(prompts, keys)
    rounds = [record for text in texts for record in text.rounds]
    if not rounds or not plain_timings:
        raise ValueError("costs: the prompts' texts end before a round; expected longer ones, or costs given")
    drafted = sum(record.drafted for record in rounds) / len(rounds)
    return costs_of(total(plain_timings), total(timings), drafted=drafted)


def costs_of(plain: Timing, fast: Timing, *, drafted: float) -> list[float]:
    """[root, step, node] in plain steps; drafted: draft tokens of a request per round.

    step is c, or 0 for a drafter that drafts all depths in its one call a round. node spreads what a
    verification takes beyond a plain step over the draft tokens. root is the rest of a round: the plain step,
    the drafter's call on what was committed, and overhead.
    """
    unit = plain.decode_s / plain.steps
    call = fast.draft_s / fast.draft_steps / unit
    step = call if fast.draft_steps > fast.steps else 0.0
    more = max(0.0, fast.verify_s / fast.steps / unit - 1)
    rest = max(0.0, (fast.decode_s - fast.draft_s - fast.verify_s) / fast.steps / unit)
    return [1 + call + rest, step, more / drafted]

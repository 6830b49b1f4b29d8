"""The section `joint` of the settings: a target that is trained along with its drafter.

Knows no torch; `spectrain/joint.py` does the work.
"""

from dataclasses import dataclass, fields

from spectrain.checks import above_zero, at_least, within


@dataclass(frozen=True, kw_only=True)
class JointConfig:
    """Medusa-2's joint training; with `rank` 0 there is none, and the other settings have no effect."""

    rank: int = 0
    """Rank of the LoRA adapters on the linear maps of the target's layers; 0: the target stays as it is."""
    alpha: int = 16
    """The product of an adapter's two matrices is multiplied with alpha / rank."""
    drafter_first: float = 0.25
    """Share of the steps that train the drafter alone, before the target moves."""
    rate_share: float = 0.25
    """Learning rate of the adapters, as a share of train.learning_rate."""
    weight: float = 5.0
    """Weight of KL(original || tuned), per token of an answer, beside the drafter's objective."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def __post_init__(self):
        at_least("joint.rank", self.rank, 0)
        at_least("joint.alpha", self.alpha, 1)
        within("joint.drafter_first", self.drafter_first, 0.0, 0.99)
        above_zero("joint.rate_share", self.rate_share)
        above_zero("joint.weight", self.weight)
        for f in fields(self):
            if not self.rank and getattr(self, f.name) != f.default:
                raise ValueError(f"joint.{f.name}={getattr(self, f.name)!r}: no effect without joint.rank")

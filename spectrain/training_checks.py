"""What is refused before anything is captured: settings of the training that do not fit the drafter.

Knows no family.
"""

from typing import Any

from spectrain.config import ObjectiveConfig, RunConfig, TrainConfig
from spectrain.objectives import check_terms
from spectrain.optim import trainable
from spectrain.target import Target

OPTIMIZER = (
    "optimizer", "learning_rate", "muon_learning_rate", "muon_momentum", "warmup_ratio", "schedule",
    "min_ratio", "weight_decay", "betas", "clip",
)  # fmt: skip
"""Settings of train that say how a drafter's weights move."""


def check_training(config: RunConfig, drafter: Any, target: Target) -> None:
    """Raise ValueError where nothing of `drafter` is trained, the objective makes no sense for it, or it has
    no weights on which objective and optimizer could have an effect."""
    passes, family = config.train.passes, config.drafter.family
    if passes and not trainable(drafter):
        raise ValueError(
            f"train.passes={passes}: nothing of drafter {family} is trained; expected train.passes=0"
        )
    if passes:
        check_terms(config.objective, drafter, target)
    elif not [*drafter.parameters()]:
        settings = {"objective": (config.objective, ObjectiveConfig())}
        settings |= {f"train.{k}": (getattr(config.train, k), getattr(TrainConfig(), k)) for k in OPTIMIZER}
        for key, (value, default) in settings.items():
            if value != default:
                raise ValueError(f"{key}={value!r}: no effect on drafter {family}, which has no weights")

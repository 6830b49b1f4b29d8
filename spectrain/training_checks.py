"""What is refused before anything is captured: settings of the training that do not fit the drafter.

Knows no family.
"""

from typing import Any

from spectrain.config import RunConfig
from spectrain.objectives import check_terms
from spectrain.optim import trainable
from spectrain.target import Target

def check_training(config: RunConfig, drafter: Any, target: Target) -> None:
    """Raise ValueError where nothing of `drafter` is trained, or the objective makes
    no sense for it."""
    passes, family = config.train.passes, config.drafter.family
    if passes and not trainable(drafter):
        raise ValueError(
            f"train.passes={passes}: nothing of drafter {family} is trained; expected train.passes=0"
        )
    if passes:
        check_terms(config.objective, drafter, target)

"""What growing a proposal needs of a family: logits at the root, and a step from any node.

Legend: R requests, M nodes of one step, W ids that the drafter knows.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from spectrain.kernels.likeliest import likeliest


class Stepper(Protocol):
    """What a family gives: logits at roots and a step from known nodes.

    kept_ids: int64 [W], the target ids of the logits' columns, ascending; vocab_size: V.
    """

    kept_ids: torch.Tensor
    vocab_size: int

    def root_positions(self, requests: Sequence[int]) -> list[int]:
        """Position n of the newest committed token x_n of each request."""

    def root_logits(self, requests: Sequence[int]) -> torch.Tensor:
        """Logits [R, W] of the token after each root."""

    def step(self, requests: Sequence[int], parents: Sequence[int], tokens: torch.Tensor) -> torch.Tensor:
        """Run M new nodes and return the logits [M, W] of the token after each.

        The nodes of one request are neighbours. parents: -1 for a child of the root, else the number of an
        earlier node of that request in order of arrival. tokens: int64 [M], target ids.
        """


def likeliest_ids(stepper: Stepper, logits_MW: torch.Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The likeliest target ids of each row, at most `count`, and their log-probability in float32."""
    columns, logq = likeliest(logits_MW, min(count, logits_MW.shape[1]))
    return stepper.kept_ids[columns].cpu().numpy(), logq.cpu().numpy()


def scattered(stepper: Stepper, logits_MW: torch.Tensor) -> torch.Tensor:
    """The logits [M, V] over the target vocabulary, -inf outside the kept ids."""
    M, W = logits_MW.shape
    if stepper.vocab_size == W:
        return logits_MW
    scattered = logits_MW.new_full((M, stepper.vocab_size), float("-inf"))
    return scattered.index_copy_(1, stepper.kept_ids, logits_MW)

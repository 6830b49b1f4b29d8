"""AdamW, or Muon with AdamW, over float32 parameters, and the learning rate as a closed form of the optimizer
step.

The parameters are the float32 masters themselves; nothing is kept in bfloat16, where an update below half the
spacing of the numbers is lost. Knows no data, no loss and no files. Source: Loshchilov and Hutter 2019
(AdamW); Jordan et al. 2024 (Muon), with the update's scale of Liu et al. 2025, "Muon is scalable".
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast
from torch import nn

from spectrain.config import TrainConfig

# Matrices whose rows are tokens have names that begin so; Muon is for maps between hidden states.
HEADS = ("lm_head", "head.", "embed_tokens", "decoder.embed_tokens")

SLOW = 0.1
"""Share of each update that the rows take which a drafter names in `slow_rows`."""


def learning_rate(step: int, total: int, config: TrainConfig) -> float:
    """Learning rate of the update that follows `step` finished ones, of `total`.

    Rises to the full rate over the warm-up, then falls by a cosine or a line to `min_ratio` of it. Worked
    example, linear, rate 1, warm-up 2 of 6 steps: 1/2, 1, 1, 3/4, 1/2, 1/4.
    """
    warmup = round(config.warmup_ratio * total)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    left = (total - step) / (total - warmup)
    share = left if config.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))
    return config.learning_rate * (config.min_ratio + (1 - config.min_ratio) * share)


def trainable(drafter: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters by name, in the module's order."""
    return {name: p for name, p in drafter.named_parameters() if p.requires_grad}


class Optimizers:
    """Several optimizers over disjoint parameters, used as one. slow: matrices, and how many of their leading
    rows take only a share SLOW of each update."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer], slow: Sequence[tuple[torch.Tensor, int]] = ()):
        self.parts, self.slow = tuple(parts), tuple(slow)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        return {parameter: state for part in self.parts for parameter, state in part.state.items()}

    @torch.no_grad()
    def step(self) -> None:
        before = [matrix[:rows].clone() for matrix, rows in self.slow]
        for part in self.parts:
            part.step()
        for (matrix, rows), old in zip(self.slow, before, strict=True):
            matrix[:rows] = torch.lerp(old, matrix[:rows], SLOW)

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()


class SharedMuon(torch.optim.Muon):
    """Muon whose matrices are each turned by one process and sent to the others; a process alone turns all.

    Gradients are the same on every process, and so are parameters and momenta after the step.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        process = PartialState()
        owners: dict[torch.Tensor, int] = {}
        load = [0] * process.num_processes
        for group in self.param_groups:
            for matrix in sorted(group["params"], key=_products, reverse=True):
                owner = owners[matrix] = load.index(min(load))
                load[owner] += _products(matrix)
                if owner != process.process_index:
                    self.state[matrix]["momentum_buffer"].lerp_(matrix.grad, 1 - group["momentum"])
                    matrix.grad = None  # leaves it out of this process's step
        super().step(closure)
        if process.num_processes > 1:
            for matrix, owner in owners.items():
                broadcast(matrix.detach(), from_process=owner)


def _products(matrix: torch.Tensor) -> int:
    """Multiplications of a step of Muon, up to a factor."""
    return matrix.numel() * min(matrix.shape)


def build_optimizer(drafter: nn.Module, config: TrainConfig) -> Optimizers:
    """AdamW in two groups, matrices with weight decay and vectors without; with optimizer=muon, Muon for the
    matrices other than head and embedding, whose rows are tokens.

    Raises ValueError naming a parameter that is not float32.
    """
    parameters = trainable(drafter)
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32:
            raise ValueError(
                f"drafter parameter {name} is {parameter.dtype}: expected torch.float32 (train.dtype)"
            )
    muon = config.optimizer == "muon"
    turned = [p for name, p in parameters.items() if muon and p.ndim == 2 and not name.startswith(HEADS)]
    rest = [p for p in parameters.values() if not any(p is q for q in turned)]
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": config.weight_decay, "share": 1.0},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0, "share": 1.0},
    ]
    parts: list[torch.optim.Optimizer] = [adamw([group for group in groups if group["params"]], config)]
    if turned:
        group = {"params": turned, "share": config.muon_learning_rate / config.learning_rate}
        parts.append(
            SharedMuon(
                [group],
                lr=config.muon_learning_rate,
                weight_decay=config.weight_decay,
                momentum=config.muon_momentum,
                adjust_lr_fn="match_rms_adamw",
            )
        )
        for parameter in turned:
            parts[1].state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
    slow_rows = getattr(drafter, "slow_rows", dict)
    return Optimizers(parts, [(parameters[name], rows) for name, rows in slow_rows().items()])


def adamw(groups: Sequence[dict[str, Any]], config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over groups of "params", "weight_decay" and "share" of the learning rate; its state is whole from
    the start, as a first step would make it."""
    first, second = config.betas
    found = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(first, second), fused=True)
    for parameter in (p for group in groups for p in group["params"]):
        found.state[parameter] = {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return found


def set_learning_rate(optimizer: Optimizers, rate: float) -> None:
    """Set AdamW's rate to `rate` and Muon's in proportion."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["share"]


def optimizer_tensors(drafter: nn.Module, optimizer: Optimizers) -> dict[str, torch.Tensor]:
    """The optimizer's state as "parameter name/exp_avg" and so on."""
    return {
        f"{name}/{key}": value
        for name, parameter in trainable(drafter).items()
        for key, value in optimizer.state[parameter].items()
    }


@torch.no_grad()
def load_optimizer(drafter: nn.Module, optimizer: Optimizers, tensors: dict[str, torch.Tensor]) -> None:
    """Put tensors of `optimizer_tensors` back; raises ValueError naming one that is missing, unknown or
    misshapen."""
    state = optimizer_tensors(drafter, optimizer)
    for name in sorted(state.keys() | tensors.keys()):
        if name not in tensors or name not in state:
            raise ValueError(f"optimizer state {name}: {'unknown' if name in tensors else 'missing'}")
        if tensors[name].shape != state[name].shape:
            found = list(tensors[name].shape)
            raise ValueError(f"optimizer state {name}: shape {found}: expected {list(state[name].shape)}")
        state[name].copy_(tensors[name])

"""Joint training of a drafter and its target: Medusa-2 (Cai et al. 2024, sections 2.2.2 and 2.3.2).

The target gets LoRA adapters. With them off it is bit for bit the original, which teaches both:
    loss = objective(drafter on the tuned target's states, law of the original)
           + weight * sum over the tokens of answers of KL(original || tuned) / their number in the step
The second term is the objective of a drafter with one slot, whose state is the tuned target's and whose head
is the target's. In the first steps the drafter is trained alone; no adapter and none of its moments moves.

While training runs, the adapters are parameters of the drafter (`adapters.LAYER.A`, `.B`), so the loop sums,
clips, saves and restores them like any other. Knows no family; what becomes of them afterwards:
`spectrain/tuned.py`. Legend: T tokens, R rows, D hidden, V vocabulary.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from spectrain.config import ObjectiveConfig, RunConfig
from spectrain.data.packing import Sample, TokenBatch, pack
from spectrain.drafters.layers import has_plain_head
from spectrain.features import FeatureBatch
from spectrain.objectives import Objective, ObjectiveResult, RowIndex, Rows
from spectrain.optim import Optimizers, adamw
from spectrain.target import Target, packed_layout

ADAPTERS = "adapters."


@dataclass(frozen=True)
class _WholeVocabulary:
    """What `Objective` asks of the tuned target, taken for a drafter: its kept ids."""

    kept_ids: torch.Tensor


class Shift:
    """How far a tuned target is from the original one, token by token of an answer."""

    def __init__(self, target: Target, *, weight: float = 1.0):
        every = _WholeVocabulary(torch.arange(target.vocab_size, device=target.device))
        terms = ObjectiveConfig(terms={"kl": weight}, slot_decay=1.0)
        self.weight, self.objective = weight, Objective(terms, every, target)

    def loss(self, tuned: FeatureBatch, original: FeatureBatch, count: float) -> ObjectiveResult:
        """weight * sum KL(original || tuned) / count over the answers' tokens, with its graph; its stats of
        slot 0: "loss", the same, "agree" (same arg-max) and "count"."""
        row = answer_rows(original.tokens)
        rows = Rows(RowIndex(row, torch.zeros_like(row), row, slots=1), tuned.final[row])
        counts = torch.full((1, 1), count, dtype=torch.float64, device=row.device)
        return self.objective.loss(rows, original, self.objective.teacher_head, counts)


class Joint:
    """The adapters of a training run. They are off but within `tuned`."""

    def __init__(self, config: RunConfig, target: Target, drafter: Any, *, steps: int):
        """steps: of the whole run. Raises ValueError for a target or a drafter that cannot be trained so."""
        self.settings, self.target, self.drafter = config.joint, target, drafter
        self.alone = round(config.joint.drafter_first * steps)
        _check(config, target, drafter)
        self.layers = _inject(target, config)
        drafter.adapters = _tree(self.layers)
        self.parameters = list(drafter.adapters.parameters())
        self.shift = Shift(target, weight=config.joint.weight)
        self._switch(False)

    def close(self) -> None:
        """Give target and drafter back as they came."""
        for name, layer in self.layers.items():
            self.target.decoder.set_submodule(name, layer.get_base_layer())
        del self.drafter.adapters

    def optimizer(self, drafters: Optimizers, config: RunConfig) -> Optimizers:
        """The drafter's own, and AdamW for the adapters at their share of its rate, without weight decay."""
        group = {"params": self.parameters, "weight_decay": 0.0, "share": self.settings.rate_share}
        return Optimizers([*drafters.parts, adamw([group], config.train)])

    def moves_target(self, step: int) -> bool:
        """Whether the update after `step` finished ones trains the target too."""
        return step >= self.alone

    def moved(self, parameters: Mapping[str, nn.Parameter], step: int) -> list[nn.Parameter]:
        """Those of the parameters that the update after `step` finished ones may change."""
        both = self.moves_target(step)
        return [p for name, p in parameters.items() if both or not name.startswith(ADAPTERS)]

    @contextmanager
    def tuned(self) -> Iterator[None]:
        """The target as trained so far."""
        self._switch(True)
        try:
            yield
        finally:
            self._switch(False)

    def states(self, batch: FeatureBatch) -> FeatureBatch:
        """The batch with the tuned target's taps and final states, with their graph."""
        tokens = batch.tokens
        layout = packed_layout(tokens.offsets)
        with self.tuned():
            states = self.target.states(tokens.ids, tokens.positions, layout, taps=batch.tap_ids)
        return replace(batch, taps=states.taps, final=states.final)

    def _switch(self, on: bool) -> None:
        for layer in self.layers.values():
            layer.enable_adapters(on)
        for parameter in self.parameters:  # peft freezes what it switches off
            parameter.requires_grad_(True)


def answer_rows(tokens: TokenBatch) -> torch.Tensor:
    """int64: the tokens whose next one the target would write itself. Span {2, 3} of 5 tokens: 1, 2."""
    same = tokens.document_ids[1:] == tokens.document_ids[:-1]
    return (tokens.loss_mask[1:] & same).nonzero()[:, 0]


def merge(target: Target, adapters: Mapping[str, torch.Tensor], scale: float) -> None:
    """Add scale B A to the target's weights, rounded once. adapters: by LAYER.A and LAYER.B."""
    for name in sorted({key.rpartition(".")[0] for key in adapters}):
        weight = target.decoder.get_submodule(name).get_parameter("weight")
        first, second = (adapters[f"{name}.{part}"].float().to(weight.device) for part in "AB")
        weight.data = (weight.data.float() + scale * (second @ first)).to(weight.dtype)


def _check(config: RunConfig, target: Target, drafter: Any) -> None:
    key = f"joint.rank={config.joint.rank}"
    if target.recurrent:
        raise ValueError(f"{key}: the target has recurrent layers; expected attention alone, or joint.rank=0")
    if not has_plain_head(target):
        raise ValueError(
            f"{key}: the target scales, caps or shifts its logits, which the loss on it does not know"
        )
    if not _reads_states(drafter, target):
        raise ValueError(
            f"{key}: drafter {config.drafter.family} does not read the target's states, so nothing would "
            "move the target; expected joint.rank=0 or a family such as medusa"
        )


def _reads_states(drafter: Any, target: Target) -> bool:
    """Whether the drafter's rows depend on the target's states, asked with a text of four tokens."""
    ids, spans = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    tokens = pack([Sample("", ids, spans >= 0, spans)])
    final = torch.zeros(4, target.hidden_size, dtype=target.dtype)
    taps, argmax = final[:, None].repeat(1, len(drafter.taps), 1), torch.zeros(4).long()
    batch = FeatureBatch(tokens, drafter.taps, taps, final, torch.zeros(4), argmax).to(target.device)
    batch.taps.requires_grad_(True)
    batch.final.requires_grad_(True)
    state = drafter.rows(batch).state
    found = torch.autograd.grad(state.sum(), (batch.taps, batch.final), allow_unused=True)
    return any(gradient is not None for gradient in found)


def _inject(target: Target, config: RunConfig) -> dict[str, Any]:
    """LoRA on every linear map of the target's layers, float32, the same for the same seed; by the map's name
    below the decoder. The product of each adapter's matrices is zero at first."""
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    decoder, settings = target.decoder, config.joint
    names = [name for name, module in decoder.named_modules() if isinstance(module, nn.Linear)]
    if not names:
        raise ValueError(
            f"joint.rank={settings.rank}: {type(decoder).__name__} has no nn.Linear to put adapters on"
        )
    lora = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=names)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        inject_adapter_in_model(lora, decoder)
    return {name: module for name, module in decoder.named_modules() if isinstance(module, LoraLayer)}


def _tree(layers: Mapping[str, Any]) -> nn.Module:
    """A module that holds the matrices of every layer, cast to float32 in place, as LAYER.A and LAYER.B."""
    root = nn.Module()
    for name, layer in layers.items():
        here = root
        for part in name.split("."):
            if not hasattr(here, part):
                here.add_module(part, nn.Module())
            here = here.get_submodule(part)
        for short, matrices in (("A", layer.lora_A), ("B", layer.lora_B)):
            matrix = matrices["default"].weight
            matrix.data = matrix.data.float()
            here.register_parameter(short, matrix)
    return root

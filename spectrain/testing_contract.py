"""For tests of the contract of every drafter family: a tiny target and random drafters for it."""

import importlib

import torch

from spectrain import checkpoint
from spectrain.compose import families
from spectrain.data.packing import pack
from spectrain.optim import trainable
from spectrain.target import Target
from spectrain.testing import make_sample, tiny_llama

V = 96
KEPT = torch.arange(0, V, 3)  # a reduced draft vocabulary
# Settings other than the family's defaults: small ones; EAGLE-1 so that it drafts more than a token, blocks
# behind a frozen head so that they can learn a text by heart.
SMALL = {
    "eagle1": {"unroll": 3},
    "eagle3": {"unroll": 3},
    "eagle3 of two layers": {"unroll": 3, "layers": 2},
    "medusa": {"heads": 3},
    "hydra": {"heads": 3},
    "hydra of two blocks": {"heads": 3, "blocks": 2},
    "medusa of a frozen head": {"heads": 3, "head": "frozen", "blocks": 3},
    "mtp by depth": {"blocks": 3},
}


def config_of(family):
    """family: a name of SMALL begins with that of its family."""
    return importlib.import_module(f"spectrain.drafters.{family.split()[0]}").Config(**SMALL.get(family, {}))


def new_drafter(family, target, *, kept=KEPT):
    """A drafter whose every parameter differs from its start."""
    drafter = checkpoint.build_drafter(config_of(family), target, kept)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainable(drafter).values():
            parameter += 0.1 * torch.randn(parameter.shape, generator=draw)
    return drafter.eval()


TARGET = Target(tiny_llama(vocab=V))
FAMILIES = sorted({*families(), *SMALL})
TRAINED = [family for family in FAMILIES if trainable(new_drafter(family, TARGET))]


def text(length, seed):
    return torch.randint(0, V, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


A = make_sample("a", text(13, 1), "...SSSSSS.TTT")
B = make_sample("b", text(9, 2), "SSSS..UUU")


def head_of(drafter, slot):
    head = drafter.head_weight()
    return head if isinstance(head, torch.Tensor) else head[slot]


def reach(drafter):
    """Draft tokens in a row that the tests ask for."""
    return drafter.index(pack([A])).slots if trainable(drafter) else 3

"""Two tiny targets and random drafters for them."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from spectrain.drafters.eagle3 import Config, build
from spectrain.target import Target
from spectrain.testing import tiny_llama

V = 260
KEPT = torch.arange(0, V, 3)  # a reduced draft vocabulary
UNROLL = 4


def qwen3():
    """Qwen3-shaped: heads wider than hidden / heads, and norms of q and k that the drafter does not have."""
    config = Qwen3Config(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        initializer_range=0.2,
    )
    return Qwen3ForCausalLM(config).float()


TARGETS = {"llama": lambda: tiny_llama(layers=5), "qwen3": qwen3}


@pytest.fixture(scope="module", params=TARGETS)
def target(request):
    torch.manual_seed(0)
    return Target(TARGETS[request.param]())


@pytest.fixture(scope="module")
def llama():
    return Target(TARGETS["llama"]())


@pytest.fixture(scope="session")
def drafter_of():
    return random_drafter


def random_drafter(target, *, kept=KEPT, seed=0, **settings):
    """A random drafter whose every parameter, norms included, differs from its start."""
    torch.manual_seed(seed)
    drafter = build(Config(**{"unroll": UNROLL} | settings), target, kept)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return drafter

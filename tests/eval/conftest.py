"""A tiny target with a chat template, and a drafter that knows one token of context."""

import pytest
import torch

from spectrain.target import Target
from spectrain.testing import Bigram, byte_tokenizer, tiny_llama


@pytest.fixture(scope="session")
def target() -> Target:
    """Large embeddings and weak attention, so that the last token tells much of the next one: alpha about
    0.5."""
    model = tiny_llama(layers=2)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
        model.model.embed_tokens.weight.mul_(8)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.5)
    return Target(model, byte_tokenizer(), path="tiny")


@pytest.fixture(scope="session")
def drafter(target) -> Bigram:
    return Bigram(target)

"""The engine's way through the kernels, on the CPU by Triton's interpreter: the texts are the same."""

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from spectrain import cache
from spectrain.decode import by_kernel
from spectrain.decode.engine import generate
from spectrain.decode.sampling import Sampling
from spectrain.kernels import commit_triton, tree_attention_triton, tree_build_triton
from spectrain.proposal import Plan
from spectrain.target import Target
from spectrain.testing import Bigram

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = {"head_dim": 16, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
BUILD = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, **MIXED, attn_logit_softcapping=20.0)),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(**SHAPE, **MIXED, num_local_experts=4, num_experts_per_tok=2, rope_parameters=ROPE)
    ),
}
SETTINGS = {"max_new_tokens": 8, "stop_ids": (), "batch_size": 2}
PROMPTS = [[5, 9, 13, 7, 3, 22, 41, 8, 30, 11, 12, 6], [7, 3, 22, 41, 8], [17]]


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU there")


@pytest.fixture(params=BUILD)
def target(request):
    return Target(BUILD[request.param]().float())


@pytest.fixture
def kernels(monkeypatch):
    """Calls of each kernel so far; from the first call on, kernels do what they do on a GPU."""
    calls = {"attention": 0, "build": 0, "commit": 0, "verify": 0}

    def counted(name, form, **settings):
        def run(*arguments):
            calls[name] += 1
            return form(*arguments, **settings)

        return run

    def choose():
        monkeypatch.setattr(cache, "KERNEL_DEVICES", ("cpu",))
        monkeypatch.setattr(by_kernel, "KERNEL_DEVICES", ("cpu",))
        monkeypatch.setattr(
            cache, "tree_attention", counted("attention", tree_attention_triton.launch, splits=2)
        )
        monkeypatch.setattr(cache, "tree_build", counted("build", tree_build_triton.launch))
        monkeypatch.setattr(cache, "commit", counted("commit", commit_triton.launch))
        monkeypatch.setattr(by_kernel, "_trees", counted("verify", by_kernel._trees))
        return calls

    return choose


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(
    ("law", "plan"),
    [("rejection", Plan("chain", 3)), ("target_only", Plan("tree", 3, nodes=6, top_k=2))],
)
def test_texts_and_rounds_are_those_without_kernels(target, law, plan, temperature, kernels):
    """Three prompts, two places."""
    settings = {"sampling": Sampling(temperature=temperature), "law": law, "plan": plan} | SETTINGS
    expected, _ = generate(target, PROMPTS, **settings, drafter=Bigram(target))
    calls = kernels()
    found, _ = generate(target, PROMPTS, **settings, drafter=Bigram(target))
    assert [g.ids for g in found] == [g.ids for g in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert [r.accepted for r in ours.rounds] == [r.accepted for r in theirs.rounds]
    assert calls["attention"] and calls["build"] and calls["verify"]
    assert bool(calls["commit"]) == (plan.shape == "tree")


def test_plain_text_is_that_without_kernels(target, kernels):
    settings = {"sampling": Sampling(temperature=0.9, top_p=0.9)} | SETTINGS
    expected, _ = generate(target, PROMPTS, **settings)
    kernels()
    found, _ = generate(target, PROMPTS, **settings)
    assert [g.ids for g in found] == [g.ids for g in expected]

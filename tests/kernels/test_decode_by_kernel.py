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
from spectrain.testing import Bigram, KnowingDrafter

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
            cache, "tree_attention", counted("attention", tree_attention_triton.launch, splits=1)
        )
        monkeypatch.setattr(cache, "tree_build", counted("build", tree_build_triton.launch))
        monkeypatch.setattr(cache, "commit", counted("commit", commit_triton.launch))
        monkeypatch.setattr(by_kernel, "_trees", counted("verify", by_kernel._trees))
        return calls

    return choose


@pytest.mark.parametrize("kind", BUILD)
def test_greedy_text_by_trees_is_plain_text_without_kernels(kind, kernels):
    """Three prompts, two places; of 3 draft tokens 0, 1, 2 or all are right."""
    target = Target(BUILD[kind]().float())
    plain, _ = generate(target, PROMPTS, sampling=Sampling(), **SETTINGS)
    texts = [[*g.prompt_ids, *g.ids] for g in plain]
    drafter = KnowingDrafter(texts, lambda n: (0, 2, 1, 9)[n % 4], vocab=64)
    calls, plan = kernels(), Plan("tree", 3, nodes=6, top_k=2)
    found, _ = generate(target, PROMPTS, sampling=Sampling(), **SETTINGS, drafter=drafter, plan=plan)
    assert [g.ids for g in found] == [g.ids for g in plain]
    assert {0, 1, 2} <= {round.accepted for g in found for round in g.rounds}
    assert all(calls.values()), calls


@pytest.mark.parametrize("plan", [None, Plan("chain", 2)], ids=["plain", "chain"])
def test_sampled_texts_and_alphas_are_those_without_kernels(plan, kernels):
    target = Target(BUILD["llama"]().float())
    drafter = None if plan is None else Bigram(target)
    settings = (
        {"sampling": Sampling(temperature=0.7), "law": "rejection", "plan": plan}
        | SETTINGS
        | {"max_new_tokens": 5}
    )
    expected, _ = generate(target, PROMPTS[1:], **settings, drafter=drafter)
    kernels()
    found, _ = generate(target, PROMPTS[1:], **settings, drafter=drafter)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.ids == theirs.ids
        alphas = [[alpha for round in g.rounds for alpha in round.alphas] for g in (ours, theirs)]
        assert alphas[0] == pytest.approx(alphas[1], abs=1e-5)

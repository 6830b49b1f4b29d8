"""The model of a GPU's limit, against numbers worked out by hand and tables of the literature."""

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
)

from spectrain.config import EvalConfig
from spectrain.drafters.eagle3 import Config, Eagle3
from spectrain.eval.limit import (
    GPUS,
    DraftShape,
    Gpu,
    Load,
    TargetShape,
    _attention,
    eta_limit,
    round_cost,
    step_s,
    target_shape,
)
from spectrain.target import Target
from spectrain.testing import tiny_llama

SMALL = TargetShape(dense=1000, kv=10, attention=0)
EAGLE = DraftShape(step=50, once=20)


@pytest.fixture(scope="module")
def llama_8b() -> Target:
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8,
    )  # fmt: skip
    with torch.device("meta"):
        return Target(LlamaForCausalLM(config))


@pytest.fixture(scope="module")
def qwen3_30b() -> Target:
    config = Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, moe_intermediate_size=768, num_experts=128,
        num_experts_per_tok=8,
    )  # fmt: skip
    with torch.device("meta"):
        return Target(Qwen3MoeForCausalLM(config))


def test_a_round_bound_by_memory_by_hand():
    gpu = Gpu(bandwidth=2.0, arithmetic=1e9)  # one weight a second
    load = Load(batch=1, context=20, drafted=5, draft_steps=5, emitted=3)
    assert step_s(gpu, SMALL, batch=1, context=20, tokens=1) == 1000 + 21 * 10
    assert step_s(gpu, SMALL, batch=1, context=20, tokens=6) == 1000 + 26 * 10
    assert round_cost(gpu, SMALL, EAGLE, load) == pytest.approx((1260 + 5 * 50 + 20) / 1210, rel=1e-12)
    assert eta_limit(3.0, gpu, SMALL, EAGLE, load) == pytest.approx(3 * 1210 / 1530, rel=1e-12)


def test_a_batch_shares_the_weights_and_not_the_cache():
    gpu = Gpu(bandwidth=2.0, arithmetic=1e9)
    assert step_s(gpu, SMALL, batch=8, context=20, tokens=6) == 1000 + 8 * 26 * 10


def test_a_round_bound_by_arithmetic_costs_its_tokens():
    gpu = Gpu(bandwidth=1e9, arithmetic=1.0)
    shape = TargetShape(dense=1000, kv=0, attention=0)
    load = Load(batch=4, context=20, drafted=3, draft_steps=3, emitted=2)
    assert step_s(gpu, shape, batch=4, context=20, tokens=4) == 2 * 1000 * 4 * 4
    assert round_cost(gpu, shape, DraftShape(0, 0), load) == 4.0
    assert eta_limit(2.0, gpu, shape, DraftShape(0, 0), load) == 0.5  # speculation loses there


def test_attention_counts_the_keys_that_each_token_sees():
    gpu = Gpu(bandwidth=1e9, arithmetic=1.0)
    shape = TargetShape(dense=0, kv=0, attention=7)
    assert step_s(gpu, shape, batch=2, context=20, tokens=3) == 7 * 2 * (21 + 22 + 23)


def test_without_draft_steps_a_round_is_a_plain_step():
    assert round_cost(GPUS["h200"], SMALL, EAGLE, Load(1, 20, 0, 0, 1)) == pytest.approx(1 + 20 / 1210)


def test_llama_8b_reads_15_gb_and_128_kib_per_token(llama_8b):
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    shape = target_shape(llama_8b)
    assert shape == TargetShape(
        dense=32 * layer + 4096 + 128256 * 4096, kv=2 * 8 * 128 * 32, attention=32 * 32 * 4 * 128
    )
    assert 2 * shape.dense == pytest.approx(15.0e9, rel=2e-3) and 2 * shape.kv == 128 * 1024
    for name, ms in (("h200_measured", 3.49), ("h200", 3.13)):
        found = step_s(GPUS[name], shape, batch=1, context=0, tokens=1)
        assert 1e3 * found == pytest.approx(ms, abs=0.005)


def test_width_is_free_up_to_the_ridge_and_then_costs(llama_8b):
    gpu, shape = GPUS["h200_measured"], target_shape(llama_8b)
    plain = step_s(gpu, shape, batch=1, context=0, tokens=1)
    for tokens, r in ((64, 1.0), (128, 1.0), (192, 1.06), (256, 1.41), (384, 2.1), (512, 2.8)):
        found = step_s(gpu, shape, batch=1, context=0, tokens=tokens) / plain
        assert found == pytest.approx(r, abs=0.05), tokens  # attention adds up to 0.03


def test_an_eagle3_step_for_llama_8b_costs_a_twentieth(llama_8b):
    with torch.device("meta"):
        drafter = Eagle3(Config(), llama_8b, torch.arange(32000))
    step, once = drafter.weights_read()
    dense = target_shape(llama_8b).dense
    assert step / dense == pytest.approx(0.050, abs=5e-4)
    assert once / dense == pytest.approx(0.007, abs=5e-4)


def test_experts_are_read_as_more_tokens_touch_more_of_them(qwen3_30b):
    shape = target_shape(qwen3_30b)
    assert (shape.experts, shape.active, shape.routed) == (128, 8, 48 * 128 * 3 * 2048 * 768)
    rows = {1: (1.56, 2.58, 4.26, 6.56), 4: (1.65, 2.55, 3.40, 3.81), 32: (1.12, 1.14, 1.14, 1.14)}
    for batch, expected in rows.items():
        found = [shape.touched(batch * n) / shape.touched(batch) for n in (2, 4, 8, 16)]
        assert found == pytest.approx(expected, rel=5e-3)


def test_a_tied_head_is_read_and_an_input_embedding_is_not():
    separate = target_shape(Target(tiny_llama(layers=1)))
    tied = target_shape(Target(tiny_llama(layers=1, tied=True)))
    assert separate == tied and separate.dense > 260 * 32


def test_recurrent_layers_keep_no_keys_and_latent_attention_keeps_its_rank():
    kinds = ["linear_attention", "full_attention"] * 2
    hybrid = Qwen3NextConfig(
        num_hidden_layers=4, layer_types=kinds, num_attention_heads=4, num_key_value_heads=2, head_dim=8
    )
    assert _attention(hybrid) == (2 * 2 * 2 * 8, 2 * 4 * 4 * 8)
    latent = DeepseekV3Config(num_hidden_layers=2, num_attention_heads=128)
    assert _attention(latent) == (2 * 576, 2 * 128 * 2 * (576 + 512))  # 242 FLOP per byte and query


def test_the_setting_knows_every_gpu_of_the_table():
    for name in ("none", *GPUS):
        assert EvalConfig(limit_gpu=name).limit_gpu == name
    with pytest.raises(
        ValueError, match=r"eval\.limit_gpu='h2000': expected one of none, h200, h100, h200_m"
    ):
        EvalConfig(limit_gpu="h2000")

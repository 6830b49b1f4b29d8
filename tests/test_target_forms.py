"""Targets of any form give the same sizes, embedding and head: read through the model, never by a name."""

import pytest
import torch
from accelerate import dispatch_model
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
)

from spectrain.config import TargetConfig
from spectrain.drafters import eagle3
from spectrain.target import ATTENTION, Target, load_target, packed_layout
from spectrain.testing import byte_tokenizer, tiny_llama
from spectrain.testing_mtp import mtp_target

TEXT = {
    "hidden_size": 32, "num_hidden_layers": 6, "vocab_size": 100, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
VISION = {
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip


def nested_gemma():
    config = Gemma3Config(text_config=TEXT, vision_config=VISION, image_token_index=99, mm_tokens_per_image=4)
    return Gemma3ForConditionalGeneration(config)


def mamba():
    return Mamba2ForCausalLM(
        Mamba2Config(
            hidden_size=32, num_hidden_layers=2, vocab_size=100, num_heads=4, head_dim=16, state_size=8,
            n_groups=1, expand=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


@pytest.mark.case("O-C03")
def test_sizes_come_from_the_nested_text_config():
    config = Gemma3Config(text_config={k: v for k, v in TEXT.items() if not k.endswith("_id")})
    assert not hasattr(config, "num_hidden_layers")
    target = Target(nested_gemma())
    sizes = (target.num_layers, target.hidden_size, target.vocab_size, target.config.head_dim)
    assert sizes == (6, 32, 100, 16)


@pytest.mark.case("O-C03")
@pytest.mark.parametrize(
    ("build", "limit", "name"),
    [
        (
            lambda: LlamaForCausalLM(LlamaConfig(**TEXT, tie_word_embeddings=True)),
            "1GB",
            "model.embed_tokens",
        ),
        (lambda: LlamaForCausalLM(LlamaConfig(**TEXT)), "40KB", "model.embed_tokens"),
        (nested_gemma, "1GB", "language_model"),
        (mamba, "1GB", "backbone.embeddings"),
    ],
    ids=["one file, tied", "sharded", "nested", "backbone"],
)
def test_the_embedding_is_found_whatever_it_is_called(tmp_path, build, limit, name):
    expected = torch.arange(3200.0).reshape(100, 32) / 3200
    model = build()
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(expected)
    model.save_pretrained(tmp_path, max_shard_size=limit)
    byte_tokenizer().save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists() == (limit == "40KB")
    assert any(name in key for key in model.state_dict())
    target = load_target(TargetConfig(path=str(tmp_path), dtype="float32"))
    assert torch.equal(target.embedding.weight, expected)
    assert (target.head.weight is target.embedding.weight) == target.config.tie_word_embeddings


@pytest.mark.case("O-C04")
@pytest.mark.parametrize(("dtype", "value"), [(torch.float32, 4.4721360), (torch.bfloat16, 4.46875)])
def test_a_drafter_takes_in_the_embedding_as_gemma_scales_it(dtype, value):
    config = Gemma3TextConfig(**TEXT | {"hidden_size": 20, "head_dim": 4})
    model = Gemma3ForCausalLM(config).to(dtype)
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(1.0)
    target = Target(model)
    drafter = eagle3.build(eagle3.Config(), target, torch.arange(100))
    taken_in = drafter.embed(torch.tensor([3, 5]))
    torch.testing.assert_close(taken_in.float(), torch.full((2, 20), value), atol=1e-6, rtol=0)


@pytest.mark.case("O-S01")
def test_layers_that_lie_on_disk_give_the_same_states(tmp_path):
    ids = torch.arange(1, 9)
    call = (ids, torch.arange(8), packed_layout((0, 3, 8)))
    whole = Target(tiny_llama()).states(*call, taps=(0, 2, 3))
    model = tiny_llama()
    places = dict.fromkeys(("lm_head", "model.embed_tokens", "model.norm", "model.rotary_emb"), "cpu")
    places |= {f"model.layers.{k}": "disk" if k in (2, 3) else "cpu" for k in range(4)}
    model = dispatch_model(model, places, main_device="cpu", offload_dir=str(tmp_path))
    assert model.model.layers[3].mlp.up_proj.weight.is_meta
    found = Target(model).states(*call, taps=(0, 2, 3))
    assert torch.equal(found.taps, whole.taps) and torch.equal(found.final, whole.final)


@pytest.mark.case("O-S06")
def test_whatever_attention_a_checkpoint_asks_for_the_target_runs_ours():
    config = LlamaConfig(**TEXT, attn_implementation="eager")
    target = Target(LlamaForCausalLM(config))
    assert {layer.self_attn.config._attn_implementation for layer in target.layers} == {ATTENTION}
    assert target.self_test() == 0.0


def test_latent_attention_whose_values_are_narrower_than_its_keys_runs_as_the_model_itself(tmp_path):
    target = mtp_target("deepseek_v3", tmp_path)
    attention = target.layers[0].self_attn
    assert (attention.qk_head_dim, attention.v_head_dim) == (18, 14)
    assert target.self_test() < 1e-4

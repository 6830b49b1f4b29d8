"""Tiny targets of every kind whose MTP weights engines know, as folders; for tests.

A MiMo is a Qwen2 with another name: transformers has none of its own.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from spectrain.target import Target

SIZES: dict[str, Any] = {
    "vocab_size": 260, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "initializer_range": 0.2,
}  # fmt: skip
DENSE: dict[str, Any] = {"intermediate_size": 64, "head_dim": 16}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 20, "num_experts_per_tok": 2}
ROUTED: dict[str, Any] = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1}
LATENT: dict[str, Any] = {
    "q_lora_rank": 24, "kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 10, "v_head_dim": 14,
}  # fmt: skip
RECURRENT: dict[str, Any] = {
    "num_hidden_layers": 4, "linear_num_value_heads": 2, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
SHARED: dict[str, Any] = {"num_experts": 4, "shared_expert_intermediate_size": 28}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
    "mscale": 1.0, "mscale_all_dim": 0.7,
}  # fmt: skip
KINDS = ("deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "mimo")


def mtp_target(kind: str, folder: Path) -> Target:
    """A random float32 target of one of KINDS, whose files lie in `folder`."""
    torch.manual_seed(0)
    model = _model(kind).float().eval()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(len(buffer)))
    model.save_pretrained(folder)
    if kind == "mimo":
        path = folder / "config.json"
        named = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
        path.write_text(json.dumps({**json.loads(path.read_text()), **named}))
        model.config.model_type = "mimo"
    return Target(model, path=str(folder))


def _model(kind: str) -> PreTrainedModel:
    moe = {**SIZES, **DENSE, **EXPERTS}
    behind = {"num_hidden_layers": 2, "first_k_dense_replace": 1, **ROUTED}
    if kind == "deepseek_v3":
        sizes = {**SIZES, "num_key_value_heads": 4, "intermediate_size": 64, **EXPERTS, **behind, **LATENT}
        return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, rope_parameters=dict(YARN)))
    if kind == "glm4_moe":
        return Glm4MoeForCausalLM(Glm4MoeConfig(**moe, **behind, attention_bias=True, use_qk_norm=True))
    if kind == "qwen3_next":
        return Qwen3NextForCausalLM(Qwen3NextConfig(**moe, **RECURRENT, **SHARED))
    if kind == "qwen3_5":
        return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES, **DENSE, **RECURRENT))
    if kind == "qwen3_5_moe":
        return Qwen3_5MoeForCausalLM(
            Qwen3_5MoeTextConfig(**SIZES, head_dim=16, **EXPERTS, **RECURRENT, **SHARED)
        )
    assert kind == "mimo", kind
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, intermediate_size=64, num_hidden_layers=2))

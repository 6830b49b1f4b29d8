"""A second, minimal EAGLE-1 and Medusa that read an exported folder and nothing else (EAGLE-3: `replay.py`).

Written from the contract of vLLM and SGLang in plain torch and float32. EAGLE-1 knows a Llama of any depth
whose first layer has no norm in front, without biases but fc's, and drafts through rows of the target's
head, which the recorded draft brings along; Medusa knows its blocks and heads.
Legend: T rows, S draft steps, D hidden, F MLP width, V vocab, W ids shown, H heads, G key/value heads,
K head dim; of Medusa, K heads.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from spectrain.replay import Replay, attend, check_tensors, inv_freq, read_stored, rms_norm, rotate

EAGLE1 = {"EagleLlamaForCausalLM": "vllm", "LlamaForCausalLM": "vllm", "LlamaForCausalLMEagle": "sglang"}
GRAPH = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False}
EAGLE1_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "rms_norm_eps", "vocab_size", "max_position_embeddings", *GRAPH, "dtype", "torch_dtype",
)  # fmt: skip
MEDUSA_KEYS = (
    "hidden_size", "vocab_size", "truncated_vocab_size", "num_heads", "num_hidden_layers", "medusa_fc_bias",
    "original_lm_head", "dtype", "torch_dtype",
)  # fmt: skip


def open_replay(folder: Path) -> "Replay | Eagle1Replay | MedusaReplay":
    """The reader of an exported folder by its config's architecture; ValueError where the folder breaks the
    contract."""
    architecture = (_config(folder / "config.json").get("architectures") or [None])[0]
    if architecture in EAGLE1:
        return Eagle1Replay(folder)
    return MedusaReplay(folder) if architecture == "MedusaModel" else Replay(folder)


class Eagle1Replay:
    """An exported EAGLE-1 drafter; attributes as `Replay`'s."""

    def __init__(self, folder: Path):
        self.config = _config(folder / "config.json", EAGLE1_KEYS, GRAPH)
        self.inv_freq, self.rope_scale = inv_freq(self.config)
        path = folder / "model.safetensors"
        self.metadata, stored = read_stored(path)
        check_tensors(path, eagle1_shapes(self.config), self.config["dtype"], stored)
        self.tensors = {name: t.float() for name, t in stored.items()}

    @torch.no_grad()
    def replayed(self, fixture: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Logits [S, W] of the recorded draft at the head rows that it shows."""
        w, rows = self.tensors, len(fixture["final"])
        state, embeds, positions = fixture["final"], fixture["embeds"][:rows], torch.arange(rows)
        past: list[list[Any]] = [[] for _ in range(self.config["num_hidden_layers"])]
        logits = []
        for step in range(len(fixture["logits"])):
            x_TD = torch.cat((embeds, state), -1) @ w["fc.weight"].T + w.get("fc.bias", torch.zeros(()))
            for i, seen in enumerate(past):
                x_TD = self._layer(i, x_TD, positions, seen)
            logits.append(fixture["head"] @ x_TD[-1])
            state, embeds = x_TD[-1:], fixture["embeds"][rows + step : rows + step + 1]
            positions = positions[-1:] + 1
        return torch.stack(logits)

    def _layer(self, i: int, x_TD: torch.Tensor, positions_T: torch.Tensor, past: list[Any]) -> torch.Tensor:
        w, config, name = self.tensors, self.config, f"layers.{i}"
        eps, K = config["rms_norm_eps"], config["head_dim"]
        normed = rms_norm(x_TD, w[f"{name}.input_layernorm.weight"], eps) if i else x_TD
        q, k, v = (
            (normed @ w[f"{name}.self_attn.{kind}_proj.weight"].T).unflatten(-1, (-1, K)).transpose(0, 1)
            for kind in "qkv"
        )
        q, k = (rotate(x, positions_T, self.inv_freq, self.rope_scale) for x in (q, k))
        x_TD = x_TD + attend(q, k, v, past) @ w[f"{name}.self_attn.o_proj.weight"].T
        normed = rms_norm(x_TD, w[f"{name}.post_attention_layernorm.weight"], eps)
        gate, up = (normed @ w[f"{name}.mlp.{kind}_proj.weight"].T for kind in ("gate", "up"))
        return x_TD + (F.silu(gate) * up) @ w[f"{name}.mlp.down_proj.weight"].T


class MedusaReplay:
    """An exported Medusa drafter; attributes as `Replay`'s."""

    def __init__(self, folder: Path):
        self.config = _config(folder / "config.json", MEDUSA_KEYS)
        path = folder / "model.safetensors"
        self.metadata, stored = read_stored(path)
        check_tensors(path, medusa_shapes(self.config), self.config["dtype"], stored)
        self.tensors = {name: t.float() for name, t in stored.items() if t.is_floating_point()}

    @torch.no_grad()
    def replayed(self, fixture: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Logits [K, W] of the first heads at the recorded state."""
        logits, w = [], self.tensors
        for head in range(len(fixture["logits"])):
            x_D = fixture["final"][-1]
            for i in range(self.config["num_hidden_layers"]):
                bias = w.get(f"blocks.{head}.layers.{i}.bias", torch.zeros(()))
                x_D = x_D + F.silu(w[f"blocks.{head}.layers.{i}.weight"] @ x_D + bias)
            logits.append(w[f"lm_heads.{0 if self.config['original_lm_head'] else head}.weight"] @ x_D)
        return torch.stack(logits)


def eagle1_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of an EAGLE-1 file, and no other; the bias of fc is SGLang's."""
    D, I, K = config["hidden_size"], config["intermediate_size"], config["head_dim"]  # noqa: E741
    Q, R = config["num_attention_heads"] * K, config["num_key_value_heads"] * K
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (D, 2 * D)}
    if EAGLE1[config["architectures"][0]] == "sglang":
        shapes["fc.bias"] = (D,)
    for i in range(config["num_hidden_layers"]):
        layer = {
            "self_attn.q_proj": (Q, D), "self_attn.k_proj": (R, D), "self_attn.v_proj": (R, D),
            "self_attn.o_proj": (D, Q), "mlp.gate_proj": (I, D), "mlp.up_proj": (I, D),
            "mlp.down_proj": (D, I), "post_attention_layernorm": (D,),
            **({"input_layernorm": (D,)} if i else {}),
        }  # fmt: skip
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def medusa_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a Medusa file, and no other."""
    D, W, K = config["hidden_size"], config["truncated_vocab_size"], config["num_heads"]
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(K):
        for i in range(config["num_hidden_layers"]):
            shapes[f"blocks.{head}.layers.{i}.weight"] = (D, D)
            if config["medusa_fc_bias"]:
                shapes[f"blocks.{head}.layers.{i}.bias"] = (D,)
    shapes |= {f"lm_heads.{head}.weight": (W, D) for head in range(1 if config["original_lm_head"] else K)}
    return shapes if config["vocab_size"] == W else {**shapes, "token_map": (W,)}


def _config(path: Path, keys: tuple[str, ...] = (), graph: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Parsed config.json; ValueError where it is missing, damaged, lacks one of `keys` or asks for another
    graph than `graph`."""
    try:
        config = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: missing or damaged ({error})") from None
    for key in keys:
        if config.get(key) is None:
            raise ValueError(f"{path}: key {key} is missing")
    for key, known in (graph or {}).items():
        if config[key] != known:
            raise ValueError(f"{path}: {key}={config[key]!r}: expected {known!r}")
    return config

"""A second, minimal EAGLE-1, Medusa and Hydra that read an exported folder and nothing else (EAGLE-3:
`replay.py`, MTP: `replay_mtp.py`).

Written from the contract of vLLM, SGLang and the authors' code in plain torch and float32. EAGLE-1 knows a
Llama of any depth whose first layer has no norm in front, without biases but fc's, and drafts through rows of
the target's head, which the recorded draft brings along; Medusa and Hydra know their blocks and heads, by
vLLM's names and by their authors'.
Legend: T rows, S draft steps, D hidden, F MLP width, V vocab, W ids shown, H heads, G key/value heads,
K head dim; of Medusa, K heads.
"""

import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from spectrain.replay import Replay, attend, check_tensors, inv_freq, read_stored, rms_norm, rotate
from spectrain.replay_mtp import SHARD, MtpReplay

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
HYDRA_KEYS = ("hydra_num_heads", "hydra_num_layers", "hidden_size", "vocab_size", "dtype", "torch_dtype")
HYDRA_GRAPH = {"hydra_head_arch": "mlp", "grounded_heads": True, "hydra_num_layers": 1}
PICKLES = ("medusa_lm_head.pt", "hydra_lm_head.pt")  # the only file that the authors' code reads


def open_replay(folder: Path) -> "Replay | Eagle1Replay | MedusaReplay | HydraReplay | MtpReplay":
    """The reader of an exported folder by its shard of MTP weights, or its config's architecture; ValueError
    where the folder breaks the contract."""
    if (folder / SHARD).exists():
        return MtpReplay(folder)
    architecture = (_config(folder / "config.json").get("architectures") or [None])[0]
    if architecture in EAGLE1:
        return Eagle1Replay(folder)
    if architecture == "HydraModel":
        return HydraReplay(folder)
    return MedusaReplay(folder) if architecture == "MedusaModel" else Replay(folder)


class Eagle1Replay:
    """An exported EAGLE-1 drafter; attributes as `Replay`'s."""

    def __init__(self, folder: Path):
        self.config = _config(folder / "config.json", EAGLE1_KEYS, GRAPH)
        self.inv_freq, self.rope_scale = inv_freq(self.config)
        path = folder / "model.safetensors"
        self.metadata, stored = read_stored(path)
        shapes = eagle1_shapes(self.config)
        if self.config.get("bias", "fc.bias" in stored):  # the authors' key; a missing one means true there
            shapes["fc.bias"] = (self.config["hidden_size"],)
        check_tensors(path, shapes, self.config["dtype"], stored)
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
        path, self.metadata, stored = read_heads(folder)
        stored = {medusa_name(name): tensor for name, tensor in stored.items()}
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


class HydraReplay:
    """An exported Hydra drafter; attributes as `Replay`'s."""

    def __init__(self, folder: Path):
        self.config = _config(folder / "config.json", HYDRA_KEYS, HYDRA_GRAPH)
        path, self.metadata, stored = read_heads(folder)
        check_tensors(path, hydra_shapes(self.config), self.config["dtype"], stored)
        self.tensors = {name: tensor.float() for name, tensor in stored.items()}

    @torch.no_grad()
    def replayed(self, fixture: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Logits [K, V] of the first heads at the recorded state, each behind the drafts before it."""
        logits, rows = [], len(fixture["final"])
        for head in range(len(fixture["logits"])):
            read = torch.cat((fixture["final"][-1:], fixture["embeds"][rows - 1 : rows + head])).flatten()
            name = f"hydra_mlp.{head}.0"
            x_D = self._linear(f"{name}.res_connection", read) + F.silu(self._linear(f"{name}.linear", read))
            logits.append(self._linear(f"hydra_lm_head.{head}", x_D))
        return torch.stack(logits)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.tensors[f"{name}.weight"] @ x + self.tensors[f"{name}.bias"]


def read_heads(folder: Path) -> tuple[Path, dict[str, str], dict[str, torch.Tensor]]:
    """File, metadata and tensors of a folder of heads. Beside a pickle, which holds none, the metadata is
    that of the recorded draft."""
    for path in (folder / name for name in PICKLES):
        if path.exists():
            return path, read_stored(folder / "check" / "replay.safetensors")[0], read_pickle(path)
    path = folder / "model.safetensors"
    return path, *read_stored(path)


def read_pickle(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a pickle, read without running code from it; ValueError where it holds more."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path}: holds more than tensors, or is damaged ({error})") from None


def medusa_name(name: str) -> str:
    """vLLM's name of a tensor of the authors' heads of one block: 1.0.linear.bias is blocks.1.layers.0.bias,
    1.1.weight is lm_heads.1.weight. Another name as it is."""
    name = re.sub(r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name)
    return re.sub(r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight", name)


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


def hydra_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a Hydra file of one block a head, and no other."""
    D, V = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(config["hydra_num_heads"]):
        for name, out, size in (
            (f"hydra_mlp.{head}.0.linear", D, (head + 2) * D),
            (f"hydra_mlp.{head}.0.res_connection", D, (head + 2) * D),
            (f"hydra_lm_head.{head}", V, D),
        ):
            shapes |= {f"{name}.weight": (out, size), f"{name}.bias": (out,)}
    return shapes


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

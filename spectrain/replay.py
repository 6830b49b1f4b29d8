"""A second, minimal EAGLE-3 that reads an exported folder and nothing else: what a serving engine computes.

Written from the contract of vLLM and SGLang (config keys, tensor names, d2t offsets) and that of speculators,
in plain torch and float32; imports nothing of ours, so that a mistake of the trainer cannot hide here. Knows
draft layers without biases (those behind the first as vLLM has them: they read the state alone, through
`input_layernorm`), with or without a norm per tap, a normed residual and a normed state fed back; a folder
that asks for another graph is refused. Attention is written out and runs on the CPU: it is a check, not an
engine. Embeddings are given, since they are the target's, in the engines too.

Row t fuses the target's states at position t with the embedding of x_{t+1}. A draft step appends a row at the
next position that carries the output of the row before it and the embedding of the draft token.
Legend: T rows, S draft steps (in attention: keys), D hidden, F MLP width, V vocab, W draft vocab, H heads,
G key/value heads, K head dim, L captured layers, E hidden size of the target.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

ARCHITECTURE, SPECULATORS_ARCHITECTURE = "LlamaForCausalLMEagle3", "Eagle3DraftModel"
IDS_KEY = "eagle_aux_hidden_state_layer_ids"
SPECULATORS_KEY = "speculators_model_type"
GRAPH = {  # keys that change the computation, at the only value known here
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "norm_before_fc": False,
}
SWITCHES = ("fc_norm", "norm_before_residual", "norm_output")
ROPE_KEYS = {  # rope type: keys it needs, keys it may have
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (("factor", "original_max_position_embeddings"), ("beta_fast", "beta_slow", "truncate")),
}


class Replay:
    """An exported EAGLE-3 drafter.

    config: parsed config.json; metadata: of model.safetensors; tensors: float32 by name; tap_ids: layer
    outputs that fc reads, in its order; target_ids: int64 [W], the target id of each draft id.
    Raises ValueError naming file and key or tensor where the folder breaks the contract.
    """

    def __init__(self, folder: Path):
        path = folder / "model.safetensors"
        self.config = _read_config(folder / "config.json")
        self.inv_freq, self.rope_scale = inv_freq(self.config)
        self.metadata, stored = read_stored(path)
        if SPECULATORS_KEY in self.config:
            stored.pop("embed_tokens.weight", None)
            stored = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in stored.items()}
        for key in ("tap_ids", "target", "target_model_type"):
            if key not in self.metadata:
                raise ValueError(f"{path}: no {key} in the file's metadata: spectrain did not write it")
        self.tap_ids = _tap_ids(folder / "config.json", self.config, self.metadata)
        check_tensors(path, expected_shapes(self.config), self.config["dtype"], stored)
        self.target_ids = _target_ids(path, self.config, stored)
        self.tensors = {name: t.float() for name, t in stored.items() if t.is_floating_point()}

    @torch.no_grad()
    def draft(
        self,
        taps_TLE: torch.Tensor,
        embeds_TD: torch.Tensor,
        positions_T: torch.Tensor,
        draft_embeds_SD: torch.Tensor,
    ) -> torch.Tensor:
        """Logits [S + 1, V] at the last row and after each of S draft tokens.

        Row i is position t = positions_T[i] with the target's states at t and the embedding of x_{t+1}.
        Ids outside the draft vocabulary get -inf.
        """
        w = self.tensors
        taps_TLE = taps_TLE.float()
        if self.config["fc_norm"]:
            normed = [self._norm(taps_TLE[:, i], f"fc_norm.{i}.weight") for i in range(taps_TLE.shape[1])]
            taps_TLE = torch.stack(normed, 1)
        state_TD = taps_TLE.flatten(1) @ w["fc.weight"].T
        embeds, positions = embeds_TD.float(), positions_T
        past: list[list[Any]] = [[] for _ in range(self.config["num_hidden_layers"])]
        logits = torch.full((len(draft_embeds_SD) + 1, self.config["vocab_size"]), -torch.inf)
        for step in range(len(logits)):
            out_TD = self._layer(0, embeds, state_TD, positions, past[0])
            for i, seen in enumerate(past[1:], 1):
                out_TD = self._layer(i, None, out_TD, positions, seen)
            normed_TD = self._norm(out_TD[-1:], "norm.weight")
            logits[step, self.target_ids] = w["lm_head.weight"] @ normed_TD[0]
            embeds = draft_embeds_SD[step : step + 1].float()
            state_TD = normed_TD if self.config["norm_output"] else out_TD[-1:]
            positions = positions[-1:] + 1
        return logits

    def _layer(self, i: int, embed_TD, state_TD, positions_T, past) -> torch.Tensor:
        """Decoder layer i on new rows; their keys and values are added to `past`."""
        w, H, G = self.tensors, self.config["num_attention_heads"], self.config["num_key_value_heads"]
        K, layer = self.config["head_dim"], layer_name(i)
        normed_TD = self._norm(state_TD, f"{layer}.{'input_layernorm' if i else 'hidden_norm'}.weight")
        read_TX = normed_TD
        if not i:
            read_TX = torch.cat((self._norm(embed_TD, f"{layer}.input_layernorm.weight"), normed_TD), -1)
        q, k, v = (read_TX @ w[f"{layer}.self_attn.{name}_proj.weight"].T for name in "qkv")
        q_HTK = self._rotate(q.unflatten(-1, (H, K)).transpose(0, 1), positions_T)
        k_GTK = self._rotate(k.unflatten(-1, (G, K)).transpose(0, 1), positions_T)
        seen_TX = attend(q_HTK, k_GTK, v.unflatten(-1, (G, K)).transpose(0, 1), past)
        residual_TD = normed_TD if self.config["norm_before_residual"] and not i else state_TD
        middle_TD = residual_TD + seen_TX @ w[f"{layer}.self_attn.o_proj.weight"].T
        x_TD = self._norm(middle_TD, f"{layer}.post_attention_layernorm.weight")
        gate_TF, up_TF = (x_TD @ w[f"{layer}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return middle_TD + (torch.nn.functional.silu(gate_TF) * up_TF) @ w[f"{layer}.mlp.down_proj.weight"].T

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, self.tensors[name], self.config["rms_norm_eps"])

    def _rotate(self, x_HTK: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        return rotate(x_HTK, positions_T, self.inv_freq, self.rope_scale)

    def replayed(self, fixture: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """What the recorded draft `fixture` should hold as `logits` [S + 1, W], from this folder alone."""
        taps, embeds, rows = fixture["taps"], fixture["embeds"], len(fixture["taps"])
        return self.draft(taps, embeds[:rows], torch.arange(rows), embeds[rows:])[:, self.target_ids]


def plain(config: dict[str, Any]) -> dict[str, Any]:
    """A config of speculators with its layer's keys at the top, as every other form has them; another as it
    is."""
    if SPECULATORS_KEY not in config:
        return config
    found = {**(config.get("transformer_layer_config") or {}), **config}
    found |= {"torch_dtype": config["dtype"]} if "dtype" in config else {}
    if config[SPECULATORS_KEY] == "eagle3":
        found["num_aux_hidden_states"] = len(config.get(IDS_KEY) or (0, 0, 0))
    return found


def layer_name(i: int) -> str:
    """What the tensors of layer i begin with."""
    return f"layers.{i}" if i else "midlayer"


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(
    x_HTK: torch.Tensor, positions_T: torch.Tensor, inv_freq: torch.Tensor, scale: float
) -> torch.Tensor:
    """Rotary embedding; dimension i is paired with i + K / 2."""
    angle = positions_T.float()[:, None] * inv_freq
    cos, sin = angle.cos() * scale, angle.sin() * scale
    a, b = x_HTK.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attend(
    q_HTK: torch.Tensor,
    k_GTK: torch.Tensor,
    v_GTK: torch.Tensor,
    past: list[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """Causal attention [T, H K] of the newest T rows, whose keys and values are added to `past`."""
    past.append((k_GTK, v_GTK))
    share = len(q_HTK) // len(k_GTK)
    k_HSK, v_HSK = (torch.cat(parts, 1).repeat_interleave(share, 0) for parts in zip(*past, strict=True))
    T, S = q_HTK.shape[1], k_HSK.shape[1]
    scores = q_HTK @ k_HSK.transpose(1, 2) / math.sqrt(q_HTK.shape[2])
    scores = scores.masked_fill(torch.ones(T, S, dtype=torch.bool).triu(S - T + 1), -torch.inf)
    return (torch.softmax(scores, -1) @ v_HSK).transpose(0, 1).flatten(1)


def inv_freq(config: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """Rotary frequencies float32 [K / 2] and the factor on cos and sin, from either dialect of config.json.

    Raises ValueError for an unknown type, a missing or unknown setting, and dialects that differ.
    """
    scaling = config.get("rope_scaling", {"rope_type": "default"})
    old = _named({"rope_theta": config.get("rope_theta"), **scaling})
    rope = _named(config.get("rope_parameters", old))
    kind, K = rope.get("rope_type"), config["head_dim"]
    if kind not in ROPE_KEYS:
        raise ValueError(f"config.json: rope_type={kind!r}: expected one of {', '.join(ROPE_KEYS)}")
    needed, allowed = ROPE_KEYS[kind]
    for key in ("rope_theta", *needed):
        if rope.get(key) is None:
            raise ValueError(f"config.json: rope_parameters.{key} is missing for rope_type={kind!r}")
    if unknown := sorted(set(rope) - {"rope_type", "rope_theta", *needed, *allowed}):
        raise ValueError(f"config.json: rope_parameters.{unknown[0]} is not known for rope_type={kind!r}")
    if "rope_theta" in config and rope != old:
        raise ValueError(f"config.json: rope_parameters={rope} differs from rope_theta, rope_scaling={old}")
    theta = rope["rope_theta"]
    plain = theta ** -(torch.arange(0, K, 2, dtype=torch.float32) / K)
    if kind == "default":
        return plain, 1.0
    stretched = plain / rope["factor"]
    if kind == "linear":
        return stretched, 1.0
    turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)  # over the original context
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return torch.lerp(stretched, plain, keep), 1.0
    low, high = (
        K * math.log(rope["original_max_position_embeddings"] / (2 * math.pi * beta)) / (2 * math.log(theta))
        for beta in (rope.get("beta_fast", 32), rope.get("beta_slow", 1))
    )
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, K - 1)
    stretch = ((torch.arange(K // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
    return torch.lerp(plain, stretched, stretch), 0.1 * math.log(rope["factor"]) + 1


def _named(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Without nulls, with `rope_type` for the `type` of older writers."""
    kind = {"rope_type": rope.get("type"), **rope}
    return {key: value for key, value in kind.items() if key != "type" and value is not None}


def expected_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor that the exported file must hold, and no other."""
    D, F, K = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    V, W = config["vocab_size"], config["draft_vocab_size"]
    H, G, E = (
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config.get("target_hidden_size", D),
    )
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (D, config["num_aux_hidden_states"] * E),
        "midlayer.hidden_norm.weight": (D,),
        "norm.weight": (D,),
        "lm_head.weight": (W, D),
    }
    for i in range(config["num_hidden_layers"]):
        layer, read = layer_name(i), D if i else 2 * D
        shapes |= {
            f"{layer}.input_layernorm.weight": (D,),
            f"{layer}.self_attn.q_proj.weight": (H * K, read),
            f"{layer}.self_attn.k_proj.weight": (G * K, read),
            f"{layer}.self_attn.v_proj.weight": (G * K, read),
            f"{layer}.self_attn.o_proj.weight": (D, H * K),
            f"{layer}.post_attention_layernorm.weight": (D,),
            f"{layer}.mlp.gate_proj.weight": (F, D),
            f"{layer}.mlp.up_proj.weight": (F, D),
            f"{layer}.mlp.down_proj.weight": (D, F),
        }
    if config["fc_norm"]:
        for i in range(config["num_aux_hidden_states"]):
            shapes[f"fc_norm.{i}.weight"] = (E,)
    return shapes if W == V else {**shapes, "d2t": (W,), "t2d": (V,)}


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = plain(json.loads(path.read_text()))
    except (FileNotFoundError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: missing or damaged ({error})") from None
    check_config(str(path), config)
    return config


def check_config(where: str, config: dict[str, Any]) -> None:
    """Raise ValueError beginning with `where` unless the keys are there and ask for the graph known here."""
    _refuse_null(where, config, "")
    named = SPECULATORS_ARCHITECTURE if SPECULATORS_KEY in config else ARCHITECTURE
    if config.get("architectures") != [named] or config.get("model_type") != "llama":
        found = f"{config.get('architectures')} of model_type {config.get('model_type')!r}"
        raise ValueError(f"{where}: architectures={found}: expected [{named!r}] of model_type 'llama'")
    numbers = (
        "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim rms_norm_eps "
        "vocab_size draft_vocab_size max_position_embeddings num_aux_hidden_states "
        "num_hidden_layers"
    )
    for key in (*numbers.split(), *GRAPH, *SWITCHES, "dtype", "torch_dtype"):
        if key not in config:
            raise ValueError(f"{where}: key {key} is missing")
    for key, known in GRAPH.items():
        if config[key] != known:
            raise ValueError(f"{where}: {key}={config[key]!r}: expected {known!r}")
    if config["dtype"] != config["torch_dtype"]:
        raise ValueError(f"{where}: dtype={config['dtype']!r}, torch_dtype={config['torch_dtype']!r}: differ")


def _refuse_null(where: str, value: Any, key: str) -> None:
    if value is None:
        raise ValueError(f"{where}: {key} is null, which strict readers refuse")
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        _refuse_null(where, item, f"{key}.{name}".lstrip("."))


def read_stored(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    if not path.exists():
        raise ValueError(f"{path}: no such file")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path}: damaged safetensors file ({error})") from None
    return metadata, tensors


def _tap_ids(path: Path, config: dict[str, Any], metadata: dict[str, str]) -> tuple[int, ...]:
    """Layer ids from the file's metadata; config.json must name the same layers in both conventions, that of
    speculators in its own."""
    nested = config.get("eagle_config", {})
    both = (("", config),) if SPECULATORS_KEY in config else (("", config), ("eagle_config.", nested))
    for where, keys in both:
        if IDS_KEY not in keys:
            raise ValueError(f"{path}: key {where}{IDS_KEY} is missing; the tapped layers are never guessed")
    taps = tuple(json.loads(metadata["tap_ids"]))
    for where, keys in both:
        ids = keys[IDS_KEY]
        shift = sglang_shift(metadata["target_model_type"], ids[0]) if where else 0
        outputs = [k + shift - 1 for k in ids]
        if tuple(outputs) != taps:
            raise ValueError(
                f"{path}: {where}{IDS_KEY}={ids} means the outputs of layers {outputs}, but the weights were "
                f"trained on {list(taps)} (metadata of model.safetensors)"
            )
    if list(taps) != sorted(set(taps)) or taps[0] < 0 or len(taps) != config["num_aux_hidden_states"]:
        raise ValueError(
            f"{path}: layers {list(taps)} with num_aux_hidden_states={config['num_aux_hidden_states']}: "
            "expected that many strictly increasing ids"
        )
    return taps


def sglang_shift(target_model_type: str, first_id: int) -> int:
    """What SGLang adds to a nested id to get the layer whose input it captures: 1, not for every target."""
    sometimes = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2")
    return int(target_model_type not in sometimes or first_id == 1)


def check_tensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], floats: str, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Raise ValueError naming the first tensor that is missing, of another shape or dtype (`floats` but for
    maps of ids), not finite or not among `shapes`."""
    for name, shape in shapes.items():
        if name not in tensors:
            raise ValueError(f"{path}: tensor {name} is missing; an engine would leave it random")
        found = tuple(tensors[name].shape)
        if found != shape:
            raise ValueError(f"{path}: tensor {name} has shape {found}: expected {shape}")
        dtype = {"d2t": "int64", "t2d": "bool", "token_map": "int64"}.get(name, floats)
        if str(tensors[name].dtype) != f"torch.{dtype}":
            raise ValueError(f"{path}: tensor {name} has dtype {tensors[name].dtype}: expected {dtype}")
        if not tensors[name].isfinite().all():
            raise ValueError(f"{path}: tensor {name} holds values that are not finite")
    if extra := sorted(set(tensors) - set(shapes)):
        raise ValueError(f"{path}: tensor {extra[0]} is not part of this export")


def _target_ids(path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """int64 [W]: i + d2t[i]; every id without d2t, which only a full draft vocabulary may leave out."""
    V, W = config["vocab_size"], config["draft_vocab_size"]
    ids = torch.arange(W)
    if W == V:
        return ids
    ids = ids + tensors["d2t"]
    if not (ids.diff() > 0).all() or ids[0] < 0 or ids[-1] >= V:
        raise ValueError(f"{path}: d2t holds no offsets: i + d2t[i] must rise strictly within 0 .. {V - 1}")
    if int(tensors["t2d"].sum()) != W or not tensors["t2d"][ids].all():
        raise ValueError(f"{path}: t2d does not mark the {W} target ids of d2t")
    return ids

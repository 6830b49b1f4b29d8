"""A second, minimal MTP block that reads an exported folder and nothing else (heads: `replay_heads.py`).

Written from the checkpoints as vLLM and SGLang load them, in plain torch and float32: the config's keys, the
shard index, and the tensors that it names. Knows a Qwen2 layer (MiMo), gated attention (Qwen3-Next, Qwen3.5),
GLM-4's with half of each head rotated, latent attention (DeepSeek-V3, GLM-4-Lite), a gated MLP, experts
behind a softmax or behind sigmoids with a correction. Embeddings and rows of the head come with the recorded
draft. Experts are read when a row needs them. Knows no window, and no indexer: it would keep all of so few
keys.

One block: a step appends a row that carries the row before. Several: block k runs on every row t, with the
token k places further on. Legend: T rows, D hidden, H heads, K head dim, N ids shown.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open

from spectrain.replay import attend, inv_freq, rms_norm, rotate

SHARD, INDEX = "mtp.safetensors", "model.safetensors.index.json"
BEHIND_THE_LAYERS = ("model.layers.{n}.", "enorm", "hnorm", "eh_proj", "shared_head.norm", "")
OF_QWEN = ("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0.")
NAMES = {  # model_type: prefix of block k, norms of embedding and state, projection, last norm, layer
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite"), BEHIND_THE_LAYERS),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), OF_QWEN),
    "mimo": (
        "model.mtp_layers.{k}.",
        "token_layernorm",
        "hidden_layernorm",
        "input_proj",
        "final_layernorm",
        "",
    ),
}


class MtpReplay:
    """The MTP blocks of an exported folder.

    state_first, pre_norm, one_plus: whether eh_proj's input begins with the state, a step reads the state
    before the last norm, norms multiply by 1 + w; as the engines of the folder have it. Raises ValueError
    naming file and key or tensor where the folder breaks the contract.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        whole = _read_json(folder / "config.json")
        self.config: dict[str, Any] = whole.get("text_config", whole)
        kind = self.config.get("model_type")
        if kind not in NAMES:
            raise ValueError(
                f"{folder / 'config.json'}: model_type={kind!r}: expected one of {', '.join(NAMES)}"
            )
        self.prefix, *self.parts, self.layer = NAMES[kind]
        self.files: dict[str, str] = _read_json(folder / INDEX)["weight_map"]
        with safe_open(folder / SHARD, framework="pt") as file:
            self.metadata: dict[str, str] = file.metadata() or {}
        engines = json.loads(self.metadata.get("engines", "[]"))
        before = {kind.startswith("glm4") and engine == "vllm" for engine in engines}
        self.state_first, self.one_plus = kind == "mimo", NAMES[kind] is OF_QWEN
        self.pre_norm = before == {True}
        self.disagree = len(before) > 1
        counts = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
        self.blocks = next((self.config[key] for key in counts if self.config.get(key)), 0)
        self.inv_freq, self.rope_scale, self.sharper = _rope(self.config)

    @torch.no_grad()
    def replayed(self, fixture: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Logits [S, N] of the recorded draft at the head rows that it shows."""
        rows, steps = len(fixture["final"]), len(fixture["logits"])
        if self.disagree and steps > 1:
            raise ValueError(f"{self.folder / SHARD}: written for engines that feed other states back")
        state_TD, positions = fixture["final"], torch.arange(rows)
        past: list[tuple[torch.Tensor, torch.Tensor]] = []
        logits = []
        for k in range(steps):
            embeds = fixture["embeds"][k : k + rows]
            if self.blocks > 1:
                past = []
            elif k:
                embeds, state_TD, positions = embeds[-1:], state_TD[-1:], positions[-1:] + 1
            block = self.prefix.format(
                n=self.config["num_hidden_layers"] + k % self.blocks, k=k % self.blocks
            )
            out_TD, normed_TD = self._block(block, embeds, state_TD, positions, past)
            logits.append(fixture["head"] @ normed_TD[-1])
            state_TD = out_TD if self.pre_norm else normed_TD
        return torch.stack(logits)

    def _block(self, block: str, embed_TD, state_TD, positions_T, past) -> tuple[torch.Tensor, torch.Tensor]:
        """States [T, D] before and after the last norm."""
        enorm, hnorm, projection, norm = (f"{block}{part}.weight" for part in self.parts)
        halves = [self._norm(embed_TD, enorm), self._norm(state_TD, hnorm)]
        if self.state_first:
            halves.reverse()
        x_TD = torch.cat(halves, -1) @ self._tensor(projection).T
        layer = block + self.layer
        normed = self._norm(x_TD, f"{layer}input_layernorm.weight")
        latent = f"{layer}self_attn.kv_b_proj.weight" in self.files
        attention = self._latent if latent else self._attention
        x_TD = x_TD + attention(f"{layer}self_attn.", normed, positions_T, past)
        normed = self._norm(x_TD, f"{layer}post_attention_layernorm.weight")
        experts = f"{layer}mlp.gate.weight" in self.files
        x_TD = x_TD + (self._experts if experts else self._mlp)(f"{layer}mlp.", normed)
        return x_TD, self._norm(x_TD, norm)

    def _attention(self, name: str, x_TD, positions_T, past) -> torch.Tensor:
        config, H = self.config, self.config["num_attention_heads"]
        K = config.get("head_dim") or config["hidden_size"] // H
        q, k, v = (self._linear(f"{name}{kind}_proj", x_TD) for kind in "qkv")
        gate = None
        if q.shape[-1] == 2 * H * K:
            q, gate = (part.flatten(1) for part in q.unflatten(-1, (H, 2 * K)).chunk(2, -1))
        q, k, v = (part.unflatten(-1, (-1, K)) for part in (q, k, v))
        if f"{name}q_norm.weight" in self.files:
            q, k = self._norm(q, f"{name}q_norm.weight"), self._norm(k, f"{name}k_norm.weight")
        q, k = (self._turned(part.transpose(0, 1), positions_T) for part in (q, k))
        seen_TX = attend(q, k, v.transpose(0, 1), past)
        return self._linear(f"{name}o_proj", seen_TX if gate is None else seen_TX * gate.sigmoid())

    def _latent(self, name: str, x_TD, positions_T, past) -> torch.Tensor:
        """Attention over latent keys and values (DeepSeek-V2, arXiv 2405.04434, section 2.1), written out."""
        config, H = self.config, self.config["num_attention_heads"]
        turned, plain = config["qk_rope_head_dim"], config["qk_nope_head_dim"]
        if f"{name}q_a_proj.weight" in self.files:
            low = self._norm(self._linear(f"{name}q_a_proj", x_TD), f"{name}q_a_layernorm.weight")
            q = self._linear(f"{name}q_b_proj", low)
        else:
            q = self._linear(f"{name}q_proj", x_TD)
        rank = config["kv_lora_rank"]
        low, k_turned = self._linear(f"{name}kv_a_proj_with_mqa", x_TD).split((rank, turned), -1)
        kv = self._linear(f"{name}kv_b_proj", self._norm(low, f"{name}kv_a_layernorm.weight"))
        k_HTP, v_HTU = kv.unflatten(-1, (H, -1)).transpose(0, 1).split((plain, config["v_head_dim"]), -1)
        q_HTP, q_turned = q.unflatten(-1, (H, -1)).transpose(0, 1).split((plain, turned), -1)
        q_turned, k_turned = (self._turned(part, positions_T) for part in (q_turned, k_turned[None]))
        q = torch.cat((q_HTP, q_turned), -1) * self.sharper
        k = torch.cat((k_HTP, k_turned.expand(H, -1, -1)), -1)
        return self._linear(f"{name}o_proj", attend(q, k, v_HTU, past))

    def _turned(self, x_HTK: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of the first dimensions; latent attention pairs neighbours, the rest halves."""
        width = 2 * len(self.inv_freq)
        head, rest = x_HTK[..., :width], x_HTK[..., width:]
        if "qk_rope_head_dim" in self.config and self.config.get("rope_interleave", True):
            head = torch.cat((head[..., ::2], head[..., 1::2]), -1)
        return torch.cat((rotate(head, positions_T, self.inv_freq, self.rope_scale), rest), -1)

    def _mlp(self, name: str, x_TD: torch.Tensor) -> torch.Tensor:
        gate, up = (self._linear(f"{name}{kind}_proj", x_TD) for kind in ("gate", "up"))
        return self._linear(f"{name}down_proj", F.silu(gate) * up)

    def _experts(self, name: str, x_TD: torch.Tensor) -> torch.Tensor:
        weight_TX, chosen_TX = self._routed(name, self._linear(f"{name}gate", x_TD))
        out_TD = torch.zeros_like(x_TD)
        for expert in chosen_TX.unique().tolist():
            row, slot = torch.where(chosen_TX == expert)
            out_TD[row] += weight_TX[row, slot, None] * self._mlp(f"{name}experts.{expert}.", x_TD[row])
        if f"{name}shared_experts.up_proj.weight" in self.files:
            return out_TD + self._mlp(f"{name}shared_experts.", x_TD)
        if f"{name}shared_expert_gate.weight" in self.files:
            share = self._linear(f"{name}shared_expert_gate", x_TD).sigmoid()
            return out_TD + share * self._mlp(f"{name}shared_expert.", x_TD)
        return out_TD

    def _routed(self, name: str, logits_TN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and numbers of each row's experts."""
        config, correction = self.config, f"{name}gate.e_score_correction_bias"
        if correction in self.files:
            score = logits_TN.sigmoid()
            ranked = (score + self._tensor(correction)).unflatten(-1, (config.get("n_group") or 1, -1))
            groups = ranked.topk(2, -1).values.sum(-1).topk(config.get("topk_group") or 1, -1).indices
            open_TG = torch.zeros(ranked.shape[:2], dtype=torch.bool).scatter(1, groups, True)
            ranked = ranked.masked_fill(~open_TG[..., None], -torch.inf).flatten(1)
        else:
            ranked = score = torch.softmax(logits_TN, -1)
        chosen = ranked.topk(config["num_experts_per_tok"], -1).indices
        weight = score.gather(1, chosen)
        if config.get("norm_topk_prob", True):
            weight = weight / weight.sum(-1, keepdim=True)
        return weight * config.get("routed_scaling_factor", 1.0), chosen

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, self._tensor(name) + self.one_plus, self.config["rms_norm_eps"])

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        bias = self._tensor(f"{name}.bias") if f"{name}.bias" in self.files else 0.0
        return x @ self._tensor(f"{name}.weight").T + bias

    def _tensor(self, name: str) -> torch.Tensor:
        if name not in self.files:
            raise ValueError(
                f"{self.folder / INDEX}: tensor {name} is missing; an engine would leave it random"
            )
        path = self.folder / self.files[name]
        try:
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(name).float()
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: tensor {name}: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: missing or damaged ({error})") from None


def _rope(config: Mapping[str, Any]) -> tuple[torch.Tensor, float, float]:
    """Rotary frequencies, the factor on cos and sin, DeepSeek's factor on queries; from either dialect."""
    old = {"rope_theta": config.get("rope_theta"), **(config.get("rope_scaling") or {})}
    rope = {key: value for key, value in (config.get("rope_parameters") or old).items() if "mrope" not in key}
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type", "default")
    share = rope.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor", 1.0)
    own, all_dim = rope.pop("mscale", None), rope.pop("mscale_all_dim", None)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    width = config.get("qk_rope_head_dim") or int(head_dim * share)
    found, scale = inv_freq({"rope_parameters": rope, "head_dim": width})
    if not all_dim or rope["rope_type"] != "yarn":
        return found, scale, 1.0
    sharper, turned = (0.1 * m * math.log(rope["factor"]) + 1 for m in (all_dim, own or 0.0))
    return found, turned / sharper if own else scale, sharper**2

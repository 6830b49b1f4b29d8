"""The frozen target: any Hugging Face decoder LM, called on flat rows of tokens through one attention
function.

Every call runs one flat row [T] of tokens; a `Layout` says which token sees which, so batches need no
padding. The layout travels as a keyword argument through `transformers.AttentionInterface` to every layer.
Taps follow docs/architecture.md: layer id k is the output of the 0-based decoder layer k, `final` is the
state after the final norm. Legend: T tokens, D hidden, V vocabulary, H query heads, G key/value heads, K head
dim.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.masking_utils import AttentionMaskInterface

from spectrain.config import TargetConfig
from spectrain.data.packing import Sample
from spectrain.target_kinds import cache_keyword, layer_kinds

ATTENTION = "spectrain"
EXPERTS = ".experts."


class Layout(Protocol):
    """Which token of a flat row sees which, and where keys and values are kept."""

    def attend(
        self,
        layer: int,
        q_HTK: torch.Tensor,
        k_GTK: torch.Tensor,
        v_GTK: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks_H: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention output [H, T, K] of one layer. window: keys at distance >= window are unseen."""

    def calls(self, ids_T: torch.Tensor, positions_T: torch.Tensor) -> Iterator["Call"]:
        """The row cut into documents or requests, each in a call of its own, for targets with recurrent
        layers: these know no layout and mix whatever lies in one row."""


@dataclass(frozen=True)
class Call:
    """One run of the decoder. state: the recurrent layers' cache, None where nothing is kept; replayed: how
    many leading rows are run again for the state alone."""

    ids: torch.Tensor
    positions: torch.Tensor
    layout: Layout
    state: Any = None
    replayed: int = 0


def _attention(module, query, key, value, attention_mask, *, scaling, layout: Layout, **kwargs):
    """The function that transformers calls in every layer; `layout` is ours, the rest is its convention.

    Values of latent attention (DeepSeek) are narrower than its keys: zeros fill them up to one width."""
    narrower = key.shape[-1] - value.shape[-1]
    out = layout.attend(
        module.layer_idx,
        query[0],
        key[0],
        torch.nn.functional.pad(value[0], (0, narrower)) if narrower else value[0],
        scale=scaling,
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        sinks_H=kwargs.get("s_aux"),
    )
    return out.transpose(0, 1)[None, ..., : value.shape[-1]], None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)


@dataclass(frozen=True)
class TargetStates:
    """taps [T, L, D] in the order of the layer ids asked for; final [T, D]."""

    taps: torch.Tensor
    final: torch.Tensor


class Target:
    """A frozen causal LM with its tokenizer (None for bare models in tests)."""

    def __init__(self, model: Any, tokenizer: Any = None, *, path: str = ""):
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.path = path
        self.config = model.config.get_text_config()
        model.set_attn_implementation(ATTENTION)
        self.decoder: nn.Module = model.get_decoder()
        self.embedding: nn.Module = model.get_input_embeddings()
        self.head: Any = model.get_output_embeddings()
        self.layers = _decoder_layers(self.decoder, self.config.num_hidden_layers)
        self.recurrent, self.attention_layers = layer_kinds(self.config, path or type(model).__name__)
        self._cache_keyword = cache_keyword(self.decoder)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        """Rows of the head, which may exceed the tokenizer's length."""
        return self.head.weight.shape[0]

    @property
    def reads_layouts(self) -> bool:
        """Whether a row runs under any layout; recurrent layers know documents that begin at position 0
        alone."""
        return not self.recurrent

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    def states(
        self, ids_T: torch.Tensor, positions_T: torch.Tensor, layout: Layout, *, taps: Sequence[int] = ()
    ) -> TargetStates:
        """Run the decoder on one flat row and return the states at the layer ids `taps` and after the final
        norm.

        A target with recurrent layers runs each document or request of the row in a call of its own. The
        states have a graph where something in the target is trained (`spectrain/joint.py`).
        """
        row = layout.calls(ids_T, positions_T) if self.recurrent else [Call(ids_T, positions_T, layout)]
        parts = [self._run(call, taps) for call in row]
        if len(parts) == 1:
            return parts[0]
        return TargetStates(
            taps=torch.cat([part.taps for part in parts]), final=torch.cat([part.final for part in parts])
        )

    def _run(self, call: Call, taps: Sequence[int]) -> TargetStates:
        found: dict[int, torch.Tensor] = {}

        def keep(k: int):
            def hook(module, args, output):
                found[k] = (output[0] if isinstance(output, tuple) else output)[0, call.replayed :]

            return hook

        handles = [self.layers[k].register_forward_hook(keep(k)) for k in taps]
        kept = {} if call.state is None else {self._cache_keyword: call.state}
        try:
            out = self.decoder(
                input_ids=call.ids[None],
                position_ids=call.positions[None],
                use_cache=call.state is not None,
                layout=call.layout,
                **kept,
            )
        finally:
            for handle in handles:
                handle.remove()
        final = out.last_hidden_state[0, call.replayed :]
        stacked = (
            torch.stack([found[k].to(final.device) for k in taps], 1)
            if taps
            else final.new_empty(len(final), 0, final.shape[1])
        )
        return TargetStates(taps=stacked, final=final)

    @torch.no_grad()
    def logits(self, final_TD: torch.Tensor) -> torch.Tensor:
        """Logits [T, V] in the target's dtype from states after the final norm."""
        return self.adjust(self.head(final_TD))

    def adjust(self, logits: torch.Tensor) -> torch.Tensor:
        """The target's own scaling and soft cap of raw head outputs (Cohere, Granite, Gemma)."""
        if scale := getattr(self.config, "logit_scale", None):
            logits = logits * scale
        if scale := getattr(self.config, "logits_scaling", None):
            logits = logits / scale
        if cap := getattr(self.config, "final_logit_softcapping", None):
            logits = torch.tanh(logits / cap) * cap
        return logits

    def stop_ids(self) -> tuple[int, ...]:
        """Token ids that end a turn, from the generation config, else the tokenizer."""
        ids = self.model.generation_config.eos_token_id if self.model.generation_config else None
        if ids is None and self.tokenizer is not None:
            ids = self.tokenizer.eos_token_id
        if ids is None:
            return ()
        return tuple(ids) if isinstance(ids, list) else (int(ids),)

    def fingerprint(self) -> dict[str, str]:
        """Hashes that tell one target from another: config, weights, tokenizer; and the dtype.

        Weights are hashed as bfloat16 and the config without its dtype, so only the last entry depends on the
        dtype. Stacked experts are left out: a checkpoint may hold them one by one.
        """
        unhashed = ("transformers_version", "dtype", "torch_dtype")
        config = {
            k: v for k, v in self.config.to_dict().items() if not k.startswith("_") and k not in unhashed
        }
        weights = hashlib.sha256()
        for name, tensor in self._weights():
            sample = tensor.flatten()[:: max(1, tensor.numel() // 4096)].to(torch.bfloat16).float().cpu()
            weights.update(f"{name}{tuple(tensor.shape)}".encode() + sample.numpy().tobytes())
        tokenizer = "" if self.tokenizer is None else json.dumps(self.tokenizer.get_vocab(), sort_keys=True)
        return {
            "config": hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[
                :16
            ],
            "weights": weights.hexdigest()[:16],
            "tokenizer": hashlib.sha256(tokenizer.encode()).hexdigest()[:16],
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and value of every weight that the fingerprint is made of, by name."""
        yield from ((k, v) for k, v in sorted(self.model.state_dict().items()) if EXPERTS not in k)

    def announce(self, samples: Sequence[Sample]) -> None:
        """Told which texts `states` will be asked for, in order. Nothing to do where the target is here."""

    def release(self) -> None:
        """Told that `states` is not needed for now. Nothing to do where the target is here."""

    @torch.no_grad()
    def self_test(self, ids_T: torch.Tensor | None = None, *, tolerance: float = 1e-4) -> float:
        """Compare our teacher logits with the model's own on a short row; returns the largest difference.

        Then each layer's attention with eager attention on the same input, so that the rounding of one layer
        does not grow through the next ones: in bfloat16 whole logits may differ by as much as they are large.
        Raises ValueError if head and final norm differ by more than `tolerance`, or an attention by more than
        its rounding.
        """
        if ids_T is None:
            ids_T = torch.arange(1, 17, device=self.device) % self.vocab_size
        positions = torch.arange(len(ids_T), device=self.device)
        name = self.path or type(self.model).__name__
        call = {"input_ids": ids_T[None], "position_ids": positions[None], "use_cache": False}
        self.model.set_attn_implementation("eager")
        try:
            eager = self._attentions({}, **call)[1]
        finally:
            self.model.set_attn_implementation(ATTENTION)
        layout = packed_layout((0, len(ids_T)))
        ours = self.logits(self.states(ids_T, positions, layout).final).float()
        own = self.model(layout=layout, **call).logits[0].float()
        worst = (ours - own).abs().max().item()
        if not worst <= tolerance:
            raise ValueError(
                f"target {name}: teacher logits differ from the model's own by {worst:.3g} "
                f"(bound {tolerance:.3g}): its head or final norm has a form that spectrain does not know"
            )
        found = self._attentions({k: given for k, (given, _) in eager.items()}, layout=layout, **call)[1]
        bound = 1e-4 if self.dtype == torch.float32 else 2e-2  # SmolLM2: 3e-7 and 4.5e-3
        for k, (_, expected) in eager.items():
            drift = ((found[k][1] - expected).norm() / expected.norm().clamp(min=1e-30)).item()
            if not drift <= bound:
                raise ValueError(
                    f"target {name}: {k} differs from eager attention by {drift:.3g} of its output "
                    f"(bound {bound:.3g}): it has a form that spectrain does not know"
                )
        return worst

    def _attentions(self, inputs: dict[str, torch.Tensor], **call):
        """Run the model; returns its output and (input, output) of each attention, float32, by module name.

        inputs: what an attention gets instead of the layer's own state, by module name.
        """
        seen: dict[str, torch.Tensor] = {}
        found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

        def before(name: str):
            def hook(module, args, kwargs):
                state = args[0] if args else kwargs["hidden_states"]
                seen[name] = inputs.get(name, state)
                if args:
                    return (seen[name], *args[1:]), kwargs
                return args, {**kwargs, "hidden_states": seen[name]}

            return hook

        def after(name: str):
            def hook(module, args, output):
                found[name] = (seen[name], (output[0] if isinstance(output, tuple) else output).float())

            return hook

        handles = []
        for name, module in self.layers.named_modules():
            if hasattr(module, "layer_idx") and name.count("."):
                handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
                handles.append(module.register_forward_hook(after(name)))
        try:
            return self.model(**call), found
        finally:
            for handle in handles:
                handle.remove()


def load_target(config: TargetConfig, *, device: str = "cpu", key: str = "target.path") -> Target:
    """Load target and tokenizer from a folder or hub id; "smollm2" is the embedded default (see
    `spectrain.smollm2`). With target.server, only what a served one needs (see `spectrain.served`).

    Raises ValueError naming `key` where that is no model; what the system refuses stays OSError.
    """
    path = resolve_path(config.path, key)
    if config.server.given:
        from spectrain.served import load_served

        return load_served(config, path, device)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code)
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, config.dtype), trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"{key}={config.path!r}: {reason}") from error
    return Target(model.to(device), tokenizer, path=config.path)


def resolve_path(path: str, key: str = "target.path") -> str:
    """The folder or hub id that `key` means. Raises ValueError for a folder without config.json."""
    if path == "smollm2":
        from spectrain.smollm2 import converted_folder

        path = str(converted_folder())
    folder = Path(path).expanduser()
    is_folder = path.startswith((".", "/", "~")) or folder.is_dir()
    if is_folder and not (folder / "config.json").exists():
        raise ValueError(f"{key}={path!r}: no config.json there")
    return str(folder) if is_folder else path


def _decoder_layers(decoder: nn.Module, num_layers: int) -> nn.ModuleList:
    """The list of decoder layers, found by its type and length, not by its name."""
    lists = [m for m in decoder.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    if not lists:
        raise ValueError(f"{type(decoder).__name__}: no list of {num_layers} decoder layers found")
    return lists[0]


class packed_layout:
    """Documents laid end to end: each token sees its own document up to itself. Nothing is kept.

    offsets: D + 1 boundaries; document d is tokens offsets[d] .. offsets[d + 1] - 1.
    """

    def __init__(self, offsets: Sequence[int]):
        self.offsets = tuple(offsets)

    def attend(self, layer, q_HTK, k_GTK, v_GTK, *, scale, window, softcap, sinks_H):
        from spectrain.kernels.attention import attend

        out = torch.empty_like(q_HTK)
        for a, b in zip(self.offsets, self.offsets[1:], strict=False):
            out[:, a:b] = attend(
                q_HTK[:, a:b], k_GTK[:, a:b], v_GTK[:, a:b], mask=None, causal=True,
                scale=scale, window=window, softcap=softcap, sinks_H=sinks_H,
            )  # fmt: skip
        return out

    def calls(self, ids_T, positions_T):
        for a, b in zip(self.offsets, self.offsets[1:], strict=False):
            yield Call(ids_T[a:b], positions_T[a:b], packed_layout((0, b - a)))

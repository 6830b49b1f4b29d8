"""Published EAGLE-3 checkpoints, read into our names: the plain form and that of speculators.

plain           config.json is the layer's Llama config; midlayer.* (or layers.0.*), fc, norm, lm_head, d2t
speculators     speculators_model_type, the layer's config in transformer_layer_config; layers.0.*
Our own exports are plain, as are those of SafeAILab and SpecForge.

Which layers are tapped is never guessed. An entry of the top-level list is the layer whose input is captured,
one above our id; of the nested list the layer whose output is captured, except for ADDS_ONE_AFTER_ONE.
Sources: the readers of vLLM 0.32, SGLang 0.5.23 and speculators 0.9.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spectrain.drafters.published import (
    Import,
    Published,
    check_authors_layer,
    compare_with_own,
    needed,
    own_shape,
)
from spectrain.drafters.vocab import read_kept_ids
from spectrain.target import Target

ADDS_ONE_AFTER_ONE = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2")
IDS_KEY = "eagle_aux_hidden_state_layer_ids"
SWITCHES = ("fc_norm", "norm_output", "norm_before_residual")
UNKNOWN = {  # switches that an engine does not have, and its name
    "sglang": (("norm_before_residual",), "SGLang"),
    "trtllm": (("norm_before_residual",), "TensorRT-LLM"),
    "reference": (SWITCHES, "the authors' code"),
}


def imported(source: Published, config: Any, target: Target) -> Import:
    """An EAGLE-3 checkpoint. config: the recipe's settings, whose taps count where the files name none.

    Raises ValueError naming the key or tensor where it is no EAGLE-3, or one with other parts than ours.
    """
    top, body = source.config, _body(source)
    _check_graph(source, top, body)
    if body["vocab_size"] != target.vocab_size:
        raise ValueError(
            f"{source.config_file}: vocab_size={body['vocab_size']}: the target has {target.vocab_size}"
        )
    size = needed(source, body, "hidden_size")
    width = 0 if size == target.hidden_size else size
    own_head = "lm_head.weight" not in source.files and "d2t" not in source.files
    kept_ids = torch.arange(target.vocab_size) if own_head else _kept_ids(source, target)
    layers = body.get("num_hidden_layers", 1)
    # vLLM has this one in every layer and uses that of the first
    unread = {"d2t", "t2d", *(f"layers.{i}.hidden_norm.weight" for i in range(1, layers))}
    if not width and "embed_tokens.weight" in source.files:
        compare_with_own(source, "embed_tokens.weight", target.embedding.get_parameter("weight"), "embedding")
        unread.add("embed_tokens.weight")
    settings = {
        "taps": _taps(source, config, target),
        "draft_vocab": 0 if len(kept_ids) == target.vocab_size else len(kept_ids),
        "width": width,
        "head": "frozen" if own_head else "trained",
        "layers": layers,
        "shape": own_shape(source, body, target, width),
        **{switch: bool(top.get(switch)) for switch in SWITCHES},
    }
    layer = "midlayer." if "midlayer.hidden_norm.weight" in source.files else "layers.0."

    def theirs(name: str) -> str | None:
        if name == "lm_head.weight" and own_head:
            return None
        return name.replace("midlayer.", layer)

    return Import(source, settings, theirs, source.tensor, frozenset(unread), kept_ids)


def check_served(
    config: Any, taps: Sequence[int], shape: Mapping[str, Any], target: Target, engine: str
) -> None:
    """Raise ValueError naming the setting with which `engine` would compute another drafter. shape: the
    layer's config."""
    switches, name = UNKNOWN.get(engine, ((), ""))
    for switch in switches:
        if getattr(config, switch):
            raise ValueError(f"drafter.{switch}=true: {name} does not know it; expected false")
    if config.layers > 1 and engine != "vllm":
        raise ValueError(
            f"drafter.layers={config.layers}: served by vLLM alone (SGLang's later layers have other names "
            f"and drop the state of the layer before); expected 1 for export.engine={engine}"
        )
    if engine == "trtllm" and len(taps) < 2:
        raise ValueError(
            f"drafter.taps={list(taps)}: TensorRT-LLM has no fc for a single tap; expected two or more"
        )
    if engine == "reference":
        n = target.num_layers
        if list(taps) != (own := [1, n // 2 - 1, n - 4]):
            raise ValueError(f"drafter.taps={list(taps)}: expected {own}, which the authors' code captures")
        check_authors_layer(shape)


def _body(source: Published) -> Mapping[str, Any]:
    """The config of the drafter's layer; raises ValueError for another drafter's files."""
    kind = source.config.get("speculators_model_type")
    if kind is None:
        return source.config
    if kind != "eagle3":
        raise ValueError(f"{source.config_file}: speculators_model_type={kind!r}: expected 'eagle3'")
    # the library takes a missing key as false, vLLM as true
    needed(source, source.config, "norm_before_residual")
    return needed(source, source.config, "transformer_layer_config")


def _check_graph(source: Published, top: Mapping[str, Any], body: Mapping[str, Any]) -> None:
    if "fc.weight" not in source.files:
        raise ValueError(f"{source.path}: tensor fc.weight is missing; expected an EAGLE-3 drafter")
    if top.get("norm_before_fc"):
        raise ValueError(f"{source.config_file}: norm_before_fc=True: expected False")
    needed(source, body, "vocab_size")


def _kept_ids(source: Published, target: Target) -> torch.Tensor:
    maps = {name: source.tensor(name) if name in source.files else None for name in ("d2t", "t2d")}
    rows, V = len(source.tensor("lm_head.weight")), target.vocab_size
    where = str(source.files["lm_head.weight"])
    return read_kept_ids(maps["d2t"], maps["t2d"], num_kept=rows, num_target=V, source=where)


def _taps(source: Published, config: Any, target: Target) -> list[int]:
    """Our layer ids from either list of the files; both must say the same."""
    found = {}
    if (ids := source.config.get(IDS_KEY)) is not None:
        found[IDS_KEY] = [k - 1 for k in ids]
    nested = source.config.get("eagle_config") or {}
    if (ids := nested.get(IDS_KEY)) is not None:
        as_is = target.config.model_type in ADDS_ONE_AFTER_ONE and ids[0] != 1
        found[f"eagle_config.{IDS_KEY}"] = [k - 1 for k in ids] if as_is else list(ids)
    if not found:
        if config.taps:
            return list(config.taps)
        n = target.num_layers
        raise ValueError(
            f"{source.config_file}: key {IDS_KEY} is missing: the tapped layers are never guessed; name them "
            f"(drafter.taps={[1, n // 2 - 1, n - 4]} is what engines take for such files and {n} layers)"
        )
    first = next(iter(found.values()))
    if any(taps != first for taps in found.values()):
        means = "; ".join(f"{key} means the outputs of layers {taps}" for key, taps in found.items())
        raise ValueError(f"{source.config_file}: {means}")
    trained = json.loads(source.metadata.get("tap_ids", json.dumps(first)))  # our exports know it
    if trained != first:
        raise ValueError(
            f"{source.config_file}: {next(iter(found))} means the outputs of layers {first}, but the weights "
            f"were trained on {trained} (metadata of the file)"
        )
    return first

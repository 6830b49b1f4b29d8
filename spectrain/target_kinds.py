"""What a target's config and signature say of its layers: which keep keys and values, which are recurrent.

Decides by layer type, never by model name. Knows no weights and runs nothing. Source: the cache classes of
transformers 5.17 and 5.24.
"""

import inspect
from typing import Any

from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

# Layer types that look at nothing of a token but what it sees by the layout, and its position; "attention"
# and "mamba" are former names.
LAYER_TYPES = frozenset(
    (
        "full_attention",
        "sliding_attention",
        "attention",
        "linear_attention",
        "conv",
        "mamba",
        "hybrid",
        "hybrid_sliding",
        "moe",
        "mlp",
    )
)
CACHE_KEYWORDS = ("cache", "past_key_values", "cache_params")


def layer_kinds(config: Any, name: str) -> tuple[bool, frozenset[int]]:
    """Whether some layer is recurrent, and the ids of the layers that keep keys and values.

    Raises ValueError for a target with layers of another type, such as Llama-4's attention within chunks.
    """
    # A foreign config: most have no such keys.
    types = getattr(config, "layer_types", None) or ()
    unknown = sorted({kind for kind in types if kind not in LAYER_TYPES})
    if unknown:
        raise ValueError(
            f"target {name}: layers of type {', '.join(unknown)} are not supported; "
            "spectrain knows full and sliding attention and recurrent layers"
        )
    if getattr(config, "attn_temperature_tuning", False):
        raise ValueError(
            f"target {name}: attn_temperature_tuning=True is not supported; "
            "it scales queries by their row in the call, not by their position"
        )
    layers = DynamicCache(config=config).layers
    recurrent = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)
    return recurrent, frozenset(k for k, layer in enumerate(layers) if isinstance(layer, CacheLayerMixin))


def cache_keyword(decoder: nn.Module) -> str:
    """The name under which `decoder` takes a cache: it changed between versions of transformers.

    Raises ValueError where it takes none.
    """
    parameters = inspect.signature(decoder.forward).parameters
    for name in CACHE_KEYWORDS:
        if name in parameters:
            return name
    raise ValueError(f"{type(decoder).__name__}.forward: no parameter named {', '.join(CACHE_KEYWORDS)}")

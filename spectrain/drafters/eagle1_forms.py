"""Published EAGLE-1 checkpoints (SafeAILab), whose names are ours: fc and layers.K.*. EAGLE-2 has the same.

The embedding that they carry is the target's. fc has a bias there, which vLLM leaves out and SGLang wants.
"""

from typing import Any

from spectrain.drafters.published import Import, Published, compare_with_own, needed, own_shape
from spectrain.target import Target


def imported(source: Published, config: Any, target: Target) -> Import:
    """An EAGLE-1 checkpoint. Raises ValueError naming the key or tensor where it is none for this target."""
    D = target.hidden_size
    if (size := needed(source, source.config, "hidden_size")) != D:
        raise ValueError(f"{source.config_file}: hidden_size={size}: the target has {D}")
    unread: set[str] = set()
    if "embed_tokens.weight" in source.files:
        compare_with_own(source, "embed_tokens.weight", target.embedding.get_parameter("weight"), "embedding")
        unread.add("embed_tokens.weight")
    bias = "fc.bias" in source.files and bool(source.tensor("fc.bias").any())
    if not bias:
        unread.add("fc.bias")
    layers = {int(name.split(".")[1]) for name in source.files if name.startswith("layers.")}
    settings = {
        "layers": max(layers, default=0) + 1,
        "bias": bias,
        "shape": own_shape(source, source.config, target),
    }
    return Import(source, settings, lambda name: name, source.tensor, frozenset(unread))

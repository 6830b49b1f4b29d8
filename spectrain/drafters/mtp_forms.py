"""Published MTP weights, read into our names: those of a target's own files, and the form of speculators.

A folder with the target's own MTP tensors (of a fine-tuned target, or a draft-only copy) names them as
`mtp_weights.py` says; the rest of its tensors is not read. speculators: mtp_layers.K.* with embedding first.
Sources: `mtp_weights.py`; speculators 0.9.
"""

from typing import Any

import torch

from spectrain.drafters.mtp_weights import SPECULATORS, STACKED, names_of, tensor_by
from spectrain.drafters.published import Import, Published, check_floats
from spectrain.target import Target


def imported(source: Published, config: Any, target: Target) -> Import:
    """MTP weights for the blocks of `config`.

    Raises ValueError naming the key or tensor where the files hold none for this kind of target.
    """
    if config.weights == "target":
        raise ValueError(f"drafter.weights=target: no effect with drafter.init_from={config.init_from!r}")
    kind = source.config.get("speculators_model_type")
    if kind not in (None, "mtp"):
        raise ValueError(f"{source.config_file}: speculators_model_type={kind!r}: expected 'mtp'")
    names = SPECULATORS if kind else names_of(target.config, config.blocks)
    if names is None:
        raise ValueError(
            f"drafter.init_from={config.init_from!r}: no MTP names are known for {config.blocks} blocks of a "
            f"target of model_type {target.config.model_type!r}"
        )

    def stored(name: str) -> torch.Tensor | None:
        if name not in source.files:
            return None
        found = source.tensor(name)
        check_floats(source.files, name, found)
        return found

    def read(name: str) -> torch.Tensor:
        return tensor_by(stored, name) if STACKED.match(name) else source.tensor(name)

    return Import(source, {"order": names.order}, names.name, read, frozenset(source.files))

"""Published Medusa checkpoints, read into our names: that of the authors (v1 and v2), and vLLM's.

authors   medusa_lm_head.pt or .safetensors: H.L.linear.weight, .bias of block L of head H, and H.n.weight of
          the head behind its n blocks; v2 lies beside the target's tensors, below medusa_head.
vLLM      blocks.H.layers.L.weight, .bias, lm_heads.H.weight, token_map for a reduced vocabulary; with
          original_lm_head, lm_heads.0 alone: the target's head for all

The tensors say how many heads and blocks there are; medusa_num_heads of the authors' v1 configs does not.
Sources: FasterDecoding/Medusa, vLLM 0.32.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch

from spectrain.drafters.published import Import, Published, compare_with_own
from spectrain.target import Target

PREFIX = re.compile(r"^medusa_heads?\.")
BLOCK = {
    "authors": re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)"),
    "vllm": re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"),
}
OURS = re.compile(r"(?:blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)|lm_heads\.(\d+)\.weight)")


def imported(source: Published, config: Any, target: Target) -> Import:
    """A Medusa checkpoint. Raises ValueError naming the tensor where it is none for this target."""
    whole = {PREFIX.sub("", name): name for name in source.files}
    form = next((form for form, block in BLOCK.items() if any(map(block.fullmatch, whole))), None)
    if form is None:
        raise ValueError(
            f"{source.path}: no tensor 0.0.linear.weight, no blocks.0.layers.0.weight; expected a Medusa"
        )
    found = [match for name in whole if (match := BLOCK[form].fullmatch(name))]
    heads, blocks = (1 + max(int(match[i]) for match in found) for i in (1, 2))
    biased = any(match[3] == "bias" for match in found)
    frozen = bool(source.config.get("original_lm_head")) and form == "vllm"
    kept_ids = _kept_ids(source, whole, target)
    if frozen:
        rows = target.head.weight
        if len(source.tensor(whole["lm_heads.0.weight"])) == len(kept_ids):
            rows = rows[kept_ids.to(target.device)]
        compare_with_own(source, whole["lm_heads.0.weight"], rows, "head")

    def theirs(name: str) -> str | None:
        match = OURS.fullmatch(name)
        assert match, name
        if match[4] is not None:
            ours = f"lm_heads.{match[4]}.weight" if form == "vllm" else f"{match[4]}.{blocks}.weight"
        elif match[3] == "bias" and not biased:
            return None  # built as zero
        else:
            ours = name if form == "vllm" else f"{match[1]}.{match[2]}.linear.{match[3]}"
        return whole.get(ours, ours)

    settings = {
        "heads": heads,
        "blocks": blocks,
        "head": "frozen" if frozen else "trained",
        "draft_vocab": 0 if len(kept_ids) == target.vocab_size else len(kept_ids),
    }
    beside = {
        name for name in source.files if any(map(PREFIX.match, source.files)) and not PREFIX.match(name)
    }
    unread = beside | {whole.get("token_map", "")} | ({whole["lm_heads.0.weight"]} if frozen else set())
    return Import(source, settings, theirs, source.tensor, frozenset(unread), kept_ids)


def authors_tensors(
    ours: Mapping[str, torch.Tensor], config: Any, rows_WD: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Our tensors by the authors' names (v1). rows: of the head that all share, where none is trained."""
    found = {}
    for name, tensor in ours.items():
        match = OURS.fullmatch(name)
        assert match, name
        head = f"{match[4]}.{config.blocks}.weight"
        found[head if match[4] else f"{match[1]}.{match[2]}.linear.{match[3]}"] = tensor
    shared = {f"{h}.{config.blocks}.weight": rows_WD for h in range(config.heads)}
    return found if config.head == "trained" else {**found, **shared}


def _kept_ids(source: Published, whole: dict[str, str], target: Target) -> torch.Tensor:
    """The ids of vLLM's token_map, which must rise; every id without one."""
    if "token_map" not in whole:
        return torch.arange(target.vocab_size)
    ids = source.tensor(whole["token_map"]).long()
    if not (ids.diff() > 0).all() or ids[0] < 0 or ids[-1] >= target.vocab_size:
        raise ValueError(
            f"{source.files[whole['token_map']]}: tensor token_map: expected strictly rising ids below "
            f"{target.vocab_size}"
        )
    return ids

"""spectrain: train, evaluate and export drafter heads for lossless speculative decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from spectrain.decode.generation import Generation
    from spectrain.decode.sampling import Sampling
    from spectrain.laws import Leniency
    from spectrain.proposal import Drafter, Plan
    from spectrain.target import Target

__version__ = "0.1.0"


def generate(
    target: str | Path | Target,
    drafter: str | Path | Drafter | None,
    prompts: Sequence[str | Sequence[Mapping[str, str]]],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    plan: Plan | None = None,
    law: str | None = None,
    leniency: Leniency | None = None,
    batch_size: int = 1,
    stop_strings: Sequence[str] = (),
    graphs: bool = False,
    device: str = "auto",
) -> list[Generation]:
    """Decode prompts with a drafter (None: plain decoding), losslessly unless a lossy law is asked for, and
    return one Generation each, text included.

    target: a loaded target, or a folder, hub id or "smollm2". drafter: a loaded one, or the folder of a
    checkpoint or run. A prompt is a list of messages ({"role", "content"}) or the text of one user message.
    sampling: greedy by default; plan: a chain of 5 draft tokens by default. law: of verification, by default
    `rejection` for a chain, `recursive` for a sampled tree and `target_only` for another; these and `block`
    keep the target's own law. The lossy `typical` and `thresholds`, to be set by `leniency`, mark their texts
    lossless=False. stop_strings: a text ends with the first that it contains (special tokens are no part of
    it). graphs: replay each round as CUDA graphs. device: of a target that is named, auto (the GPU if there
    is one), cpu or cuda. Raises ValueError for prompts and settings that do not fit.

        spectrain.generate("smollm2", "runs/quickstart", ["Why is the sky blue?"], max_new_tokens=64)
    """
    from pathlib import Path

    from spectrain.decode.engine import generate as decode
    from spectrain.decode.sampling import Sampling
    from spectrain.eval.prompts import render
    from spectrain.laws import Leniency
    from spectrain.proposal import Plan

    if isinstance(target, (str, Path)):
        target = _load_target(str(target), device)
    elif device != "auto":
        raise ValueError(f"device={device!r}: the target is loaded already, on {target.device}; leave it out")
    network = _load(drafter, target) if isinstance(drafter, (str, Path)) else drafter
    plan = Plan(shape="chain", length=5) if plan is None and network is not None else plan
    if target.tokenizer is None:
        raise ValueError("target: it has no tokenizer, so spectrain.generate cannot read texts")
    found, _ = decode(
        target,
        [render(target.tokenizer, _messages(prompt), {}) for prompt in prompts],
        sampling=sampling or Sampling(),
        max_new_tokens=max_new_tokens,
        stop_ids=target.stop_ids(),
        stop_strings=stop_strings,
        batch_size=batch_size,
        drafter=network,
        plan=plan,
        law=_law_of(plan) if law is None else law,
        leniency=leniency or Leniency(),
        graphs=graphs,
    )
    return _with_texts(target.tokenizer, found, stop_strings)


def _messages(prompt: str | Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(map(dict, prompt))


def _law_of(plan: Plan | None) -> str:
    if plan is not None and plan.shape == "chain":
        return "rejection"
    return "recursive" if plan is not None and plan.sampled else "target_only"


def _with_texts(tokenizer, found: Sequence[Generation], stop_strings: Sequence[str]) -> list[Generation]:
    from dataclasses import replace

    from spectrain.decode.stops import StopStrings

    texts = tokenizer.batch_decode([list(one.ids) for one in found], skip_special_tokens=True)
    if stop_strings:
        texts = list(map(StopStrings(stop_strings, tokenizer).cut, texts))
    return [replace(one, text=text) for one, text in zip(found, texts, strict=True)]


def _load_target(path: str, device: str) -> Target:
    import torch

    from spectrain.config import TargetConfig
    from spectrain.target import load_target

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return load_target(TargetConfig(path=path), device=device)


def _load(folder: str | Path, target: Target) -> Drafter:
    from pathlib import Path

    from spectrain.checkpoint import load_drafter

    return load_drafter(Path(folder), target).to(target.dtype)

"""Write a drafter as the folder that vLLM and SGLang load, and prove that it computes what was trained.

The family names its tensors and config keys (`export_names`, `engine_config`); this file adds what every
export has: both rotary dialects, both dtype keys, vocabulary sizes, d2t offsets, metadata, model card.
Weights go from the state dict to the file; no model is built on the way. Knows no engine's code.

A finished folder holds
    config.json, model.safetensors    what an engine reads
    check/replay.safetensors          fixed random states and the drafter's own decode-loop logits on them
    README.md                         the model card
"""

import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from spectrain.artifacts import read_json, read_tensors, write_bytes, write_json, write_tensors
from spectrain.checkpoint import best, check_target
from spectrain.checks import choose
from spectrain.config import RunConfig
from spectrain.drafters.vocab import vocabulary_maps
from spectrain.proposal import Observation, Plan
from spectrain.replay import ROPE_KEYS, Replay, check_config, inv_freq
from spectrain.target import Target

CHECK_ROWS, CHECK_STEPS, CHECK_SEED = 16, 3, 20251
TOLERANCE = 1e-5  # of the largest logit: two float32 programs that sum in another order

CARD = """\
# A draft model for speculative decoding

An {family} drafter. It works with its target only, and does not change the target's text.

{facts}

## Use

vLLM: `--speculative-config '{{"method": "{family}", "model": "FOLDER", "num_speculative_tokens": {length}}}'`

SGLang: `--speculative-algorithm {algorithm} --speculative-draft-model-path FOLDER`

The embedding is the target's and is not in this folder. `check/` holds a recorded draft of the trained
drafter; spectrain replays it from these files.
"""

log = logging.getLogger(__name__)


def export(config: RunConfig, target: Target, drafter, folder: Path) -> Path:
    """Write `folder`/FAMILY, check it, then give it its name; returns its path.

    drafter: the trained module. Raises ValueError where the files would not compute the drafter's logits.
    """
    dtype = getattr(torch, config.export.dtype)
    final = folder / config.drafter.family
    staging = folder / f".{final.name}.partial"
    shutil.rmtree(staging, ignore_errors=True)
    try:
        write_json(staging / "config.json", engine_config(target, drafter, config.export.dtype))
        names = drafter.export_names("vllm")
        tensors = {names[name]: t.detach().to(dtype).cpu() for name, t in drafter.state_dict().items()}
        tensors |= vocabulary_maps(drafter.kept_ids.cpu(), target.vocab_size)
        write_tensors(staging / "model.safetensors", tensors, _metadata(config, target, drafter))
        write_tensors(staging / "check" / "replay.safetensors", record(drafter, target, dtype))
        worst = check(staging, target)
        write_bytes(staging / "README.md", model_card(config, target, drafter, folder.parent).encode())
        if final.exists():
            shutil.rmtree(final)
        staging.rename(final)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    log.info("exported %s: replayed logits differ by %.2g", final, worst)
    return final


def check(folder: Path, target: Target) -> float:
    """Reload an exported folder alone; compare it with the target and with the drafter's recorded logits.

    Returns the largest difference of a logit. Raises ValueError naming file, key or tensor where the folder
    is not complete, was made for another target, or computes other logits.
    """
    replay = Replay(folder)
    weights = folder / "model.safetensors"
    check_target(folder, json.loads(replay.metadata["target"]), target.fingerprint())
    if replay.config["vocab_size"] != target.vocab_size:
        raise ValueError(
            f"{folder}: vocab_size={replay.config['vocab_size']}: target has {target.vocab_size}"
        )
    _check_shape(str(folder / "config.json"), replay.config, replay.tap_ids, target)
    outside = sorted(set(target.stop_ids()) - set(replay.target_ids.tolist()))
    if outside:
        log.warning("%s: stop ids %s are outside the draft vocabulary and are never drafted", folder, outside)
    fixture = read_tensors(folder / "check" / "replay.safetensors")
    taps, embeds, rows = fixture["taps"], fixture["embeds"], len(fixture["taps"])
    logits = replay.draft(taps, embeds[:rows], torch.arange(rows), embeds[rows:])[:, replay.target_ids]
    worst = (logits - fixture["logits"]).abs().max().item()
    bound = TOLERANCE * max(1.0, fixture["logits"].abs().max().item())
    if not worst <= bound:
        raise ValueError(
            f"{weights}: replayed logits differ from the trained drafter's by {worst:.3g} (bound {bound:.3g})"
        )
    return worst


def check_untrained(target: Target, drafter, dtype: str) -> None:
    """Raise ValueError now for a drafter whose shape `check` would refuse after its training."""
    _check_shape("export", engine_config(target, drafter, dtype), drafter.taps, target)


def engine_config(target: Target, drafter, dtype: str) -> dict[str, Any]:
    """All of config.json: the family's keys and those of every export.

    Raises ValueError on an unknown rope type.
    """
    own = drafter.engine_config(target)
    special = {key: target.config.to_dict().get(key) for key in ("bos_token_id", "eos_token_id")}
    return {
        **own,
        **rope_dialects(own["rope_parameters"]),
        **{key: value for key, value in special.items() if value is not None},
        "vocab_size": target.vocab_size,
        "draft_vocab_size": len(drafter.kept_ids),
        "tie_word_embeddings": False,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def rope_dialects(rope: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` for transformers 5, `rope_theta` and (unless plain) `rope_scaling` for older readers.

    A plain rope_scaling is left out, since some readers take its presence for a scaling.
    """
    choose("rope_parameters.rope_type", rope.get("rope_type"), tuple(ROPE_KEYS))
    new = {key: value for key, value in rope.items() if value is not None}
    new["rope_theta"] = float(new["rope_theta"])
    dialects = {"rope_parameters": new, "rope_theta": new["rope_theta"]}
    if new["rope_type"] != "default":
        dialects["rope_scaling"] = {key: value for key, value in new.items() if key != "rope_theta"}
    return dialects


def model_card(config: RunConfig, target: Target, drafter, run_dir: Path) -> str:
    """README.md: what the drafter was trained on, for how long, what it reaches, and how it is served."""
    family = config.drafter.family
    facts = {
        "recipe": config.recipe,
        "target": f"{target.path} (fingerprint {json.dumps(target.fingerprint())})",
        "conversations": config.corpus.path,
        "objective": json.dumps(config.objective.terms),
        "tapped layers": f"{list(drafter.taps)} (outputs of the 0-based decoder layers)",
        "draft vocabulary": f"{len(drafter.kept_ids):,} of {target.vocab_size:,} ids",
        "weights": config.export.dtype,
    }
    if checkpoint := best(run_dir):
        state = read_json(checkpoint / "state.json")
        facts["training"] = f"{state['step']:,} steps, {state['counters']['tokens']:,} tokens"
        if state["tau"] is not None:
            facts["tau"] = f"{state['tau']:.3f} on held-out prompts at the end of training"
    lines = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    return CARD.format(
        family=family, algorithm=family.upper(), facts=lines, length=config.eval.runs[0].length
    )


class _Recorder:
    """A sampler that keeps the logits it is shown and draws their arg-max."""

    greedy = penalised = False

    def __init__(self) -> None:
        self.logits: list[torch.Tensor] = []

    def best(self, logits_MV: torch.Tensor) -> torch.Tensor:
        return logits_MV.argmax(-1)

    def draft_law(self, logits_MV: torch.Tensor) -> torch.Tensor:
        self.logits.append(logits_MV.float().cpu())
        return torch.softmax(logits_MV.float(), -1)

    def draw(
        self,
        law_MV: torch.Tensor,
        *,
        requests: Sequence[int],
        root_positions: Sequence[int],
        slots: Sequence[int],
    ) -> list[int]:
        return self.best(law_MV).tolist()

    def penalise(self, logits_MW: torch.Tensor, requests, paths, kept_ids=None) -> torch.Tensor:
        return logits_MW


@torch.no_grad()
def record(drafter, target: Target, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Fixed random states, and what the drafter's decode loop gives on them with weights rounded to `dtype`.

    A chain of S + 1 draws from T rows: taps [T, L, E]; embeds [T + S, D] of the rows' tokens and the first S
    draws; logits [S + 1, W] of each draw over the draft vocabulary. All are float32.
    """
    generator = torch.Generator().manual_seed(CHECK_SEED)
    taps = torch.randn(CHECK_ROWS, len(drafter.taps), target.hidden_size, generator=generator)
    final = torch.randn(CHECK_ROWS, target.hidden_size, generator=generator)
    next_ids = torch.randint(target.vocab_size, (CHECK_ROWS,), generator=generator)
    recorder, device = _Recorder(), target.device
    with _rounded(drafter, dtype):
        drafting = drafter.start(1, CHECK_ROWS + CHECK_STEPS + 1)
        seen = Observation(
            request=0, start=0, next_ids=next_ids.to(device), taps=taps.to(device), final=final.to(device)
        )
        drafting.observe([seen])
        (proposal,) = drafting.propose([0], Plan(shape="chain", length=CHECK_STEPS), recorder)
    logits_SV, kept = torch.cat(recorder.logits), drafter.kept_ids.cpu()
    assert logits_SV.shape == (CHECK_STEPS, target.vocab_size), f"a chain of 3 gave logits {logits_SV.shape}"
    assert (logits_SV > -torch.inf).sum() == CHECK_STEPS * len(kept), (
        "ids outside the draft vocabulary have q > 0"
    )
    used = torch.cat((next_ids.to(device), proposal.tokens[:-1].to(device)))
    embeds = target.embedding(used).float().cpu()
    return {"taps": taps, "embeds": embeds, "logits": logits_SV[:, kept].contiguous()}


@contextmanager
def _rounded(drafter, dtype: torch.dtype) -> Iterator[None]:
    """The drafter with weights rounded to `dtype` and held in float32, put back at the end."""
    original = [(p, p.data) for p in drafter.parameters()]
    try:
        for p, data in original:
            p.data = data.to(dtype).float()
        yield
    finally:
        for p, data in original:
            p.data = data


def _check_shape(where: str, config: dict[str, Any], taps: Sequence[int], target: Target) -> None:
    """Engines must know the graph and reach the taps; the frequencies of the config must be among the rotary
    buffers of the target's decoder."""
    check_config(where, config)
    if taps[-1] > target.num_layers - 2:
        raise ValueError(f"{where}: layer {taps[-1]} is tapped: engines capture 0 to {target.num_layers - 2}")
    found, _ = inv_freq(config)
    own = [b.float().cpu() for name, b in target.decoder.named_buffers() if name.endswith("inv_freq")]
    if own and not any(b.shape == found.shape and torch.allclose(b, found, 1e-5) for b in own):
        raise ValueError(
            f"{where}: rope_parameters={config['rope_parameters']} give frequencies "
            f"{found.tolist()[:4]}..: the target has {own[0].tolist()[:4]}.."
        )


def _metadata(config: RunConfig, target: Target, drafter) -> dict[str, str]:
    return {
        "format": "pt",
        "tap_ids": json.dumps(list(drafter.taps)),
        "target": json.dumps(target.fingerprint()),
        "target_path": target.path,
        "target_model_type": target.config.model_type,
        "recipe": config.recipe,
    }

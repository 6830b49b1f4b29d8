"""Write a drafter as the folders that engines load, and prove that each computes what was trained.

The family names its engines, tensors and config keys (`SERVED`, `export_tensors`, `engine_config`); this file
adds what every export of a head has: both rotary dialects, both dtype keys, metadata, model card. Weights go
from the state dict to the file; no model is built on the way. Families that are written as a whole model:
`export_models.py`. Knows no engine's code.

A finished folder of a head holds
    config.json, model.safetensors    what an engine reads; the code of Medusa's and Hydra's authors reads
                                      FAMILY_lm_head.pt in place of the latter
    check/replay.safetensors          fixed random states and the drafter's own decode-loop logits on them
    README.md                         the model card
A target with MTP weights has the record too.
"""

import io
import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from spectrain.artifacts import read_json, read_tensors, write_bytes, write_json, write_tensors
from spectrain.checkpoint import best, check_target, weights_print
from spectrain.checks import CheckFailed, choose
from spectrain.config import ExportConfig, RunConfig
from spectrain.export_forms import forms, method
from spectrain.export_models import SHARD, rounded, write_mtp, write_standalone
from spectrain.proposal import Observation, Plan
from spectrain.replay import ROPE_KEYS, Replay, check_config, inv_freq, plain
from spectrain.replay_heads import PICKLES, Eagle1Replay, HydraReplay, MedusaReplay, open_replay
from spectrain.replay_mtp import MtpReplay
from spectrain.target import Target

FORM = 1
"""Raise when the files of an export change: those of older code are then made anew."""
CHECK_ROWS, CHECK_STEPS, CHECK_SEED = 16, 3, 20251
SHOWN = 64  # rows of the target's head in the recorded draft of a family that drafts through it
TOLERANCE = 1e-5  # of the largest logit: two float32 programs that sum in another order
WHOLE_MODELS = ("mtp", "mtp-speculators", "standalone")

CARD = """\
# A draft model for speculative decoding

Family {family}. It works with its target only, and does not change the target's text.

{facts}

## Use

{use}

{contents}
"""
CONTENTS = {  # by folder, where it is no head
    "mtp": "This folder is the target with other MTP weights (`mtp.safetensors`); its other weights are "
    "links.",
    "mtp-speculators": "This folder is the MTP block alone; embedding and head are the target's.",
    "standalone": "This folder is an ordinary model.",
}
HEAD = (
    "The embedding is the target's. `check/` holds a recorded draft of the trained drafter; "
    "`stages=check_export path=FOLDER` replays it from these files."
)

log = logging.getLogger(__name__)


def export(config: RunConfig, target: Target, drafter, folder: Path) -> list[Path]:
    """Write, for the engines of the settings, each form of the family below `folder`, check it, then give it
    its name; returns their paths.

    drafter: the trained module. Raises ValueError where an engine serves no such drafter, CheckFailed where
    the files would not compute the drafter's logits.
    """
    check_untrained(target, drafter, config.export)
    found = forms(config.drafter.family, config.export.engine)
    return [_write(config, target, drafter, folder / name, engines) for name, engines in found.items()]


def _write(config: RunConfig, target: Target, drafter, final: Path, engines: list[str]) -> Path:
    staging = final.parent / f".{final.name}.partial"
    shutil.rmtree(staging, ignore_errors=True)
    whole = {"mtp": write_target, "mtp-speculators": write_mtp, "standalone": write_standalone}
    write = whole.get(final.name, write_head)
    try:
        staging.mkdir(parents=True)
        worst = write(config, target, drafter, staging, engines)
        contents = CONTENTS.get(final.name, HEAD)
        card = model_card(config, target, drafter, final.parent.parent, engines, contents)
        write_bytes(staging / "README.md", card.encode())
        if final.exists():
            shutil.rmtree(final)
        staging.rename(final)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    log.info("exported %s for %s: it differs by %.2g", final, ", ".join(engines), worst)
    return final


def write_head(config: RunConfig, target: Target, drafter, folder: Path, engines: list[str]) -> float:
    """Weights, config and recorded draft of a head; returns the largest difference of a replayed logit."""
    engine, dtype = engines[0], getattr(torch, config.export.dtype)
    write_json(folder / "config.json", engine_config(target, drafter, config.export.dtype, engine))
    tensors = {
        name: t.detach().to(dtype if t.is_floating_point() else t.dtype).cpu()
        for name, t in drafter.export_tensors(engine).items()
    }
    metadata, pickled = _metadata(config, target, drafter, engines), f"{config.drafter.family}_lm_head.pt"
    if engine == "reference" and pickled in PICKLES:
        stream = io.BytesIO()
        torch.save({name: tensor.clone() for name, tensor in tensors.items()}, stream)
        write_bytes(folder / pickled, stream.getvalue())
    else:
        write_tensors(folder / "model.safetensors", tensors, metadata)
    write_tensors(folder / "check" / "replay.safetensors", record(drafter, target, dtype), metadata)
    return check(folder, target)


def write_target(config: RunConfig, target: Target, drafter, folder: Path, engines: list[str]) -> float:
    """The target's folder with MTP weights, and a recorded draft; returns the largest difference of a
    replayed logit."""
    write_mtp(config, target, drafter, folder, engines)
    dtype = getattr(torch, config.export.dtype)
    write_tensors(folder / "check" / "replay.safetensors", record(drafter, target, dtype))
    return _difference(folder, open_replay(folder))


def check(folder: Path, target: Target) -> float:
    """Reload an exported head's folder alone; compare it with the target and with the drafter's recorded
    logits.

    Returns the largest difference of a logit. Raises ValueError naming file, key or tensor where the folder
    is not complete or was made for another target, CheckFailed where it computes other logits.
    """
    replay = open_replay(folder)
    check_target(folder, json.loads(replay.metadata["target"]), target.fingerprint())
    if replay.config["vocab_size"] != target.vocab_size:
        raise ValueError(
            f"{folder}: vocab_size={replay.config['vocab_size']}: target has {target.vocab_size}"
        )
    if isinstance(replay, Replay):
        _check_taps(str(folder / "config.json"), replay.tap_ids, target)
        outside = sorted(set(target.stop_ids()) - set(replay.target_ids.tolist()))
        if outside:
            log.warning(
                "%s: stop ids %s are outside the draft vocabulary and are never drafted", folder, outside
            )
    if not isinstance(replay, MtpReplay):
        _check_rope(str(folder / "config.json"), replay.config, target)
    return _difference(folder, replay)


def _difference(
    folder: Path, replay: Replay | Eagle1Replay | MedusaReplay | HydraReplay | MtpReplay
) -> float:
    """The largest difference of a logit from the recorded ones; CheckFailed above the bound."""
    fixture = read_tensors(folder / "check" / "replay.safetensors")
    worst = (replay.replayed(fixture) - fixture["logits"]).abs().max().item()
    bound = TOLERANCE * max(1.0, fixture["logits"].abs().max().item())
    if not worst <= bound:
        weights = folder / (SHARD if isinstance(replay, MtpReplay) else "model.safetensors")
        raise CheckFailed(
            f"{weights}: replayed logits differ from the trained drafter's by {worst:.3g} (bound {bound:.3g})"
        )
    return worst


def check_untrained(target: Target, drafter, settings: ExportConfig) -> None:
    """Raise ValueError now for a drafter that no engine of the settings serves, or whose shape `check` would
    refuse after its training."""
    family = drafter.config.family
    for engine in settings.engine:
        drafter.engine_config(target, engine)
        (name,) = forms(family, [engine])
        if name not in WHOLE_MODELS:
            config = plain(engine_config(target, drafter, settings.dtype, engine))
            _check_rope("export", config, target)
        if family == "eagle3":
            check_config("export", config)
            _check_taps("export", drafter.taps, target)


def engine_config(target: Target, drafter, dtype: str, engine: str) -> dict[str, Any]:
    """All of a head's config.json: the family's keys and those of every export.

    Raises ValueError on an unknown rope type.
    """
    own = drafter.engine_config(target, engine)
    if engine == "speculators":
        layer = own["transformer_layer_config"]
        own["transformer_layer_config"] = {**layer, **rope_dialects(layer["rope_parameters"])}
        return {**own, "tie_word_embeddings": False, "dtype": dtype}
    special = {key: target.config.to_dict().get(key) for key in ("bos_token_id", "eos_token_id")}
    return {
        **own,
        **(rope_dialects(own["rope_parameters"]) if "rope_parameters" in own else {}),
        **{key: value for key, value in special.items() if value is not None},
        "vocab_size": target.vocab_size,
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


def model_card(
    config: RunConfig, target: Target, drafter, run_dir: Path, engines: Sequence[str], contents: str
) -> str:
    """README.md: what the drafter was trained on, for how long, what it reaches, and how `engines` serve
    it."""
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
    lines = "\n".join(f"- {name}: {value}" for name, value in {**facts, **reached(run_dir, drafter)}.items())
    use = "\n\n".join(_launch(drafter, engine, config.eval.runs[0].length) for engine in engines)
    return CARD.format(family=family, facts=lines, use=use, contents=contents)


def reached(run_dir: Path, drafter) -> dict[str, str]:
    """What the card says of training and evaluation of a drafter in float32, as far as they are done."""
    facts = {}
    if checkpoint := best(run_dir):
        state = read_json(checkpoint / "state.json")
        facts["training"] = f"{state['step']:,} steps, {state['counters']['tokens']:,} tokens"
        if state["tau"] is not None:
            facts["tau"] = f"{state['tau']:.3f} on held-out prompts at the end of training"
    if (found := run_dir / "eval" / "certificate" / "certificate.json").exists():
        certificate = read_json(found)
        facts["certificate"] = "passed" if certificate["pass"] else "not passed: do not serve it"
        if certificate.get("drafter") != weights_print(drafter):
            facts["certificate"] = "of other weights or none; evaluate these (stages=[eval,export])"
    return facts


def _launch(drafter, engine: str, length: int) -> str:
    """How an engine is started with the folder of the drafter; with MTP, the folder is the target too."""
    family = drafter.config.family
    name, inside = method(family, engine), family == "mtp"
    if engine == "reference":
        return f"The authors' code: `{name}`"
    if engine == "speculators":
        return "speculators: `SpeculatorModel.from_pretrained(FOLDER)`"
    if engine == "trtllm":
        given: dict[str, Any] = {"decoding_type": name, "max_draft_len": length}
        given |= {} if inside else {"speculative_model": "FOLDER"}
        given |= {"eagle3_layers_to_capture": list(drafter.taps)} if family == "eagle3" else {}
        return f"TensorRT-LLM: `speculative_config: {json.dumps(given)}`"
    if engine == "sglang":
        where = "--model-path FOLDER" if inside else "--speculative-draft-model-path FOLDER"
        return f"SGLang: `--speculative-algorithm {name} {where}`"
    settings = {"method": name, **({} if inside else {"model": "FOLDER"}), "num_speculative_tokens": length}
    serve = "vllm serve FOLDER " if inside else ""
    return f"vLLM: `{serve}--speculative-config '{json.dumps(settings)}'`"


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

    A chain of S + 1 draws from T rows: taps [T, L, E] of a family that has some, else final [T, E]; embeds
    [T + S, D] of the rows' tokens and the first S draws; logits [S + 1, W] of each draw over the draft
    vocabulary. A family that drafts through the target's head has some of its rows, head [N, E], and the
    logits [S + 1, N] of those. All are float32.
    """
    generator = torch.Generator().manual_seed(CHECK_SEED)
    taps = torch.randn(CHECK_ROWS, len(drafter.taps), target.hidden_size, generator=generator)
    final = torch.randn(CHECK_ROWS, target.hidden_size, generator=generator)
    next_ids = torch.randint(target.vocab_size, (CHECK_ROWS,), generator=generator)
    recorder, device = _Recorder(), target.device
    steps = min(CHECK_STEPS, _trained_steps(drafter.config))
    with rounded(drafter, dtype):
        drafting = drafter.start(1, CHECK_ROWS + CHECK_STEPS + 1)
        seen = Observation(
            request=0, start=0, next_ids=next_ids.to(device), taps=taps.to(device), final=final.to(device)
        )
        drafting.observe([seen])
        (proposal,) = drafting.propose([0], Plan(shape="chain", length=steps), recorder)
    logits_SV, kept = torch.cat(recorder.logits), drafter.kept_ids.cpu()
    assert logits_SV.shape == (steps, target.vocab_size), f"a chain of {steps} gave logits {logits_SV.shape}"
    assert (logits_SV > -torch.inf).sum() == steps * len(kept), "ids outside the draft vocabulary have q > 0"
    used = torch.cat((next_ids.to(device), proposal.tokens[:-1].to(device)))
    found = {"taps": taps} if len(drafter.taps) else {"final": final}
    found["embeds"] = target.embedding(used).float().cpu()
    if drafter.config.family in ("eagle1", "mtp"):
        shown = torch.arange(0, len(kept), max(1, len(kept) // SHOWN))
        found["head"], kept = drafter.head_weight()[shown.to(device)].float().cpu(), kept[shown]
    return {**found, "logits": logits_SV[:, kept].contiguous()}


def _trained_steps(config: Any) -> int:
    """Steps in which engines compute what was trained: Medusa's and Hydra's heads, MTP's blocks, and of one
    MTP block that never read its own output the first, for engines differ in what it would read."""
    if config.family in ("medusa", "hydra"):
        return config.heads
    if config.family == "mtp" and (config.unroll == 1 or config.blocks > 1):
        return config.unroll
    return CHECK_STEPS


def _check_taps(where: str, taps: Sequence[int], target: Target) -> None:
    """Engines must reach the taps."""
    if taps[-1] > target.num_layers - 2:
        raise ValueError(f"{where}: layer {taps[-1]} is tapped: engines capture 0 to {target.num_layers - 2}")


def _check_rope(where: str, config: dict[str, Any], target: Target) -> None:
    """The frequencies of the config, if it has some, must be among the rotary buffers of the target's
    decoder."""
    if "rope_parameters" not in config:
        return
    found, _ = inv_freq(config)
    own = [b.float().cpu() for name, b in target.decoder.named_buffers() if name.endswith("inv_freq")]
    if own and not any(b.shape == found.shape and torch.allclose(b, found, 1e-5) for b in own):
        raise ValueError(
            f"{where}: rope_parameters={config['rope_parameters']} give frequencies "
            f"{found.tolist()[:4]}..: the target has {own[0].tolist()[:4]}.."
        )


def _metadata(config: RunConfig, target: Target, drafter, engines: list[str]) -> dict[str, str]:
    return {
        "format": "pt",
        "tap_ids": json.dumps(list(drafter.taps)),
        "target": json.dumps(target.fingerprint()),
        "target_path": target.path,
        "target_model_type": target.config.model_type,
        "recipe": config.recipe,
        "engines": json.dumps(engines),
    }

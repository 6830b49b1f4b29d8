"""Is an exported folder what engines read? Eleven rules, each PASS, FAIL with reasons, or none that applies.

For folders that anybody wrote. Rule 9 replays the recorded draft of the trained drafter (`replay.py`,
`replay_heads.py`, `replay_mtp.py`) and is the only one that sees a swapped order of halves or another state
fed back; a folder without such a record has no rule 9. Rule 7 says of MTP weights which of the two it is.
Families that read blocks (rule 8) are not known yet.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spectrain.artifacts import read_json, read_tensors
from spectrain.checks import CheckFailed
from spectrain.drafters.eagle3_forms import UNKNOWN
from spectrain.export_files import ARCHITECTURES, INDEX, KEYS, NOT_FLOAT, Folder
from spectrain.replay import IDS_KEY, SPECULATORS_KEY, inv_freq, sglang_shift
from spectrain.replay_heads import open_replay
from spectrain.replay_mtp import MtpReplay

TOLERANCE = 1e-5  # of the largest logit: two float32 programs that sum in another order
HEADS = ("eagle3", "eagle1", "medusa", "hydra")
MTP_FAULTS = {  # a flag of MtpReplay: what is wrong with weights that fit its opposite
    "state_first": "the halves of eh_proj are swapped",
    "pre_norm": "a step was trained on the state on the other side of the last norm",
    "one_plus": "norms are stored as the other of w and w - 1",
}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finding:
    """What a rule found: its faults, or why it does not apply, or neither."""

    rule: int
    name: str
    faults: tuple[str, ...]
    absent: str

    @property
    def status(self) -> str:
        return "FAIL" if self.faults else "none" if self.absent else "PASS"


class DoesNotApply(Exception):
    """Raised by a rule that has nothing to look at, with the reason."""


def examine_all(folder: Path, target: Any, engines: Sequence[str]) -> None:
    """Print the findings of a folder for `engines`, or of every export below it for those of them that it was
    written for; target: the config of the text model.

    Raises CheckFailed naming the rules that failed, ValueError where there is nothing to examine.
    """
    alone = (folder / "config.json").exists()
    inside = [folder] if alone else [path.parent for path in sorted(folder.glob("*/config.json"))]
    if not inside:
        raise ValueError(f"export.path={folder}: no config.json there or in a folder below it")
    failed = []
    for path in inside:
        written = None if alone else Folder(path, target, tuple(engines)).recorded_engines()
        meant = engines if written is None else [engine for engine in engines if engine in written]
        if not meant:
            log.info("%s: written for %s, not examined for %s", path, written, list(engines))
            continue
        findings = examine(path, target, meant)
        print(page(path, findings))
        failed += [f"{path.name}: rule {f.rule}, {f.name}" for f in findings if f.faults]
    if failed:
        raise CheckFailed(f"export.path={folder}: {'; '.join(failed)}")


def page(path: Path, findings: Sequence[Finding]) -> str:
    lines = [str(path)]
    for f in findings:
        lines.append(f"  {f.status} {f.rule:2} {f.name}{f': {f.absent}' if f.absent else ''}")
        lines += [f"          {fault}" for fault in f.faults]
    return "\n".join(lines)


def examine(path: Path, target: Any, engines: Sequence[str]) -> list[Finding]:
    """Every rule on one folder."""
    folder, findings = Folder(path, target, tuple(engines)), []
    for number, (name, rule) in enumerate(RULES.items(), 1):
        faults: list[str] = []
        absent = ""
        try:
            for fault in rule(folder):
                faults.append(fault)  # kept where a later look raises
        except DoesNotApply as error:
            absent = str(error)
        except KeyError as error:
            faults.append(f"config.json: key {error.args[0]} is missing")
        except ValueError as error:
            faults.append(str(error))
        findings.append(Finding(number, name, tuple(faults), absent))
    return findings


def keys(e: Folder) -> Iterator[str]:
    config = e.text_config
    for key in KEYS[e.form]:
        if key not in config:
            yield f"key {key} is missing"
        elif config[key] is None and key != "draft_vocab_size":
            yield f"key {key} is null"
    named = e.config.get("architectures")
    for engine in e.engines if e.form in HEADS else ():
        if engine == "reference":
            continue  # the authors' code does not read it
        allowed = ARCHITECTURES.get((e.form, engine), ())
        if not named or len(named) != 1 or named[0] not in allowed:
            yield f"architectures={named}: {engine} wants {' or '.join(allowed) or 'no ' + e.form}"
    if e.form in HEADS and "auto_map" in e.config:
        yield "auto_map: engines would need trust_remote_code"
    if config.get("vocab_size") != e.target.vocab_size:
        yield f"vocab_size={config.get('vocab_size')}: the target has {e.target.vocab_size}"
    reach, whole = config.get("max_position_embeddings"), e.target.max_position_embeddings
    if reach is not None and reach < whole:
        yield f"max_position_embeddings={reach}: the target has {whole}"
    for engine in e.engines if e.form == "eagle3" else ():
        switches, name = UNKNOWN.get(engine, ((), ""))
        yield from (f"{switch}=true: {name} does not know it" for switch in switches if config.get(switch))
    if e.form == "eagle3" and config.get("num_hidden_layers", 1) > 1:
        others = [engine for engine in e.engines if engine != "vllm"]
        yield from (f"num_hidden_layers: {engine} does not know several as vLLM does" for engine in others)
    yield from _speculators(e)
    if config.get("norm_before_fc") and config.get("fc_norm"):
        yield "norm_before_fc and fc_norm: engines differ in what they do with both"
    if e.form in ("eagle3", "eagle1"):
        yield from _rope(e)


def _speculators(e: Folder) -> Iterator[str]:
    """What its library needs; vLLM takes a missing norm_before_residual as true, the library as false."""
    if "speculators" not in e.engines:
        return
    section = e.config.get("speculators_config") or {}
    if SPECULATORS_KEY not in e.config:
        yield f"key {SPECULATORS_KEY} is missing: speculators takes it for a foreign form"
    if not (section.get("verifier") or {}).get("name_or_path"):
        yield "speculators_config.verifier.name_or_path is missing: speculators reads the target there"
    if not section.get("proposal_methods"):
        yield "speculators_config.proposal_methods is missing"
    if e.form == "eagle3" and "norm_before_residual" not in e.config:
        yield "key norm_before_residual is missing: readers differ in what that means"


def _rope(e: Folder) -> Iterator[str]:
    config = {key: value for key, value in e.config.items() if value is not None}
    if "rope_theta" not in config:
        yield "key rope_theta is missing: some readers know no other"
    found, _ = inv_freq(config)
    own = getattr(e.target, "rope_parameters", None) or {}
    if "rope_theta" in own and "rope_type" in own:
        head_dim = getattr(e.target, "head_dim", None) or (
            e.target.hidden_size // e.target.num_attention_heads
        )
        wanted, _ = inv_freq({"rope_parameters": own, "head_dim": head_dim})
        if wanted.shape != found.shape or not torch.allclose(wanted, found, 1e-5):
            yield f"rotary frequencies {found.tolist()[:3]}..: the target has {wanted.tolist()[:3]}.."


def tensor_set(e: Folder) -> Iterator[str]:
    prefixes = () if e.form in ("mtp", "standalone") else ("model.", "draft_model.")
    for name in e.names:
        if name.startswith(prefixes) and prefixes:
            yield f"{name}: the prefix is the engine's to add; SGLang loses such a tensor"
    shapes = e.shapes()
    for name in e.names:
        plain = e.canonical(name)
        if plain not in shapes:
            if e.form in HEADS and plain not in ("t2d", "embed_tokens.weight"):
                yield f"{name} is not part of this form"
            continue
        tensor, floats = e.tensor(name), NOT_FLOAT.get(plain)
        if tuple(tensor.shape) != shapes[plain]:
            yield f"{name} has shape {tuple(tensor.shape)}: expected {shapes[plain]}"
        if floats and str(tensor.dtype) != f"torch.{floats}":
            yield f"{name} has dtype {tensor.dtype}: expected {floats}"
        if not floats and not tensor.is_floating_point():
            yield f"{name} has dtype {tensor.dtype}: expected a float"
    for name, count in Counter(e.canonical(name) for name in e.names).items():
        if count > 1:
            yield f"{name} is there {count} times; an engine takes the last one it reads"
    if e.form == "mtp" and (e.path / INDEX).exists():
        named = read_json(e.path / INDEX)["weight_map"]
        for name in sorted(set(named) ^ set(e.names))[:3]:
            yield f"{name} is {'only in the index' if name in named else 'not in the index'}"


def fc_width(e: Folder) -> Iterator[str]:
    if e.form == "eagle1":
        D = e.config["hidden_size"]
        width = e.tensor("fc.weight").shape[1] if "fc.weight" in e.names else None
        if width != 2 * D or e.target.hidden_size != D:
            yield f"fc reads {width}: expected twice the target's {e.target.hidden_size}"
        return
    if e.form != "eagle3":
        raise DoesNotApply("no fc")
    if "fc.weight" not in e.names:
        yield "fc.weight is missing"
    elif e.tensor("fc.weight").shape[1] != e.num_taps * e.target.hidden_size:
        yield f"fc reads {e.tensor('fc.weight').shape[1]}: expected {e.num_taps} x {e.target.hidden_size}"
    ids, n = e.config.get(IDS_KEY), e.target.num_hidden_layers
    if ids is None:
        return
    if len(ids) != e.num_taps:
        yield f"{IDS_KEY}={ids}: num_aux_hidden_states is {e.num_taps}"
    if ids != sorted(set(ids)) or not all(0 < k < n for k in ids):
        yield f"{IDS_KEY}={ids}: expected strictly increasing ids of 1 to {n - 1}"


def layer_convention(e: Folder) -> Iterator[str]:
    """The layers whose input an engine captures must be those of training, and the same in each engine."""
    if e.form != "eagle3":
        raise DoesNotApply("no tapped layers")
    n, nested = e.target.num_hidden_layers, (e.config.get("eagle_config") or {}).get(IDS_KEY)
    points = {"vllm": e.config.get(IDS_KEY) or [2, n // 2, n - 3]}
    shift = sglang_shift(e.target.model_type, nested[0]) if nested else 0
    points["sglang"] = [k + shift for k in nested] if nested else [2, n // 2, n - 3]
    points["speculators"], points["reference"] = points["vllm"], [2, n // 2, n - 3]
    engines = [engine for engine in e.engines if engine != "trtllm"]  # it is told at its start
    if not engines:
        raise DoesNotApply("TensorRT-LLM is told the layers at its start")
    trained = e.recorded_taps()
    wanted = points[engines[0]] if trained is None else [k + 1 for k in trained]
    for engine in engines:
        if points[engine] != wanted:
            source = f"{engines[0]} of" if trained is None else "trained were"
            yield f"{engine} captures the inputs of layers {points[engine]}: {source} {wanted}"


def vocabulary(e: Folder) -> Iterator[str]:
    maps = {"eagle3": "d2t", "medusa": "token_map"}
    if e.form not in maps:
        raise DoesNotApply("the whole vocabulary")
    V, name = e.target.vocab_size, maps[e.form]
    if name not in e.names:
        kept = e.config.get("draft_vocab_size" if e.form == "eagle3" else "truncated_vocab_size")
        if kept not in (None, V):
            yield f"no {name}, but {kept} draft ids differ from {V} target ids"
        return
    ids = e.tensor(name).long()
    if e.form == "eagle3":
        ids = ids + torch.arange(len(ids))
    if not (ids.diff() > 0).all() or ids[0] < 0 or ids[-1] >= V:
        yield (
            f"{name} gives target ids {ids[:3].tolist()} .. {ids[-1]}: expected strictly rising ids below {V}"
            + ("; it must hold offsets (id = i + d2t[i])" if e.form == "eagle3" else "")
        )
    elif "t2d" in e.names:
        t2d = e.tensor("t2d")
        if len(t2d) != V or int(t2d.sum()) != len(ids) or not t2d[ids].all():
            yield f"t2d does not mark the {len(ids)} target ids of d2t"
    eos = e.target.eos_token_id
    for token in eos if isinstance(eos, list) else [eos]:
        if token is not None and token not in set(ids.tolist()):
            log.warning("%s: the target's eos %d is never drafted", e.path, token)


def eagle1(e: Folder) -> Iterator[str]:
    if e.form != "eagle1":
        raise DoesNotApply("no EAGLE-1")
    if "layers.0.input_layernorm.weight" in e.names:
        yield "layers.0.input_layernorm.weight: the first layer has no norm in front"
    bias = e.tensor("fc.bias") if "fc.bias" in e.names else None
    if bias is None and "sglang" in e.engines:
        yield "fc.bias is missing: SGLang leaves it random"
    if bias is None and "reference" in e.engines and e.config.get("bias", True):
        yield "fc.bias is missing and bias is not false: the authors' code leaves it random"
    if bias is not None and bias.any() and "vllm" in e.engines:
        yield "fc.bias is not zero: vLLM leaves it out"


def mtp_orders(e: Folder) -> Iterator[str]:
    if e.form != "mtp":
        raise DoesNotApply("no MTP weights")
    if e.mtp_names is None:
        yield f"{e.mtp_count} blocks of MTP weights: not known of a {e.target.model_type} target"
        return
    path = e.fixture()
    if path is None:
        raise DoesNotApply("orders and norms show in a recorded draft only (check/replay.safetensors)")
    fixture = read_tensors(path)
    replay = MtpReplay(e.path)
    if not _beyond(replay, fixture):
        return
    for flag, fault in MTP_FAULTS.items():
        setattr(replay, flag, not getattr(replay, flag))
        if not _beyond(replay, fixture):
            yield f"{fault}: so read, the weights give the recorded draft"
        setattr(replay, flag, not getattr(replay, flag))


def blocks(e: Folder) -> Iterator[str]:
    raise DoesNotApply("no family that drafts blocks")


def numeric_replay(e: Folder) -> Iterator[str]:
    path = e.fixture()
    if path is None:
        raise DoesNotApply("no recorded draft (check/replay.safetensors)")
    if fault := _beyond(open_replay(e.path), read_tensors(path)):
        yield fault


def _beyond(replay: Any, fixture: dict[str, torch.Tensor]) -> str:
    """What a replay differs by from the recorded draft; "" where that is within the bound."""
    worst = (replay.replayed(fixture) - fixture["logits"]).abs().max().item()
    bound = TOLERANCE * max(1.0, fixture["logits"].abs().max().item())
    if worst <= bound:
        return ""
    return f"replayed logits differ from the trained drafter's by {worst:.3g} (bound {bound:.3g})"


def random_parameters(e: Folder) -> Iterator[str]:
    shapes, found = e.shapes(), {e.canonical(name) for name in e.names}
    if not shapes:
        raise DoesNotApply("an ordinary model, which engines load strictly")
    whole = e.config.get("draft_vocab_size") in (None, e.target.vocab_size)
    for name in sorted(set(shapes) - found):
        if not (name == "lm_head.weight" and e.form == "eagle3" and whole):
            yield f"{name} is missing: an engine leaves it random"


def values(e: Folder) -> Iterator[str]:
    pickles = {path.name for path in e.path.glob("*") if path.suffix in (".bin", ".pt", ".pth")}
    others = sorted(pickles - set(e.files))
    for name in others:
        yield f"{name}: weights that do not load with safetensors alone"
    for name in e.names:
        if name in NOT_FLOAT:
            continue
        tensor = e.tensor(name)
        if not tensor.isfinite().all():
            yield f"{name} holds values that are not finite"
        elif tensor.ndim > 1 and e.form in HEADS and (tensor == tensor.flatten()[0]).all():
            yield f"{name} holds one value throughout: it was never trained"


RULES = {
    "config keys": keys,
    "tensor set": tensor_set,
    "width of fc": fc_width,
    "layer convention": layer_convention,
    "vocabulary maps": vocabulary,
    "EAGLE-1's bias and norms": eagle1,
    "MTP orders and norms": mtp_orders,
    "block families": blocks,
    "numeric replay": numeric_replay,
    "random parameters": random_parameters,
    "values": values,
}

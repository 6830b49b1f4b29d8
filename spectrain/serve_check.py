"""The exported drafter in a real engine: does vLLM write the same text with it as without, and does it accept
as many draft tokens as our own decoder?

vLLM runs in the user's environment, once plainly and once with the drafter, on first turns of the
evaluation's prompts, greedily; then our decoder, with the checkpoint's drafter, on the same prompts in the
same dtype.

    R/serve_check.json                 what is compared, all counts
    R/serve_check/NAME.request.json, NAME.answer.json, NAME.log    of each run of the engine

Two texts of a rounded dtype may part where the target's best logits round to the same value. A first
difference is a tie if plain vLLM gave both tokens log probabilities within TIES; behind it the texts are not
compared.
Acceptance is counted as vLLM does: before stop and length cuts, per position over all verifications.
"""

import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from spectrain.artifacts import read_json, write_json
from spectrain.checks import CheckFailed
from spectrain.config import RunConfig
from spectrain.decode.engine import generate
from spectrain.decode.sampling import Sampling
from spectrain.eval.prompts import load_prompts, render
from spectrain.export_forms import forms, method
from spectrain.proposal import Plan
from spectrain.target import Target, resolve_path

WORKER = Path(__file__).with_name("vllm_decode.py")
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
TIES = {"bfloat16": 0.25, "float32": 1e-3}  # nats; two steps of bfloat16 at logits from 16 to 32
CAUSE, OUTER = re.compile(r"\b\w+(Error|Exception): .*"), "Engine core initialization failed"
SHOWN = 5  # most likely tokens that plain vLLM tells of each place

log = logging.getLogger(__name__)


class Disagreement(CheckFailed):
    """The engine does not load the drafter, writes other text with it or accepts other numbers of tokens."""


def serve_check(
    config: RunConfig, load_both: Callable[[], tuple[Target, Any]], folder: Path
) -> dict[str, Any]:
    """Compare both engines and write `folder`/serve_check.json; returns its content.

    folder: of the run. load_both: target, and trained drafter in its dtype; called when vLLM is done, since
    one GPU may not hold both engines. Raises Disagreement.
    """
    serve, dtype = config.serve, config.target.dtype
    exported = _exported(config, folder)
    prompts = load_prompts(config.eval.prompts, limit=serve.prompts)
    path, trusted = resolve_path(config.target.path), config.target.trust_remote_code
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trusted)
    arguments = config.corpus.template_arguments
    ids = [render(tokenizer, [{"role": "user", "content": p.turns[0]}], arguments) for p in prompts]
    base: dict[str, Any] = {
        "model": path,
        "tokenizer": path,
        "dtype": dtype,
        "enforce_eager": True,
        "max_num_seqs": serve.batch,
        "max_model_len": max(map(len, ids)) + serve.tokens + 16 * serve.length,
        "disable_log_stats": False,
        "trust_remote_code": trusted,
    }
    drafts: dict[str, Any] = {
        "method": method(config.drafter.family, "vllm"),
        "num_speculative_tokens": serve.length,
    }
    if config.drafter.family == "mtp":  # its export is the target with other weights
        speculative = {**base, "model": str(exported), "speculative_config": drafts}
    else:
        speculative = {**base, "speculative_config": {**drafts, "model": str(exported)}}
    request = {"prompts": ids, "tokens": serve.tokens, "logprobs": SHOWN}
    place = folder / "serve_check"
    python = serve.python or sys.executable
    plain = run_engine(python, place, "plain", {**request, "engine": base})
    served = run_engine(python, place, "speculative", {**request, "engine": speculative, "logprobs": 0})
    target, drafter = load_both()
    result: dict[str, Any] = {
        "engine": f"vllm {served['version']}",
        "target": target.fingerprint(),
        "drafter": str(exported),
        "dtype": dtype,
        "settings": asdict(serve),
        "texts": compare_texts([p.id for p in prompts], plain, served["texts"], margin=TIES[dtype]),
        "acceptance": {
            "engine": acceptance(served["verifications"], served["per_position"]),
            "ours": _ours(config, target, drafter, ids, served["texts"]),
        },
        "seconds": {"plain": plain["seconds"], "speculative": served["seconds"]},
    }
    result |= verdict(result, serve.bound)
    write_json(folder / "serve_check.json", result)
    print(table(result))
    if result["reasons"]:
        raise Disagreement(f"stages: serve_check: {'; '.join(result['reasons'])} ({folder}/serve_check.json)")
    return result


def run_engine(python: str, folder: Path, name: str, request: dict[str, Any]) -> dict[str, Any]:
    """Decode `request` (see `vllm_decode.py`) in the environment of `python`; returns its answer.

    Raises ValueError where `python` cannot be run, Disagreement with the engine's last line where it fails.
    """
    asked, answered, said = (folder / f"{name}.{end}" for end in ("request.json", "answer.json", "log"))
    write_json(asked, request)
    answered.unlink(missing_ok=True)
    log.info("vllm: %d prompts, %s; its messages: %s", len(request["prompts"]), name, said)
    command = [str(Path(python).expanduser()), str(WORKER), str(asked), str(answered)]
    with open(said, "wb") as output:
        try:
            environment = {**ENVIRONMENT, **os.environ}
            done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        except OSError as error:
            raise ValueError(f"serve.python={python!r}: cannot be run ({error.strerror})") from None
    if done.returncode or not answered.exists():
        lines = [line for line in said.read_text(errors="replace").splitlines() if line.strip()]
        causes = [found[0] for line in lines if (found := CAUSE.search(line)) and OUTER not in line]
        last = (causes or lines or ["it said nothing"])[-1].strip()
        raise Disagreement(f"vllm ({name}) ended with exit code {done.returncode}: {last} ({said})")
    return read_json(answered)


def compare_texts(
    ids: Sequence[str], plain: dict[str, Any], texts: Sequence[Sequence[int]], *, margin: float
) -> dict[str, Any]:
    """Texts decoded with a drafter against plain ones, each up to its first difference.

    margin of a difference: log probability of the plain token minus that of the other, or None where plain
    decoding did not tell it (it is then no tie). `differences`: list of prompt, place, margin, tie.
    """
    differences: list[dict[str, Any]] = []
    for id, before, after, likely in zip(ids, plain["texts"], texts, plain["likely"], strict=True):
        if list(before) == list(after):
            continue
        shorter = min(len(before), len(after))
        at = next((i for i in range(shorter) if before[i] != after[i]), shorter)
        found = None
        if at < shorter:
            told = {token: logprob for token, logprob in likely[at]}
            if before[at] in told and after[at] in told:
                found = told[before[at]] - told[after[at]]
        tie = found is not None and abs(found) <= margin
        differences.append({"prompt": id, "place": at, "margin": found, "tie": tie})
    ties = sum(difference["tie"] for difference in differences)
    return {
        "prompts": len(ids),
        "equal": len(ids) - len(differences),
        "ties": ties,
        "other": len(differences) - ties,
        "tie_margin": margin,
        "differences": differences,
    }


def acceptance(verifications: int, per_position: Sequence[int]) -> dict[str, Any]:
    """per_position[k]: verifications that accepted draft tokens 0 to k. The mean length counts the bonus."""
    if not verifications:
        raise Disagreement("vllm: no verification was counted: no draft token was ever proposed")
    return {
        "mean_acceptance_length": 1 + sum(per_position) / verifications,
        "joint_k": [count / verifications for count in per_position],
        "verifications": verifications,
        "per_position": list(per_position),
    }


def verdict(result: dict[str, Any], bound: float) -> dict[str, Any]:
    """`ratio` of our mean acceptance length to the engine's, and the `reasons` of a disagreement."""
    here, there = (result["acceptance"][name]["mean_acceptance_length"] for name in ("ours", "engine"))
    reasons = []
    if other := result["texts"]["other"]:
        reasons.append(f"{other} texts differ from plain vLLM's beyond ties")
    if abs(here / there - 1) > bound:
        reasons.append(f"mean acceptance length {there:.3f} there, {here:.3f} here (serve.bound={bound})")
    return {"ratio": here / there, "reasons": reasons}


def table(result: dict[str, Any]) -> str:
    """The comparison for the terminal."""
    there, here = result["acceptance"]["engine"], result["acceptance"]["ours"]
    rows = [("", result["engine"], "spectrain")]
    names = ["mean acceptance length", *(f"tokens 0 to {k} accepted" for k in range(len(there["joint_k"])))]
    for name, a, b in zip(
        names,
        [there["mean_acceptance_length"], *there["joint_k"]],
        [here["mean_acceptance_length"], *here["joint_k"]],
        strict=True,
    ):
        rows.append((name, f"{a:.3f}", f"{b:.3f}"))
    rows.append(("verifications", str(there["verifications"]), str(here["verifications"])))
    texts = result["texts"]
    lines = [f"{name:<24}{a:>14}{b:>12}" for name, a, b in rows]
    lines.append(
        f"texts: {texts['equal']} of {texts['prompts']} as plain vLLM's, {texts['ties']} part at ties, "
        f"{texts['other']} otherwise; {here['equal_texts']} as ours"
    )
    return "\n".join(lines)


def _exported(config: RunConfig, folder: Path) -> Path:
    [form] = forms(config.drafter.family, ["vllm"])
    given = config.serve.drafter
    found = Path(given).expanduser() if given else folder / "export" / form
    if not (found / "config.json").exists():
        raise ValueError(
            f"{found}: no exported drafter there; run the export stage, or name one (serve.drafter)"
        )
    return found.resolve()


def _ours(config: RunConfig, target: Target, drafter: Any, ids, texts) -> dict[str, Any]:
    """The same prompts with our decoder."""
    serve = config.serve
    begin = time.perf_counter()
    generations, _ = generate(
        target,
        ids,
        sampling=Sampling(temperature=0.0),
        max_new_tokens=serve.tokens,
        stop_ids=target.stop_ids(),
        drafter=drafter,
        plan=Plan(shape="chain", length=serve.length),
        law="rejection",
        batch_size=serve.batch,
    )
    accepted = [r.accepted for g in generations for r in g.rounds]
    counts = [sum(a > k for a in accepted) for k in range(serve.length)]
    equal = sum(list(g.ids) == list(text) for g, text in zip(generations, texts, strict=True))
    seconds = time.perf_counter() - begin
    return {**acceptance(len(accepted), counts), "equal_texts": equal, "seconds": seconds}

"""Answers by the target itself: prompts in, conversations out, one JSONL line per prompt and temperature.

A drafter must learn the target's own text, not somebody else's. Answers are appended group by group, by each
process to a file of its own; a killed run goes on where it stopped, since a line names its prompt and
temperature. Sampling settings and the target's fingerprint are in the provenance file beside the output.
Knows no training.
"""

import json
import logging
from dataclasses import asdict
from pathlib import Path

from accelerate import PartialState
from tqdm import tqdm

from spectrain import __version__
from spectrain.artifacts import fingerprint, read_json, write_bytes, write_json
from spectrain.config import RunConfig
from spectrain.decode.engine import generate
from spectrain.decode.generation import Generation
from spectrain.decode.sampling import Sampling
from spectrain.eval.prompts import Prompt, load_prompts, render
from spectrain.target import Target

log = logging.getLogger(__name__)

QUICKSTART = Path(__file__).parent / "data" / "quickstart_prompts.jsonl"


def regenerate(config: RunConfig, target: Target, out: Path) -> None:
    """Write the target's answers to `config.regenerate.prompts` to the JSONL file `out`, going on where it
    stopped.

    A line is {"id", "messages", "temperature", "finish_reason"}; several turns are answered one after the
    other, each with the answers before it. Raises ValueError if `out` holds answers that other settings made.
    """
    settings = config.regenerate
    prompts = load_prompts(str(QUICKSTART) if settings.prompts == "quickstart" else settings.prompts)
    asked = asdict(settings) | {
        "prompts": settings.prompts,
        "questions": fingerprint([[p.id, p.turns] for p in prompts]),
        "seed": config.train.seed,
        "target": target.fingerprint(),
        "template_arguments": config.corpus.template_arguments,
    }
    process = PartialState(cpu=target.device.type == "cpu")
    if process.is_main_process:
        _open(out, asked)
        _gather(out)
    process.wait_for_everyone()
    done = {row["id"] for row in _rows(out)}
    jobs = [
        (p, i, t)
        for i, p in enumerate(prompts)
        for t in (
            [settings.temperatures[i % len(settings.temperatures)]]
            if settings.in_turn
            else settings.temperatures
        )
        if answer_id(p, t) not in done
    ]
    # neighbours of like length finish together
    jobs.sort(key=lambda job: (job[2], sum(map(len, job[0].turns))))
    process.wait_for_everyone()  # all have read before one appends
    _write(
        config,
        target,
        jobs[process.process_index :: process.num_processes],
        _part(out, process.process_index),
    )
    process.wait_for_everyone()
    if process.is_main_process:
        rows = _gather(out)
        log.info("%d conversations in %s", len(rows), out)


def _write(config: RunConfig, target: Target, jobs: list[tuple[Prompt, int, float]], out: Path) -> None:
    """Append the answers of this process to its own file."""
    num_tokens = 0
    with (
        tqdm(total=len(jobs), desc="regenerate", unit="answer", dynamic_ncols=True) as bar,
        open(out, "a", encoding="utf-8") as file,
    ):
        for first in range(0, len(jobs), config.regenerate.batch):
            group = jobs[first : first + config.regenerate.batch]
            for row, count in _answer(config, target, group):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                num_tokens += count
            file.flush()
            bar.update(len(group))
            bar.set_postfix_str(f"{num_tokens} tokens")


def _part(out: Path, process: int) -> Path:
    return out if process == 0 else out.with_suffix(f".{process}.jsonl")


def _rows(path: Path) -> list[dict]:
    """The whole lines of a file of answers, none if it is not there; a last line cut by a kill, perhaps
    inside a character, is not one."""
    written = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in written[: written.rfind(b"\n") + 1].split(b"\n") if line]


def _gather(out: Path) -> list[dict]:
    """Put the answers of all processes into `out`, by id, and drop their files."""
    parts = sorted(out.parent.glob(f"{out.stem}.*.jsonl"))
    rows = {row["id"]: row for path in (out, *parts) for row in _rows(path)}
    ordered = [rows[key] for key in sorted(rows)]
    write_bytes(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ordered).encode())
    for path in parts:
        path.unlink()
    return ordered


def answer_id(prompt: Prompt, temperature: float) -> str:
    return f"{prompt.id}-t{temperature:g}"


def _open(out: Path, asked: dict) -> None:
    """Say beside `out` how its answers are made; raises ValueError if it holds answers made otherwise."""
    provenance = out.with_suffix(".provenance.json")
    if out.exists() and (
        not provenance.exists() or read_json(provenance)["settings"] != json.loads(json.dumps(asked))
    ):
        raise ValueError(
            f"{out}: holds answers made with other settings; move it away or give another run_dir"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(provenance, {"settings": asked, "spectrain": __version__, "made_by": "stages=regenerate"})


def _answer(config: RunConfig, target: Target, group: list[tuple[Prompt, int, float]]):
    """Yield (line, answer tokens) for each (prompt, its number, temperature) of a group of one temperature or
    more."""
    messages: list[list[dict[str, str]]] = [[] for _ in group]
    reasons = ["stop"] * len(group)
    counts = [0] * len(group)
    for turn in range(max(len(prompt.turns) for prompt, _, _ in group)):
        for temperature in sorted({t for _, _, t in group}):
            here = [
                j
                for j, (prompt, _, t) in enumerate(group)
                if t == temperature and turn < len(prompt.turns) and reasons[j] == "stop"
            ]
            for j in here:
                messages[j].append({"role": "user", "content": group[j][0].turns[turn]})
            generations, _ = generate(
                target,
                [render(target.tokenizer, messages[j], config.corpus.template_arguments) for j in here],
                sampling=Sampling(
                    temperature=temperature, top_p=config.regenerate.top_p, seed=config.train.seed
                ),
                max_new_tokens=config.regenerate.max_new_tokens,
                stop_ids=target.stop_ids(),
                batch_size=config.regenerate.batch,
                request_keys=[group[j][1] * 16 + turn for j in here],
            )
            for j, generation in zip(here, generations, strict=True):
                messages[j].append({"role": "assistant", "content": _text(target, generation)})
                reasons[j] = generation.finish_reason
                counts[j] += len(generation.ids)
    for (prompt, _, temperature), turns, reason, count in zip(group, messages, reasons, counts, strict=True):
        row = {
            "id": answer_id(prompt, temperature),
            "messages": turns,
            "temperature": temperature,
            "finish_reason": reason,
        }
        yield row, count


def _text(target: Target, generation: Generation) -> str:
    """The answer without the stop token."""
    ids = list(generation.ids)
    if generation.finish_reason == "stop":
        ids = ids[:-1]
    return target.tokenizer.decode(ids, skip_special_tokens=False)

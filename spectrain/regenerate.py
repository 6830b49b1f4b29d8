"""Answers by the target itself: prompts in, conversations out, one JSONL line per prompt and temperature.

A drafter must learn the target's own text, not somebody else's. The target answers in this process, batched,
or on an OpenAI-compatible server. Answers are appended as they come, by each process to a file of its own; a
killed run goes on where it stopped, since a line names its prompt and temperature. Sampling settings and what
the target is stand in the provenance file beside the output. Knows no training.
"""

import json
import logging
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import PartialState
from tqdm import tqdm

from spectrain import __version__
from spectrain.artifacts import fingerprint, read_json, write_bytes, write_json
from spectrain.chat_server import ChatServer
from spectrain.config import RunConfig
from spectrain.decode.engine import context_length, generate
from spectrain.decode.generation import Generation
from spectrain.decode.sampling import Sampling
from spectrain.eval.prompts import render
from spectrain.questions import Dialogue, Question, load_questions
from spectrain.target import Target

log = logging.getLogger(__name__)

Job = tuple[Question, int, float]
"""A question, its number in the file, a temperature."""


def regenerate(config: RunConfig, target: Target | None, out: Path) -> None:
    """Write the target's answers to `config.regenerate.prompts` to the JSONL file `out`, going on where it
    stopped.

    target: None if `config.regenerate.server` answers. A line is {"id", "messages", "temperature",
    "finish_reason"} and "tools" where there are any; several turns are answered one after the other, each
    with the answers before it. In this process tool calls and reasoning stay in the text as the target wrote
    them; a server takes them apart. Raises ValueError if `out` holds answers that other settings made.
    """
    settings = config.regenerate
    questions = load_questions(settings.prompts)
    assert (target is None) == bool(settings.server)
    source = target or ChatServer.connect(settings.server, settings.model, settings.request)
    asked = asdict(settings)
    how = {key: asked.pop(key) for key in ("server", "batch")}  # no answer depends on them
    asked |= {
        "questions": fingerprint([[q.id, q.given, q.tools] for q in questions]),
        "seed": config.train.seed,
        "target": {"model": source.model} if isinstance(source, ChatServer) else source.fingerprint(),
        "template_arguments": config.corpus.template_arguments,
    }
    process = PartialState(cpu=target is None or target.device.type == "cpu")
    if process.is_main_process:
        _open(out, asked, how)
        _gather(out)
    process.wait_for_everyone()
    done = {row["id"] for row in _rows(out)}
    jobs = [
        (q, i, t)
        for i, q in enumerate(questions)
        for t in (
            [settings.temperatures[i % len(settings.temperatures)]]
            if settings.in_turn
            else settings.temperatures
        )
        if answer_id(q, t) not in done
    ]
    # neighbours of like length finish together
    jobs.sort(key=lambda job: (job[2], job[0].length))
    process.wait_for_everyone()  # all have read before one appends
    mine = jobs[process.process_index :: process.num_processes]
    stride = max(16, *(q.answers for q in questions))  # answers of one question have keys of their own
    if isinstance(source, ChatServer):
        rows = _served(config, source, mine, stride)
    else:
        rows = _in_process(config, source, mine, stride)
    _write(rows, len(mine), _part(out, process.process_index))
    process.wait_for_everyone()
    if process.is_main_process:
        log.info("%d conversations in %s", len(_gather(out)), out)


def _write(rows: Iterable[tuple[dict[str, Any], int]], total: int, out: Path) -> None:
    """Append (line, its answer tokens) of this process to its own file, each as it comes."""
    num_tokens = 0
    with (
        tqdm(total=total, desc="regenerate", unit="answer", dynamic_ncols=True) as bar,
        open(out, "a", encoding="utf-8") as file,
    ):
        for row, count in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            num_tokens += count
            bar.update()
            bar.set_postfix_str(f"{num_tokens} tokens", refresh=False)


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


def answer_id(question: Question, temperature: float) -> str:
    return f"{question.id}-t{temperature:g}"


def _open(out: Path, asked: dict, how: dict) -> None:
    """Say beside `out` how its answers are made; raises ValueError if it holds answers made otherwise."""
    provenance = out.with_suffix(".provenance.json")
    if out.exists() and (
        not provenance.exists() or read_json(provenance)["settings"] != json.loads(json.dumps(asked))
    ):
        raise ValueError(
            f"{out}: holds answers made with other settings; move it away or give another run_dir"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    made = {"settings": asked, "how": how, "spectrain": __version__, "made_by": "stages=regenerate"}
    write_json(provenance, made)


def _in_process(
    config: RunConfig, target: Target, jobs: list[Job], stride: int
) -> Iterator[tuple[dict[str, Any], int]]:
    """(line, answer tokens) of each job, generated `regenerate.batch` at a time."""
    settings = config.regenerate
    for first in range(0, len(jobs), settings.batch):
        group = jobs[first : first + settings.batch]
        dialogues = [Dialogue(question) for question, _, _ in group]
        counts, turn = [0] * len(group), 0
        while waiting := [j for j, dialogue in enumerate(dialogues) if dialogue.waits()]:
            for temperature in sorted({group[j][2] for j in waiting}):
                here = [j for j in waiting if group[j][2] == temperature]
                generations, _ = generate(
                    target,
                    [_prompt(config, target, dialogues[j]) for j in here],
                    sampling=Sampling(temperature=temperature, top_p=settings.top_p, seed=config.train.seed),
                    max_new_tokens=settings.max_new_tokens,
                    stop_ids=target.stop_ids(),
                    batch_size=settings.batch,
                    request_keys=[group[j][1] * stride + turn for j in here],
                )
                for j, generation in zip(here, generations, strict=True):
                    message = {"role": "assistant", "content": _text(target, generation)}
                    dialogues[j].answer(message, generation.finish_reason)
                    counts[j] += len(generation.ids)
            turn += 1
        yield from (
            (_row(d, temperature), n)
            for d, (_, _, temperature), n in zip(dialogues, group, counts, strict=True)
        )


def _prompt(config: RunConfig, target: Target, dialogue: Dialogue) -> list[int]:
    """Ids of the turns so far; raises ValueError naming the prompt if they leave the context no room."""
    question, arguments = dialogue.question, config.corpus.template_arguments
    ids = render(target.tokenizer, dialogue.messages, arguments, tools=question.tools)
    if len(ids) >= (limit := context_length(target)):
        raise ValueError(
            f"prompt {question.id}: {len(ids)} tokens, but the target's context is {limit}; take it out of "
            "regenerate.prompts"
        )
    return ids


def _served(
    config: RunConfig, server: ChatServer, jobs: list[Job], stride: int
) -> Iterator[tuple[dict[str, Any], int]]:
    """(line, answer tokens) of each job as the server's answers come; the first error ends the rest."""
    settings = config.regenerate
    fixed: dict[str, Any] = {"top_p": settings.top_p, "max_tokens": settings.max_new_tokens}
    if config.corpus.template_arguments:
        fixed["chat_template_kwargs"] = config.corpus.template_arguments

    def answer(job: Job) -> tuple[dict[str, Any], int]:
        question, number, temperature = job
        dialogue, count, turn = Dialogue(question), 0, 0
        while dialogue.waits():
            seed = config.train.seed * 2**20 + number * stride + turn
            sampling = fixed | {"temperature": temperature, "seed": seed}
            sampling |= {"tools": question.tools} if question.tools else {}
            try:
                message, reason, tokens = server.ask(dialogue.messages, sampling)
            except ValueError as error:
                raise ValueError(f"prompt {question.id}: {error}") from error
            dialogue.answer(message, reason)
            count, turn = count + tokens, turn + 1
        return _row(dialogue, temperature), count

    pool = ThreadPoolExecutor(max_workers=settings.batch)
    try:
        for answered in as_completed([pool.submit(answer, job) for job in jobs]):
            yield answered.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _row(dialogue: Dialogue, temperature: float) -> dict[str, Any]:
    """The line of a dialogue that is over."""
    row = {
        "id": answer_id(dialogue.question, temperature),
        "messages": dialogue.messages,
        "temperature": temperature,
        "finish_reason": dialogue.finish_reason,
    }
    return row | ({"tools": dialogue.question.tools} if dialogue.question.tools else {})


def _text(target: Target, generation: Generation) -> str:
    """The answer without the stop token, or without the half of a character at which the limit cut it."""
    ids, stopped = list(generation.ids), generation.finish_reason == "stop"
    text = target.tokenizer.decode(ids[:-1] if stopped else ids, skip_special_tokens=False)
    return text if stopped else text.rstrip("\N{REPLACEMENT CHARACTER}")

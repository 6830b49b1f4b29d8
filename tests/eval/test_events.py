"""The log of verifications that an evaluation writes on request."""

import json
from dataclasses import dataclass

from spectrain.config import EvalConfig, RunConfig, WandbConfig
from spectrain.decode_settings import DecodeRunConfig
from spectrain.eval.records import read_texts
from spectrain.eval.run import evaluate

RUNS = [
    DecodeRunConfig(
        name="penalised", dtype="float32", length=3, repetition_penalty=1.2, presence_penalty=0.3
    ),
    DecodeRunConfig(name="plain_t0", dtype="float32", length=3),
    DecodeRunConfig(
        name="all", dtype="float32", length=3, temperature=1.0, top_k_filter=50, min_p=0.01,
        repetition_penalty=1.2, frequency_penalty=0.3,
    ),
]  # fmt: skip


@dataclass(frozen=True)
class Family:
    family: str = "bigram"


def test_events_are_one_line_per_verification_and_penalised_runs_are_certified(tmp_path, target, drafter):
    rows = [{"id": f"p{i}", "category": "a", "turns": [f"Say {i}."]} for i in range(2)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    limits = {"max_new_tokens": 16, "greedy_prompts": 2, "greedy_tokens": 12, "sampling_tokens": 60}
    settings = EvalConfig(
        baseline="", prompts=str(tmp_path / "prompts.jsonl"), runs=RUNS, events=True, **limits
    )
    config = RunConfig(recipe="tiny", drafter=Family(), wandb=WandbConfig(enabled=False), eval=settings)
    evaluate(config, lambda dtype: target, lambda target: drafter, tmp_path / "eval")

    certificate = json.loads((tmp_path / "eval" / "certificate" / "certificate.json").read_text())
    assert certificate["pass"] and certificate["greedy"]["differences"] == 0
    assert len(certificate["greedy"]["plans"]) == 2
    assert certificate["sampling"]["runs"][0]["impossible"] == []
    for run in RUNS:
        folder = tmp_path / "eval" / "runs" / run.name
        lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        for text in read_texts(folder / "texts.jsonl"):
            mine = [line for line in lines if (line["id"], line["turn"]) == (text.id, text.turn)]
            assert [line["round"] for line in mine] == list(range(len(text.speculative.rounds)))
            ids = list(text.speculative.ids[:1])
            for line in mine:
                assert set(line) == {
                    "id", "turn", "round", "root_position", "tokens", "parents", "path", "bonus", "alphas",
                    "emitted",
                }  # fmt: skip
                assert line["root_position"] == len(text.speculative.prompt_ids) + len(ids) - 1
                ids += [*(line["tokens"][node] for node in line["path"]), line["bonus"]][: line["emitted"]]
            assert tuple(ids) == text.speculative.ids

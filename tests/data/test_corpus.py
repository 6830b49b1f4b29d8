import json

import pytest

from spectrain.data.corpus import BadRow, parse, without_nulls

GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}


def parse_row(row):
    return parse(json.dumps(row).encode(), source="file.jsonl", line=7)


def with_turn(**turn):
    return {"messages": [*GOOD["messages"], turn]}


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


@pytest.mark.parametrize("calls", [5, "get", {"name": "get"}])
def test_tool_calls_that_are_no_list_are_rejected(calls):
    with pytest.raises(BadRow, match=r"bad_tool_call \(turn 2: `tool_calls` is .*, expected a list"):
        parse_row(with_turn(role="assistant", content="a", tool_calls=calls))


@pytest.mark.parametrize("tools", [["get"], [1], "[1]", {"name": "get"}, 5])
def test_tools_that_are_no_list_of_objects_are_rejected(tools):
    with pytest.raises(BadRow, match=r"bad_tools \(`tools` is .*, expected a list of objects"):
        parse_row(GOOD | {"tools": tools})


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


@pytest.mark.parametrize("reply", ["response", "completion"])
def test_a_prompt_and_its_reply_are_two_turns(reply):
    messages = parse_row({"prompt": "hi", reply: "yo"}).messages
    assert messages == GOOD["messages"]


def test_prompt_and_completion_may_be_lists_of_turns():
    row = {"prompt": GOOD["messages"][:1], "completion": GOOD["messages"][1:]}
    assert parse_row(row).messages == GOOD["messages"]


def test_messages_win_over_the_prompt_that_a_row_repeats():
    assert parse_row({"prompt": "other"} | GOOD).messages == GOOD["messages"]


def test_a_prompt_without_reply_is_rejected():
    with pytest.raises(BadRow, match="`response` is None"):
        parse_row({"prompt": "hi"})


def test_tokens_are_taken_as_they_are():
    row = parse_row({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]})
    assert (row.ids, row.mask, row.id) == ([5, 6, 7], [False, True, True], "file.jsonl:7")


@pytest.mark.parametrize(
    ("ids", "mask", "why"),
    [
        ([5, 6], [0], "2 `input_ids` beside 1"),
        ([5, "6"], [0, 1], "whole numbers"),
        ([5, 6], [0, 2], "0 and 1"),
        ([5, 6], None, "0 and 1"),
    ],
)
def test_tokens_that_do_not_fit_their_mask_are_rejected(ids, mask, why):
    with pytest.raises(BadRow, match=f"bad_tokens.*{why}"):
        parse_row({"input_ids": ids, "loss_mask": mask})


def test_keys_that_a_column_filled_in_are_no_keys():
    row = {"messages": [{"role": "user", "content": "a", "tool_calls": None}], "tools": None}
    assert without_nulls(row) == {"messages": [{"role": "user", "content": "a"}]}

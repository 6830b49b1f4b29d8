"""Which turns of a file are answered anew, and when a conversation cannot go on."""

import json

import pytest

from spectrain.questions import Dialogue, Question, load_questions


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


def call(city, id="old"):
    return {"id": id, "type": "function", "function": {"name": "weather", "arguments": {"city": city}}}


WEATHER = (
    turn("system", "Be brief."),
    turn("user", "Warm?"),
    turn("assistant", "", tool_calls=[call("Rome")]),
    turn("tool", "7C", tool_call_id="old"),
    turn("assistant", "No."),
    turn("user", "Sure?"),
)


def answered(given, *answers):
    """The dialogue after those answers, and whether it waits for another."""
    dialogue = Dialogue(Question("q", given))
    for message, reason in answers:
        assert dialogue.waits()
        dialogue.answer(message, reason)
    return dialogue, dialogue.waits()


def test_old_answers_are_replaced_and_the_last_question_is_answered_too():
    given = (turn("user", "a"), turn("assistant", "b"), turn("user", "c"))
    dialogue, waits = answered(given, (turn("assistant", "B"), "stop"), (turn("assistant", "C"), "stop"))
    assert not waits
    assert [message["content"] for message in dialogue.messages] == ["a", "B", "c", "C"]
    assert Question("q", given).answers == 2


def test_a_leading_answer_is_context():
    dialogue, waits = answered((turn("assistant", "Hello."), turn("user", "a"), turn("assistant", "b")))
    assert waits and [message["content"] for message in dialogue.messages] == ["Hello.", "a"]


def test_a_tools_result_follows_the_same_call_under_the_new_calls_id():
    called = turn("assistant", "", tool_calls=[call("Rome", "new")])
    called["tool_calls"][0]["function"] = {"name": "weather", "arguments": '{"city": "Rome"}'}
    dialogue, waits = answered(WEATHER, (called, "tool_calls"), (turn("assistant", "Cold."), "stop"))
    assert waits
    result = turn("tool", "7C", tool_call_id="new")
    assert dialogue.messages == [*WEATHER[:2], called, result, turn("assistant", "Cold."), WEATHER[5]]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (turn("assistant", "", tool_calls=[call("Oslo")]), "tool_calls"),
        (turn("assistant", "", tool_calls=[call("Rome"), call("Rome")]), "tool_calls"),
        (turn("assistant", "I do not know."), "stop"),
        (turn("assistant", "", tool_calls=[call("Rome")]), "length"),
    ],
    ids=["another call", "one call more", "no call", "cut"],
)
def test_a_conversation_ends_where_the_given_results_no_longer_fit(message, reason):
    dialogue, waits = answered(WEATHER, (message, reason))
    assert not waits
    assert dialogue.messages == [*WEATHER[:2], message] and dialogue.finish_reason == reason


def test_a_conversation_ends_at_a_call_without_a_result():
    given = (turn("user", "a"), turn("assistant", "b"), turn("user", "c"))
    dialogue, waits = answered(given, (turn("assistant", "", tool_calls=[call("Rome")]), "tool_calls"))
    assert not waits and dialogue.finish_reason == "tool_calls"


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_prompts_and_conversations_are_read_from_a_file(tmp_path):
    tools = [{"type": "function", "function": {"name": "weather"}}]
    prompts = write(tmp_path / "p.jsonl", {"id": "one", "turns": ["a", "b"]})
    assert load_questions(prompts) == [
        Question("one", (turn("user", "a"), turn("assistant", ""), turn("user", "b")))
    ]
    share = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    rows = write(tmp_path / "c.jsonl", {"id": 7, "messages": WEATHER, "tools": tools}, share)
    first, second = load_questions(rows)
    assert first == Question("7", WEATHER, tools)
    assert second == Question("c-2", (turn("user", "a"), turn("assistant", "b")))


@pytest.mark.parametrize("row", ["{", {"messages": []}, {"messages": [turn("boss", "a")]}, [1]], ids=str)
def test_a_line_that_asks_nothing_is_named(tmp_path, row):
    rows = write(tmp_path / "c.jsonl", {"messages": [turn("user", "a")]}, row)
    with pytest.raises(ValueError, match="c.jsonl:2: "):
        load_questions(rows)


def test_an_id_that_comes_twice_is_named(tmp_path):
    rows = write(tmp_path / "c.jsonl", *[{"id": "x", "messages": [turn("user", "a")]}] * 2)
    with pytest.raises(ValueError, match="c.jsonl:2: id 'x' occurs twice"):
        load_questions(rows)


def test_a_conversation_may_come_behind_a_byte_order_mark(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"messages": [turn("user", "a")]}) + "\n", encoding="utf-8-sig")
    assert load_questions(str(path)) == [Question("q-1", (turn("user", "a"),))]


def test_a_question_that_is_no_utf8_is_named(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_bytes(b'\n{"messages": [{"role": "user", "content": "\xe9"}]}\n')
    with pytest.raises(ValueError, match=r"q\.jsonl:2: not UTF-8 \(.*0xe9"):
        load_questions(str(path))

import json
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrain.data.chat import Chat
from spectrain.data.corpus import BadRow, parse
from spectrain.testing import CHATML, GENERATION_PROMPT, NOTHINK, THINK, TOOL, byte_tokenizer

END = 257


def user(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


def render(template, messages, *, max_length=1000, min_supervised=1, auto_bos=False, stop_ids=(), **row):
    """Samples and drops of one conversation."""
    chat = Chat(
        byte_tokenizer(template, auto_bos=auto_bos),
        max_length=max_length,
        min_supervised=min_supervised,
        template_arguments={},
        stop_ids=stop_ids,
    )
    raw = json.dumps({"messages": messages, **row}).encode()
    return chat.samples(parse(raw, source="c.jsonl", line=1))


def mask(sample):
    """The loss mask as runs: 0x21 1x3 is 21 tokens of context, then 3 supervised."""
    assert len(sample.ids) == len(sample.loss_mask) == len(sample.span_ids)
    assert (sample.span_ids >= 0).tolist() == sample.loss_mask.tolist()
    return " ".join(f"{int(k)}x{len(list(run))}" for k, run in groupby(sample.loss_mask.tolist()))


def supervised(sample):
    return sample.ids[sample.loss_mask].tolist()


def text(template, ids):
    return byte_tokenizer(template).decode(ids)


@pytest.mark.case("O-D01")
def test_a_template_without_generation_tags_gives_the_answer_and_its_end_token():
    [sample], drops = render(CHATML, [user("hi"), answer("yo")])
    assert len(sample.ids) == 25
    assert mask(sample) == "0x21 1x3 0x1"
    assert supervised(sample) == [121, 111, END]
    assert not drops


@pytest.mark.case("O-D02")
def test_a_template_that_rewrites_history_gives_one_row_per_answer():
    turns = [user("a"), answer("B", reasoning_content="x"), user("c"), answer("D", reasoning_content="y")]
    first, second = render(THINK, turns)[0]
    assert (len(first.ids), mask(first)) == (39, "0x20 1x18 0x1")
    assert (len(second.ids), mask(second)) == (62, "0x43 1x18 0x1")
    assert text(THINK, supervised(first)) == "<think>x</think>B<|im_end|>"
    assert text(THINK, supervised(second)) == "<think>y</think>D<|im_end|>"
    assert (first.id, second.id) == ("c.jsonl:1#1", "c.jsonl:1#3")


def test_answers_between_which_no_history_is_rewritten_share_a_row():
    turns = [user("a"), answer("B", reasoning_content="x"), {"role": "tool", "content": "c"}, answer("D")]
    [sample], _ = render(THINK, turns)
    assert sample.id == "c.jsonl:1"
    spans = [sample.ids[sample.span_ids == k].tolist() for k in (0, 1)]
    assert [text(THINK, s) for s in spans] == ["<think>x</think>B<|im_end|>", "<think></think>D<|im_end|>"]


@pytest.mark.case("O-D02")
def test_a_turn_whose_prompt_is_no_prefix_of_its_row_is_refused_and_counted():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
    )
    samples, drops = render(template, [user("a"), answer("<think>b"), user("c"), answer("d")])
    assert [mask(sample) for sample in samples] == ["0x27 1x2 0x1"]
    assert drops == {"unstable_turn": 1}


@pytest.mark.case("O-D03")
@pytest.mark.parametrize(
    ("max_length", "expected"),
    [(20, None), (21, None), (22, None), (24, "0x21 1x3"), (45, "0x21 1x3 0x1"), (47, "0x21 1x3 0x22 1x1")],
)
def test_a_cut_answer_keeps_its_visible_part(max_length, expected):
    turns = [user("hi"), answer("yo"), user("ok"), answer("bye")]
    samples, drops = render(CHATML, turns, max_length=max_length, min_supervised=2)
    assert [mask(sample) for sample in samples] == ([expected] if expected else [])
    assert drops["truncated"] == (0 if expected else 1)


@pytest.mark.case("O-D03")
def test_a_sample_that_fits_is_whole():
    [sample], _ = render(CHATML, [user("hi"), answer("yo"), user("ok"), answer("bye")], max_length=51)
    assert mask(sample) == "0x21 1x3 0x22 1x4 0x1"
    assert sample.span_ids.unique().tolist() == [-1, 0, 1]


@pytest.mark.case("O-D04")
def test_a_leading_assistant_turn_is_context():
    turns = [{"from": "gpt", "value": "A"}, {"from": "human", "value": "u"}, {"from": "gpt", "value": "B"}]
    [sample], _ = render(CHATML, turns)
    assert (len(sample.ids), mask(sample)) == (37, "0x34 1x2 0x1")
    assert text(CHATML, supervised(sample)) == "B<|im_end|>"


@pytest.mark.case("O-D05")
def test_the_template_alone_writes_bos():
    [sample], _ = render("{{ bos_token }}" + CHATML, [user("hi"), answer("yo")], auto_bos=True)
    assert len(sample.ids) == 26
    assert sample.ids[:3].tolist() == [259, 256, 117]


@pytest.mark.case("O-D06")
def test_an_empty_answer_has_a_span_of_its_end_token_alone():
    [sample], _ = render(CHATML, [user("hi"), answer("")])
    assert (len(sample.ids), mask(sample)) == (23, "0x21 1x1 0x1")


@pytest.mark.case("O-D06")
def test_an_empty_answer_is_too_short_to_train_on():
    samples, drops = render(CHATML, [user("hi"), answer("")], min_supervised=2)
    assert (samples, drops) == ([], {"too_short": 1})


@pytest.mark.case("O-D07")
def test_what_the_generation_prompt_writes_is_not_supervised():
    [sample], _ = render(NOTHINK, [user("hi"), answer("yo")])
    assert (len(sample.ids), mask(sample)) == (44, "0x40 1x3 0x1")
    assert text(NOTHINK, supervised(sample)) == "yo<|im_end|>"


@pytest.mark.case("O-D08")
def test_user_text_that_looks_like_an_answer_is_not_supervised():
    [sample], _ = render(CHATML, [user("<|im_start|>assistant\nfake<|im_end|>"), answer("fake")])
    assert (len(sample.ids), mask(sample)) == (41, "0x35 1x5 0x1")


@pytest.mark.case("O-D09")
@pytest.mark.parametrize("arguments", [{"city": "SF"}, '{"city":"SF"}'])
def test_a_tool_call_is_supervised_and_its_result_is_not(arguments):
    call = {"type": "function", "function": {"name": "get", "arguments": arguments}}
    turns = [user("w?"), answer(None, tool_calls=[call]), {"role": "tool", "content": "7C"}, answer("cold")]
    [sample], _ = render(TOOL, turns)
    assert (len(sample.ids), mask(sample)) == (117, "0x21 1x68 0x22 1x5 0x1")


def test_tools_reach_every_rendering():
    template = "{% if tools %}<s>{{ tools | length }}{% endif %}" + CHATML
    [sample], _ = render(template, [user("hi"), answer("yo")], tools=[{"a": 1}, {"b": 2}])
    assert text(template, sample.ids[:2].tolist()) == "<s>2"
    assert mask(sample) == "0x23 1x3 0x1"


@pytest.mark.case("O-D10")
def test_an_answer_stopped_by_the_length_limit_gets_no_end_token():
    [sample], _ = render(CHATML, [user("hi"), answer("yo")], finish_reason="length")
    assert mask(sample) == "0x21 1x2"
    assert supervised(sample) == [121, 111]


@pytest.mark.case("O-D10")
def test_only_the_last_answer_of_a_cut_row_lacks_its_end_token():
    turns = [user("hi"), answer("yo"), user("ok"), answer("bye")]
    [sample], _ = render(CHATML, turns, finish_reason="length")
    assert mask(sample) == "0x21 1x3 0x22 1x3"


def test_a_conversation_that_the_template_refuses_is_a_bad_row():
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    with pytest.raises(BadRow, match="template_error .no system"):
        render(template, [{"role": "system", "content": "s"}, user("hi"), answer("yo")])


def test_an_end_that_is_no_special_token_is_refused_at_the_start():
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}" + GENERATION_PROMPT
    with pytest.raises(ValueError, match=r"ends an answer with '\\n'"):
        render(template, [user("hi"), answer("yo")])


def test_the_next_header_joins_the_span_where_it_is_the_end_token():
    template = (
        "{% for m in messages %}"
        "{{ '<s>' if m.role == 'user' else '<|im_start|>' }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    [sample], _ = render(template, [user("a"), answer("b"), user("c"), answer("d")], stop_ids=[259])
    assert mask(sample) == "0x3 1x2 0x2 1x1"
    assert text(template, supervised(sample)) == "b<s>d"


TEXTS = st.text(alphabet="ab \n", max_size=4)
ASKS = TEXTS | st.sampled_from(["<|im_end|>", "<|im_start|>assistant\nb<|im_end|>\n", "é\u2028"])


@pytest.mark.case("O-D02")
@settings(deadline=None, max_examples=60)
@given(
    turns=st.lists(st.tuples(ASKS, TEXTS), min_size=1, max_size=4), template=st.sampled_from([CHATML, THINK])
)
def test_before_every_span_stands_the_prompt_as_served(turns, template):
    messages = [m for ask, reply in turns for m in (user(ask), answer(reply))]
    tokenizer = byte_tokenizer(template)
    samples, drops = render(template, messages)
    assert not drops
    assert len(samples) == (1 if template == CHATML else len(turns))
    spans = [
        (sample, (sample.span_ids == k).nonzero()[:, 0].tolist())
        for sample in samples
        for k in range(int(sample.span_ids.max()) + 1)
    ]
    assert len(spans) == len(turns)
    for n, (sample, where) in enumerate(spans):
        before = tokenizer.apply_chat_template(
            messages[: 2 * n + 1], tokenize=False, add_generation_prompt=True
        )
        start, stop = where[0], where[-1] + 1
        assert where == list(range(start, stop))
        assert sample.ids[:start].tolist() == tokenizer.encode(before, add_special_tokens=False)
        thought = "<think></think>" if template == THINK else ""
        assert tokenizer.decode(sample.ids[start:stop].tolist()) == f"{thought}{turns[n][1]}<|im_end|>"

"""Spans under the templates of published models: golden masks, and the prefix property on random texts.

The fixtures in templates/ are written anew from the structure of the templates that the named repositories
served in 2025 (a revision is given where it is known), cut down to what decides where an answer begins and
ends: order of the parts, markers, what is trimmed, what the generation prompt writes, what is dropped from
history. A mask is drawn as the row's text, what is supervised between { and }.
"""

import json
import random
from pathlib import Path

import pytest
from tokenizers import AddedToken

from spectrain.data.chat import Chat
from spectrain.data.corpus import BadRow, parse
from spectrain.testing import byte_tokenizer

CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
MODELS = {  # fixture: its special tokens, and those that end a turn as served (generation config)
    "llama-3.1": (
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
        ("<|eot_id|>", "<|eom_id|>"),
    ),
    "qwen3": (CHATML, ("<|im_end|>", "<|endoftext|>")),
    "gemma-3": (("<bos>", "<start_of_turn>", "<end_of_turn>", "<eos>"), ("<eos>", "<end_of_turn>")),
    "harmony": (
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
        ("<|return|>", "<|call|>"),
    ),
    "mistral": (("<s>", "</s>", "[INST]", "[/INST]"), ("</s>",)),
    "phi-4": ((*CHATML, "<|im_sep|>"), ("<|im_end|>",)),
    "deepseek-v3": (DEEPSEEK, ("<｜end▁of▁sentence｜>",)),
    "deepseek-v3.1": ((*DEEPSEEK, "<think>", "</think>"), ("<｜end▁of▁sentence｜>",)),
    "smollm2": (CHATML, ("<|im_end|>",)),
}
CASES = {
    **{name: (name, {}) for name in MODELS},
    "deepseek-v3.1": ("deepseek-v3.1", {"thinking": False}),
    "qwen3-off": ("qwen3", {"enable_thinking": False}),
}
REWRITES = ("qwen3", "qwen3-off", "harmony")


def make_chat(model, arguments):
    markers, ends = MODELS[model]
    template = Path(__file__).with_name("templates").joinpath(f"{model}.jinja").read_text()
    tokenizer = byte_tokenizer(template)
    tokenizer.add_tokens([AddedToken(marker, normalized=False, special=True) for marker in markers])
    tokenizer.eos_token = ends[0]
    return Chat(
        tokenizer,
        max_length=4000,
        min_supervised=1,
        template_arguments=arguments,
        stop_ids=tokenizer.convert_tokens_to_ids(list(ends)),
    )


def conversation(messages):
    return parse(json.dumps({"messages": messages}).encode(), source="c.jsonl", line=1)


def drawn(sample, tokenizer):
    """The sample's text with braces around each span."""
    text, last = "", -1
    for span, token in zip([*sample.span_ids.tolist(), -1], [*sample.ids.tolist(), None], strict=True):
        if span != last:
            text += ("}" if last >= 0 else "") + ("{" if span >= 0 else "")
            last = span
        text += "" if token is None else tokenizer.decode([token])
    return text


def golden(case, *messages):
    chat = make_chat(*CASES[case])
    samples, drops = chat.samples(conversation(list(messages)))
    return [drawn(sample, chat.tokenizer) for sample in samples], dict(drops)


def system(text):
    return {"role": "system", "content": text}


def user(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


TWO = (user("a"), answer("B"), user("c"), answer("D"))
HEADER = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
    "Today Date: 26 Jul 2024\n\n"
)
OPEN = "<|start_header_id|>assistant<|end_header_id|>\n\n"
ASK = "<|start_header_id|>user<|end_header_id|>\n\n"


@pytest.mark.case("O-D01")
@pytest.mark.parametrize(
    ("case", "row"),
    [
        (
            "llama-3.1",
            f"{HEADER}<|eot_id|>{ASK}a<|eot_id|>{OPEN}{{B<|eot_id|>}}{ASK}c<|eot_id|>{OPEN}{{D<|eot_id|>}}",
        ),
        (
            "gemma-3",
            "<bos><start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\n{B<end_of_turn>}\n"
            "<start_of_turn>user\nc<end_of_turn>\n<start_of_turn>model\n{D<end_of_turn>}\n",
        ),
        ("mistral", "<s>[INST] a[/INST]{ B</s>}[INST] c[/INST]{ D</s>}"),
        (
            "phi-4",
            "<|im_start|>user<|im_sep|>a<|im_end|><|im_start|>assistant<|im_sep|>{B<|im_end|>}"
            "<|im_start|>user<|im_sep|>c<|im_end|><|im_start|>assistant<|im_sep|>{D<|im_end|>}",
        ),
        (
            "deepseek-v3",
            "<｜begin▁of▁sentence｜><｜User｜>a<｜Assistant｜>{B<｜end▁of▁sentence｜>}"
            "<｜User｜>c<｜Assistant｜>{D<｜end▁of▁sentence｜>}",
        ),
        (
            "deepseek-v3.1",
            "<｜begin▁of▁sentence｜><｜User｜>a<｜Assistant｜></think>{B<｜end▁of▁sentence｜>}"
            "<｜User｜>c<｜Assistant｜></think>{D<｜end▁of▁sentence｜>}",
        ),
        (
            "smollm2",
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
            "<|im_end|>\n"
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{B<|im_end|>}\n"
            "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n{D<|im_end|>}\n",
        ),
    ],
)
def test_a_template_that_only_appends_gives_one_row(case, row):
    assert golden(case, *TWO) == ([row], {})


def test_llama_trims_an_answer_and_calls_its_tool_role_ipython():
    call = {"type": "function", "function": {"name": "get", "arguments": {}}}
    turns = (
        system("S"),
        user("a"),
        answer(None, tool_calls=[call]),
        {"role": "tool", "content": "7"},
        answer(" B "),
    )
    [row], drops = golden("llama-3.1", *turns)
    body = row.replace('{"name": "get", "parameters": {}}', "CALL")
    assert body == (
        f"{HEADER}S<|eot_id|>{ASK}a<|eot_id|>{OPEN}{{CALL<|eot_id|>}}"
        f"<|start_header_id|>ipython<|end_header_id|>\n\n7<|eot_id|>{OPEN}{{B<|eot_id|>}}"
    )
    assert not drops


@pytest.mark.case("O-D02")
def test_qwen3_shows_a_thought_only_in_the_row_of_its_own_turn():
    turns = (user("a"), answer("B", reasoning_content="x"), user("c"), answer("D", reasoning_content="y"))
    rows, drops = golden("qwen3", *turns)
    ask = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert rows == [
        ask + "{<think>\nx\n</think>\n\nB<|im_end|>}\n",
        ask + "B<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
        "{<think>\ny\n</think>\n\nD<|im_end|>}\n",
    ]
    assert not drops


def test_qwen3_keeps_thoughts_between_tool_calls_in_one_row():
    call = {"type": "function", "function": {"name": "get", "arguments": {}}}
    turns = (
        user("a"),
        answer("", reasoning_content="x", tool_calls=[call]),
        {"role": "tool", "content": "7"},
        answer("B", reasoning_content="y"),
    )
    [row], _ = golden("qwen3", *turns)
    body = row.replace('{"name": "get", "arguments": {}}', "CALL")
    assert body == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
        "{<think>\nx\n</think>\n\n<tool_call>\nCALL\n</tool_call><|im_end|>}\n"
        "<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n{<think>\ny\n</think>\n\nB<|im_end|>}\n"
    )


@pytest.mark.case("O-D07")
def test_qwen3_without_thinking_supervises_no_empty_thought():
    rows, drops = golden("qwen3-off", *TWO)
    ask, thought = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n", "<think>\n\n</think>\n\n"
    assert rows == [
        ask + thought + "{B<|im_end|>}\n",
        ask
        + "B<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
        + thought
        + "{D<|im_end|>}\n",
    ]
    assert not drops


def test_qwen3_refuses_a_thought_where_thinking_is_off():
    rows, drops = golden("qwen3-off", user("a"), answer("B", reasoning_content="x"))
    assert (rows, drops) == ([], {"unstable_turn": 1})


def test_gemma_puts_the_system_text_into_the_first_question():
    rows, _ = golden("gemma-3", system("S"), user(" a "), answer(" B "))
    assert rows == ["<bos><start_of_turn>user\nS\n\na<end_of_turn>\n<start_of_turn>model\n{B<end_of_turn>}\n"]


def test_gemma_rejects_roles_that_do_not_alternate():
    with pytest.raises(BadRow, match="template_error .roles must alternate"):
        golden("gemma-3", user("a"), user("b"), answer("C"))


HARMONY = (
    "<|start|>system<|message|>You are ChatGPT.\n\nReasoning: medium<|end|><|start|>user<|message|>a<|end|>"
)


def test_harmony_supervises_both_channels_up_to_return_in_a_row_per_answer():
    turns = (user("a"), answer("B", reasoning_content="x"), user("c"), answer("D"))
    rows, drops = golden("harmony", *turns)
    final = "<|channel|>final<|message|>"
    assert rows == [
        f"{HARMONY}<|start|>assistant{{<|channel|>analysis<|message|>x<|end|><|start|>assistant{final}B<|return|>}}",
        f"{HARMONY}<|start|>assistant{final}B<|end|><|start|>user<|message|>c<|end|>"
        f"<|start|>assistant{{{final}D<|return|>}}",
    ]
    assert not drops


def harmony_call(**more):
    call = {"type": "function", "function": {"name": "get", "arguments": {}}}
    return user("a"), answer(None, tool_calls=[call], **more), {"role": "tool", "content": "7"}, answer("B")


ASKED = " to=functions.get<|channel|>commentary json<|message|>{}<|call|>"
RESULT = '<|start|>functions.get to=assistant<|channel|>commentary<|message|>"7"<|end|>'


def test_harmony_ends_a_tool_call_with_call():
    rows, drops = golden("harmony", *harmony_call())
    end = "<|channel|>final<|message|>B<|return|>"
    assert rows == [f"{HARMONY}<|start|>assistant{{{ASKED}}}{RESULT}<|start|>assistant{{{end}}}"]
    assert not drops


def test_harmony_refuses_the_answer_behind_a_call_whose_thought_it_then_drops():
    """The prompt as served shows the thought of the call, prompt and final answer together do not."""
    rows, drops = golden("harmony", *harmony_call(reasoning_content="x"))
    thought = "<|channel|>analysis<|message|>x<|end|><|start|>assistant"
    assert rows == [f"{HARMONY}<|start|>assistant{{{thought}{ASKED}}}"]
    assert drops == {"unstable_turn": 1}


def test_mistral_refuses_answers_to_a_system_text_that_it_moves():
    """With a question last its template shows the system text, with the answer behind it no more."""
    rows, drops = golden("mistral", system("S"), *TWO)
    assert (rows, drops) == ([], {"unstable_turn": 2})


def test_deepseek_v31_refuses_answers_that_open_a_thought_of_their_own():
    chat = make_chat("deepseek-v3.1", {"thinking": True})
    samples, drops = chat.samples(conversation([user("a"), answer("B")]))
    assert (samples, dict(drops)) == ([], {"unstable_turn": 1})


WORDS = ("a", "B", " ", "\n", "é", "<think>", "</think>", "assistant", "{", "\u2028")


def random_conversation(draw, case, markers):
    """One to four questions and answers, at times a system text, thoughts and markers in a question."""
    words = list(WORDS)
    turns = [system("S")] if draw.random() < 0.3 and case != "mistral" else []
    for _ in range(draw.randint(1, 4)):
        ask = "".join(draw.choices(words + list(markers), k=draw.randint(0, 5)))
        reply = "".join(w for w in draw.choices(words, k=draw.randint(0, 5)) if "think" not in w)
        thought = draw.random() < 0.5 and case in ("qwen3", "harmony")
        turns += [user(ask), answer(reply, **({"reasoning_content": "t"} if thought else {}))]
    return turns


@pytest.mark.case("O-D02")
@pytest.mark.parametrize("case", CASES)
def test_before_every_answer_stands_the_prompt_as_served_on_200_conversations(case):
    model, arguments = CASES[case]
    chat, draw = make_chat(model, arguments), random.Random(case)
    tokenizer, ends = chat.tokenizer, set(chat.end_ids)
    for _ in range(200):
        turns = random_conversation(draw, case, MODELS[model][0])
        samples, drops = chat.samples(conversation(turns))
        answers = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
        spans = [
            (sample.ids.tolist(), (sample.span_ids == k).nonzero()[:, 0].tolist())
            for sample in samples
            for k in range(int(sample.span_ids.max()) + 1)
        ]
        assert not drops
        assert len(spans) == len(answers)
        assert len(samples) == (len(answers) if case in REWRITES else 1)
        for i, (ids, where) in zip(answers, spans, strict=True):
            text = tokenizer.apply_chat_template(
                turns[:i], tokenize=False, add_generation_prompt=True, **arguments
            )
            prompt = tokenizer.encode(text, add_special_tokens=False)
            assert where == list(range(len(prompt), len(prompt) + len(where)))
            assert ids[: len(prompt)] == prompt
            assert ids[where[-1]] in ends
            assert not ends.intersection(ids[j] for j in where[:-1])

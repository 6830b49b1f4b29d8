"""Answers of the target itself: what a line holds, and that a killed run ends as one that was not."""

import json
from types import SimpleNamespace

import pytest

from spectrain.config import RegenerateConfig, RunConfig, TrainConfig
from spectrain.data.corpus import parse
from spectrain.data.sources import open_sources
from spectrain.decode.engine import generate
from spectrain.decode.sampling import Sampling
from spectrain.eval.prompts import render
from spectrain.regenerate import _text, regenerate
from spectrain.target import Target
from spectrain.testing import byte_tokenizer, tiny_llama

LONGEST = 12
TURNS = {"b": ["hello"], "a": ["ab", "cd"], "c": ["what?"]}


def answer(target, messages, *, temperature=0.0, key=0):
    """Ids of the target's answer to a conversation, and why it ended."""
    prompt = render(target.tokenizer, messages, {})
    found, _ = generate(
        target,
        [prompt],
        sampling=Sampling(temperature=temperature),
        max_new_tokens=LONGEST,
        stop_ids=target.stop_ids(),
        batch_size=1,
        request_keys=[key],
    )
    return list(found[0].ids), found[0].finish_reason


def user(text):
    return {"role": "user", "content": text}


@pytest.fixture(scope="module")
def target():
    """Its end-of-turn token is one that comes later in the first answer of prompt a, and not in b's."""
    model = tiny_llama()
    model.generation_config.eos_token_id = []
    target = Target(model, byte_tokenizer())
    first = answer(target, [user("ab")])[0]
    other = answer(target, [user("hello")])[0]
    stop = next(t for i, t in enumerate(first) if i and t not in other and t not in first[:i])
    model.generation_config.eos_token_id = [stop]
    return target


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": i, "turns": texts}) + "\n" for i, texts in TURNS.items()))
    return path


def config_of(prompts, *, seed=0, **settings):
    defaults = {"temperatures": [0.0, 0.7], "max_new_tokens": LONGEST, "batch": 2}
    regenerated = RegenerateConfig(prompts=str(prompts), **(defaults | settings))
    return RunConfig(recipe="test", regenerate=regenerated, train=TrainConfig(seed=seed))


def lines(out):
    rows = [json.loads(line) for line in out.read_bytes().split(b"\n") if line]
    return {row["id"]: row for row in rows}


@pytest.fixture
def out(target, prompts, tmp_path):
    path = tmp_path / "run" / "corpus.jsonl"
    regenerate(config_of(prompts), target, path)
    return path


def test_there_is_one_line_per_prompt_and_temperature_in_the_order_of_their_ids(out):
    assert list(lines(out)) == ["a-t0", "a-t0.7", "b-t0", "b-t0.7", "c-t0", "c-t0.7"]
    assert [row["temperature"] for row in lines(out).values()] == [0.0, 0.7] * 3
    assert all(set(row) == {"id", "messages", "temperature", "finish_reason"} for row in lines(out).values())


def test_an_answer_at_the_length_limit_says_so_and_holds_every_token(target, out):
    ids, reason = answer(target, [user("hello")])
    assert (len(ids), reason) == (LONGEST, "length")
    row = lines(out)["b-t0"]
    assert row["finish_reason"] == "length"
    assert row["messages"] == [user("hello"), {"role": "assistant", "content": target.tokenizer.decode(ids)}]


def test_the_second_turn_is_answered_after_the_first_answer_without_its_stop_token(target, out):
    ids, reason = answer(target, [user("ab")])
    assert reason == "stop" and ids[-1] in target.stop_ids()
    first = {"role": "assistant", "content": target.tokenizer.decode(ids[:-1])}
    second, reason = answer(target, [user("ab"), first, user("cd")])
    row = lines(out)["a-t0"]
    assert row["messages"][:3] == [user("ab"), first, user("cd")]
    text = target.tokenizer.decode(second[:-1] if reason == "stop" else second)
    assert row["messages"][3:] == [{"role": "assistant", "content": text}]
    assert row["finish_reason"] == reason


def test_no_turn_follows_an_answer_that_was_cut(target, prompts, tmp_path):
    path = tmp_path / "short.jsonl"
    regenerate(config_of(prompts, temperatures=[0.0], max_new_tokens=1), target, path)
    row = lines(path)["a-t0"]
    assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
    assert row["finish_reason"] == "length"


def test_a_sampled_answer_depends_on_the_seed_but_not_on_the_batch(target, prompts, out, tmp_path):
    for name, settings in (("batch", {"batch": 6}), ("seed", {"seed": 1})):
        regenerate(config_of(prompts, **settings), target, tmp_path / f"{name}.jsonl")
    assert lines(tmp_path / "batch.jsonl") == lines(out)
    other = lines(tmp_path / "seed.jsonl")
    assert other["b-t0"] == lines(out)["b-t0"]
    assert other["b-t0.7"] != lines(out)["b-t0.7"]


@pytest.mark.parametrize("whole_lines", [0, 1, 4])
@pytest.mark.parametrize("cut", ["between lines", "inside a line", "inside a character"])
def test_a_killed_run_goes_on_and_ends_with_the_same_file(target, prompts, out, whole_lines, cut):
    full = out.read_bytes()
    *kept, last = full.splitlines(keepends=True)[
        ::-1
    ]  # the order of the appended lines is not that of the ids
    at = {"between lines": 0, "inside a line": 17, "inside a character": last.index("\ufffd".encode()) + 1}
    out.write_bytes(b"".join(kept[:whole_lines]) + last[: at[cut]])
    regenerate(config_of(prompts), target, out)
    assert out.read_bytes() == full


def test_a_prompt_that_fills_the_context_is_named_by_its_id(target, prompts, tmp_path):
    prompts.write_text(
        "".join(json.dumps({"id": i, "turns": [i * n]}) + "\n" for i, n in (("z", 600), ("a", 1)))
    )
    ids = render(target.tokenizer, [user("z" * 600)], {})
    message = f"^prompt z: {len(ids)} tokens, but the target's context is 512; take it out of"
    with pytest.raises(ValueError, match=message):
        regenerate(config_of(prompts, temperatures=[0.0]), target, tmp_path / "long.jsonl")


def test_a_finished_run_asks_the_target_nothing(prompts, out, monkeypatch, target):
    monkeypatch.setattr(target, "states", None)
    before = out.read_bytes()
    regenerate(config_of(prompts), target, out)
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    "settings", [{"max_new_tokens": 13}, {"temperatures": [0.0]}, {"top_p": 0.9}, {"seed": 1}], ids=str
)
def test_answers_of_other_settings_are_refused_and_left_alone(target, prompts, out, settings):
    before = out.read_bytes()
    with pytest.raises(ValueError, match=r"corpus.jsonl: .*other settings"):
        regenerate(config_of(prompts, **settings), target, out)
    assert out.read_bytes() == before


def test_answers_of_another_target_are_refused(prompts, out):
    with pytest.raises(ValueError, match="other settings"):
        regenerate(config_of(prompts), Target(tiny_llama(seed=1), byte_tokenizer()), out)


def test_answers_to_other_prompts_are_refused(target, prompts, out):
    prompts.write_text(json.dumps({"id": "a", "turns": ["something else"]}) + "\n")
    with pytest.raises(ValueError, match="other settings"):
        regenerate(config_of(prompts), target, out)


def test_a_file_that_says_not_how_it_was_made_is_refused(target, prompts, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"id": "a-t0"}\n')
    with pytest.raises(ValueError, match="mine.jsonl"):
        regenerate(config_of(prompts), target, path)
    assert path.read_text() == '{"id": "a-t0"}\n'


def test_the_corpus_reader_takes_every_line_and_knows_which_were_cut(out):
    [source] = open_sources(str(out))
    rows = [row for block in source.blocks() for row in source.rows(*block)]
    found = [parse(content, source=source.name, line=line) for line, content in rows]
    assert len(found) == 6
    assert [c.messages for c in found] == [row["messages"] for row in lines(out).values()]
    assert [c.cut for c in found] == [row["finish_reason"] == "length" for row in lines(out).values()]


def test_the_half_of_a_character_at_the_limit_is_no_text_of_the_target(target):
    ids = target.tokenizer("né", add_special_tokens=False).input_ids
    cut = SimpleNamespace(ids=ids[:-1], finish_reason="length")
    assert target.tokenizer.decode(cut.ids) == "n\N{REPLACEMENT CHARACTER}"
    assert _text(target, cut) == "n"
    assert _text(target, SimpleNamespace(ids=[*ids, 0], finish_reason="stop")) == "né"

import json
import os

import pytest
import torch

from spectrain.checks import CheckFailed
from spectrain.config import CorpusConfig
from spectrain.data import prepare as room
from spectrain.data.prepare import Prepared, prepare, tokenizer_hash
from spectrain.drafters.vocab import choose_kept_ids
from spectrain.testing import CHATML, THINK, byte_tokenizer


def row(*texts, **more):
    roles = ("user", "assistant") * len(texts)
    return {"messages": [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)], **more}


def write(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


@pytest.fixture
def corpus(tmp_path):
    rows = [row(f"question {n}", f"answer number {n}", "more", "end") for n in range(12)]
    return write(tmp_path / "corpus.jsonl", rows)


def config(path, **more):
    return CorpusConfig(path=str(path), **{"max_length": 100, "eval_fraction": 0.0, **more})


def equal(a, b):
    same = [
        torch.equal(x, y) for x, y in ((a.ids, b.ids), (a.loss_mask, b.loss_mask), (a.span_ids, b.span_ids))
    ]
    return a.id == b.id and all(same)


@pytest.mark.case("O-D11")
def test_rows_are_made_again_when_and_only_when_something_that_shapes_them_changes(tmp_path, corpus):
    tokenizer, folder = byte_tokenizer(), tmp_path / "prepared"
    content, stamp = corpus.read_bytes(), corpus.stat()

    def run(length, num_kept):
        prepared = prepare(config(corpus, max_length=length), tokenizer, folder)
        return prepared.reused, choose_kept_ids(prepared.counts, num_kept, num_tokens=260)

    rebuilt_a, kept_a = run(64, 40)
    rebuilt_b, kept_b = run(48, 40)
    reused_c, kept_c = run(64, 50)
    corpus.write_bytes(content + json.dumps(row("zzz", "ZYXWVUTSRQPONMLKJIHGFEDCBA" * 2)).encode())
    os.utime(corpus, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    rebuilt_d, kept_d = run(64, 40)
    corpus.write_bytes(content)
    reused_e, kept_e = run(64, 40)
    assert [rebuilt_a, rebuilt_b, reused_c, rebuilt_d, reused_e] == [False, False, True, False, True]
    assert (len(kept_a), len(kept_c)) == (40, 50)
    assert kept_a.tolist() == kept_e.tolist()
    assert kept_a.tolist() != kept_d.tolist()


@pytest.mark.case("O-D11")
@pytest.mark.parametrize(
    ("change", "template"),
    [
        ({"max_length": 99}, CHATML),
        ({"min_supervised": 3}, CHATML),
        ({"template_arguments": {"enable_thinking": False}}, CHATML),
        ({"eval_fraction": 0.3}, CHATML),
        ({}, THINK),
    ],
)
def test_every_option_and_the_template_are_part_of_the_fingerprint(tmp_path, corpus, change, template):
    first = prepare(config(corpus), byte_tokenizer(), tmp_path / "prepared")
    second = prepare(config(corpus, **change), byte_tokenizer(template), tmp_path / "prepared")
    assert not second.reused
    assert first.fingerprint != second.fingerprint


@pytest.mark.case("O-D11")
def test_a_folder_that_does_not_say_what_shaped_it_is_refused(tmp_path, corpus):
    prepared = prepare(config(corpus), byte_tokenizer(), tmp_path)
    manifest = prepared.folder / "manifest.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({key: content[key] for key in content if key != "fingerprint"}))
    with pytest.raises(ValueError, match="does not say what shaped it"):
        Prepared.load(tmp_path)


def test_the_tokenizer_hash_ignores_what_padding_calls_leave_behind():
    tokenizer = byte_tokenizer()
    before = tokenizer_hash(tokenizer)
    tokenizer(["a", "bc"], padding=True, truncation=True, max_length=1)
    assert tokenizer_hash(tokenizer) == before


def test_another_end_token_is_another_tokenizer():
    other = byte_tokenizer()
    other.eos_token = "<|endoftext|>"
    assert tokenizer_hash(other) != tokenizer_hash(byte_tokenizer())


def test_loading_gives_what_prepare_returned(tmp_path, corpus):
    made = prepare(config(corpus), byte_tokenizer(), tmp_path)
    loaded = Prepared.load(tmp_path)
    assert (len(loaded.train), loaded.fingerprint, loaded.summary) == (12, made.fingerprint, made.summary)
    assert all(equal(a, b) for a, b in zip(loaded.train, made.train, strict=True))
    assert loaded.train.lengths == [len(sample.ids) for sample in loaded.train]
    assert [loaded.train[-1].id, *(s.id for s in loaded.train[:2])] == [
        f"corpus.jsonl:{n}" for n in (12, 1, 2)
    ]


def test_shards_change_nothing(tmp_path, corpus, monkeypatch):
    whole = prepare(config(corpus), byte_tokenizer(), tmp_path / "a")
    monkeypatch.setattr(room, "SHARD_TOKENS", 200)
    parts = prepare(config(corpus), byte_tokenizer(), tmp_path / "b")
    assert (len(whole.train.shards), len(parts.train.shards)) == (1, 4)
    assert all(equal(a, b) for a, b in zip(whole.train, parts.train, strict=True))
    assert whole.counts.tolist() == parts.counts.tolist()


def test_a_conversation_with_its_rows_stands_on_one_side(tmp_path, corpus):
    prepared = prepare(config(corpus, eval_fraction=0.5), byte_tokenizer(THINK), tmp_path)
    lines = [{sample.id.split("#")[0] for sample in split} for split in (prepared.train, prepared.eval)]
    assert len(prepared.train) + len(prepared.eval) == 24
    assert all(lines)
    assert not lines[0] & lines[1]


def test_two_answers_to_one_question_stand_on_one_side(tmp_path):
    rows = [row(f"question {n}", reply) for n in range(20) for reply in ("one", "two")]
    path = write(tmp_path / "twice.jsonl", rows)
    prepared = prepare(config(path, eval_fraction=0.5), byte_tokenizer(), tmp_path / "prepared")
    lines = sorted(int(sample.id.split(":")[1]) for sample in prepared.eval)
    assert 0 < len(lines) < 40
    assert [n for n in lines if n % 2] == [n - 1 for n in lines if not n % 2]


def test_the_split_does_not_depend_on_the_order_of_lines(tmp_path, corpus):
    first = prepare(config(corpus, eval_fraction=0.5), byte_tokenizer(), tmp_path / "a")
    corpus.write_text("\n".join(reversed(corpus.read_text().splitlines())))
    second = prepare(config(corpus, eval_fraction=0.5), byte_tokenizer(), tmp_path / "b")
    rows = [sorted(sample.ids.tolist() for sample in made.eval) for made in (first, second)]
    assert rows[0] == rows[1]


def test_the_summary_counts_lines_drops_samples_and_tokens(tmp_path):
    path = tmp_path / "mixed.jsonl"
    write(path, [row("hi", "yo"), row("hi", ""), row("hi"), row("hi", "yo", finish_reason="length")])
    with path.open("a") as file:
        file.write("\n{\n")
    summary = prepare(config(path), byte_tokenizer(), tmp_path / "prepared").summary
    assert summary["first"]["no_assistant"][0] == "mixed.jsonl:3"
    assert {key: value for key, value in summary.items() if key != "first"} == {
        "files": ["mixed.jsonl"],
        "read": 6,
        "kept": 3,
        "blank": 1,
        "rejected": {"no_assistant": 1, "bad_json": 1},
        "cut": 1,
        "dropped": {"too_short": 1},
        "samples": {"train": 2, "eval": 0},
        "tokens": {"train": 25 + 23, "eval": 0},
        "supervised": {"train": 3 + 2, "eval": 0},
    }


def test_every_rejected_line_is_listed_beside_the_rows(tmp_path):
    path = write(tmp_path / "mixed.jsonl", [row("hi", "yo"), row("hi"), ["x"]])
    prepared = prepare(config(path), byte_tokenizer(), tmp_path / "prepared")
    rejected = json.loads((prepared.folder / "rejected.json").read_text())
    assert [entry[:2] for entry in rejected] == [
        ["mixed.jsonl:2", "no_assistant"],
        ["mixed.jsonl:3", "not_object"],
    ]


def test_a_row_that_the_template_refuses_is_rejected_with_its_line(tmp_path):
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    path = write(tmp_path / "system.jsonl", [row("hi", "yo"), row("hi", "yo", system="s")])
    prepared = prepare(config(path), byte_tokenizer(template), tmp_path / "prepared")
    assert prepared.summary["rejected"] == {"template_error": 1}
    assert prepared.summary["kept"] == 1
    with pytest.raises(ValueError, match=r"system\.jsonl:2: template_error \(no system\)"):
        prepare(config(path, strict=True), byte_tokenizer(template), tmp_path / "prepared")


def test_counts_are_those_of_supervised_training_tokens(tmp_path):
    path = write(tmp_path / "one.jsonl", [row("hi", "yoyo")])
    counts = prepare(config(path), byte_tokenizer(), tmp_path / "prepared").counts
    assert counts.shape == (260,)
    assert {i: int(counts[i]) for i in counts.nonzero()[:, 0].tolist()} == {111: 2, 121: 2, 257: 1}


@pytest.mark.case("O-D01")
def test_no_supervised_token_in_the_whole_set_is_an_error(tmp_path):
    path = write(tmp_path / "empty.jsonl", [row("hi", ""), row("ho", "")])
    with pytest.raises(ValueError, match=r"empty\.jsonl: no training sample is left\n") as caught:
        prepare(config(path), byte_tokenizer(), tmp_path / "prepared")
    assert "\ndropped              2 too_short: fewer supervised tokens than" in str(caught.value)
    assert not list(tmp_path.glob("prepared/*/manifest.json"))


def test_a_damaged_shard_is_named(tmp_path, corpus):
    prepared = prepare(config(corpus), byte_tokenizer(), tmp_path)
    shard = prepared.folder / "train-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x00")
    with pytest.raises(CheckFailed, match=r"train-00000\.safetensors.*damaged"):
        Prepared.load(tmp_path)

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spectrain.config import CorpusConfig
from spectrain.data import sources
from spectrain.data.prepare import prepare
from spectrain.data.sources import PACKAGED, corpus_path, open_sources
from spectrain.testing import TOOL, byte_tokenizer

GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}


def row(n):
    return {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a{n}" * 9}]}


def rows(source):
    return [found for block in source.blocks() for found in source.rows(*block)]


def prepared(tmp_path, path, *, template=None, **more):
    settings = {"max_length": 400, "eval_fraction": 0.0, **more}
    tokenizer = byte_tokenizer(template) if template else byte_tokenizer()
    return prepare(CorpusConfig(path=path, **settings), tokenizer, tmp_path / "prepared")


def texts(made):
    return [bytes(i for i in sample.ids.tolist() if i < 256) for sample in made.train]


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
def test_every_line_is_kept_or_rejected_with_its_number_and_reason(bad_lines, tmp_path):
    made = prepared(tmp_path, str(bad_lines))
    assert [sample.id for sample in made.train] == [f"bad.jsonl:{n}" for n in (1, 8, 9)]
    rejected = json.loads((made.folder / "rejected.json").read_text())
    assert [entry[:2] for entry in rejected] == [
        ["bad.jsonl:3", "bad_json"],
        ["bad.jsonl:4", "bad_content"],
        ["bad.jsonl:5", "not_object"],
        ["bad.jsonl:6", "no_turns"],
        ["bad.jsonl:7", "no_assistant"],
    ]
    assert [made.summary[key] for key in ("read", "kept", "blank", "cut")] == [9, 3, 1, 1]
    assert made.summary["rejected"]["bad_json"] == 1


@pytest.mark.case("O-D10")
def test_strict_stops_at_the_first_bad_line_and_names_it(bad_lines, tmp_path):
    with pytest.raises(ValueError, match=r"bad\.jsonl:3: bad_json"):
        prepared(tmp_path, str(bad_lines), strict=True)


@pytest.mark.case("O-D10")
def test_a_file_without_a_conversation_is_an_error(tmp_path):
    path = tmp_path / "empty.jsonl"
    path.write_text("\n[1]\n")
    with pytest.raises(
        ValueError, match=r"empty\.jsonl: no training sample is left\n(.*\n)*.*not_object: a row"
    ):
        prepared(tmp_path, str(path))


def test_blocks_change_neither_rows_nor_line_numbers(tmp_path, monkeypatch):
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps(row(n)) + "\n" * (1 + n % 3) for n in range(40)))
    [source] = open_sources(str(path))
    whole = rows(source)
    monkeypatch.setattr(sources, "BLOCK_BYTES", 100)
    assert len(list(source.blocks())) > 9
    assert rows(source) == whole
    assert [line for line, content in whole if json.loads(content.strip() or b"0")] == [
        1 + n + sum(m % 3 for m in range(n)) for n in range(40)
    ]


def test_a_list_in_a_json_file_gives_its_items(tmp_path, monkeypatch):
    items = [row(n) for n in range(20)] + [{"messages": [{"role": "user", "content": "\u00e9 ] , ["}]}]
    path = tmp_path / "list.json"
    path.write_text("\n " + json.dumps(items, ensure_ascii=False, indent=1), encoding="utf-8-sig")
    [source] = open_sources(str(path))
    whole = [(line, json.loads(content)) for line, content in rows(source)]
    assert whole == list(enumerate(items, 1))
    monkeypatch.setattr(sources, "BLOCK_BYTES", 300)
    assert len(list(source.blocks())) > 5
    assert [(line, json.loads(content)) for line, content in rows(source)] == whole


@pytest.mark.parametrize("end", ["", ", {]"])
def test_a_list_that_breaks_off_is_named_with_its_line(tmp_path, end):
    path = tmp_path / "list.json"
    path.write_text('[\n{"a": 1}' + end)
    with pytest.raises(ValueError, match=r"list\.json:2: bad_json"):
        list(open_sources(str(path))[0].blocks())


def test_a_json_file_with_a_row_on_each_line_is_read_line_by_line(tmp_path):
    path = tmp_path / "lines.json"
    path.write_text(json.dumps(row(0)) + "\n" + json.dumps(row(1)))
    assert [line for line, _ in rows(open_sources(str(path))[0])] == [1, 2]


@pytest.mark.case("O-D09")
def test_a_parquet_file_gives_what_the_same_lines_give(tmp_path):
    call = {"type": "function", "function": {"name": "get", "arguments": '{"city":"SF"}'}}
    turns = [
        {"role": "user", "content": "w?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "7C"},
        {"role": "assistant", "content": "cold"},
    ]
    table = [{"messages": turns}, row(1)]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "c.parquet", row_group_size=1)
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(r) + "\n" for r in table))
    columns, lines = (
        prepared(tmp_path, str(tmp_path / name), template=TOOL) for name in ("c.parquet", "c.jsonl")
    )
    assert len(columns.train[0].ids) == 117
    assert [sample.ids.tolist() for sample in columns.train] == [
        sample.ids.tolist() for sample in lines.train
    ]
    assert [sample.id for sample in columns.train] == ["c.parquet:1", "c.parquet:2"]


def test_what_is_no_parquet_file_is_named(tmp_path):
    (tmp_path / "c.parquet").write_text("nothing")
    with pytest.raises(ValueError, match=r"c\.parquet: no Parquet file"):
        list(open_sources(str(tmp_path / "c.parquet"))[0].blocks())


def test_a_hub_dataset_is_asked_for_by_name_config_revision_and_split(tmp_path, monkeypatch):
    datasets.Dataset.from_list([row(n) for n in range(3)]).save_to_disk(tmp_path / "hub")
    asked = []

    def load(*args, **kwargs):
        asked.append((args, kwargs))
        return datasets.load_from_disk(tmp_path / "hub")

    monkeypatch.setattr(datasets, "load_dataset", load)
    made = prepared(tmp_path, "hub:me/chats/small@v2:train_sft")
    assert asked == [(("me/chats", "small"), {"revision": "v2", "split": "train_sft"})]
    assert [sample.id for sample in made.train] == [f"me/chats/small@v2:train_sft:{n}" for n in (1, 2, 3)]


def test_a_hub_name_without_owner_is_refused():
    with pytest.raises(ValueError, match=r"hub:OWNER/NAME"):
        open_sources("hub:chats")


def test_several_files_are_read_one_after_the_other(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "c.jsonl").write_text(json.dumps(row(name)) + "\n")
    made = prepared(tmp_path, [str(tmp_path / "b" / "c.jsonl"), str(tmp_path / "a" / "c.jsonl")])
    assert [sample.id for sample in made.train] == ["b/c.jsonl:1", "a/c.jsonl:1"]
    assert made.summary["files"] == ["b/c.jsonl", "a/c.jsonl"]


def test_a_file_named_twice_is_refused(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text("")
    with pytest.raises(ValueError, match="names something twice"):
        open_sources([str(path), f"{tmp_path}/./c.jsonl"])


def test_an_ending_that_nobody_knows_is_refused(tmp_path):
    (tmp_path / "c.csv").write_text("")
    with pytest.raises(ValueError, match=r"ends in '\.csv'; expected \.jsonl"):
        open_sources(str(tmp_path / "c.csv"))


@pytest.mark.parametrize("name", PACKAGED)
def test_a_packaged_corpus_is_the_file_beside_the_module_from_any_folder(name, tmp_path, monkeypatch):
    package, elsewhere = tmp_path / "package", tmp_path / "elsewhere"
    package.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(sources, "__file__", str(package / "sources.py"))
    with pytest.raises(ValueError, match=r"corpus\.path='" + name + r"'.*stages=regenerate"):
        corpus_path(name)
    (package / f"{name}.jsonl").write_text("")
    assert corpus_path(name) == package / f"{name}.jsonl"


def test_a_missing_file_is_named_with_its_key():
    with pytest.raises(ValueError, match=r"corpus\.path='nowhere\.jsonl'"):
        corpus_path("nowhere.jsonl")


@pytest.mark.parametrize("path", [[], [1], 5])
def test_a_path_that_is_no_text_is_refused(path):
    with pytest.raises(ValueError, match=r"corpus\.path=.*a text or a list of texts"):
        CorpusConfig(path=path)


def test_processes_change_nothing(tmp_path, monkeypatch):
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps(row(n)) + "\n" for n in range(30)) + "{\n")
    monkeypatch.setattr(sources, "BLOCK_BYTES", 600)
    one, two = (
        prepare(
            CorpusConfig(path=str(path), max_length=60, eval_fraction=0.3, processes=number),
            byte_tokenizer(),
            tmp_path / str(number),
        )
        for number in (1, 2)
    )
    assert (one.fingerprint, one.summary) == (two.fingerprint, two.summary)
    assert one.summary["rejected"] == {"bad_json": 1}
    files = [{f.name: f.read_bytes() for f in made.folder.iterdir()} for made in (one, two)]
    assert files[0] == files[1]
    assert "scratch" not in files[0]


def test_rows_of_tokens_need_no_template(tmp_path):
    path = tmp_path / "tokens.jsonl"
    lines = [
        {"input_ids": [1, 2, 3, 4, 5, 6], "loss_mask": [0, 1, 1, 0, 1, 1]},
        {"input_ids": [1, 2, 260], "loss_mask": [0, 1, 1]},
        {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1]},
        GOOD,
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines[:3]))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    made = prepare(CorpusConfig(path=str(path), eval_fraction=0.0), tokenizer, tmp_path / "prepared")
    assert [sample.span_ids.tolist() for sample in made.train] == [[-1, 0, 0, -1, 1, 1]]
    assert made.summary["rejected"] == {"bad_tokens": 1}
    assert made.summary["dropped"] == {"too_short": 1}
    assert made.summary["first"]["bad_tokens"][1] == "id 260, but the tokenizer's ids are 0 to 259"
    path.write_text(json.dumps(lines[3]))
    with pytest.raises(ValueError, match=r"tokens\.jsonl:1: .* no chat template"):
        prepare(CorpusConfig(path=str(path)), tokenizer, tmp_path / "prepared")


@pytest.mark.case("O-D03")
@pytest.mark.parametrize(("max_length", "expected"), [(22, None), (24, 3), (47, 4), (51, 7)])
def test_rows_of_tokens_are_cut_like_conversations(tmp_path, max_length, expected):
    mask = [0] * 21 + [1] * 3 + [0] * 22 + [1] * 4 + [0]
    path = tmp_path / "tokens.jsonl"
    whole = {"input_ids": [65, 66], "loss_mask": [1, 1]}
    path.write_text("\n".join(map(json.dumps, [{"input_ids": [65] * 51, "loss_mask": mask}, whole])))
    made = prepared(tmp_path, str(path), max_length=max_length)
    assert [int(sample.loss_mask.sum()) for sample in made.train] == ([expected, 2] if expected else [2])
    dropped = {"truncated": 1} if expected is None else {"shortened": 1} if max_length < 51 else {}
    assert made.summary["dropped"] == dropped

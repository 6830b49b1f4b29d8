"""Stop strings: found at the very token that completes them, wherever tokens, characters and blocks end."""

import random

import pytest
import torch

import spectrain
from spectrain.decode.engine import generate
from spectrain.decode.sampling import Sampling
from spectrain.decode.stops import StopStrings, Tail, cut
from spectrain.proposal import Plan
from spectrain.testing import byte_tokenizer


class Pieces:
    """A tokenizer of byte pieces; `strip` drops a leading space of a decoded text, as SentencePiece does."""

    added_tokens_decoder: dict = {}

    def __init__(self, *pieces, strip=False):
        self.pieces, self.strip = pieces, strip

    def decode(self, ids, *, skip_special_tokens):
        text = b"".join(self.pieces[i] for i in ids).decode(errors="replace")
        return text.removeprefix(" ") if self.strip else text


def stops_at(tokenizer, strings, ids):
    """Index of the token at which a tail sees the text end, or None."""
    tail = Tail(StopStrings(strings, tokenizer))
    return next((i for i, token in enumerate(ids) if tail.push(token)), None)


@pytest.mark.parametrize(
    ("pieces", "strings", "index", "text"),
    [
        ([b"xE", b"ND!", b"more"], ["END"], 1, "xEND"),
        ([b"x", b"END", b"y"], ["END"], 1, "xEND"),
        ([b"E", b"N", b"EN", b"D"], ["END"], 3, "ENEND"),
        ([b"\n", b"\n", b"\n"], ["\n\n"], 1, "\n\n"),
        ([b"a", b"bc", b"d"], ["cd", "b"], 1, "ab"),
        ([b"aENDbSTOP"], ["STOP", "END"], 0, "aEND"),
        ([b"caf\xc3", b"\xa9", b"!"], ["f\u00e9"], 1, "caf\u00e9"),
        ([b"END\xf0\x9f", b"\x98\x80"], ["END"], 0, "END"),
        ([b"EN", b"", b"D"], ["END"], 2, "END"),
        ([b"EN", b"\xff", b"D"], ["END"], None, None),
    ],
)
def test_a_stop_string_is_complete_at_exactly_one_token(pieces, strings, index, text):
    tokenizer = Pieces(*pieces)
    assert stops_at(tokenizer, strings, range(len(pieces))) == index
    if index is not None:
        decoded = tokenizer.decode(range(index + 1), skip_special_tokens=True)
        assert StopStrings(strings, tokenizer).cut(decoded) == text


def test_a_decoder_that_drops_the_first_space_hides_no_stop_string():
    assert stops_at(Pieces(b" to", b" the", b" END", strip=True), ["the END"], [0, 1, 2]) == 2
    assert stops_at(Pieces(b" to", b" the", b" END", strip=True), ["theEND"], [0, 1, 2]) is None


def test_the_tail_agrees_with_decoding_the_whole_text_after_every_token():
    tokenizer = Pieces(
        *(bytes([b]) for b in (97, 98, 0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80)), b"ab", b"", b"\xa9b"
    )
    draw, found = random.Random(0), 0
    for _ in range(400):
        strings = ["".join(draw.choices("ab\u00e9\U0001f600", k=draw.randint(1, 4))) for _ in range(2)]
        ids = draw.choices(range(11), k=30)
        texts = (tokenizer.decode(ids[: i + 1], skip_special_tokens=True) for i in range(30))
        first = next((i for i, text in enumerate(texts) if any(s in text for s in strings)), None)
        assert stops_at(tokenizer, strings, ids) == first
        found += first is not None
    assert 100 < found < 400


@pytest.mark.case("O-X01")
@pytest.mark.parametrize(
    ("block", "budget", "kept", "reason"),
    [
        ([0, 1, 2, 3], 10, [0, 1], "stop_string"),
        ([0, 1, 2, 3], 2, [0, 1], "stop_string"),
        ([0, 1, 2, 3], 1, [0], "length"),
        ([0, 2, 3, 1], 10, [0, 2, 3], "stop"),
        ([0, 2], 10, [0, 2], None),
    ],
)
def test_a_block_is_cut_at_the_stop_string_then_at_the_budget(block, budget, kept, reason):
    tail = Tail(StopStrings(["END"], Pieces(b"xE", b"ND!", b"more", b"<stop>")))
    assert cut(block, frozenset({3}), budget, tail) == (kept, reason)


@pytest.mark.parametrize(
    ("strings", "message"),
    [
        ("END", "stop_strings='END': expected a list of non-empty strings"),
        (["END", ""], r"stop_strings=\['END', ''\]: expected a list of non-empty strings"),
        (["x<|im_end|>"], r"stop_strings: 'x<\|im_end\|>' holds '<\|im_end\|>', a special token"),
    ],
)
def test_stop_strings_that_no_text_can_contain_are_refused(strings, message):
    with pytest.raises(ValueError, match=message):
        StopStrings(strings, byte_tokenizer())


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(ValueError, match=r"stop_strings=\['a'\]: the target has no tokenizer"):
        StopStrings(["a"], None)


@pytest.fixture
def alphabet(markov):
    """After a comes b, after z comes a, after a line end (of the chat template) a."""
    logits = torch.zeros(260, 260)
    for letter in range(97, 123):
        logits[letter, 97 + (letter - 96) % 26] = 9.0
    logits[10, 97] = 9.0
    return markov(logits, byte_tokenizer())


@pytest.mark.case("O-X01")
@pytest.mark.parametrize("arm", ["plain", "chain", "tree"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_stop_string_ends_texts_of_every_kind_at_the_same_token(alphabet, bigram, arm, batch_size):
    settings = {"sampling": Sampling(), "stop_ids": (ord("x"),), "stop_strings": ["fgh", "zab", "ku"]}
    if arm != "plain":
        drafter = bigram(alphabet.logits_VV)
        plan = Plan("chain", 4) if arm == "chain" else Plan("tree", 4, nodes=8, top_k=2)
        settings |= {"drafter": drafter, "plan": plan}
    found, _ = generate(
        alphabet, [[97], [ord("h")], [ord("y")]], **settings, max_new_tokens=9, batch_size=batch_size
    )
    texts = [(alphabet.tokenizer.decode(g.ids), g.finish_reason) for g in found]
    assert texts == [("bcdefgh", "stop_string"), ("ijklmnopq", "length"), ("zab", "stop_string")]
    if arm != "plain":  # "b" from the prefill, one block of five, then "h" of the next
        assert [(r.accepted, r.emitted, r.bonus_cut) for r in found[0].rounds] == [
            (4, 5, False),
            (2, 1, True),
        ]


def test_the_public_call_cuts_the_text_to_end_with_the_string(alphabet, bigram):
    for drafter in (None, bigram(alphabet.logits_VV)):
        one, two = spectrain.generate(
            alphabet, drafter, ["hi", "ho"], max_new_tokens=9, batch_size=2, stop_strings=["cde", "de"]
        )
        assert one.text == two.text == "abcde" and one.finish_reason == "stop_string"
    (cut_short,) = spectrain.generate(alphabet, None, ["hi"], max_new_tokens=3, stop_strings=["cde"])
    assert cut_short.text == "abc" and cut_short.finish_reason == "length"
    (plain,) = spectrain.generate(alphabet, None, ["hi"], max_new_tokens=3)
    assert plain.text == "abc"


@pytest.mark.parametrize(
    ("gpu", "asked", "device"),
    [
        (False, {}, "cpu"),
        (True, {}, "cuda"),
        (True, {"device": "cpu"}, "cpu"),
        (False, {"device": "cuda"}, "cuda"),
    ],
)
def test_the_public_call_loads_a_named_target_on_the_gpu_if_there_is_one(
    alphabet, monkeypatch, gpu, asked, device
):
    devices = []

    def load_target(config, *, device):
        devices.append(device)
        return alphabet

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr("spectrain.target.load_target", load_target)
    spectrain.generate("alphabet", None, ["hi"], max_new_tokens=1, **asked)
    assert devices == [device]


def test_the_public_call_moves_no_loaded_target(alphabet):
    with pytest.raises(
        ValueError, match="^device='cuda': the target is loaded already, on cpu; leave it out"
    ):
        spectrain.generate(alphabet, None, ["hi"], max_new_tokens=1, device="cuda")


def test_the_public_call_takes_penalties(alphabet):
    repeat = spectrain.generate(alphabet, None, ["hi"], max_new_tokens=30)[0].text
    assert repeat == "abcdefghijklmnopqrstuvwxyzabcd"
    once = Sampling(presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=9.0)
    (found,) = spectrain.generate(alphabet, None, ["hi"], max_new_tokens=27, sampling=once)
    assert found.text[:26] == repeat[:26] and found.text[26:] != "a"

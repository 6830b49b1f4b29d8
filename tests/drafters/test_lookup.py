"""Drafters that know the text alone: exact proposals on texts written by hand, and lossless decoding."""

import pytest
import torch

from spectrain import checkpoint
from spectrain.decode.engine import generate
from spectrain.decode.exact import Process
from spectrain.decode.sampling import Sampling
from spectrain.drafters import ngram, suffix
from spectrain.drafters.lookup import chosen, new_tokens
from spectrain.proposal import Budget, Observation, Plan
from spectrain.target import Target
from spectrain.testing import byte_tokenizer, tiny_llama

V = 64
BUILD = {"ngram": ngram.build, "suffix": suffix.build}
CONFIG = {"ngram": ngram.Config, "suffix": suffix.Config}


@pytest.fixture(scope="module")
def llama():
    return Target(tiny_llama(layers=2, vocab=V))


def seen(tokens, *, start=0, request=0):
    """The observation of `tokens` from position `start` on; the last one is the root."""
    none = torch.empty(len(tokens) - 1, 0, 1)
    return Observation(request, start, torch.tensor(tokens[1:]), none, none, first_id=tokens[0])


def drafting(family, target, *texts, **settings):
    found = BUILD[family](CONFIG[family](**settings), target, torch.arange(V)).start(len(texts), 100)
    found.observe([seen(text, request=i) for i, text in enumerate(texts)])
    return found


def chain(family, target, text, length=3, **settings):
    (found,) = drafting(family, target, text, **settings).propose([0], Plan("chain", length), None)
    assert found.q is None and found.parents == tuple(range(-1, len(found.tokens) - 1))
    return found.tokens.tolist()


# n-grams


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([5, 6, 7, 8, 9, 5, 6], [7, 8, 9]),
        ([1, 2, 3, 9, 2, 4, 1, 2], [3, 9, 2]),  # 1 2 is longer than the 2 behind which 4 came last
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2]),  # the most recent of two
        ([1, 2, 1, 2, 1], [2, 1, 2]),  # the match runs into the end
        ([7, 7], [7, 7, 7]),
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_ngram_drafts_what_followed_the_longest_match_last(llama, text, expected):
    assert chain("ngram", llama, text) == expected


def test_ngram_looks_up_no_fewer_and_no_more_tokens_than_it_is_told(llama):
    text = [1, 2, 3, 4, 9, 5, 2, 3, 8, 1, 2, 3]
    assert chain("ngram", llama, text, 1, max_match=3) == [4]
    assert chain("ngram", llama, text, 1, max_match=2) == [8]
    assert chain("ngram", llama, [3, 1, 3], 1, min_match=2) == []


@pytest.mark.parametrize("family", BUILD)
def test_text_that_comes_in_parts_drafts_as_if_it_came_at_once(llama, family):
    text = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1]
    parts = drafting(family, llama, text[:4])
    parts.observe([seen(text[3:6], start=3)])
    parts.observe([seen(text[5:], start=5)])
    (found,) = parts.propose([0], Plan("chain", 3), None)
    assert found.tokens.tolist() == chain(family, llama, text)


@pytest.mark.parametrize("family", BUILD)
def test_requests_know_their_own_text_and_a_new_one_forgets_the_old(llama, family):
    several = drafting(family, llama, [1, 2, 1], [3, 4, 3])
    plan = Plan("chain", 1)
    assert [p.tokens.tolist() for p in several.propose([1, 0], plan, None)] == [[4], [2]]
    several.observe([seen([3, 5, 3], request=0)])
    assert [p.tokens.tolist() for p in several.propose([0, 1], plan, None)] == [[5], [4]]


@pytest.mark.parametrize("family", BUILD)
def test_an_id_that_the_head_cannot_emit_ends_the_draft(llama, family):
    assert chain(family, llama, [1, 2, V, 3, 1, 2, V, 3, 1]) == [2]


def test_what_hangs_on_an_id_outside_the_head_goes_with_it():
    found = chosen([1, 9, 2, 3], [-1, -1, 1, 0], num_ids=9, ranked=True)
    assert (found.tokens.tolist(), found.parents) == ([1, 3], (-1, 0))
    assert found.ranked.tolist() == [[1], [3], [-1]]


def test_the_first_token_is_new_only_at_the_beginning():
    assert new_tokens(seen([4, 5, 6])) == [4, 5, 6]
    assert new_tokens(seen([4, 5, 6], start=2)) == [5, 6]


# suffixes

ABC = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2]


def test_suffix_drafts_the_most_frequent_continuation(llama):
    assert chain("suffix", llama, ABC, max_match=2) == [3, 1]
    assert chain("suffix", llama, ABC, max_match=2, tokens_per_match=1.5) == [3, 1, 2]


def test_the_newest_of_equally_frequent_continuations_is_drafted(llama):
    assert chain("suffix", llama, [1, 2, 9, 1, 3, 9, 1], 1) == [3]


def test_a_suffix_draft_is_as_long_as_its_match(llama):
    text = [1, 2, 3, 4, 5, 6, 1, 2]
    assert chain("suffix", llama, text, 5) == [3, 4]
    assert chain("suffix", llama, text, 5, tokens_per_match=0.1) == [3]
    assert chain("suffix", llama, [1, 2, 3]) == []


def test_a_suffix_draft_ends_where_its_survival_is_too_small(llama):
    assert chain("suffix", llama, ABC, max_match=2, min_share=0.67) == []


def test_a_suffix_draft_goes_on_past_the_end_of_the_text(llama):
    assert chain("suffix", llama, [1, 2, 1, 2, 1], 3) == [2, 1, 2]


def test_a_suffix_tree_holds_the_likeliest_candidates_first(llama):
    (found,) = drafting("suffix", llama, ABC, max_match=2).propose(
        [0], Plan("tree", 2, nodes=9, top_k=2, ranked=64), None
    )
    assert found.tokens.tolist() == [3, 1, 4, 1]
    assert found.parents == (-1, 0, -1, 2)
    assert found.ranked.tolist() == [[3], [1], [-1], [1], [-1]]


def test_a_budget_keeps_the_suffixes_that_pay(llama):
    for node, expected in ((0.6, [3, 1]), (0.7, [])):
        plan = Plan("chain", 2, budget=Budget(1.0, 0.1, node, rates=(1.0,)))
        (found,) = drafting("suffix", llama, ABC, max_match=2).propose([0], plan, None)
        assert found.tokens.tolist() == expected


def test_a_corpus_is_matched_where_it_knows_more_than_the_text(tmp_path):
    target = Target(tiny_llama(layers=2), byte_tokenizer())
    answers = ["the cat sat", "on the cat mat"]
    rows = [
        f'{{"messages": [{{"role": "user", "content": "?"}}, {{"role": "assistant", "content": "{a}"}}]}}\n'
        for a in answers
    ]
    (tmp_path / "corpus.jsonl").write_text("".join(rows))
    config = suffix.Config(corpus=str(tmp_path / "corpus.jsonl"))
    drafter = suffix.build(config, target, torch.arange(260))
    assert bytes(t for t in drafter.corpus_ids.tolist() if t >= 0) == b"the cat saton the cat mat"
    work = drafter.start(1, 100)
    work.observe([seen(list(b"xx the c"))])
    (found,) = work.propose([0], Plan("chain", 9), None)
    assert bytes(found.tokens.tolist()) == b"at mat"
    work.observe([seen(list(b"zq sat"))])  # " sat" ends an answer; "at" is followed elsewhere
    (found,) = work.propose([0], Plan("chain", 9), None)
    assert bytes(found.tokens.tolist()) == b" mat"


def test_a_corpus_that_is_not_there_is_named(llama):
    target = Target(tiny_llama(layers=2), byte_tokenizer())
    with pytest.raises(ValueError, match=r"^drafter.corpus='no.jsonl': no file no.jsonl$"):
        suffix.build(suffix.Config(corpus="no.jsonl"), target, torch.arange(260))


# both, in the loop

PROMPTS = [[5, 9, 13, 7], [3, 22, 3, 22, 3], [41, 8, 30] * 4]
LAWS = {
    "rejection": Plan("chain", 4),
    "block": Plan("chain", 4),
    "target_only": Plan("tree", 4, nodes=8, top_k=3),
}
CASES = [(f, law) for f in BUILD for law in LAWS if (f, law) != ("ngram", "target_only")]


def decode(target, family, law, **settings):
    drafter = BUILD[family](CONFIG[family](), target, torch.arange(V))
    return generate(
        target, PROMPTS, max_new_tokens=40, stop_ids=(), drafter=drafter, plan=LAWS[law], law=law, **settings
    )[0]


@pytest.mark.parametrize(("family", "law"), CASES)
def test_greedy_text_equals_plain_decoding(llama, family, law):
    plain, _ = generate(llama, PROMPTS, sampling=Sampling(), max_new_tokens=40, stop_ids=(), batch_size=3)
    found = decode(llama, family, law, sampling=Sampling(), batch_size=2)
    assert [text.ids for text in found] == [text.ids for text in plain]
    assert sum(record.accepted for text in found for record in text.rounds) > 0


@pytest.mark.parametrize(("family", "law"), CASES)
def test_a_sampled_text_is_the_same_in_every_batch(llama, family, law):
    sampling = Sampling(temperature=1.0, seed=3)
    alone, together = (decode(llama, family, law, sampling=sampling, batch_size=b) for b in (1, 3))
    assert [text.ids for text in alone] == [text.ids for text in together]


@pytest.mark.parametrize("law", ["rejection", "block"])
@pytest.mark.parametrize("family", BUILD)
def test_two_rounds_emit_exactly_the_targets_law(llama, family, law):
    """By enumeration over three tokens: what is drafted in the second round hangs on the first."""
    prompt = [0, 1, 0, 2, 0]

    def propose(streams, text):
        return drafting(family, llama, [*prompt, *text]).propose([0], Plan("chain", 2), streams)[0]

    process = Process(1, 3)
    assert len(propose(None, ()).tokens)
    assert process.distance(propose, law, length=3, rounds=2) < 1e-9


# refusals


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("ngram", {"min_match": 0}, "drafter.min_match=0: expected at least 1"),
        ("ngram", {"max_match": 0}, "drafter.max_match=0: expected at least drafter.min_match=1"),
        ("suffix", {"max_match": 0}, "drafter.max_match=0: expected at least 1"),
        ("suffix", {"tokens_per_match": 0.0}, "drafter.tokens_per_match=0.0: expected above 0"),
        ("suffix", {"min_share": 1.5}, "drafter.min_share=1.5: expected 0 to 1"),
    ],
)
def test_settings_out_of_range_are_refused(family, settings, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        CONFIG[family](**settings)


@pytest.mark.parametrize(
    ("family", "plan", "message"),
    [
        ("ngram", Plan("tree", 2, nodes=3, top_k=2), "proposal=tree: ngram proposes chains only"),
        ("ngram", Plan("chain", 2, budget=Budget(1, 1, 1)), "adaptive=true: ngram has no confidences"),
        ("suffix", Plan("static", 1, paths=((0,),)), "proposal=static: suffix proposes chains and trees"),
    ],
)
def test_plans_without_a_meaning_are_refused(llama, family, plan, message):
    with pytest.raises(ValueError, match=message):
        drafting(family, llama, [1, 2, 1]).propose([0], plan, None)


@pytest.mark.parametrize("family", BUILD)
def test_there_is_no_checkpoint_and_no_export_of_what_has_no_weights(llama, family, tmp_path):
    drafter = BUILD[family](CONFIG[family](), llama, torch.arange(V))
    with pytest.raises(ValueError, match=f"drafter.family='{family}': nothing of it is trained"):
        checkpoint.save(tmp_path, drafter, None, {"step": 1}, target={}, keep=1)
    with pytest.raises(ValueError, match=f'{family} has no weights.*"method": "{family}"'):
        drafter.engine_config(llama, "vllm")

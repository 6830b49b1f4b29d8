"""Penalties and filters through the whole loop: lossless by enumeration, and the same text in any batch."""

from collections import defaultdict
from dataclasses import replace
from itertools import product

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from spectrain.decode import engine
from spectrain.decode.engine import generate
from spectrain.decode.sampling import Sampling, Streams
from spectrain.proposal import Budget, Plan, Proposal
from spectrain.target import Target
from spectrain.testing import byte_tokenizer, tiny_llama

PENALISED = Sampling(  # penalties whose products are exact in binary, so that both sides round alike
    temperature=0.8, repetition_penalty=1.7, presence_penalty=0.625, frequency_penalty=0.875, min_p=0.02
)  # fmt: skip
ALL = Sampling(
    temperature=0.9, top_k=40, top_p=0.95, min_p=0.02, repetition_penalty=1.2, presence_penalty=0.3,
    frequency_penalty=0.4, draft_temperature=0.7, seed=3,
)  # fmt: skip
CHAIN, TREE = Plan("chain", 2), Plan("tree", 2, nodes=4, top_k=2)
STATIC = Plan("static", 2, paths=((0,), (1,), (0, 0)))
THRIFTY = replace(CHAIN, budget=Budget(root=1.0, step=0.1, node=0.4))


class Enumeration(Streams):
    """Streams that follow a script of outcomes and note the chance of each and of its alternatives."""

    script: list[int] = []

    def __init__(self, sampling, keys, history=None):
        super().__init__(sampling, keys, history)
        self.trail = Enumeration.trail = []

    def outcome(self, weights):
        weights = torch.as_tensor(weights, dtype=torch.float64)
        possible = [(i, w) for i, w in enumerate((weights / weights.sum()).tolist()) if w > 0]
        at = self.script[len(self.trail)] if len(self.trail) < len(self.script) else 0
        self.trail.append((at, possible))
        return possible[at][0]

    def choose(self, weights, request, root_position, slot):
        return self.outcome(weights)

    def pick(self, law_MV, requests, root_positions, slots, purpose):
        return [self.outcome(row) for row in law_MV]


def emitted_law(run):
    """Probability of each result of run(), over all outcomes of its random choices."""
    found, scripts = defaultdict(float), [[]]
    while scripts:
        Enumeration.script = scripts.pop()
        text, chance = run(), 1.0
        for at, possible in Enumeration.trail:
            chance *= possible[at][1]
        found[text] += chance
        for i in range(len(Enumeration.script), len(Enumeration.trail)):
            head = [at for at, _ in Enumeration.trail[:i]]
            scripts += [[*head, other] for other in range(1, len(Enumeration.trail[i][1]))]
    return found


def target_law(logits_VV, prompt, length, sampling):
    """Probability of each text, with penalties from transformers and by hand rather than from ours."""
    found = {}
    for text in product(range(len(logits_VV)), repeat=length):
        chance = 1.0
        for i, token in enumerate(text):
            before = [*prompt, *text[:i]]
            processor = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
            scores = processor(torch.tensor([before]), logits_VV[before[-1]][None].clone())[0]
            for v in range(len(scores)):
                n = text[:i].count(v)
                scores[v] = scores[v] - sampling.frequency_penalty * n
                scores[v] = scores[v] - sampling.presence_penalty * (n > 0)
            p = sampling.law(scores[None])[0].double()
            chance *= (p[token] / p.sum()).item()
        found[text] = chance
    return found


def distance(monkeypatch, target, drafter, plan, rule, length):
    monkeypatch.setattr(engine, "Streams", Enumeration)
    prompt = [0, 1]

    def run():
        (one,), _ = generate(
            target, [prompt], sampling=PENALISED, max_new_tokens=length, stop_ids=(), batch_size=1,
            drafter=drafter, plan=plan, law=rule,
        )  # fmt: skip
        return one.ids

    emitted, expected = emitted_law(run), target_law(target.logits_VV, prompt, length, PENALISED)
    assert sum(emitted.values()) == pytest.approx(1, abs=1e-12)
    assert sum(chance > 0 for chance in expected.values()) > len(expected) / 2
    return sum(abs(emitted[text] - expected[text]) for text in expected) / 2


CASES = [
    (2, None, CHAIN, "rejection"),
    (2, None, CHAIN, "target_only"),
    (3, [0, 2], CHAIN, "rejection"),
    (2, None, CHAIN, "block"),
    (2, None, THRIFTY, "rejection"),
    (2, None, THRIFTY, "block"),
    (3, None, TREE, "target_only"),
    (3, [0, 2], STATIC, "target_only"),
    (2, None, replace(TREE, sampled=True), "recursive"),
]


@pytest.mark.case("O-X03")
@pytest.mark.parametrize(("vocab", "kept_ids", "plan", "rule"), CASES)
def test_decoding_with_penalties_is_lossless(monkeypatch, markov, bigram, vocab, kept_ids, plan, rule):
    target = markov(torch.randn(vocab, vocab) / 2)
    drafter = bigram(torch.randn(vocab, len(kept_ids or range(vocab))), kept_ids)
    assert distance(monkeypatch, target, drafter, plan, rule, 4) <= 1e-12


def test_penalties_that_forget_the_path_are_seen_by_the_enumeration(monkeypatch, markov, bigram):
    monkeypatch.setattr(Proposal, "path", lambda proposal, node: [])
    target, drafter = markov(torch.randn(2, 2) / 2), bigram(torch.randn(2, 2))
    assert distance(monkeypatch, target, drafter, CHAIN, "rejection", 4) > 0.01


def test_a_drafter_is_penalised_along_its_own_path(markov, bigram):
    """Drafter and target agree, so every draft token of a chain is kept, though penalties change at each."""
    logits = 2 * torch.randn(12, 12)
    (one,), _ = generate(
        markov(logits), [[0, 1]], sampling=PENALISED, max_new_tokens=21, stop_ids=(), batch_size=1,
        drafter=bigram(logits), plan=Plan("chain", 4), law="rejection",
    )  # fmt: skip
    assert [(r.accepted, r.alphas) for r in one.rounds] == [(4, pytest.approx([1.0] * 4, abs=1e-6))] * 4


@pytest.mark.parametrize("plan", [Plan("chain", 4), Plan("tree", 3, nodes=8, top_k=3)], ids=lambda p: p.shape)
@pytest.mark.parametrize("sampling", [ALL, Sampling(repetition_penalty=1.3, frequency_penalty=0.2)])
def test_all_filters_on_a_text_is_the_same_in_a_batch_of_1_and_of_8(bigram, plan, sampling):
    target = Target(tiny_llama(layers=2), byte_tokenizer())
    settings = {
        "sampling": sampling, "max_new_tokens": 16, "stop_ids": (7,), "stop_strings": ["e", "Q"],
        "drafter": bigram(2 * torch.randn(260, 100), list(range(30, 130))), "plan": plan,
        "law": "rejection" if plan.shape == "chain" else "target_only", "record_events": True,
    }  # fmt: skip
    prompts = [[65 + i, 66, 65 + 2 * i, 67][: 1 + i % 4] for i in range(8)]
    together, _ = generate(target, prompts, **settings, batch_size=8)
    for i, prompt in enumerate(prompts):
        (alone,), _ = generate(target, [prompt], **settings, batch_size=1, request_keys=[i])
        assert (alone.ids, alone.finish_reason) == (together[i].ids, together[i].finish_reason)
        shapes = [[(e.tokens, e.parents, e.path, e.bonus) for e in g.events] for g in (alone, together[i])]
        assert shapes[0] == shapes[1]


def test_greedy_text_with_penalties_is_the_plain_one(bigram):
    target = Target(tiny_llama(layers=2))
    settings = {
        "sampling": Sampling(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
        "max_new_tokens": 24, "stop_ids": (), "batch_size": 2,
    }  # fmt: skip
    plain, _ = generate(target, [[5, 6, 7], [8]], **settings)
    drafter = bigram(2 * torch.randn(260, 260))
    trees = [Plan("tree", 3, nodes=9, top_k=3, sampled=s) for s in (False, True)]
    for plan in (Plan("chain", 3), THRIFTY, STATIC, *trees, replace(trees[0], budget=THRIFTY.budget)):
        fast, _ = generate(target, [[5, 6, 7], [8]], **settings, drafter=drafter, plan=plan)
        assert [g.ids for g in fast] == [g.ids for g in plain]


def test_the_events_of_a_text_tell_all_of_it(bigram):
    target = Target(tiny_llama(layers=2))
    prompts = [[5, 6, 7], [8]]
    for plan in (Plan("chain", 3), Plan("tree", 3, nodes=9, top_k=3)):
        found, _ = generate(
            target, prompts, sampling=Sampling(temperature=1.0, top_k=20), max_new_tokens=14, stop_ids=(),
            batch_size=2, drafter=bigram(torch.randn(260, 260)), plan=plan, record_events=True,
        )  # fmt: skip
        for one in found:
            text = list(one.ids[:1])
            for event, record in zip(one.events, one.rounds, strict=True):
                assert event.root_position == len(one.prompt_ids) + len(text) - 1
                assert len(event.parents) == len(event.tokens) == record.drafted
                assert (event.alphas, event.emitted) == (record.alphas, record.emitted)
                text += [*(event.tokens[node] for node in event.path), event.bonus][: event.emitted]
            assert tuple(text) == one.ids
    assert not generate(target, prompts, sampling=Sampling(), max_new_tokens=3, stop_ids=(), batch_size=2)[0][
        0
    ].events


@pytest.mark.parametrize(
    "plan",
    [
        Plan("chain", 5),
        Plan("tree", 5, nodes=12, top_k=3),
        Plan("static", 5, paths=((1,), *((0,) * n for n in range(1, 6)))),
    ],
    ids=lambda p: p.shape,
)
def test_drafts_never_cross_the_context_limit_whatever_the_batch(markov, bigram, plan):
    logits = 2 * torch.randn(12, 12)
    target, drafter = markov(logits), bigram(logits)
    target.config.max_position_embeddings = 16
    settings = {
        "sampling": Sampling(temperature=1.0, seed=1), "max_new_tokens": 50, "stop_ids": (), "plan": plan,
        "drafter": drafter, "record_events": True,
    }  # fmt: skip
    prompts = [[i % 12 for i in range(n)] for n in (13, 2, 15, 9)]
    together, _ = generate(target, prompts, **settings, batch_size=4)
    assert max(target.positions) == 14 and drafter.deepest == 14  # the last token of a text is never run
    assert [len(g.ids) for g in together] == [3, 14, 1, 7]
    assert {g.finish_reason for g in together} == {"length"} and not together[2].rounds
    for i, prompt in enumerate(prompts):
        (alone,), _ = generate(target, [prompt], **settings, batch_size=1, request_keys=[i])
        assert (alone.ids, alone.events) == (together[i].ids, together[i].events)


def test_a_prompt_that_fills_the_context_is_refused(markov):
    target = markov(torch.zeros(4, 4))
    target.config.max_position_embeddings = 16
    with pytest.raises(ValueError, match=r"prompt 0: 16 tokens, expected 1 to 15 \(context - 1\)"):
        generate(target, [[1] * 16], sampling=Sampling(), max_new_tokens=1, stop_ids=(), batch_size=1)

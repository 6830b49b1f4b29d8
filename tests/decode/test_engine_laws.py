"""Every law through the whole loop: greedy text, sampled law, fresh random numbers, batches, labels."""

import pytest
import torch

from spectrain.decode.engine import generate
from spectrain.decode.sampling import Sampling, Streams, law
from spectrain.drafters.autoregressive import grow
from spectrain.laws import Leniency
from spectrain.proposal import Plan
from spectrain.target import Target, packed_layout
from spectrain.testing import tiny_llama

V = 64
CHAIN = Plan("chain", 3)
DRAWN = Plan("tree", 3, nodes=8, top_k=3, sampled=True)
CHOSEN = Plan("tree", 3, nodes=8, top_k=3)
LOSSLESS = {"rejection": CHAIN, "block": CHAIN, "target_only": CHOSEN, "recursive": DRAWN}
LOSSY = {"typical": CHOSEN, "thresholds": CHAIN}
LENIENT = {"typical": Leniency(), "thresholds": Leniency(threshold_acc=0.5)}
PLANS = LOSSLESS | LOSSY


class Bigram:
    """A drafter whose law after a token is a fixed row of logits."""

    taps = ()
    kept_ids, vocab_size = torch.arange(V), V

    def __init__(self, target):
        ids = torch.arange(V)
        states = target.states(ids, torch.zeros(V, dtype=torch.int64), packed_layout(range(V + 1)))
        self.logits = target.logits(states.final).detach()
        self.roots, self.steps = {}, 0

    def start(self, num_requests, capacity):
        return self

    def observe(self, observations):
        for seen in observations:
            self.roots[seen.request] = (int(seen.next_ids[-1]), seen.start + len(seen.next_ids))

    def propose(self, requests, plan, sampler):
        return grow(self, requests, plan, sampler)

    def root_positions(self, requests):
        return [self.roots[request][1] for request in requests]

    def root_logits(self, requests):
        return self.logits[[self.roots[request][0] for request in requests]]

    def step(self, requests, parents, tokens):
        return self.logits[tokens]


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    return Target(tiny_llama(layers=3, hidden=32, vocab=V))


def decode(target, prompts, rule, *, sampling, batch=4, length=20):
    return generate(
        target, prompts, sampling=sampling, max_new_tokens=length, stop_ids=(), batch_size=batch,
        drafter=Bigram(target), plan=PLANS[rule], law=rule, leniency=LENIENT.get(rule, Leniency()),
    )[0]  # fmt: skip


PROMPTS = [[5, 9, 13, 7], [3, 22], [41, 8, 30]]


@pytest.mark.parametrize("rule", PLANS)
def test_greedy_text_equals_plain_decoding_under_every_law(target, rule):
    settings = {"max_new_tokens": 20, "stop_ids": (), "batch_size": 2}
    plain, _ = generate(target, PROMPTS, sampling=Sampling(), **settings)
    found = decode(target, PROMPTS, rule, sampling=Sampling())
    assert [text.ids for text in found] == [text.ids for text in plain]
    assert all(text.lossless for text in found)


@pytest.mark.parametrize("rule", PLANS)
def test_a_sampled_text_says_whether_its_law_keeps_the_targets(target, rule):
    found = decode(target, PROMPTS, rule, sampling=Sampling(temperature=1.0))
    assert [text.lossless for text in found] == [rule in LOSSLESS] * 3


def test_plain_text_is_lossless_whatever_the_law(target):
    settings = {"max_new_tokens": 3, "stop_ids": (), "batch_size": 2, "law": "typical"}
    (found,), _ = generate(target, [[1, 2]], sampling=Sampling(temperature=1.0), **settings)
    assert found.lossless


@pytest.mark.parametrize("rule", PLANS)
def test_no_random_number_is_read_twice(target, rule, monkeypatch):
    read, uniform = [], Streams.uniform

    def logged(self, request, *where):
        read.append((self.keys[request], *where))
        return uniform(self, request, *where)

    monkeypatch.setattr(Streams, "uniform", logged)
    decode(target, PROMPTS, rule, sampling=Sampling(temperature=1.0, draft_temperature=1.5), batch=2)
    assert len(read) > 20 and len(set(read)) == len(read)


@pytest.mark.parametrize("rule", PLANS)
def test_a_sampled_text_is_the_same_in_every_batch(target, rule):
    """Also near the end, where requests have different room left."""
    sampling = Sampling(temperature=1.0, seed=3)
    alone = decode(target, PROMPTS, rule, sampling=sampling, batch=1)
    together = decode(target, PROMPTS, rule, sampling=sampling, batch=3)
    assert [text.ids for text in alone] == [text.ids for text in together]


@pytest.mark.parametrize("rule", ["block", "recursive"])
def test_sampled_pairs_of_tokens_follow_the_targets_law(target, rule):
    """Chi-square of the second, third and fourth token given those before; draft temperature is free."""
    sampling = Sampling(temperature=1.0, top_k=3, seed=2, draft_temperature=2.0)
    texts = decode(target, [[5, 6]] * 1200, rule, sampling=sampling, batch=600, length=5)
    assert sum(record.accepted for text in texts for record in text.rounds) > 100
    for place in (1, 2, 3):
        seen = {}
        for text in texts:
            seen.setdefault(text.ids[:place], []).append(text.ids[place])
        head = max(seen, key=lambda ids: len(seen[ids]))
        ids = torch.tensor([5, 6, *head])
        final = target.states(ids, torch.arange(len(ids)), packed_layout((0, len(ids)))).final
        p = law(target.logits(final[-1:]), temperature=1.0, top_k=3)[0]
        counts = torch.bincount(torch.tensor(seen[head]), minlength=V)
        expected = len(seen[head]) * p
        assert not counts[p == 0].any()
        assert ((counts - expected)[p > 0] ** 2 / expected[p > 0]).sum() < 13.8  # 2 degrees, 0.1%

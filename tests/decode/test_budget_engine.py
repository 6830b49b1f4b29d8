"""Budgets and static trees through the decode loop: ragged drafts, equal text, lengths that pay."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from spectrain.decode.engine import generate
from spectrain.decode.plan import check_plan
from spectrain.decode.sampling import Sampling, Streams
from spectrain.drafters.autoregressive import grow
from spectrain.proposal import Budget, Plan
from spectrain.target import Target, packed_layout
from spectrain.testing import TableStepper, tiny_llama


class Sure:
    """A drafter that knows the next token from the last one alone, by `grow`; how sure it is falls with each
    token of a round, and it is right where `right` says so."""

    taps = (0,)

    def __init__(self, texts, right, sharpness, vocab=64):
        self.texts, self.right, self.sharpness, self.vocab_size = texts, right, sharpness, vocab
        self.kept_ids = torch.arange(vocab)

    def start(self, num_requests, capacity):
        self.known, self.steps, self.lengths = {}, 0, []
        return self

    def observe(self, observations):
        self.steps += 1
        for seen in observations:
            before = [] if seen.start == 0 else self.known[seen.request]
            self.known[seen.request] = [*before, *seen.next_ids.tolist()]

    def propose(self, requests, plan, sampler):
        found = grow(self, requests, plan, sampler)
        self.lengths += [len(proposal.parents) for proposal in found]
        return found

    def root_positions(self, requests):
        return [len(self.known[request]) for request in requests]

    def root_logits(self, requests):
        self.nodes = {request: [] for request in requests}
        return torch.stack([self._logits(request, 0) for request in requests])

    def step(self, requests, parents, tokens):
        self.steps += 1
        rows = []
        for request, parent in zip(requests, parents, strict=True):
            depth = 1 if parent < 0 else self.nodes[request][parent] + 1
            self.nodes[request].append(depth)
            rows.append(self._logits(request, depth))
        return torch.stack(rows)

    def _logits(self, request, depth):
        known = self.known[request]
        (text,) = [text for text in self.texts if text[1 : len(known) + 1] == known]
        place = len(known) + 1 + depth
        token = text[place] if place < len(text) else 0
        if not self.right(place):
            token = (token + 1) % self.vocab_size
        return torch.nn.functional.one_hot(torch.tensor(token), self.vocab_size) * self.sharpness(place)


PROMPTS = [[5, 9, 13, 7, 3, 22, 41, 8], [17, 4, 6], [30, 11, 12, 6, 2]]
PLANS = {
    "chain": Plan("chain", 5),
    "tree": Plan("tree", 4, nodes=12, top_k=3),
    "static": Plan("static", 3, paths=((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))),
}


@pytest.fixture(scope="module")
def target():
    return Target(tiny_llama(layers=2, vocab=64))


@pytest.fixture(scope="module")
def texts(target):
    found, _ = generate(target, PROMPTS, sampling=Sampling(), max_new_tokens=30, stop_ids=(), batch_size=3)
    return [[*prompt, *text.ids] for prompt, text in zip(PROMPTS, found, strict=True)]


def decode(target, drafter, plan, *, batch_size=3):
    found, _ = generate(
        target, PROMPTS, sampling=Sampling(), max_new_tokens=30, stop_ids=(), batch_size=batch_size,
        drafter=drafter, plan=plan,
    )  # fmt: skip
    return found


def with_budget(plan, **costs):
    return replace(plan, budget=Budget(**costs))


@pytest.mark.parametrize("shape", PLANS)
@pytest.mark.parametrize("thrifty", [False, True])
def test_greedy_text_is_plain_decodings_with_ragged_drafts(target, texts, shape, thrifty):
    drafter = Sure(texts, lambda n: n % 4 != 0, lambda n: 9.0 if n % 3 else 4.5)
    plan = with_budget(PLANS[shape], root=1.1, step=0.05, node=0.1) if thrifty else PLANS[shape]
    found = decode(target, drafter, plan)
    assert [[*prompt, *text.ids] for prompt, text in zip(PROMPTS, found, strict=True)] == texts
    rounds = [record for text in found for record in text.rounds]
    assert max(record.accepted for record in rounds) > 1
    if thrifty:
        assert len({record.drafted for record in rounds}) > 2
    assert [text.rounds for text in decode(target, drafter, plan, batch_size=1)] == [t.rounds for t in found]


def test_a_drafter_that_is_sure_and_right_drafts_in_full(target, texts):
    found = decode(
        target,
        Sure(texts, lambda n: True, lambda n: 30.0),
        with_budget(PLANS["chain"], root=1.0, step=0.05, node=0.02),
    )
    assert [r.drafted for r in found[0].rounds] == [5, 5, 5, 5, 4]


def test_a_drafter_that_knows_nothing_drafts_nothing(target, texts):
    drafter = Sure(texts, lambda n: True, lambda n: 0.0)
    found = decode(target, drafter, with_budget(PLANS["chain"], root=1.0, step=0.05, node=0.02))
    assert {(r.drafted, r.emitted, r.alphas) for text in found for r in text.rounds} == {(0, 1, ())}
    assert len(found[0].rounds) == 29


def test_the_rate_is_what_the_rounds_earned():
    price = Budget(root=1.1, step=0.1, node=0.05)
    assert price.rate(tokens=0, rounds=0, steps=0, nodes=0) == 1.0
    assert price.rate(tokens=9, rounds=4, steps=6, nodes=10) == pytest.approx(10 / (1 + 4.4 + 0.6 + 0.5))


def test_adaptive_lengths_beat_every_fixed_one_where_rounds_differ():
    """Every other round each draft token is right with probability .95, else with .15, and the drafter knows.

    Expected tokens and time of two rounds, computed and not drawn: root 1.05, step 0.1, node 0.03.
    """
    costs = {"root": 1.05, "step": 0.1, "node": 0.03}

    def two_rounds(lengths):
        tokens = sum(sum(a**k for k in range(n + 1)) for a, n in zip((0.95, 0.15), lengths, strict=True))
        return tokens, sum(1.05 + 0.1 * max(0, n - 1) + 0.03 * n for n in lengths)

    def eta(lengths):
        tokens, spent = two_rounds(lengths)
        return tokens / spent

    best_fixed = max(eta((n, n)) for n in range(13))
    lengths, rate = (0, 0), 1.0
    for _ in range(6):  # the running rate, at its fixed point
        lengths = tuple(drafted(a, Budget(**costs, rates=(rate,))) for a in (0.95, 0.15))
        rate = eta(lengths)
    best = max(eta(pair) for pair in product(range(13), repeat=2))
    assert eta(lengths) > 1.1 * best_fixed
    assert eta(lengths) == pytest.approx(best, rel=1e-12) and lengths == (12, 1)


def drafted(confidence, budget):
    logits = torch.tensor([confidence, *[(1 - confidence) / 99] * 99]).log().tolist()
    (chain,) = grow(
        TableStepper({(): logits}), [0], Plan("chain", 12, budget=budget), Streams(Sampling(), [0])
    )
    return len(chain.parents)


@pytest.mark.parametrize(
    ("plan", "law", "message"),
    [
        (PLANS["static"], "rejection", "^law=rejection: verifies chains only"),
        (PLANS["static"], "recursive", "^law=recursive: needs drawn siblings"),
        (replace(PLANS["static"], sampled=True), "target_only", "^plan.sampled=True with plan.shape=static"),
        (
            replace(with_budget(PLANS["tree"], root=1.0, step=0.1, node=0.1), sampled=True),
            "recursive",
            "^plan.sampled=True with plan.shape=tree, plan.budget=Budget",
        ),
        (with_budget(PLANS["chain"], root=0.0, step=0.1, node=0.1), "rejection", "^plan.budget.root=0.0"),
        (with_budget(PLANS["chain"], root=1.0, step=-1, node=0.1), "rejection", "^plan.budget.step=-1"),
    ],
)
def test_plans_that_do_not_fit_are_refused(plan, law, message):
    with pytest.raises(ValueError, match=message):
        check_plan(plan, law)


def test_drawn_texts_under_a_budget_follow_the_targets_law_through_the_engine(target):
    """Chi-square of the second and third token given the first; chains drawn, cut by confidence and rate."""
    sampling = Sampling(temperature=1.0, top_k=3, seed=2)
    n = 1500
    drafter = Vague(target, [5, 6])
    texts, _ = generate(
        target, [[5, 6]] * n, sampling=sampling, max_new_tokens=4, stop_ids=(), batch_size=500,
        drafter=drafter, plan=with_budget(Plan("chain", 2), root=1.0, step=0.1, node=0.35), law="rejection",
    )  # fmt: skip
    lengths = [r.drafted for text in texts for r in text.rounds]
    assert {0, 1, 2} <= set(lengths) and sum(r.accepted for t in texts for r in t.rounds) > 50
    for place in (1, 2):
        seen = {}
        for text in texts:
            seen.setdefault(text.ids[:place], []).append(text.ids[place])
        head = max(seen, key=lambda ids: len(seen[ids]))
        p = sampling.law(plain_logits(target, [5, 6, *head]))[0]
        counts = torch.bincount(torch.tensor(seen[head]), minlength=64)
        expected = len(seen[head]) * p
        possible = p > 0
        assert not counts[~possible].any()
        assert ((counts - expected)[possible] ** 2 / expected[possible]).sum() < 13.8  # 2 degrees, 0.1%


class Vague(Sure):
    """The target's own logits, with much more on the arg-max behind some tokens; its chains are drawn."""

    def __init__(self, target, prompt):
        super().__init__([], None, None)
        self.target, self.first, self.cached = target, prompt[0], {}

    def root_logits(self, requests):
        self.paths = {request: [] for request in requests}
        return torch.stack([self._after(tuple(self.known[request])) for request in requests])

    def step(self, requests, parents, tokens):
        rows = []
        for request, parent, token in zip(requests, parents, tokens.tolist(), strict=True):
            before = tuple(self.known[request]) if parent < 0 else self.paths[request][parent]
            self.paths[request].append((*before, token))
            rows.append(self._after(self.paths[request][-1]))
        return torch.stack(rows)

    def _after(self, known):
        if known not in self.cached:
            logits = plain_logits(self.target, [self.first, *known])[0]
            logits[logits.argmax()] += 3.0 * (known[-1] % 3 > 0)
            self.cached[known] = logits
        return self.cached[known]


def plain_logits(target, ids):
    """Logits [1, V] behind `ids`."""
    ids = torch.tensor(ids)
    final = target.states(ids, torch.arange(len(ids)), packed_layout((0, len(ids)))).final
    return target.logits(final[-1:]).detach()

"""The decode loop: text equal to plain decoding, cuts, counters, positions, and what a drafter is told."""

import dataclasses

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    MistralForCausalLM,
)

from spectrain.cache import KVCache
from spectrain.decode.engine import generate
from spectrain.decode.sampling import Sampling, law
from spectrain.proposal import Plan, Proposal
from spectrain.target import Target, packed_layout
from spectrain.testing import tiny_llama

GREEDY = Sampling()
CHAIN = Plan(shape="chain", length=4)


def mistral():
    return MistralForCausalLM(
        MistralConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, sliding_window=8, initializer_range=0.3,
        )
    )  # fmt: skip


def gemma3():
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.3,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"], sliding_window=4,
            tie_word_embeddings=False,
        )
    )  # fmt: skip


def llama():
    return tiny_llama(layers=3, hidden=32, vocab=64)


@pytest.fixture
def target():
    return Target(llama())


def final_states(target, ids):
    return target.states(torch.tensor(ids), torch.arange(len(ids)), packed_layout((0, len(ids)))).final


def greedy_text(target, prompt, length):
    """Plain greedy decoding, the whole text run again for every token."""
    ids = list(prompt)
    for _ in range(length):
        ids.append(int(target.logits(final_states(target, ids)[-1:]).argmax()))
    return ids[len(prompt) :]


class Scripted:
    """A drafter that knows the whole text of each prompt and spoils its proposals at chosen lengths.

    right(n): how many of the draft tokens behind root position n are right. It logs what it is told.
    """

    taps = (0, 2)

    def __init__(self, texts, right, vocab=64):
        self.texts, self.right, self.vocab = texts, right, vocab
        self.roots, self.log, self.proposed, self.steps = {}, [], [], 0

    def start(self, num_requests, capacity):
        self.places = num_requests
        return self

    def observe(self, observations):
        self.steps += 1
        for seen in observations:
            assert 0 <= seen.request < self.places
            n = len(seen.next_ids)
            assert seen.taps.shape[:2] == (n, len(self.taps)) and len(seen.final) == n
            known = [] if seen.start == 0 else self.roots[seen.request]
            self.roots[seen.request] = [*known, *seen.next_ids.tolist()]
            assert len(known) == seen.start
            self.log.append(seen)

    def propose(self, requests, plan, sampler):
        self.steps += plan.length - 1
        found = []
        for request in requests:
            known = self.roots[request]
            n = len(known)  # position of the root
            (text,) = [text for text in self.texts if text[1 : n + 1] == known]
            tokens = text[n + 1 : n + 1 + plan.length]
            tokens += [0] * (plan.length - len(tokens))
            right = self.right(n)
            if right < plan.length:
                tokens[right] = (tokens[right] + 1) % self.vocab
            self.proposed.append((request, n, len(tokens)))
            found.append(Proposal(torch.tensor(tokens), tuple(range(-1, plan.length - 1))))
        return found


PROMPT = [5, 9, 13, 7, 3, 22, 41, 8, 30, 11, 12, 6]
RIGHT = {"always": lambda n: 99, "never": lambda n: 0, "sometimes": lambda n: n % 3}


@pytest.mark.case("O-X06")
@pytest.mark.parametrize("right", RIGHT)
@pytest.mark.parametrize("build", [llama, mistral, gemma3])
def test_greedy_text_equals_plain_decoding_whatever_the_drafter(build, right):
    """Of the case: its windows (8 and 4), prompt, lengths and drafters.

    Its eager and sdpa, its two transformers majors and `crop(-n)` after every step do not apply: our own
    attention and cache run in every target, and the cache keeps what a window no longer sees.
    """
    target = Target(build().float())
    prompts = [PROMPT, PROMPT[3:8], [17]]
    texts = [greedy_text(target, prompt, 24) for prompt in prompts]
    drafter = Scripted([p + t for p, t in zip(prompts, texts, strict=True)], RIGHT[right])
    settings = {"sampling": GREEDY, "max_new_tokens": 24, "stop_ids": (), "batch_size": 2}
    plain, _ = generate(target, prompts, **settings)
    fast, _ = generate(target, prompts, **settings, drafter=drafter, plan=CHAIN, law="rejection")
    assert [list(g.ids) for g in plain] == texts
    assert [g.ids for g in fast] == [g.ids for g in plain]
    if right == "always":
        assert [r.accepted for r in fast[0].rounds] == [4, 4, 4, 4, 2]
    if right == "never":
        assert {r.accepted for r in fast[0].rounds} == {0}


class Bushy(Scripted):
    """Each chain with a wrong twin beside every node and a child under each twin."""

    def propose(self, requests, plan, sampler):
        bushes = []
        for chain in super().propose(requests, plan, sampler):
            tokens, parents, tip = [], [], -1
            for token in chain.tokens.tolist():
                tokens += [(token + 7) % self.vocab, token, (token + 3) % self.vocab]
                parents += [tip, tip, len(tokens) - 3]
                tip = len(tokens) - 2
            bushes.append(Proposal(torch.tensor(tokens), tuple(parents)))
        return bushes


@pytest.mark.parametrize("build", [llama, mistral, gemma3])
def test_greedy_text_of_trees_equals_plain_decoding(build):
    target = Target(build().float())
    prompts = [PROMPT, PROMPT[3:8], PROMPT[:4]]
    texts = [greedy_text(target, prompt, 20) for prompt in prompts]
    drafter = Bushy([p + t for p, t in zip(prompts, texts, strict=True)], lambda n: n % 5)
    plan = Plan(shape="tree", length=4, nodes=12, top_k=3)
    fast, _ = generate(
        target,
        prompts,
        sampling=GREEDY,
        max_new_tokens=20,
        stop_ids=(),
        batch_size=3,
        drafter=drafter,
        plan=plan,
    )
    assert [list(g.ids) for g in fast] == texts
    assert max(r.accepted for g in fast for r in g.rounds) == 4


@pytest.mark.case("O-X01")
def test_a_perfect_drafter_fills_the_budget_exactly_in_one_verification(target):
    text = greedy_text(target, PROMPT, 5)
    drafter = Scripted([PROMPT + text], RIGHT["always"])
    (fast,), _ = generate(
        target,
        [PROMPT],
        sampling=GREEDY,
        max_new_tokens=5,
        stop_ids=(),
        batch_size=1,
        drafter=drafter,
        plan=CHAIN,
    )
    assert list(fast.ids) == text and fast.finish_reason == "length"
    assert [(r.drafted, r.accepted, r.emitted, r.bonus_cut) for r in fast.rounds] == [(3, 3, 4, False)]


@pytest.mark.case("O-X01")
def test_a_stop_token_inside_a_block_ends_text_and_counters(target):
    text = greedy_text(target, PROMPT, 24)
    at = next(i for i in range(2, 24) if text[i] not in text[:i] and i % 5 not in (0, 4))
    drafter = Scripted([PROMPT + text], RIGHT["always"])
    settings = {"sampling": GREEDY, "max_new_tokens": 24, "stop_ids": (text[at],), "batch_size": 1}
    (plain,), _ = generate(target, [PROMPT], **settings)
    (fast,), _ = generate(target, [PROMPT], **settings, drafter=drafter, plan=CHAIN)
    assert list(fast.ids) == list(plain.ids) == text[: at + 1]
    assert fast.finish_reason == plain.finish_reason == "stop"
    assert 1 + sum(r.emitted for r in fast.rounds) == at + 1
    assert fast.rounds[-1].bonus_cut and fast.rounds[-1].accepted == 4


@pytest.mark.case("O-X02")
def test_counters_of_rounds_that_accept_3_0_4_1(target):
    accepted = iter([3, 0, 4, 1])
    text = greedy_text(target, PROMPT, 20)
    drafter = Scripted([PROMPT + text], lambda n: next(accepted))
    (fast,), (timing,) = generate(
        target, [PROMPT], sampling=GREEDY, max_new_tokens=13, stop_ids=(), batch_size=1, drafter=drafter,
        plan=dataclasses.replace(CHAIN, length=4),
    )  # fmt: skip
    assert [r.accepted for r in fast.rounds] == [3, 0, 4, 1]
    assert [r.drafted for r in fast.rounds] == [4, 4, 4, 1]
    assert [r.emitted for r in fast.rounds] == [4, 1, 5, 2]
    assert [r.alphas for r in fast.rounds] == [(1, 1, 1, 0), (0,), (1, 1, 1, 1), (1,)]
    assert sum(r.emitted for r in fast.rounds) / len(fast.rounds) == 3.0
    assert timing.steps == 4
    assert (
        timing.draft_steps == 3 * 4
    )  # three times a chain of 4 and one observation, the last chain has length 1
    assert timing.decode_s >= timing.draft_s + timing.verify_s > 0 and timing.prefill_s > 0


@pytest.mark.case("O-X08")
def test_positions_follow_accepted_plus_one(target, monkeypatch):
    """Prompt of 5, chains of 3, of which 3, 0, 1 are accepted."""
    accepted = iter([3, 0, 1])
    prompt = PROMPT[:5]
    text = greedy_text(target, prompt, 20)
    drafter = Scripted([prompt + text], lambda n: next(accepted, 0))
    calls, states = [], target.states
    kept, commit_all = [], KVCache.commit_all

    def logged(ids, positions, layout, *, taps):
        calls.append(positions.tolist())
        return states(ids, positions, layout, taps=taps)

    def committed(cache, requests, paths):
        nodes = len(cache.pending[0])
        commit_all(cache, requests, paths)
        kept.append((cache.committed[0], nodes - len(paths[0])))

    monkeypatch.setattr(target, "states", logged)
    monkeypatch.setattr(KVCache, "commit_all", committed)
    (fast,), _ = generate(
        target, [prompt], sampling=GREEDY, max_new_tokens=12, stop_ids=(), batch_size=1, drafter=drafter,
        plan=Plan(shape="chain", length=3),
    )  # fmt: skip
    assert calls[:4] == [[0, 1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [10, 11, 12, 13]]
    assert kept[:4] == [(5, 0), (9, 0), (10, 3), (12, 2)]  # kv, removed: after the prompt, then each round
    assert [n for _, n, _ in drafter.proposed][:3] == [5, 9, 10]
    assert [1 + sum(r.emitted for r in fast.rounds[:i]) for i in (1, 2, 3)] == [5, 6, 8]


def test_a_drafter_sees_the_targets_states_at_every_committed_token(target):
    text = greedy_text(target, PROMPT, 20)
    drafter = Scripted([PROMPT + text], lambda n: n % 4)
    generate(
        target,
        [PROMPT],
        sampling=GREEDY,
        max_new_tokens=20,
        stop_ids=(),
        batch_size=1,
        drafter=drafter,
        plan=CHAIN,
    )
    known = sum(len(seen.next_ids) for seen in drafter.log)
    ids = torch.tensor((PROMPT + text)[:known])
    expected = target.states(ids, torch.arange(known), packed_layout((0, known)), taps=drafter.taps)
    assert [seen.start for seen in drafter.log] == [
        sum(len(s.next_ids) for s in drafter.log[:i]) for i in range(len(drafter.log))
    ]
    torch.testing.assert_close(
        torch.cat([seen.taps for seen in drafter.log]), expected.taps, atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(
        torch.cat([seen.final for seen in drafter.log]), expected.final, atol=1e-4, rtol=1e-4
    )


class Drawn(Scripted):
    """Draft tokens drawn from a fixed law: sampled speculation through the whole loop."""

    q = torch.softmax(torch.arange(64) / 20.0, 0)

    def propose(self, requests, plan, sampler):
        q = self.q.expand(len(requests), 64)
        tokens = [
            sampler.draw(
                q,
                requests=requests,
                root_positions=[len(self.roots[r]) for r in requests],
                slots=[k] * len(requests),
            )
            for k in range(plan.length)
        ]
        parents = tuple(range(-1, plan.length - 1))
        laws = self.q.expand(plan.length, 64)
        return [Proposal(torch.tensor(column), parents, q=laws) for column in zip(*tokens, strict=True)]


@pytest.mark.parametrize("rule", ["rejection", "target_only"])
def test_sampled_pairs_of_tokens_follow_the_targets_law_through_a_drafter(target, rule):
    """Chi-square of the second and third token given the first, over the requests that share it."""
    sampling = Sampling(temperature=1.0, top_k=3, seed=2)
    n = 2400
    texts, _ = generate(
        target, [[5, 6]] * n, sampling=sampling, max_new_tokens=4, stop_ids=(), batch_size=800,
        drafter=Drawn([], None), plan=Plan(shape="chain", length=2), law=rule,
    )  # fmt: skip
    assert sum(r.accepted for g in texts for r in g.rounds) > 50
    for place in (1, 2):
        seen = {}
        for text in texts:
            seen.setdefault(text.ids[:place], []).append(text.ids[place])
        head = max(seen, key=lambda ids: len(seen[ids]))
        p = law(target.logits(final_states(target, [5, 6, *head])[-1:]), temperature=1.0, top_k=3)[0]
        counts = torch.bincount(torch.tensor(seen[head]), minlength=64)
        expected = len(seen[head]) * p
        possible = p > 0
        assert not counts[~possible].any()
        assert ((counts - expected)[possible] ** 2 / expected[possible]).sum() < 13.8  # 2 degrees, 0.1%


def test_the_context_limit_bounds_text_and_drafts(target):
    target.config.max_position_embeddings = 16
    text = greedy_text(target, PROMPT, 4)
    drafter = Scripted([PROMPT + text], RIGHT["always"])
    (fast,), _ = generate(
        target,
        [PROMPT],
        sampling=GREEDY,
        max_new_tokens=50,
        stop_ids=(),
        batch_size=1,
        drafter=drafter,
        plan=CHAIN,
    )
    assert list(fast.ids) == text and fast.finish_reason == "length"
    assert [r.drafted for r in fast.rounds] == [2]


def test_orders_name_the_drafters_ranking_at_each_emitted_token(target):
    class Ranked(Scripted):
        def propose(self, requests, plan, sampler):
            assert plan.ranked == 64
            ranked = torch.tensor([[9, 8], [7, 6], [5, 4], [3, 2], [-1, -1]])
            return [dataclasses.replace(p, ranked=ranked) for p in super().propose(requests, plan, sampler)]

    text = greedy_text(target, PROMPT, 7)
    (fast,), _ = generate(
        target, [PROMPT], sampling=GREEDY, max_new_tokens=7, stop_ids=(), batch_size=1, plan=CHAIN,
        drafter=Ranked([PROMPT + text], RIGHT["always"]), record_orders=True,
    )  # fmt: skip
    rows = [None if order is None else order.tolist() for order in fast.orders]
    assert rows == [None, [9, 8], [7, 6], [5, 4], [3, 2], None, None]

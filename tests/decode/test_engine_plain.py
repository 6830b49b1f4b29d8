"""The decode loop without a drafter: cuts, seeds, timings, and what it refuses."""

import pytest
import torch

from spectrain.decode.engine import generate
from spectrain.decode.plan import clamp
from spectrain.decode.sampling import Sampling, law
from spectrain.decode.stops import cut
from spectrain.proposal import Plan, Proposal
from spectrain.target import Target, packed_layout
from spectrain.testing import tiny_llama

GREEDY = Sampling()
CHAIN = Plan(shape="chain", length=4)
PROMPT = [5, 9, 13, 7, 3, 22, 41, 8, 30, 11, 12, 6]


@pytest.fixture
def target():
    return Target(tiny_llama(layers=3, hidden=32, vocab=64))


@pytest.mark.case("O-X01")
@pytest.mark.parametrize(
    ("block", "budget", "kept", "reason"),
    [
        ([7, 8, 2, 9, 4], 10, [7, 8, 2], "stop"),
        ([7, 8, 2, 9, 4], 3, [7, 8, 2], "stop"),
        ([7, 8, 2, 9, 4], 2, [7, 8], "length"),
        ([2], 5, [2], "stop"),
        ([5, 6, 7, 8, 2], 4, [5, 6, 7, 8], "length"),
        ([5, 6], 4, [5, 6], None),
    ],
)
def test_a_block_is_cut_at_the_stop_token_then_at_the_budget(block, budget, kept, reason):
    assert cut(block, frozenset({2}), budget) == (kept, reason)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, top_p=0.9, seed=5)])
def test_a_request_has_the_same_text_alone_and_in_any_batch(target, sampling):
    prompts = [PROMPT[: 3 + i] for i in range(5)]
    settings = {"sampling": sampling, "max_new_tokens": 12, "stop_ids": (7, 30)}
    together, _ = generate(target, prompts, **settings, batch_size=3)
    for i, prompt in enumerate(prompts):
        (alone,), _ = generate(target, [prompt], **settings, batch_size=1, request_keys=[i])
        assert alone == together[i]


def test_each_prompt_has_its_own_timing_at_batch_size_1(target):
    _, timings = generate(
        target, [[1], [2], [3]], sampling=GREEDY, max_new_tokens=3, stop_ids=(), batch_size=1
    )
    assert [timing.steps for timing in timings] == [2, 2, 2]


def test_plain_decoding_at_a_temperature_draws_from_the_targets_law(target):
    sampling = Sampling(temperature=0.7, top_k=4, seed=1)
    n = 3000
    texts, _ = generate(
        target, [[5, 6]] * n, sampling=sampling, max_new_tokens=1, stop_ids=(), batch_size=500
    )
    logits = target.logits(
        target.states(torch.tensor([5, 6]), torch.arange(2), packed_layout((0, 2))).final[-1:]
    )
    p = law(logits, temperature=0.7, top_k=4)[0]
    counts = torch.bincount(torch.tensor([g.ids[0] for g in texts]), minlength=64)
    possible = p > 0
    assert not counts[~possible].any() and possible.sum() == 4
    assert ((counts - n * p)[possible] ** 2 / (n * p[possible])).sum() < 16.3  # 3 degrees of freedom, 0.1%


def test_clamp_drops_deep_nodes_and_renumbers():
    tree = Proposal(torch.tensor([4, 5, 6, 7, 8]), (-1, 0, 1, -1, 3), ranked=torch.arange(6)[:, None])
    short = clamp(tree, 2)
    assert short.tokens.tolist() == [4, 5, 7, 8] and short.parents == (-1, 0, -1, 2)
    assert short.ranked.tolist() == [[0], [1], [2], [4], [5]]
    assert clamp(tree, 3) is tree


def test_logits_that_are_not_finite_name_the_prompt(target, monkeypatch):
    logits = target.logits
    monkeypatch.setattr(
        target, "logits", lambda states: logits(states).index_fill(0, torch.tensor(1), float("nan"))
    )
    with pytest.raises(ValueError, match="prompt 1 after 0 tokens: target logits are not finite"):
        generate(target, [[1], [2]], sampling=GREEDY, max_new_tokens=3, stop_ids=(), batch_size=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"law": "strict"},
            "law='strict': expected one of rejection, block, target_only, recursive, typical",
        ),
        ({"law": "thresholds"}, "leniency: thresholds of 1 are law target_only"),
        ({"law": "recursive", "plan": CHAIN, "drafter": object()}, "law=recursive: a chain has no siblings"),
        (
            {"law": "recursive", "plan": Plan("tree", 2, nodes=3, top_k=2), "drafter": object()},
            "law=recursive with plan.sampled=False",
        ),
        (
            {"law": "block", "plan": Plan("chain", 2, sampled=True), "drafter": object()},
            "plan.sampled=True with plan.shape=chain, plan.budget=None: expected False",
        ),
        ({"plan": CHAIN}, "plan=.* and a drafter go together"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"request_keys": [3, 3]}, "request_keys="),
        ({"prompts": [[1], []]}, "prompt 1: 0 tokens, expected 1 to 511"),
        (
            {"plan": Plan("tree", 2, nodes=3, top_k=2), "law": "rejection", "drafter": object()},
            "law=rejection: verifies chains only",
        ),
        ({"plan": Plan("tree", 2), "drafter": object()}, "plan.nodes=0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(target, settings, message):
    defaults = {
        "prompts": [[1], [2]],
        "sampling": GREEDY,
        "max_new_tokens": 3,
        "stop_ids": (),
        "batch_size": 2,
    }
    with pytest.raises(ValueError, match=message):
        generate(target, **{**defaults, **settings})


def test_no_prompts_give_no_texts(target):
    assert generate(target, [], sampling=GREEDY, max_new_tokens=3, stop_ids=(), batch_size=2) == ([], [])

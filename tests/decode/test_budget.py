"""A budget keeps the law exact because it never looks at the token that it would cut; enumerated."""

import pytest
import torch

from spectrain.decode.exact import Process
from spectrain.drafters.autoregressive import grow
from spectrain.proposal import Budget, Plan, Proposal
from spectrain.testing import LawStepper

NOTHING = Proposal(torch.empty(0, dtype=torch.int64), ())
PRICES = [(0.05, 0.3), (0.3, 0.1), (0.05, 0.9)]


def adaptive(process, step, node, *, length, most, seen):
    """Chains of at most `most` tokens in a text of `length` under a budget whose rate follows the rounds
    before, as the engine's does."""
    price = Budget(root=1.0, step=step, node=node)
    spent = {}

    def propose(streams, text):
        if not text:
            spent.update(rounds=0, steps=0, nodes=0)
        budget = Budget(root=1.0, step=step, node=node, rates=(price.rate(tokens=len(text), **spent),))
        room = min(most, length - len(text) - 1)
        found = NOTHING
        if room > 0:
            stepper = LawStepper(process.q, text)
            (found,) = grow(stepper, [0], Plan("chain", room, budget=budget), streams)
            seen.add(len(found.parents))
        for name, more in (("rounds", 1), ("steps", len(found.parents) - 1), ("nodes", len(found.parents))):
            spent[name] += max(0, more)
        return found

    return propose


@pytest.mark.parametrize("law", ["rejection", "block", "target_only"])
@pytest.mark.parametrize(("vocab", "length", "most"), [(2, 4, 3), (3, 3, 2)])
def test_the_law_stays_exact_when_the_budget_ends_chains(vocab, length, most, law):
    """Texts of one to `length` rounds, whose draft lengths follow confidences and all earlier rounds."""
    seen = set()
    for seed in range(4):
        process = Process(seed, vocab)
        for step, node in PRICES:
            propose = adaptive(process, step, node, length=length, most=most, seen=seen)
            assert process.distance(propose, law, length=length, rounds=length) <= 1e-12
    assert seen == set(range(most + 1))  # the rule does cut


def anticipating(process, node, *, length, most):
    """The mistake: a slot is cut by the probability of the very token that was drawn for it."""

    def propose(streams, text):
        room = min(most, length - len(text) - 1)
        if room < 1:
            return NOTHING
        whole = process.chain(room)(streams, text)
        budget, survival, kept = Budget(root=1.0, step=0.0, node=node, rates=(1.0,)), 1.0, 0
        for token, q in zip(whole.tokens.tolist(), whole.q, strict=True):
            survival *= float(q[token])
            if not budget.keeps(0, survival):
                break
            kept += 1
        return Proposal(whole.tokens[:kept], whole.parents[:kept], q=whole.q[:kept] or None)

    return propose


@pytest.mark.parametrize("law", ["rejection", "block"])
def test_a_budget_that_looks_at_the_drawn_token_is_caught(law):
    found = []
    for seed in (0, 2, 3):  # nothing is cut under the laws of seed 1
        process = Process(seed, 3)
        propose = anticipating(process, 0.3, length=3, most=2)
        found.append(process.distance(propose, law, length=3, rounds=3))
    assert min(found) > 0.01


def test_target_only_does_not_mind_what_the_budget_looks_at():
    for seed in range(4):
        process = Process(seed, 3)
        propose = anticipating(process, 0.3, length=3, most=2)
        assert process.distance(propose, "target_only", length=3, rounds=3) <= 1e-12


def test_the_published_counterexample_of_retrospective_cutting():
    """p = .7 .3, q = .5 .5: dropping the draft whenever it is token 1 gives .85 .15 (DSpark's appendix)."""
    process = Process(0, 2, p=[0.7, 0.3], q=[0.5, 0.5])

    def propose(streams, text):
        whole = process.chain(1)(streams, text)
        return NOTHING if whole.tokens.tolist() == [1] else whole

    for law, error in (("rejection", 0.15), ("block", 0.15), ("target_only", 0.0)):
        assert process.distance(propose, law, length=1) == pytest.approx(error, abs=1e-7)

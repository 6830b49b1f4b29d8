"""A budget keeps the law exact because it never looks at the token that it would cut; enumerated."""

from collections import defaultdict
from itertools import product

import pytest
import torch

from spectrain.decode.sampling import Sampling, Streams
from spectrain.decode.verify import check_proposal, verify
from spectrain.drafters.autoregressive import grow
from spectrain.proposal import Budget, Plan, Proposal
from spectrain.testing import TableStepper


class Enumeration(Streams):
    """Streams that follow a script of outcomes; they record each one's probability and the alternatives."""

    def __init__(self, script):
        super().__init__(Sampling(temperature=1.0), [0])
        self.script, self.trail, self.probability = list(script), [], 1.0

    def outcome(self, weights):
        weights = torch.as_tensor(weights, dtype=torch.float64)
        possible = [(i, w) for i, w in enumerate((weights / weights.sum()).tolist()) if w > 0]
        at = self.script[len(self.trail)] if len(self.trail) < len(self.script) else 0
        self.trail.append((at, len(possible)))
        self.probability *= possible[at][1]
        return possible[at][0]

    def choose(self, weights, request, root_position, slot):
        return self.outcome(weights)

    def pick(self, law_MV, requests, root_positions, slots, purpose):
        return [self.outcome(row) for row in law_MV]


def outcomes(run):
    """(result, probability) of every way `run(streams)` can go."""
    scripts = [[]]
    while scripts:
        streams = Enumeration(scripts.pop())
        yield run(streams), streams.probability
        for i in range(len(streams.script), len(streams.trail)):
            head = [at for at, _ in streams.trail[:i]]
            scripts += [[*head, other] for other in range(1, streams.trail[i][1])]


class Process:
    """Random p and q behind every text of less than `length` tokens, with zeros and ties."""

    def __init__(self, seed, vocab, length):
        generator = torch.Generator().manual_seed(seed)
        self.vocab, self.length = vocab, length
        self.p, self.q = {}, {}
        for text in (text for n in range(length) for text in product(range(vocab), repeat=n)):
            for laws in (self.p, self.q):
                weights = torch.randint(0, 4, (vocab,), generator=generator).float()
                weights[int(torch.randint(vocab, (1,), generator=generator))] += 1
                laws[text] = weights / weights.sum()

    def stepper(self, text):
        """The drafter behind `text`."""
        table = {
            path[len(text) :]: q.log().tolist() for path, q in self.q.items() if path[: len(text)] == text
        }
        return TableStepper(table)

    def distance(self, propose, law):
        """Total variation between the text of rounds of propose(streams, text, history) and p's own."""
        found = defaultdict(float)

        def run(streams):
            text, history = (), {"tokens": 0, "rounds": 0, "steps": 0, "nodes": 0}
            while len(text) < self.length:
                proposal = propose(streams, text, history)
                check_proposal(proposal, self.vocab, law)
                prefixes = [text]
                for token, parent in zip(proposal.tokens.tolist(), proposal.parents, strict=True):
                    prefixes.append((*prefixes[parent + 1], token))
                (verdict,) = verify(
                    [proposal],
                    lambda which, nodes, at=prefixes: torch.stack([self.law(at[node + 1]) for node in nodes]),
                    law=law,
                    streams=streams,
                    requests=[0],
                    root_positions=[len(text)],
                )
                text += (*proposal.tokens[list(verdict.path)].tolist(), verdict.bonus)
                N = len(proposal.parents)
                for name, more in (("tokens", len(verdict.path) + 1), ("rounds", 1), ("nodes", N)):
                    history[name] += more
                history["steps"] += max(0, N - 1)
            return text[: self.length]

        for text, chance in outcomes(run):
            found[text] += chance
        return (
            sum(
                abs(found[text] - self.chance(text))
                for text in product(range(self.vocab), repeat=self.length)
            )
            / 2
        )

    def law(self, text):
        """p, or anything behind the end of the text."""
        return self.p.get(text, self.p[()])

    def chance(self, text):
        found = 1.0
        for i, token in enumerate(text):
            p = self.p[text[:i]].double()
            found *= (p[token] / p.sum()).item()
        return found


PRICES = [(0.05, 0.3), (0.3, 0.1), (0.05, 0.9)]


def adaptive(process, step, node, most, seen):
    """Chains under a budget whose rate follows the rounds before, as the engine's does."""

    def propose(streams, text, history):
        price = Budget(root=1.0, step=step, node=node)
        budget = Budget(root=1.0, step=step, node=node, rates=(price.rate(**history),))
        length = min(most, process.length - len(text) - 1)
        if length < 1:
            return Proposal(torch.empty(0, dtype=torch.int64), ())
        (proposal,) = grow(process.stepper(text), [0], Plan("chain", length, budget=budget), streams)
        seen.add((length, len(proposal.parents)))
        return proposal

    return propose


@pytest.mark.parametrize("law", ["rejection", "target_only"])
@pytest.mark.parametrize(("vocab", "length", "most"), [(2, 4, 3), (3, 3, 2)])
def test_the_law_stays_exact_when_the_budget_ends_chains(vocab, length, most, law):
    """Texts of one to `length` rounds, whose draft lengths follow confidences and all earlier rounds."""
    seen = set()
    for seed in range(4):
        for step, node in PRICES:
            process = Process(seed, vocab, length)
            assert process.distance(adaptive(process, step, node, most, seen), law) <= 1e-12
    assert {drafted for _, drafted in seen} == set(range(most + 1))  # the rule does cut


def anticipating(process, node, most):
    """The mistake: a slot is cut by the probability of the very token that was drawn for it."""

    def propose(streams, text, history):
        length = min(most, process.length - len(text) - 1)
        if length < 1:
            return Proposal(torch.empty(0, dtype=torch.int64), ())
        (whole,) = grow(process.stepper(text), [0], Plan("chain", length), streams)
        budget, survival, kept = Budget(root=1.0, step=0.0, node=node, rates=(1.0,)), 1.0, 0
        for token, q in zip(whole.tokens.tolist(), whole.q, strict=True):
            survival *= float(q[token])
            if not budget.keeps(0, survival):
                break
            kept += 1
        return Proposal(whole.tokens[:kept], whole.parents[:kept], q=whole.q[:kept] or None)

    return propose


def test_a_budget_that_looks_at_the_drawn_token_is_caught_under_rejection():
    found = []
    for seed in range(4):
        process = Process(seed, 3, 3)
        found.append(process.distance(anticipating(process, 0.3, 2), "rejection"))
    assert min(found) > 0.01


def test_target_only_does_not_mind_what_the_budget_looks_at():
    for seed in range(4):
        process = Process(seed, 3, 3)
        assert process.distance(anticipating(process, 0.3, 2), "target_only") <= 1e-12


def test_the_published_counterexample_of_retrospective_cutting():
    """p = .7 .3, q = .5 .5: dropping the draft whenever it is token 1 gives .85 .15 (DSpark's appendix)."""
    process = Process(0, 2, 1)
    process.p[()], process.q[()] = torch.tensor([0.7, 0.3]), torch.tensor([0.5, 0.5])

    def propose(streams, text, history):
        (whole,) = grow(process.stepper(text), [0], Plan("chain", 1), streams)
        if whole.tokens.tolist() == [1]:
            return Proposal(torch.empty(0, dtype=torch.int64), ())
        return whole

    assert process.distance(propose, "rejection") == pytest.approx(0.15, abs=1e-7)
    assert process.distance(propose, "target_only") <= 1e-12

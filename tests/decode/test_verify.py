"""Exact losslessness: every outcome of coins and draws is enumerated with its probability, none is drawn."""

from collections import defaultdict
from itertools import product

import pytest
import torch

from spectrain.decode.sampling import BONUS, DRAFT, Sampling, Streams
from spectrain.decode.verify import check_proposal, verify
from spectrain.proposal import Proposal


class Enumeration(Streams):
    """Streams that follow a script of outcomes; they record each one's probability and the alternatives."""

    def __init__(self, script):
        super().__init__(Sampling(temperature=1.0), [0])
        self.script, self.trail = list(script), []

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

    @property
    def probability(self):
        found = 1.0
        for at, possible in self.trail:
            found *= possible[at][1]
        return found


def outcomes(run):
    """(result, probability) of every way `run(streams)` can go."""
    scripts = [[]]
    while scripts:
        streams = Enumeration(scripts.pop())
        result = run(streams)
        yield result, streams.probability
        for i in range(len(streams.script), len(streams.trail)):
            head = [at for at, _ in streams.trail[:i]]
            scripts += [[*head, other] for other in range(1, len(streams.trail[i][1]))]


def law_of(generator, vocab, *, zeros=True):
    """A float32 law; a third of the entries are 0 and the rest is coarse, so that ties occur."""
    weights = torch.randint(1, 4, (vocab,), generator=generator).float()
    if zeros:
        weights *= torch.rand(vocab, generator=generator) > 1 / 3
    if weights.sum() == 0:
        weights[0] = 1
    return weights / weights.sum()


class Process:
    """p and q at every prefix of at most `depth` tokens."""

    def __init__(self, seed, vocab, depth):
        generator = torch.Generator().manual_seed(seed)
        prefixes = [prefix for n in range(depth + 1) for prefix in product(range(vocab), repeat=n)]
        self.p = {prefix: law_of(generator, vocab) for prefix in prefixes}
        self.q = {prefix: law_of(generator, vocab) for prefix in prefixes}
        self.vocab, self.depth, self.generator = vocab, depth, generator

    def target_law(self):
        """Probability of each text of depth + 1 tokens under p alone."""
        found = {}
        for text in product(range(self.vocab), repeat=self.depth + 1):
            chance = 1.0
            for i, token in enumerate(text):
                p = self.p[text[:i]].double()
                chance *= (p[token] / p.sum()).item()
            found[text] = chance
        return found

    def emitted_law(self, propose, law):
        """Probability of each text when a round's tokens are followed by plain draws from p."""
        found = defaultdict(float)

        def run(streams):
            proposal = propose(streams)
            check_proposal(proposal, self.vocab, law)
            prefixes = [()]
            for token, parent in zip(proposal.tokens.tolist(), proposal.parents, strict=True):
                prefixes.append((*prefixes[parent + 1], token))
            (verdict,) = verify(
                [proposal],
                lambda which, nodes: torch.stack([self.p[prefixes[node + 1]] for node in nodes]),
                law=law,
                streams=streams,
                requests=[0],
                root_positions=[0],
            )
            text = (*(proposal.tokens[node].item() for node in verdict.path), verdict.bonus)
            while len(text) <= self.depth:
                text = (*text, *streams.pick(self.p[text][None], [0], [0], [0], BONUS))
            return text

        for text, chance in outcomes(run):
            found[text] += chance
        return found

    def distance(self, propose, law):
        emitted, expected = self.emitted_law(propose, law), self.target_law()
        return sum(abs(emitted[text] - expected[text]) for text in expected) / 2


def drawn_chain(process):
    def propose(streams):
        tokens, laws = [], []
        for _ in range(process.depth):
            laws.append(process.q[tuple(tokens)])
            tokens += streams.pick(laws[-1][None], [0], [0], [len(tokens)], DRAFT)
        parents = tuple(range(-1, process.depth - 1))
        return Proposal(torch.tensor(tokens), parents, q=torch.stack(laws))

    return propose


def fixed_tree(process, nodes):
    """A random tree of distinct siblings, no deeper than the process."""
    tokens, parents, depths = [], [], []
    while len(tokens) < nodes:
        parent = int(torch.randint(-1, len(tokens), (1,), generator=process.generator)) if tokens else -1
        token = int(torch.randint(process.vocab, (1,), generator=process.generator))
        depth = 1 if parent < 0 else depths[parent] + 1
        if depth > process.depth or (parent, token) in zip(parents, tokens, strict=True):
            nodes -= 1
            continue
        tokens.append(token)
        parents.append(parent)
        depths.append(depth)
    proposal = Proposal(torch.tensor(tokens), tuple(parents))
    return lambda streams: proposal


@pytest.mark.parametrize(("vocab", "depth"), [(2, 1), (2, 3), (3, 2), (4, 2), (5, 1)])
def test_rejection_is_exact(vocab, depth):
    for seed in range(6):
        process = Process(seed, vocab, depth)
        assert process.distance(drawn_chain(process), "rejection") <= 1e-12


@pytest.mark.parametrize(("vocab", "depth", "nodes"), [(2, 3, 6), (3, 2, 5), (4, 2, 7), (5, 1, 4), (3, 3, 8)])
def test_target_only_is_exact_on_trees(vocab, depth, nodes):
    for seed in range(6):
        process = Process(seed, vocab, depth)
        assert process.distance(fixed_tree(process, nodes), "target_only") <= 1e-12


def test_target_only_is_exact_on_drawn_chains():
    """The draft's law plays no part, but its draws must be independent of the coins."""
    for seed in range(6):
        process = Process(seed, 3, 2)
        assert process.distance(drawn_chain(process), "target_only") <= 1e-12


def test_rejection_of_a_chosen_chain_is_exact():
    for seed in range(6):
        process = Process(seed, 4, 2)
        chain = Proposal(torch.tensor([seed % 4, 1]), (-1, 0))
        assert process.distance(lambda streams, chain=chain: chain, "rejection") <= 1e-12


def one_level(p, propose, law):
    """Law of the first emitted token, and the acceptance of the first level."""
    process = Process(0, len(p), 0)
    process.p[()] = torch.tensor(p)
    accepted = 0.0

    def run(streams):
        proposal = propose(streams)
        rows = torch.tensor([p] * (len(proposal.parents) + 1))
        (verdict,) = verify(
            [proposal],
            lambda which, nodes: rows[[node + 1 for node in nodes]],
            law=law,
            streams=streams,
            requests=[0],
            root_positions=[0],
        )
        return (
            [*proposal.tokens[list(verdict.path)].tolist(), verdict.bonus][0],
            len(verdict.path),
            verdict.alphas[0],
        )

    emitted, alphas = [0.0] * len(p), set()
    for (token, length, alpha), chance in outcomes(run):
        emitted[token] += chance
        accepted += chance * (length > 0)
        alphas.add(round(alpha, 6))
    (alpha,) = alphas
    assert alpha == pytest.approx(accepted, abs=1e-6)
    return emitted, accepted


def drawn_from(q):
    def propose(streams):
        law = torch.tensor([q])
        return Proposal(torch.tensor(streams.pick(law, [0], [0], [0], DRAFT)), (-1,), q=law)

    return propose


@pytest.mark.case("O-X03")
def test_filters_on_both_sides_or_on_the_target_alone():
    p = [0.625, 0.375, 0.0, 0.0]  # [.5 .3 .15 .05] after top-k 2
    emitted, alpha = one_level(p, drawn_from([0.0, 0.0, 3 / 7, 4 / 7]), "rejection")
    assert emitted == pytest.approx(p, abs=1e-9) and alpha == 0
    emitted, alpha = one_level(p, drawn_from([0.1, 0.2, 0.3, 0.4]), "rejection")
    assert emitted == pytest.approx(p, abs=1e-7) and alpha == pytest.approx(0.3, abs=1e-7)


@pytest.mark.case("O-X04")
def test_the_residual_uses_its_own_number():
    p, q = [0.4, 0.1, 0.3, 0.2], [0.1, 0.5, 0.2, 0.2]
    emitted, alpha = one_level(p, drawn_from(q), "rejection")
    assert emitted == pytest.approx(p, abs=1e-7) and alpha == pytest.approx(0.6, abs=1e-7)
    streams, counts, n = Streams(Sampling(temperature=1.0, seed=1), [0]), [0] * 4, 20000
    law = torch.tensor([p])
    proposals = [
        Proposal(torch.tensor([token]), (-1,), q=torch.tensor([q]))
        for token in streams.draw(
            torch.tensor([q]).expand(n, 4), requests=[0] * n, root_positions=range(n), slots=[0] * n
        )
    ]
    verdicts = verify(
        proposals,
        lambda which, nodes: law.expand(len(which), 4),
        law="rejection",
        streams=streams,
        requests=[0] * n,
        root_positions=range(n),
    )
    for proposal, verdict in zip(proposals, verdicts, strict=True):
        counts[proposal.tokens[0] if verdict.path else verdict.bonus] += 1
    chi_square = sum((c - n * e) ** 2 / (n * e) for c, e in zip(counts, p, strict=True))
    assert chi_square < 16.3  # 3 degrees of freedom, 0.1%; one number for coin and residual gives about 73


@pytest.mark.case("O-X05")
def test_siblings_1_then_0_of_the_field_case():
    siblings = Proposal(torch.tensor([1, 0]), (-1, -1))
    emitted, alpha = one_level([0.5, 0.3, 0.2], lambda streams: siblings, "target_only")
    assert emitted == pytest.approx([0.5, 0.3, 0.2], abs=1e-7) and alpha == pytest.approx(0.8, abs=1e-7)


def test_children_that_hold_all_the_mass_leave_no_residual():
    siblings = Proposal(torch.tensor([2, 0, 1]), (-1, -1, -1))
    emitted, alpha = one_level([0.1, 0.2, 0.7], lambda streams: siblings, "target_only")
    assert emitted == pytest.approx([0.1, 0.2, 0.7], abs=1e-7) and alpha == pytest.approx(1)


def test_equal_laws_always_accept():
    p = [0.1, 0.2, 0.7]
    assert one_level(p, drawn_from(p), "rejection")[1] == pytest.approx(1, abs=1e-12)


def test_greedy_follows_the_arg_max_through_a_tree():
    best = {(): 3, (3,): 1, (3, 1): 0}
    proposal = Proposal(torch.tensor([2, 3, 0, 1, 1]), (-1, -1, 1, 1, 0))
    prefixes = [(), (2,), (3,), (3, 0), (3, 1), (2, 1)]

    def laws(which, nodes):
        logits = torch.zeros(len(nodes), 4)
        for row, node in enumerate(nodes):
            logits[row, best[prefixes[node + 1]]] = 1
        return Sampling().law(logits)

    (verdict,) = verify(
        [proposal],
        laws,
        law="target_only",
        streams=Streams(Sampling(), [0]),
        requests=[0],
        root_positions=[4],
    )
    assert (verdict.path, verdict.bonus, verdict.alphas) == ((1, 3), 0, (1.0, 1.0))


@pytest.mark.case("O-X02")
def test_acceptance_counts_the_prefix_only():
    """Match rows 1011, 1110, 0111 accept 1, 3 and 0 draft tokens."""
    rows = [(1, 0, 1, 1), (1, 1, 1, 0), (0, 1, 1, 1)]
    proposals = [Proposal(torch.tensor(row), (-1, 0, 1, 2)) for row in rows]

    def laws(which, nodes):
        return torch.tensor([[0.0, 1.0]] * len(which))

    verdicts = verify(
        proposals,
        laws,
        law="rejection",
        streams=Streams(Sampling(), [0, 1, 2]),
        requests=[0, 1, 2],
        root_positions=[0, 0, 0],
    )
    assert [len(verdict.path) for verdict in verdicts] == [1, 3, 0]
    assert [verdict.alphas for verdict in verdicts] == [(1, 0), (1, 1, 1, 0), (0,)]


@pytest.mark.parametrize(
    ("proposal", "law", "message"),
    [
        (Proposal(torch.tensor([1, 1]), (-1, -1)), "target_only", "node -1 has child token 1 twice"),
        (Proposal(torch.tensor([1, 2]), (-1, -1)), "rejection", "a tree, which needs law=target_only"),
        (Proposal(torch.tensor([1, 2]), (1, -1)), "target_only", "node 0 has parent 1"),
        (Proposal(torch.tensor([9]), (-1,)), "target_only", "node 0 has token 9, expected 0 to 3"),
        (Proposal(torch.tensor([1]), ()), "target_only", "1 tokens but 0 parents"),
    ],
)
def test_proposals_that_no_law_covers_are_refused(proposal, law, message):
    with pytest.raises(ValueError, match=message):
        check_proposal(proposal, 4, law)


@pytest.mark.parametrize("bad", [0.0, float("nan")])
def test_a_token_that_its_law_cannot_draw_is_refused(bad):
    proposal = Proposal(torch.tensor([1]), (-1,), q=torch.tensor([[1.0, bad]]))
    with pytest.raises(ValueError, match="draft token 1 has q="):
        verify(
            [proposal],
            lambda which, nodes: torch.tensor([[0.5, 0.5]]),
            law="rejection",
            streams=Streams(Sampling(temperature=1.0), [0]),
            requests=[0],
            root_positions=[0],
        )

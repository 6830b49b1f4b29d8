"""Exact losslessness: every outcome of coins and draws is enumerated with its probability, none is drawn."""

import numpy as np
import pytest
import torch

from spectrain.decode import verify as rules
from spectrain.decode.exact import Process, emitted, outcomes
from spectrain.decode.sampling import COIN, DRAFT, RESIDUAL, Sampling, Streams
from spectrain.decode.verify import check_proposal, verify
from spectrain.eval.pit import chi_square_tail
from spectrain.proposal import Proposal


def fixed_tree(seed, vocab, depth, nodes):
    """A random tree of distinct siblings, at most `depth` deep."""
    generator = torch.Generator().manual_seed(seed)
    tokens, parents, depths = [], [], []
    while len(tokens) < nodes:
        parent = int(torch.randint(-1, len(tokens), (1,), generator=generator)) if tokens else -1
        token = int(torch.randint(vocab, (1,), generator=generator))
        level = 1 if parent < 0 else depths[parent] + 1
        if level > depth or (parent, token) in zip(parents, tokens, strict=True):
            nodes -= 1
            continue
        tokens.append(token)
        parents.append(parent)
        depths.append(level)
    proposal = Proposal(torch.tensor(tokens), tuple(parents))
    return lambda streams, text: proposal


@pytest.mark.parametrize(("vocab", "depth"), [(2, 1), (2, 4), (3, 2), (4, 2), (5, 1), (6, 1)])
def test_rejection_is_exact(vocab, depth):
    for seed in range(4):
        process = Process(seed, vocab)
        assert process.distance(process.chain(depth), "rejection", length=depth + 1) <= 1e-12


@pytest.mark.parametrize(
    ("vocab", "depth", "nodes"), [(2, 4, 8), (3, 2, 5), (4, 2, 7), (5, 1, 4), (3, 3, 8), (6, 1, 4)]
)
def test_target_only_is_exact_on_trees(vocab, depth, nodes):
    for seed in range(4):
        tree = fixed_tree(seed, vocab, depth, nodes)
        assert Process(seed, vocab).distance(tree, "target_only", length=depth + 1) <= 1e-12


@pytest.mark.parametrize("law", ["rejection", "target_only"])
def test_two_rounds_are_exact(law):
    """The pair law of successive rounds, with the keys of the real random streams."""
    for seed in range(3):
        process = Process(seed, 3)
        assert process.distance(process.chain(1), law, length=4, rounds=2) <= 1e-12
        process = Process(seed, 2)
        assert process.distance(process.chain(2), law, length=5, rounds=2) <= 1e-12


def test_target_only_is_exact_on_drawn_chains():
    """The draft's law plays no part, but its draws must be independent of the coins."""
    for seed in range(6):
        process = Process(seed, 3)
        assert process.distance(process.chain(2), "target_only", length=3) <= 1e-12


@pytest.mark.parametrize("law", ["rejection", "block", "recursive", "target_only"])
def test_a_chosen_chain_is_verified_exactly_by_every_lossless_law(law):
    for seed in range(6):
        chain = Proposal(torch.tensor([seed % 4, 1]), (-1, 0))
        assert Process(seed, 4).distance(lambda streams, text, c=chain: c, law, length=3) <= 1e-12


@pytest.mark.parametrize("law", ["rejection", "block", "target_only"])
def test_the_alphas_are_the_chances_of_the_reached_slots(law):
    """Over the rounds that reach slot k, accepted minus alpha_k has the mean 0."""
    for seed in range(6):
        process = Process(seed, 3)
        excess = [0.0] * 3
        for _, verdict, chance in process.one_round(process.chain(3), law):
            kept = len(verdict.path)
            assert len(verdict.alphas) == min(kept + 1, 3)
            for k, alpha in enumerate(verdict.alphas):
                excess[k] += chance * ((k < kept) - alpha)
        assert excess == pytest.approx([0, 0, 0], abs=1e-6)  # rejection's alphas are float32


@pytest.mark.parametrize("law", ["rejection", "block"])
def test_a_length_that_looks_at_the_drawn_token_is_lossy(law):
    """Dropping every draft token 1 gives (.85, .15) instead of (.7, .3)."""
    process = Process(0, 2, p=[0.7, 0.3], q=[0.5, 0.5])

    def looking(streams, text):
        chain = process.chain(1)(streams, text)
        return chain if chain.tokens[0] == 0 else Proposal(chain.tokens[:0], ())

    found = first_token([0.7, 0.3], looking, law)
    assert found == pytest.approx([0.85, 0.15], abs=1e-6)
    assert process.distance(looking, law, length=2) == pytest.approx(0.15, abs=1e-6)
    assert process.distance(looking, "target_only", length=2) <= 1e-12


@pytest.mark.parametrize("law", ["rejection", "block"])
def test_a_length_that_looks_at_earlier_text_alone_is_exact(law):
    for seed in range(4):
        process = Process(seed, 3)

        def propose(streams, text, process=process):
            return process.chain(1 + (len(text) + sum(text)) % 2)(streams, text)

        assert process.distance(propose, law, length=4, rounds=2) <= 1e-12


def one_level(p, propose, law):
    """Law of the first emitted token, and the acceptance of the first level."""
    alphas, accepted = set(), 0.0
    for _, verdict, chance in Process(0, len(p), p=p).one_round(propose, law):
        accepted += chance * (len(verdict.path) > 0)
        alphas.add(round(verdict.alphas[0], 6))
    (alpha,) = alphas
    assert alpha == pytest.approx(accepted, abs=1e-6)
    return first_token(p, propose, law), accepted


def first_token(p, propose, law, **settings):
    """Law of the first emitted token, also of a rule with a planted fault; settings: those of `outcomes`."""
    process, found = Process(0, len(p), p=p), [0.0] * len(p)

    def run(streams):
        proposal = propose(streams, ())
        return emitted(proposal, process.verdict(proposal, (), law, streams))[0]

    for token, chance in outcomes(run, **settings):
        found[token] += chance
    return found


def drawn_from(q, stated=None):
    """One token drawn from q, with the law `stated` where the proposal says another."""

    def propose(streams, text):
        law = torch.tensor([q])
        tokens = torch.tensor(streams.pick(law, [0], [0], [0], DRAFT))
        return Proposal(tokens, (-1,), q=torch.tensor([stated or q]))

    return propose


@pytest.mark.case("O-X03")
def test_filters_on_both_sides_or_on_the_target_alone():
    p = [0.625, 0.375, 0.0, 0.0]  # [.5 .3 .15 .05] after top-k 2
    found, alpha = one_level(p, drawn_from([0.0, 0.0, 3 / 7, 4 / 7]), "rejection")
    assert found == pytest.approx(p, abs=1e-9) and alpha == 0
    found, alpha = one_level(p, drawn_from([0.1, 0.2, 0.3, 0.4]), "rejection")
    assert found == pytest.approx(p, abs=1e-7) and alpha == pytest.approx(0.3, abs=1e-7)


@pytest.mark.case("O-X03")
def test_each_fault_of_filtering_one_side_gives_the_law_that_the_field_saw(monkeypatch):
    raw, kept = [0.5, 0.3, 0.15, 0.05], [0.625, 0.375, 0.0, 0.0]
    q, kept_q = [0.1, 0.2, 0.3, 0.4], [0.0, 0.0, 3 / 7, 4 / 7]
    raw_q_in_the_ratio = first_token(kept, drawn_from(kept_q, stated=q), "rejection")
    assert raw_q_in_the_ratio == pytest.approx([0.75, 0.25, 0, 0], abs=1e-7)
    raw_p_in_the_ratio = first_token(raw, drawn_from(q), "rejection")
    assert raw_p_in_the_ratio == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=1e-7)
    monkeypatch.setattr(rules, "_ratios", lambda p, q, offered: ([p[0, offered[0]].tolist()], [0.0]))
    accepted_with_p = first_token(raw, drawn_from(q), "rejection")
    assert accepted_with_p == pytest.approx([0.71, 0.225, 0.045, 0.02], abs=1e-7)


@pytest.mark.case("O-X04")
def test_one_number_for_coin_and_residual_gives_the_law_that_the_field_saw():
    p, propose = [0.4, 0.1, 0.3, 0.2], drawn_from([0.1, 0.5, 0.2, 0.2])
    assert first_token(p, propose, "rejection") == pytest.approx(p, abs=1e-7)

    def shared(root_position, slot, purpose):
        return root_position, slot, COIN if purpose == RESIDUAL else purpose

    found = first_token(p, propose, "rejection", key=shared)
    assert found == pytest.approx([0.375, 0.1, 0.325, 0.2], abs=1e-7)


@pytest.mark.case("O-X04")
@pytest.mark.parametrize("reused", [False, True])
def test_400000_draws_tell_a_reused_number_from_one_of_its_own(reused):
    """The rule of `rejection` on arrays; the reuse leaves the acceptance rate right."""
    p, q, n = np.array([0.4, 0.1, 0.3, 0.2]), np.array([0.1, 0.5, 0.2, 0.2]), 400_000
    drafts, coins, others = np.random.default_rng(0).random((3, n))
    tokens = np.searchsorted(q.cumsum(), drafts, side="right")
    is_kept = coins < np.minimum(1, p / q)[tokens]
    residual = np.maximum(p - q, 0).cumsum() / np.maximum(p - q, 0).sum()
    bonus = np.searchsorted(residual, coins if reused else others, side="right")
    found = np.bincount(np.where(is_kept, tokens, bonus), minlength=4) / n
    assert is_kept.mean() == pytest.approx(0.6, abs=0.003)
    assert found == pytest.approx([0.375, 0.1, 0.325, 0.2] if reused else p, abs=0.003)
    p_value = chi_square_tail((n * (found - p) ** 2 / p).sum(), 3)
    assert p_value < 1e-100 if reused else p_value > 0.01


@pytest.mark.case("O-X04")
def test_the_residual_uses_its_own_number():
    p, q = [0.4, 0.1, 0.3, 0.2], [0.1, 0.5, 0.2, 0.2]
    found, alpha = one_level(p, drawn_from(q), "rejection")
    assert found == pytest.approx(p, abs=1e-7) and alpha == pytest.approx(0.6, abs=1e-7)
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
    found, alpha = one_level([0.5, 0.3, 0.2], lambda streams, text: siblings, "target_only")
    assert found == pytest.approx([0.5, 0.3, 0.2], abs=1e-7) and alpha == pytest.approx(0.8, abs=1e-7)


@pytest.mark.case("O-X05")
def test_siblings_without_the_adjusted_p_give_the_laws_of_the_field_case(monkeypatch):
    p, siblings = [0.5, 0.3, 0.2], Proposal(torch.tensor([1, 0]), (-1, -1))
    monkeypatch.setattr(rules, "or_target", lambda residual, original: original)
    found = first_token(p, lambda streams, text: siblings, "target_only")
    assert found == pytest.approx([0.6, 0.36, 0.04], abs=1e-7)  # the last draw alone is from the original p
    not_renormalised = [[0.3, (1 - 0.3) * 0.5]]  # a coin of p(0) = .5 behind the refusal of 1
    monkeypatch.setattr(rules, "gather", lambda law, sums, offered: not_renormalised)
    found = first_token(p, lambda streams, text: siblings, "target_only")
    assert found == pytest.approx([0.525, 0.405, 0.07], abs=1e-7)


def test_children_that_hold_all_the_mass_leave_no_residual():
    siblings = Proposal(torch.tensor([2, 0, 1]), (-1, -1, -1))
    found, alpha = one_level([0.1, 0.2, 0.7], lambda streams, text: siblings, "target_only")
    assert found == pytest.approx([0.1, 0.2, 0.7], abs=1e-7) and alpha == pytest.approx(1)


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
        (
            Proposal(torch.tensor([1, 2]), (-1, -1)),
            "rejection",
            "law=rejection: the proposal is a tree, expected",
        ),
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

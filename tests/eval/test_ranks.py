"""Which rank the target's choice had at each depth, and the tree that follows from it."""

import numpy as np
import pytest
import torch

from spectrain.decode.engine import generate
from spectrain.decode.generation import Generation, Round
from spectrain.decode.sampling import Sampling
from spectrain.drafters.autoregressive import grow
from spectrain.eval.ranks import RankCounts, count_ranks, rounds_of
from spectrain.proposal import Plan
from spectrain.trees import best_paths, expected_accepted

PROMPTS = [list(f"tell {i}".encode()) for i in range(12)]


def ids(*rows):
    return [None if row is None else torch.tensor(row) for row in rows]


def test_ranks_are_counted_by_depth_where_the_drafter_was_asked():
    places = [
        (ids([7, 8, 9], [4, 5, 6], None), [8, 4, 1]),
        (ids([7, 8, 9]), [7]),
        (ids([7, 8, 9], [4, 5, 6]), [3, 6]),  # rank 2 is beyond the two that are counted
    ]
    counts = count_ranks(places, depth=3, ranks=2)
    assert counts.hits.tolist() == [[1, 1], [1, 0], [0, 0]] and counts.seen.tolist() == [3, 2, 0]
    assert counts.accuracies() == [[1 / 3, 1 / 3], [0.5, 0.0]]
    assert (counts + counts).accuracies() == counts.accuracies()


def test_the_places_of_a_round_are_its_emitted_tokens():
    """The prefill's token, a round that accepts 2 and adds 1, a round that accepts 1 and loses its bonus."""
    rounds = (Round(2, 2, 2, 3, (1.0, 1.0), False), Round(2, 2, 2, 1, (1.0, 1.0), True))
    a, b, c = ids([1], [2], [3])
    text = Generation((0,), (50, 51, 52, 53, 54), "stop", rounds, (None, a, b, None, c))
    assert [(list(rankings), list(tokens)) for rankings, tokens in rounds_of(text)] == [
        ([a, b, None], [51, 52, 53]),
        ([c], [54]),
    ]


def test_rankings_shorter_than_the_ranks_are_refused():
    with pytest.raises(ValueError, match="^ranks=4: the rankings hold 3 ids"):
        count_ranks([(ids([7, 8, 9]), [8])], depth=1, ranks=4)


class Grown:
    """The bigram drafter of these tests behind `grow`, so that static trees are grown as a family does it."""

    taps: tuple[int, ...] = ()

    def __init__(self, logits_VV):
        self.logits_VV = logits_VV
        self.vocab_size = len(logits_VV)
        self.kept_ids = torch.arange(self.vocab_size)

    def start(self, num_requests, capacity):
        self.steps, self.roots = 0, {}
        return self

    def observe(self, observations):
        self.steps += 1
        self.roots |= {seen.request: int(seen.next_ids[-1]) for seen in observations}

    def propose(self, requests, plan, sampler):
        return grow(self, requests, plan, sampler)

    def root_positions(self, requests):
        raise AssertionError("greedy decoding draws nothing")

    def root_logits(self, requests):
        return self.logits_VV[[self.roots[request] for request in requests]]

    def step(self, requests, parents, tokens):
        self.steps += 1
        return self.logits_VV[tokens]


def decode(target, drafter, plan):
    texts, _ = generate(
        target, PROMPTS, sampling=Sampling(), max_new_tokens=40, stop_ids=(), batch_size=12,
        drafter=Grown(drafter.logits_VV), plan=plan, record_orders=True,
    )  # fmt: skip
    return texts


def accepted(texts):
    rounds = [record for text in texts for record in text.rounds]
    return sum(record.accepted for record in rounds) / len(rounds)


def test_the_tree_found_from_decoded_texts_accepts_more_than_a_chain_of_as_many_nodes(target, drafter):
    plain, _ = generate(target, PROMPTS, sampling=Sampling(), max_new_tokens=40, stop_ids=(), batch_size=12)
    chain = decode(target, drafter, Plan("chain", 6))
    counts = RankCounts(np.zeros((6, 4), np.int64), np.zeros(6, np.int64))
    for text in chain:
        counts += count_ranks(rounds_of(text), depth=6, ranks=4)
    assert counts.seen[0] == sum(r.drafted > 0 for text in chain for r in text.rounds)
    assert (counts.hits[:, 0][:-1] >= counts.seen[1:]).all()  # a depth is seen once the one above was right
    accuracies = counts.accuracies()
    paths = best_paths(accuracies, 6)
    tree = decode(target, drafter, Plan("static", max(map(len, paths)), paths=paths))
    assert [text.ids for text in tree] == [text.ids for text in chain] == [text.ids for text in plain]
    only_first = [(0,) * depth for depth in range(1, len(accuracies) + 1)]
    assert expected_accepted(paths, accuracies) > expected_accepted(only_first, accuracies)
    assert accepted(tree) > accepted(chain)

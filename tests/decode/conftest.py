"""A target and a drafter whose laws depend on the last token alone, so that every law is written down."""

import pytest
import torch

from spectrain.drafters.autoregressive import grow
from spectrain.target import Target, TargetStates
from spectrain.testing import tiny_llama


class Markov(Target):
    """The logits after token v are row v of logits_VV, exactly."""

    def __init__(self, logits_VV, tokenizer=None):
        super().__init__(tiny_llama(layers=1, vocab=len(logits_VV)), tokenizer)
        self.attention_layers = frozenset()  # nothing to keep in the cache
        self.logits_VV, self.positions = logits_VV, []

    def states(self, ids_T, positions_T, layout, *, taps=()):
        self.positions += positions_T.tolist()
        return TargetStates(taps=torch.zeros(len(ids_T), 0, 1), final=ids_T[:, None])

    def logits(self, final_TD):
        return self.logits_VV[final_TD[:, 0]].clone()


class Bigram:
    """Row v of logits_VW is what follows token v, over the target ids `kept_ids`."""

    taps: tuple[int, ...] = ()

    def __init__(self, logits_VW, kept_ids=None):
        self.logits_VW, self.vocab_size = logits_VW, len(logits_VW)
        self.kept_ids = torch.arange(self.vocab_size) if kept_ids is None else torch.tensor(kept_ids)
        self.roots, self.steps, self.deepest = {}, 0, 0

    def start(self, num_requests, capacity):
        return self

    def observe(self, observations):
        for seen in observations:
            self.roots[seen.request] = (int(seen.next_ids[-1]), seen.start + len(seen.next_ids))

    def propose(self, requests, plan, sampler):
        self.deepest = max(self.deepest, max(self.root_positions(requests)) + plan.length)
        return grow(self, requests, plan, sampler)

    def root_positions(self, requests):
        return [self.roots[request][1] for request in requests]

    def root_logits(self, requests):
        return self.logits_VW[[self.roots[request][0] for request in requests]]

    def step(self, requests, parents, tokens):
        return self.logits_VW[tokens]


@pytest.fixture
def markov():
    return Markov


@pytest.fixture
def bigram():
    return Bigram

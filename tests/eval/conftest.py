"""A tiny target with a chat template, and a drafter that knows one token of context."""

import pytest
import torch
from torch import nn

from spectrain.proposal import Plan, Proposal
from spectrain.target import Target, packed_layout
from spectrain.testing import byte_tokenizer, tiny_llama


class Bigram(nn.Module):
    """q of the next token depends on the last one only: what the target says after that token alone.

    A chain is drawn from q; a tree of depth d has top_k siblings at each level below the best one of the
    level before.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, target: Target):
        super().__init__()
        V = target.vocab_size
        ids, positions = torch.arange(V), torch.zeros(V, dtype=torch.int64)
        states = target.states(ids, positions, packed_layout(range(V + 1)))
        self.register_buffer("logits_VV", target.logits(states.final).float())

    def start(self, num_requests: int, capacity: int) -> "BigramDrafting":
        return BigramDrafting(self.logits_VV)


class BigramDrafting:
    def __init__(self, logits_VV: torch.Tensor):
        self.logits_VV = logits_VV
        self.roots: dict[int, tuple[int, int]] = {}
        self.steps = 0

    def observe(self, observations) -> None:
        self.steps += 1
        for seen in observations:
            self.roots[seen.request] = (int(seen.next_ids[-1]), seen.start + len(seen.next_ids))

    def propose(self, requests, plan: Plan, sampler) -> list[Proposal]:
        make = self.chain if plan.shape == "chain" else self.tree
        return [make(request, plan, sampler) for request in requests]

    def chain(self, request: int, plan: Plan, sampler) -> Proposal:
        token, position = self.roots[request]
        tokens, laws = [], []
        for slot in range(plan.length):
            law = sampler.draft_law(self.logits_VV[token][None])
            [token] = sampler.draw(law, requests=[request], root_positions=[position], slots=[slot])
            tokens.append(token)
            laws.append(law)
            self.steps += 1
        return Proposal(
            torch.tensor(tokens),
            tuple(range(-1, plan.length - 1)),
            q=torch.cat(laws),
            ranked=self._ranked([self.roots[request][0], *tokens]),
        )

    def tree(self, request: int, plan: Plan, sampler) -> Proposal:
        token, parent = self.roots[request][0], -1
        tokens: list[int] = []
        parents: list[int] = []
        for _ in range(plan.length):
            best = self.logits_VV[token].topk(plan.top_k).indices.tolist()
            parents += [parent] * plan.top_k
            parent, token = len(tokens), best[0]
            tokens += best
            self.steps += 1
        return Proposal(
            torch.tensor(tokens), tuple(parents), ranked=self._ranked([self.roots[request][0], *tokens])
        )

    def _ranked(self, tokens: list[int]) -> torch.Tensor:
        return self.logits_VV[tokens].sort(descending=True, stable=True).indices[:, :20]


@pytest.fixture(scope="session")
def target() -> Target:
    """Large embeddings and weak attention, so that the last token tells much of the next one: alpha about
    0.5."""
    model = tiny_llama(layers=2)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
        model.model.embed_tokens.weight.mul_(8)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.5)
    return Target(model, byte_tokenizer(), path="tiny")


@pytest.fixture(scope="session")
def drafter(target) -> Bigram:
    return Bigram(target)

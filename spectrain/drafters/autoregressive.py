"""Grow a proposal token after token: a chain, or a tree (`chosen_trees.py`, `drawn_trees.py`).

For any drafter that gives logits at the root and can step from any node. A chain is drawn from the draft law
q, or chosen by arg-max where sampling is greedy. With a budget a chain ends where more does not pay
(`proposal.Budget`), decided before the token in question is drawn, by the largest entry of its law. Penalties
of the sampler count along each node's path, before anything else. Knows no network and no verification.

Legend: R requests, M nodes of one step, W ids that the drafter knows, V target vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from spectrain.drafters.chosen_trees import grow_trees
from spectrain.drafters.drawn_trees import draw_trees
from spectrain.drafters.stepper import Stepper, likeliest_ids, scattered
from spectrain.kernels.likeliest import in_cache
from spectrain.proposal import Budget, Plan, Proposal, Sampler


def grow(stepper: Stepper, requests: Sequence[int], plan: Plan, sampler: Sampler) -> list[Proposal]:
    """One proposal per request by `plan`; the network runs at most plan.length - 1 steps."""
    if plan.shape == "chain":
        return _chains(stepper, requests, plan, sampler)
    if plan.sampled:
        return draw_trees(stepper, requests, plan, sampler)
    return grow_trees(stepper, requests, plan, sampler)


@dataclass
class _Chain:
    """The chain of one request; row: index among the requests, survival: product of its confidences."""

    row: int
    survival: float = 1.0
    tokens: list[int] = field(default_factory=list)
    laws: list[torch.Tensor] = field(default_factory=list)
    ranked: list[np.ndarray] = field(default_factory=list)

    def proposal(self) -> Proposal:
        if self.ranked and len(self.ranked) == len(self.tokens):
            self.ranked.append(np.full_like(self.ranked[0], -1))
        return Proposal(
            tokens=torch.tensor(self.tokens, dtype=torch.int64),
            parents=tuple(range(-1, len(self.tokens) - 1)),
            q=self.laws or None,
            ranked=torch.from_numpy(np.stack(self.ranked)) if self.ranked else None,
        )


def _chains(stepper: Stepper, requests: Sequence[int], plan: Plan, sampler: Sampler) -> list[Proposal]:
    chains = [_Chain(row) for row in range(len(requests))]
    live, budget = chains, plan.budget
    logits = stepper.root_logits(requests)
    for slot in range(plan.length):
        if slot:
            if budget is not None:
                live = [chain for chain in live if budget.steps_on(chain.row, [chain.survival], slot)]
            if not live:
                break
            newest = torch.tensor([chain.tokens[-1] for chain in live], device=logits.device)
            logits = stepper.step([requests[chain.row] for chain in live], [slot - 2] * len(live), newest)
        if sampler.penalised:
            paths = [chain.tokens for chain in live]
            logits = sampler.penalise(
                logits, [requests[chain.row] for chain in live], paths, stepper.kept_ids
            )
        if plan.ranked:
            for chain, ids in zip(live, likeliest_ids(stepper, logits, plan.ranked)[0], strict=True):
                chain.ranked.append(ids)
        live = _extend(live, logits, stepper, requests, plan, sampler)
    return [chain.proposal() for chain in chains]


def _extend(
    live: list[_Chain],
    logits_MW: torch.Tensor,
    stepper: Stepper,
    requests: Sequence[int],
    plan: Plan,
    sampler: Sampler,
) -> list[_Chain]:
    """Give the live chains their next token, where it pays; returns those that got one.

    Whether it pays is decided before the token is drawn, by the largest entry of its law.
    """
    slot = len(live[0].tokens)
    if sampler.greedy:
        if plan.budget is not None:
            confidences = likeliest_ids(stepper, logits_MW, 1)[1][:, 0]
            live, logits_MW = _paying(plan.budget, live, np.exp(confidences).tolist(), logits_MW)
        if live:
            for chain, token in zip(live, stepper.kept_ids[sampler.best(logits_MW)].tolist(), strict=True):
                chain.tokens.append(token)
        return live
    roots = stepper.root_positions([requests[chain.row] for chain in live])
    position = {chain.row: root for chain, root in zip(live, roots, strict=True)}
    extended: list[_Chain] = []
    first = 0
    for part in in_cache(logits_MW):
        some = live[first : first + len(part)]
        first += len(part)
        law = sampler.draft_law(scattered(stepper, part))
        if plan.budget is not None:
            some, law = _paying(plan.budget, some, law.amax(-1).tolist(), law)
        if not some:
            continue
        drawn = sampler.draw(
            law,
            requests=[requests[chain.row] for chain in some],
            root_positions=[position[chain.row] for chain in some],
            slots=[slot] * len(some),
        )
        for chain, token, row in zip(some, drawn, law, strict=True):
            chain.tokens.append(token)
            chain.laws.append(row)
        extended += some
    return extended


def _paying(
    budget: Budget, live: list[_Chain], confidences: list[float], rows: torch.Tensor
) -> tuple[list[_Chain], torch.Tensor]:
    """The chains whose next token pays, with their survival updated, and their rows."""
    for chain, confidence in zip(live, confidences, strict=True):
        chain.survival *= confidence
    kept = [i for i, chain in enumerate(live) if budget.keeps(chain.row, chain.survival)]
    return [live[i] for i in kept], rows if len(kept) == len(live) else rows[kept]

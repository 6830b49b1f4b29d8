"""Which plans decoding takes, and what of a proposal a request has room for. Knows no model."""

from collections.abc import Sequence

from spectrain.checks import above_zero, at_least, choose
from spectrain.laws import check_law
from spectrain.proposal import Plan, Proposal


def check_plan(plan: Plan, law: str, *, recurrent: bool = False) -> None:
    """Raise ValueError for a plan that is malformed or does not go with `law`, or with a target of
    `recurrent` layers."""
    choose("plan.shape", plan.shape, ("chain", "tree", "static"))
    check_law("law", law, plan.shape)
    at_least("plan.length", plan.length, 1)
    if plan.budget is not None:
        above_zero("plan.budget.root", plan.budget.root)
        at_least("plan.budget.step", plan.budget.step, 0)
        at_least("plan.budget.node", plan.budget.node, 0)
    if plan.shape == "tree":
        at_least("plan.nodes", plan.nodes, 1)
        at_least("plan.top_k", plan.top_k, 1)
    if law == "recursive" and not plan.sampled:
        raise ValueError("law=recursive with plan.sampled=False: expected siblings drawn without replacement")
    if plan.sampled and (plan.shape != "tree" or plan.budget is not None):
        raise ValueError(
            f"plan.sampled=True with plan.shape={plan.shape}, plan.budget={plan.budget}: expected False; "
            "only a tree without a budget has drawn siblings"
        )
    if recurrent and plan.shape != "chain":
        raise ValueError(
            f"plan.shape={plan.shape!r}: the target has recurrent layers, whose state follows one path: "
            "expected chain"
        )


def depths(parents: Sequence[int]) -> list[int]:
    """Depth of each node; a child of the root has depth 1. Parents (-1, 0, 0, 2) give 1, 2, 2, 3."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


def clamp(proposal: Proposal, depth: int) -> Proposal:
    """The proposal without nodes deeper than `depth`; lossless, since the cut looks at no draft token."""
    levels = depths(proposal.parents)
    if max(levels, default=0) <= depth:
        return proposal
    kept = [node for node, level in enumerate(levels) if level <= depth]
    number = {-1: -1, **{node: i for i, node in enumerate(kept)}}
    return Proposal(
        tokens=proposal.tokens[kept],
        parents=tuple(number[proposal.parents[node]] for node in kept),
        q=None if proposal.q is None else [proposal.q[node] for node in kept],
        ranked=None if proposal.ranked is None else proposal.ranked[[0, *(node + 1 for node in kept)]],
    )

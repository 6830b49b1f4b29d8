"""What drafters share that know their request's text alone: its new tokens, and proposals of chosen tokens.

A chosen token has no q: its draft law is a point mass, for which `rejection`, `block` and `recursive` are
`target_only` (`decode/verify.py`), lossless at every temperature. Knows no family.
"""

from collections.abc import Sequence

import torch

from spectrain.proposal import Observation, Proposal


def new_tokens(seen: Observation) -> list[int]:
    """The tokens that an observation adds to its request's text: its `next_ids`, at the beginning of a text
    behind the first token."""
    begin = [seen.first_id] if seen.start == 0 else []
    return [*begin, *seen.next_ids.tolist()]


def chosen(tokens: Sequence[int], parents: Sequence[int], *, num_ids: int, ranked: bool) -> Proposal:
    """A proposal of chosen tokens, without those that the target's head cannot emit (id >= `num_ids`: a
    prompt may hold them) and what hangs on them.

    ranked: whether to say at each node which token comes first among its children, -1 at a leaf.
    """
    kept: dict[int, int] = {-1: -1}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if token < num_ids and parent in kept:
            kept[node] = len(kept) - 1
    found = [tokens[node] for node in kept if node >= 0]
    above = tuple(kept[parents[node]] for node in kept if node >= 0)
    first = [-1] * (len(found) + 1)
    for token, parent in zip(reversed(found), reversed(above), strict=True):
        first[parent + 1] = token
    return Proposal(
        tokens=torch.tensor(found, dtype=torch.int64),
        parents=above,
        ranked=torch.tensor(first)[:, None] if ranked else None,
    )

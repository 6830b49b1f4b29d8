"""Typical acceptance, a lossy law (Cai et al. 2024, Medusa, section 2.3.1).

A draft token x is accepted where p(x) > min(epsilon, delta exp(-H(p))), H the entropy of the target's law p
there: no coin is tossed, and what is emitted is not of law p. The longest accepted path is kept, the likelier
one among equals, then the one of lower nodes; the next token is drawn from p. At temperature 0 only the
arg-max is accepted, as by every law. Knows no model. Legend: R places, V vocabulary.
"""

from collections.abc import Sequence

from spectrain.decode.sampling import BONUS, Streams
from spectrain.decode.walk import Laws, Walk, end, normal
from spectrain.laws import Leniency

SMALL = 1e-5  # inside the logarithm, as Medusa has it


def typical(walks: Sequence[Walk], live: list[int], laws: Laws, leniency: Leniency, streams: Streams) -> None:
    """Take the walks numbered `live` to their ends; a level's alpha is 1 where a child was accepted or 0."""
    best: dict[int, tuple[float, list[int]]] = {}  # log p of the kept path, and the path
    front: list[tuple[int, float, list[int]]] = [(i, 0.0, []) for i in live]
    while front:
        for i, score, path in front:  # of equal lengths, and in order of the nodes
            if i not in best or len(path) > len(best[i][1]) or score > best[i][0]:
                best[i] = (score, path)
        inner = [place for place in front if walks[place[0]].children.get(_last(place[2]))]
        front = _accepted(walks, inner, laws, leniency) if inner else []
    for i in live:
        walks[i].path = best[i][1]
        walks[i].alphas = [1.0] * len(walks[i].path) + [0.0] * bool(walks[i].offered)
    p_RV = laws(live, [walks[i].node for i in live])
    end([walks[i] for i in live], p_RV, streams, BONUS)


def _accepted(
    walks: Sequence[Walk], inner: list[tuple[int, float, list[int]]], laws: Laws, leniency: Leniency
) -> list[tuple[int, float, list[int]]]:
    """The places one level below those of `inner`: (walk, log p, path) of every accepted child."""
    p_RV = normal(laws([i for i, _, _ in inner], [_last(path) for _, _, path in inner]))
    entropy_R = -(p_RV * (p_RV + SMALL).log()).sum(-1)
    bars = (leniency.delta * (-entropy_R).exp()).clamp(max=leniency.epsilon).tolist()
    found = []
    for row, (i, score, path) in enumerate(inner):
        children = walks[i].children[_last(path)]
        chances = p_RV[row, [walks[i].tokens[child] for child in children]]
        for child, p, log_p in zip(children, chances.tolist(), chances.log().tolist(), strict=True):
            if p > bars[row]:
                found.append((i, score + log_p, [*path, child]))
    return sorted(found, key=lambda place: place[2])


def _last(path: Sequence[int]) -> int:
    return path[-1] if path else -1

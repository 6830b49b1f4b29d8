"""The draft vocabulary: the target ids that a drafter can propose, those that training supervises most often.

Inside, a vocabulary is `kept_ids`, int64 [W], the kept target ids in ascending order. On disk it is what the
engines read: d2t holds offsets, target id = i + d2t[i], and t2d marks the kept ids. Kept 0, 2, 3, 7, 9 of 10:
    i         0 1 2 3 4
    kept_ids  0 2 3 7 9
    d2t       0 1 1 4 5
    t2d       1 0 1 1 0 0 0 1 0 1
Knows nothing of families, models and files. Source: the layout of EAGLE-3 checkpoints as vLLM and SGLang load
them.
"""

from collections.abc import Iterable

import torch


def choose_kept_ids(
    counts: torch.Tensor, num_kept: int, *, num_tokens: int, forced: Iterable[int] = ()
) -> torch.Tensor:
    """The `forced` ids and those with the highest counts, int64 [num_kept] in ascending order.

    counts: int64 [N], occurrences per id in supervised tokens. num_tokens: length of the tokenizer; the
    target's head may have more rows, and those never occur. Equal counts go to the lower id, so ids without
    any count fill up from the lowest. Raises ValueError if `num_kept` does not lie between the number of
    forced ids and `num_tokens`.
    """
    must = sorted(set(forced))
    if not max(1, len(must)) <= num_kept <= num_tokens:
        raise ValueError(
            f"drafter.draft_vocab={num_kept}: expected {max(1, len(must))} (the forced ids) to {num_tokens} "
            "(the tokenizer)"
        )
    if must and not 0 <= must[0] <= must[-1] < num_tokens:
        raise ValueError(f"forced ids {must}: expected ids of the tokenizer, 0 to {num_tokens - 1}")
    rank = torch.zeros(num_tokens, dtype=torch.int64)
    known = min(num_tokens, len(counts))
    rank[:known] = counts[:known]
    rank[must] = rank.max() + 1
    return rank.argsort(descending=True, stable=True)[:num_kept].sort().values


def forced_ids(tokenizer, counts: torch.Tensor, stop_ids: Iterable[int]) -> set[int]:
    """The stop tokens, which end every answer, and each added token (<think>, <tool_call>, ..) that training
    supervises: rare in number, but what follows hangs on it. counts: int64 [N], occurrences per id."""
    added = [i for i in tokenizer.added_tokens_decoder if i < len(counts) and counts[i] > 0]
    return {*stop_ids, *added}


def vocabulary_maps(kept_ids: torch.Tensor, num_target: int) -> dict[str, torch.Tensor]:
    """d2t int64 [W] (offsets) and t2d bool [num_target]; nothing where all ids are kept."""
    if len(kept_ids) == num_target:
        return {}
    t2d = torch.zeros(num_target, dtype=torch.bool)
    t2d[kept_ids] = True
    return {"d2t": kept_ids - torch.arange(len(kept_ids)), "t2d": t2d}


def read_kept_ids(
    d2t: torch.Tensor | None, t2d: torch.Tensor | None, *, num_kept: int, num_target: int, source: str
) -> torch.Tensor:
    """kept_ids from the maps of an exported file; without d2t every id is kept.

    Raises ValueError naming `source` if d2t is missing though the sizes differ, is no list of offsets
    (absolute ids leave the range or skip), or disagrees with t2d.
    """
    if d2t is None:
        if num_kept != num_target:
            raise ValueError(
                f"{source}: no d2t, but {num_kept} draft ids differ from {num_target} target ids"
            )
        return torch.arange(num_target)
    if len(d2t) != num_kept:
        raise ValueError(f"{source}: d2t has {len(d2t)} entries for {num_kept} draft ids")
    kept_ids = torch.arange(num_kept) + d2t.long()
    if kept_ids[0] < 0 or kept_ids[-1] >= num_target or not (kept_ids.diff() > 0).all():
        raise ValueError(
            f"{source}: d2t gives target ids {kept_ids[:3].tolist()} .. {kept_ids[-1]}, expected "
            f"strictly rising ids below {num_target}; it must hold offsets (id = i + d2t[i]), not target ids"
        )
    if t2d is not None and not (
        len(t2d) == num_target and int(t2d.sum()) == num_kept and bool(t2d[kept_ids].all())
    ):
        raise ValueError(f"{source}: t2d does not mark the {num_kept} ids of d2t among {num_target}")
    return kept_ids


def coverage(kept_ids: torch.Tensor, counts: torch.Tensor) -> float:
    """Share of the counted tokens that the draft vocabulary holds; counts: int64 [N], occurrences per id."""
    inside = kept_ids[kept_ids < len(counts)]
    return (counts[inside].sum() / counts.sum()).item()

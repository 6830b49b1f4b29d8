"""The likeliest ids of each row of logits and their log-probabilities, without a sort of the row; torch
reference.

    ids = top count of logits, log q = logits[ids] - logsumexp(logits), in float32.

The count largest entries lie in the count blocks with the largest maxima, so only those blocks are searched.
Legend: M rows, W ids.
"""

import torch

BLOCK = 128
# Entries that a core's cache holds. 512 x 49,152 logsumexp: 151 ms whole, 20 ms in pieces (2 cores, 2026-11).
CACHED = 2**19


def in_cache(rows_MW: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The rows in pieces that fit a CPU's cache; in one piece on other devices."""
    M, W = rows_MW.shape
    return rows_MW.split(max(1, CACHED // W) if rows_MW.device.type == "cpu" else max(1, M))


def likeliest(logits_MW: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Column ids, int64 [M, count], by descending logit, and log-probabilities, float32 [M, count], never
    above 0.

    Raises ValueError if a row holds NaN or +inf, or nothing but -inf.
    """
    found = [_likeliest(part.float(), count) for part in in_cache(logits_MW)]
    ids, logq = (torch.cat(parts) for parts in zip(*found, strict=True))
    if logq.isnan().any():
        raise ValueError("the drafter's logits are not finite: NaN, inf, or nothing but -inf in a row")
    return ids, logq


def _likeliest(logits_MW: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    M, W = logits_MW.shape
    total = logits_MW.logsumexp(-1, keepdim=True)
    blocks = W // BLOCK
    if blocks < 2 * count:
        values, ids = logits_MW.topk(count, -1)
        return ids, (values - total).clamp_(max=0)
    best = logits_MW[:, : blocks * BLOCK].unflatten(-1, (blocks, BLOCK)).amax(-1).topk(count, -1).indices
    searched = (best[..., None] * BLOCK + torch.arange(BLOCK, device=best.device)).flatten(1)
    tail = torch.arange(blocks * BLOCK, W, device=best.device).expand(M, -1)
    searched = torch.cat((searched, tail), 1)
    values, places = logits_MW.gather(1, searched).topk(count, -1)
    return searched.gather(1, places), (values - total).clamp_(max=0)

"""Attention of a few queries over many keys: tree mask, window, soft cap and sinks; torch reference.

    out = softmax(softcap(scale * q k^T) + visible) v, with a sink logit per head added to the softmax's
    denominator.

Plain cases go to torch's fused attention, the rest is written out in float32. Queries of the heads that share
a key/value head are stacked, so grouped heads never cost a copy of keys. Legend: B batch, H query heads, G
key/value heads, N queries, S keys, K head dim, R = H / G.
"""

import torch
import torch.nn.functional as F

ROWS = 512  # queries per block of a windowed or written-out prompt, so that no [S, S] mask exists


def attend(
    q_HNK: torch.Tensor,
    k_GSK: torch.Tensor,
    v_GSK: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    distance_NS: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention output [H, N, K] in the dtype of q.

    mask: bool [N, S], True = seen, or None (all seen, or causal with the last query at the last key if
    `causal`). window: keys at distance >= window are unseen; distance_NS (query position - key position) is
    needed with a mask.
    """
    N, S = q_HNK.shape[1], k_GSK.shape[1]
    if mask is None and causal:
        return _causal(q_HNK, k_GSK, v_GSK, scale=scale, window=window, softcap=softcap, sinks_H=sinks_H)
    if window is not None and window <= S:
        if distance_NS is None:
            rows = torch.arange(S - N, S, device=q_HNK.device)
            distance_NS = rows[:, None] - torch.arange(S, device=q_HNK.device)
        near = distance_NS < window
        mask = near if mask is None else mask & near
    if mask is not None:
        mask = additive(mask, q_HNK.dtype)[None, None]
    return attend_batch(
        q_HNK[None], k_GSK[None], v_GSK[None], mask, scale=scale, softcap=softcap, sinks_H=sinks_H
    )[0]


def attend_batch(
    q_BHNK: torch.Tensor,
    k_BGSK: torch.Tensor,
    v_BGSK: torch.Tensor,
    mask_B1NS: torch.Tensor | None,
    *,
    scale: float,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention output [B, H, N, K]. mask_B1NS: additive, 0 or -inf, in the dtype of q, or None where all
    keys are seen."""
    B, H, N, K = q_BHNK.shape
    G, R = k_BGSK.shape[1], H // k_BGSK.shape[1]
    q = q_BHNK.reshape(B, G, R * N, K)
    mask = mask_B1NS
    if mask is not None and N > 1 and R > 1:
        mask = mask[:, :, None].expand(B, 1, R, N, -1).reshape(B, 1, R * N, -1)
    if softcap is None and sinks_H is None:
        return F.scaled_dot_product_attention(q, k_BGSK, v_BGSK, attn_mask=mask, scale=scale).view(B, H, N, K)
    scores = q.float() @ k_BGSK.float().transpose(2, 3) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks_H is not None:
        sinks = sinks_H.float().view(1, G, R, 1, 1).expand(B, G, R, N, 1).reshape(B, G, R * N, 1)
        scores = torch.cat((scores, sinks), -1)
    weights = torch.softmax(scores, -1)[..., : k_BGSK.shape[2]]
    return (weights @ v_BGSK.float()).to(q.dtype).view(B, H, N, K)


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where the bool `mask` is True, -inf elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def _causal(q_HNK, k_GSK, v_GSK, *, scale, window, softcap, sinks_H) -> torch.Tensor:
    """Causal, the last query at the last key; in blocks of queries where torch has no fused form."""
    N, S = q_HNK.shape[1], k_GSK.shape[1]
    windowed = window is not None and window < S
    if N == S and not windowed and softcap is None and sinks_H is None:
        return F.scaled_dot_product_attention(
            q_HNK[None], k_GSK[None], v_GSK[None], is_causal=True, scale=scale, enable_gqa=True
        )[0]
    out = torch.empty_like(q_HNK)
    for a in range(0, N, ROWS):
        b = min(a + ROWS, N)
        first, last = S - N + a, S - N + b
        low = max(0, first - window + 1) if windowed else 0
        slots = torch.arange(low, last, device=q_HNK.device)
        distance = slots[first - low :, None] - slots
        seen = (distance >= 0) & (distance < window) if windowed else distance >= 0
        out[:, a:b] = attend_batch(
            q_HNK[None, :, a:b], k_GSK[None, :, low:last], v_GSK[None, :, low:last],
            additive(seen, q_HNK.dtype)[None, None], scale=scale, softcap=softcap, sinks_H=sinks_H,
        )[0]  # fmt: skip
    return out

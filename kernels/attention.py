"""Attention of a few queries over many keys with an optional tree mask, window, soft cap and sinks: torch reference.

    out = softmax(softcap(scale * q k^T) + visible) v, with a sink logit per head added to the softmax's denominator.

Plain cases go to torch's fused attention, the rest is written out in float32. Legend: H query heads, G key/value heads,
N queries, S keys, K head dim.
"""

import torch
import torch.nn.functional as F


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

    mask: bool [N, S], True = seen, or None (all seen, or causal with the last query at the last key if `causal`).
    window: keys at distance >= window are unseen; distance_NS (query position - key position) is needed with a mask.
    """
    H, N, K = q_HNK.shape
    S = k_GSK.shape[1]
    if causal and N > 1 or window is not None and S >= window:
        rows = torch.arange(S - N, S, device=q_HNK.device)[:, None]
        if distance_NS is None:
            distance_NS = rows - torch.arange(S, device=q_HNK.device)
        windowed = window is not None and bool((distance_NS >= window).any())
        if causal and N == S and not windowed and softcap is None and sinks_H is None:
            return F.scaled_dot_product_attention(
                q_HNK[None], k_GSK[None], v_GSK[None], is_causal=True, scale=scale, enable_gqa=True
            )[0]
        seen = distance_NS >= 0 if causal else torch.ones_like(distance_NS, dtype=torch.bool)
        if windowed:
            seen = seen & (distance_NS < window)
        mask = seen if mask is None else mask & seen
    if softcap is None and sinks_H is None:
        out = F.scaled_dot_product_attention(
            q_HNK[None], k_GSK[None], v_GSK[None], attn_mask=mask, scale=scale, enable_gqa=True
        )
        return out[0]
    k_HSK, v_HSK = (t.repeat_interleave(H // k_GSK.shape[0], 0).float() for t in (k_GSK, v_GSK))
    scores = q_HNK.float() @ k_HSK.transpose(1, 2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks_H is not None:
        scores = torch.cat((scores, sinks_H.float()[:, None, None].expand(H, N, 1)), -1)
    weights = torch.softmax(scores, -1)[..., :S]
    return (weights @ v_HSK).to(q_HNK.dtype)

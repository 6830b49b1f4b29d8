"""Attention of the nodes of token trees over the text in a cache and their own ancestors.

    out_i = sum_j e^{s_ij} v_j / (sum_j e^{s_ij} + e^{sink}),   s_ij = softcap(scale q_i k_j)

over the committed keys and the ancestors j of node i, itself among them, that are nearer than the window.
The committed keys need no mask: they are cut into `splits` parts of equal length, one program each. The nodes
of the tree are one part more, under bits packed 32 nodes a word (kernels/tree_build.py). A part keeps its
output and its log-sum-exp L; they are merged with weights e^L. The query heads of one key/value head are rows
of the same program, so its keys are read once. Grids and shapes follow from the tensors' shapes alone, never
from lengths, which are read on the device: a captured graph serves every length. Accumulation is float32;
rows of no request are not defined.
Legend: T tokens of the call, R requests in it, S slots, H query heads, G key/value heads, K head dim, M
places for nodes, W words of bits.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TreeRows:
    """Who asks and what each sees; int32 tensors on the device, filled anew for each call.

    requests [R]: rows of the cache. starts [R], counts [R]: their new tokens, flat rows starts .. starts +
    counts - 1, which are the newest of nodes [R] uncommitted ones. lengths [R]: committed tokens, slots 0 ..
    lengths - 1; node n lies in slot lengths + n. depths [R, M], bits [R, M, W]: see `tree_build`. most: bound
    of counts.
    """

    requests: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    lengths: torch.Tensor
    nodes: torch.Tensor
    depths: torch.Tensor
    bits: torch.Tensor
    most: int


@dataclass(frozen=True)
class Form:
    """What a layer's attention looks like; window: keys at distance >= window are unseen, None: all are
    seen; sinks [H]: a logit per head that takes weight and gives nothing."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


def tree_attention(
    q_HTK: torch.Tensor, keys_RSGK: torch.Tensor, values_RSGK: torch.Tensor, rows: TreeRows, form: Form
) -> torch.Tensor:
    """Output [H, T, K] in the dtype of q. keys, values: the whole cache, new nodes written already."""
    if q_HTK.device.type == "cpu":
        return reference(q_HTK, keys_RSGK, values_RSGK, rows, form)
    from spectrain.kernels.tree_attention_triton import launch, splits_of

    processors = torch.cuda.get_device_properties(q_HTK.device).multi_processor_count
    splits = splits_of(q_HTK, keys_RSGK, rows, processors)
    return launch(q_HTK, keys_RSGK, values_RSGK, rows, form, splits=splits)


def reference(q_HTK, keys_RSGK, values_RSGK, rows: TreeRows, form: Form) -> torch.Tensor:
    """The same with a dense mask per request, in the dtype of q or float32, whichever is wider."""
    group = q_HTK.shape[0] // keys_RSGK.shape[2]
    out = torch.zeros_like(q_HTK)
    wide = torch.promote_types(q_HTK.dtype, torch.float32)
    lists = (t.tolist() for t in (rows.requests, rows.starts, rows.counts, rows.lengths, rows.nodes))
    for r, (request, start, count, length, nodes) in enumerate(zip(*lists, strict=True)):
        here = slice(start, start + count)
        k, v = (
            t[request, : length + nodes].transpose(0, 1).to(wide).repeat_interleave(group, 0)
            for t in (keys_RSGK, values_RSGK)
        )
        scores = q_HTK[:, here].to(wide) @ k.transpose(1, 2) * form.scale
        if form.softcap is not None:
            scores = torch.tanh(scores / form.softcap) * form.softcap
        new = slice(nodes - count, nodes)
        words = rows.bits[r, new, :, None] >> torch.arange(32, device=k.device)
        seen = (words & 1).flatten(1)[:, :nodes].bool()
        seen = torch.cat((seen.new_ones(count, length), seen), 1)
        if form.window is not None:
            depths = rows.depths[r, :nodes]
            places = torch.cat((torch.arange(length, device=k.device), length + depths))
            seen &= places[length:][new, None] - places < form.window
        scores = scores.masked_fill(~seen, -torch.inf)
        if form.sinks is not None:
            scores = torch.cat((scores, form.sinks.to(wide)[:, None, None].expand(-1, count, 1)), -1)
        out[:, here] = (torch.softmax(scores, -1)[..., : length + nodes] @ v).to(out.dtype)
    return out

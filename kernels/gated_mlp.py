"""Gated MLP that keeps its input and two projections for the backward; torch reference.

    y = (silu(g) u) D^T,  g = x G^T,  u = x U^T,  silu(g) = g / (1 + e^-g)
    da = dy D        du = da silu(g)        dg = da u silu'(g)        dx = dg G + du U

Autograd would keep silu(g) and silu(g) u as well, twice the memory; both are formed again from g and u,
without a matrix product. CPU tensors take the lean form, others the reference.
Legend: N rows, D hidden, I inner.
"""

import torch
import torch.nn.functional as F


def gated_mlp(
    x_ND: torch.Tensor, gate_ID: torch.Tensor, up_ID: torch.Tensor, down_DI: torch.Tensor
) -> torch.Tensor:
    """y [N, D]."""
    if x_ND.device.type == "cpu":
        return _GatedMLP.apply(x_ND, gate_ID, up_ID, down_DI)
    return reference(x_ND, gate_ID, up_ID, down_DI)


def reference(x_ND, gate_ID, up_ID, down_DI):
    """The same by autograd; every device, any dtype."""
    return F.linear(F.silu(F.linear(x_ND, gate_ID)) * F.linear(x_ND, up_ID), down_DI)


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, up, down):
        g, u = F.linear(x, gate), F.linear(x, up)
        ctx.save_for_backward(x, gate, up, down, g, u)
        return F.linear(F.silu(g).mul_(u), down)

    @staticmethod
    def backward(ctx, dy):
        x, gate, up, down, g, u = ctx.saved_tensors
        silu = F.silu(g)
        d_down = dy.t() @ (silu * u)
        da = dy @ down
        du = silu.mul_(da)
        dg = torch.ops.aten.silu_backward(da.mul_(u), g)
        return (dg @ gate).addmm_(du, up), dg.t() @ x, du.t() @ x, d_down

"""Root-mean-square norm that keeps only its input for the backward; torch reference.

    y = x r w,  r = (mean_d x_d^2 + eps)^-1/2          (Zhang and Sennrich 2019)
    dw = sum_n dy x r        dx = r (g - x r mean_d(g x r)),  g = dy w

Autograd would keep x r as well. All is computed in float32; y has the dtype of x. CPU tensors take the lean
form, others torch's own.
Legend: N rows, D hidden.
"""

import torch
import torch.nn.functional as F


def rms_norm(x_ND: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """y [N, D] in the dtype of x."""
    if x_ND.device.type == "cpu":
        return _RMSNorm.apply(x_ND, weight_D, eps)
    return reference(x_ND, weight_D, eps)


def reference(x_ND: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """The same by torch's own norm; every device."""
    return F.rms_norm(x_ND.float(), weight_D.shape, weight_D.float(), eps).to(x_ND.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ND, weight_D, eps):
        x = x_ND.float()
        scale = (
            torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        )
        ctx.save_for_backward(x_ND, weight_D, scale)
        return (x * scale).mul_(weight_D).to(x_ND.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        normed = x.float() * scale
        d_weight = (grad * normed).sum(0)
        dx = grad * weight
        inner = torch.linalg.vecdot(dx, normed)[:, None] / x.shape[-1]
        return dx.sub_(normed.mul_(inner)).mul_(scale), d_weight, None

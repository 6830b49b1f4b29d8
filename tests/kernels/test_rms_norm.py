"""The lean norm against its formula in float64."""

import pytest
import torch

from spectrain.kernels.rms_norm import reference, rms_norm

EPS = 1e-5
FORMS = pytest.mark.parametrize("form", [rms_norm, reference])


@FORMS
@pytest.mark.parametrize("rows", [1, 63, 1000])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_output_and_gradients_equal_the_formula(form, rows, dtype, bound):
    x = (3 * torch.randn(rows, 48)).to(dtype).requires_grad_()
    weight = torch.randn(48, requires_grad=True)
    above = torch.randn(rows, 48).to(dtype)
    y = form(x, weight, EPS)
    assert y.dtype == dtype
    x64, weight64 = (t.detach().double().requires_grad_() for t in (x, weight))
    expected = x64 / (x64.square().mean(-1, keepdim=True) + EPS).sqrt() * weight64
    ours = (y, *torch.autograd.grad(y, (x, weight), above))
    theirs = (expected, *torch.autograd.grad(expected, (x64, weight64), above.double()))
    for a, b in zip(ours, theirs, strict=True):
        assert (a.double() - b).abs().max() <= bound * b.abs().max()


@FORMS
def test_a_row_of_zeros_stays_zero_and_has_a_finite_gradient(form):
    x = torch.zeros(2, 8, requires_grad=True)
    y = form(x, torch.ones(8), EPS)
    y.sum().backward()
    assert y.abs().max() == 0
    torch.testing.assert_close(x.grad, torch.full((2, 8), EPS**-0.5))

"""The lean gated MLP against its formula in float64."""

import pytest
import torch

from spectrain.kernels.gated_mlp import gated_mlp, reference


@pytest.mark.parametrize("form", [gated_mlp, reference])
@pytest.mark.parametrize("rows", [1, 63, 1000])
def test_output_and_gradients_equal_the_formula(form, rows):
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((rows, 12), (20, 12), (20, 12), (12, 20))]
    above = torch.randn(rows, 12)
    y = form(*inputs)
    x, gate, up, down = wide = [t.detach().double().requires_grad_() for t in inputs]
    g = x @ gate.T
    expected = (g / (1 + (-g).exp()) * (x @ up.T)) @ down.T
    ours = (y, *torch.autograd.grad(y, inputs, above))
    theirs = (expected, *torch.autograd.grad(expected, wide, above.double()))
    for a, b in zip(ours, theirs, strict=True):
        assert (a.double() - b).abs().max() <= 2e-6 * b.abs().max()


@pytest.mark.case("O-S05")
def test_the_gradient_equals_finite_differences():
    inputs = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((3, 4), (5, 4), (5, 4), (4, 5))
    ]
    assert torch.autograd.gradcheck(gated_mlp, inputs)

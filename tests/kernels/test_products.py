"""bfloat16 factors in float32 products: on request only, and exact for bfloat16 tensors."""

import pytest
import torch

from spectrain.kernels.products import bfloat16_products

MATMUL = torch.backends.mkldnn.matmul


def test_products_of_bfloat16_values_are_exact_up_to_the_order_of_sums():
    a, b = torch.randn(63, 128).bfloat16().float(), torch.randn(128, 100).bfloat16().float()
    with bfloat16_products(True):
        torch.testing.assert_close(a @ b, (a.double() @ b.double()).float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("enabled", "inside"), [(True, "bf16"), (False, MATMUL.fp32_precision)])
def test_the_setting_comes_back_also_after_an_error(enabled, inside):
    before = MATMUL.fp32_precision
    with pytest.raises(KeyError), bfloat16_products(enabled):
        assert MATMUL.fp32_precision == inside
        raise KeyError
    assert MATMUL.fp32_precision == before

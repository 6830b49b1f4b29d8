"""The fixtures of conftest.py leave what they patch usable."""

import torch


def test_a_device_context_still_reaches_torch_empty():
    with torch.device("meta"):
        assert torch.empty(2).is_meta
        assert torch.nn.Linear(2, 2).weight.is_meta
    assert torch.empty(2).isnan().all()

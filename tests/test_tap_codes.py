"""Taps in 8 bits: what a code holds, how far it may be off, and that only the stored taps change."""

import pytest
import torch

from spectrain.artifacts import read_json
from spectrain.capture import capture
from spectrain.config import TrainConfig
from spectrain.features import FeatureStore, bytes_per_token
from spectrain.tap_codes import decode, encode
from spectrain.target import Target
from spectrain.testing import random_samples, tiny_llama


def test_each_token_and_layer_has_the_scale_that_its_largest_value_asks_for():
    states = torch.tensor([[[896.0, -14.0, 0.0], [0.0, 0.0, 0.0]], [[1.75, -3.5, 0.0], [0.0, 448.0, 1.0]]])
    codes, scale = encode(states)
    assert scale.tolist() == [[2.0, 1.0], [0.0078125, 1.0]]
    assert codes.float()[0].tolist() == [[448.0, -7.0, 0.0], [0.0, 0.0, 0.0]]
    assert torch.equal(decode(codes, scale, torch.float32), states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_value_is_off_by_more_than_a_sixteenth_however_large_its_neighbours(dtype):
    states = torch.randn(50, 2, 64)
    states[:, :, 3] *= 300
    states = states.to(dtype)
    there = states.float()
    back = decode(*encode(states), dtype)
    assert back.dtype == dtype
    smallest = there.abs().amax(-1, keepdim=True) / 448 * 2**-6  # below it codes are evenly spaced
    off = (back.float() - there).abs()
    assert bool((off <= there.abs().maximum(smallest) * (1 / 16 + 2**-8)).all())


def test_stored_taps_come_back_decoded_and_nothing_else_changes(tmp_path):
    target, samples = Target(tiny_llama().bfloat16()), random_samples(9)
    manifests = {}
    for bits in (0, 8):
        folder = tmp_path / str(bits)
        manifests[bits] = capture(
            target, samples, (0, 2), folder, micro_tokens=80, taps_bits=bits, progress=False
        )
    exact, coded = (FeatureStore.load(tmp_path / name).batch(["s003", "s000"]) for name in ("0", "8"))
    assert torch.equal(coded.taps, decode(*encode(exact.taps), torch.bfloat16))
    assert coded.taps.dtype == torch.bfloat16 and not torch.equal(coded.taps, exact.taps)
    for name in ("final", "lse", "argmax"):
        assert torch.equal(getattr(coded, name), getattr(exact, name))
    assert torch.equal(coded.tokens.ids, exact.tokens.ids)
    saved = (manifests[0]["bytes"] - manifests[8]["bytes"]) / manifests[0]["tokens"]
    assert saved == pytest.approx(2 * 32 * 2 - 2 * (32 + 4), rel=0.05)
    assert bytes_per_token(2, 32, torch.bfloat16) - bytes_per_token(2, 32, torch.bfloat16, 8) == 56


def test_exact_taps_are_captured_again_where_eight_bits_are_asked_for(tmp_path):
    target, samples = Target(tiny_llama()), random_samples(3)
    for bits in (0, 8):
        capture(target, samples, (0,), tmp_path, micro_tokens=80, taps_bits=bits, progress=False)
        assert read_json(tmp_path / "capture.json")["taps_bits"] == bits
        FeatureStore.load(tmp_path).check(target.fingerprint(), (0,), samples, taps_bits=bits)


def test_bits_of_taps_that_are_never_stored_are_refused():
    with pytest.raises(ValueError, match="train.taps_bits=8: no effect with train.features=online"):
        TrainConfig(taps_bits=8, features="online")
    with pytest.raises(ValueError, match="train.taps_bits=4: expected one of 0, 8"):
        TrainConfig(taps_bits=4)

"""Shards on disk: what was written comes back, and nothing else is taken for it."""

import pytest
import torch

from spectrain.artifacts import MANIFEST
from spectrain.capture import capture, capture_batch
from spectrain.checks import CheckFailed
from spectrain.features import FeatureStore, hash_samples, id_order
from spectrain.target import Target
from spectrain.testing import make_sample, random_samples, tiny_llama

TAPS = (0, 2)


@pytest.fixture(scope="module")
def target():
    return Target(tiny_llama())


@pytest.fixture
def captured(target, tmp_path):
    """Nine samples in three or more shards."""
    samples = random_samples(9)
    capture(target, samples, TAPS, tmp_path / "features", micro_tokens=80, progress=False)
    return tmp_path / "features", samples


def test_a_batch_holds_the_rows_that_were_computed_bit_for_bit(target, tmp_path):
    samples = random_samples(3)
    capture(target, samples, TAPS, tmp_path, micro_tokens=200, progress=False)
    stored, computed = (
        FeatureStore.load(tmp_path).batch(["s000", "s001", "s002"]),
        capture_batch(target, samples, TAPS),
    )
    for name in ("taps", "final", "lse", "argmax"):
        assert torch.equal(getattr(stored, name), getattr(computed, name)), name
    for name in ("ids", "loss_mask", "document_ids", "positions", "span_ids"):
        assert torch.equal(getattr(stored.tokens, name), getattr(computed.tokens, name)), name
    assert stored.tokens.offsets == computed.tokens.offsets
    assert (stored.taps.dtype, stored.lse.dtype, stored.argmax.dtype) == (
        torch.float32,
        torch.float32,
        torch.int64,
    )


def test_samples_of_different_shards_are_packed_in_the_order_asked_for(captured):
    folder, samples = captured
    store = FeatureStore.load(folder)
    assert len({file for file, _ in store.places.values()}) >= 3
    batch = store.batch(["s007", "s000", "s004"])
    expected = torch.cat([samples[i].ids for i in (7, 0, 4)])
    assert torch.equal(batch.tokens.ids, expected.long())
    assert batch.tokens.sample_ids == ("s007", "s000", "s004")
    alone = store.batch(["s004"])
    assert torch.equal(batch.final[batch.tokens.document_ids == 2], alone.final)


def test_an_unknown_sample_is_named(captured):
    with pytest.raises(ValueError, match="no features of sample 'other'"):
        FeatureStore.load(captured[0]).batch(["other"])


@pytest.mark.case("O-C07")
def test_a_shard_cut_short_is_named_with_its_samples(captured):
    folder, _ = captured
    store = FeatureStore.load(folder)
    path = folder / "shard-00001.safetensors"
    names = [sample_id for sample_id, (file, _) in store.places.items() if file == path.name]
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckFailed) as error:
        FeatureStore.load(folder)
    assert f"{path}: damaged shard" in str(error.value)
    assert f"samples: {', '.join(names)}." in str(error.value)
    with pytest.raises(CheckFailed, match=f"damaged shard.*{names[0]}"):
        store.batch([names[0]])


@pytest.mark.case("O-C07")
def test_skip_bad_leaves_out_the_samples_of_damaged_shards_and_counts_them(captured):
    folder, samples = captured
    whole = FeatureStore.load(folder)
    path = folder / "shard-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    store = FeatureStore.load(folder, skip_bad=True)
    lost = {sample_id for sample_id, (file, _) in whole.places.items() if file == path.name}
    assert store.damaged == (path.name,)
    assert set(store.lengths) == {sample.id for sample in samples} - lost


def test_a_capture_that_has_not_finished_is_refused(captured):
    folder, _ = captured
    (folder / MANIFEST).unlink()
    with pytest.raises(ValueError, match="no finished capture there"):
        FeatureStore.load(folder)


@pytest.mark.case("O-S03")
def test_another_target_is_an_error_that_names_both(captured, target):
    folder, samples = captured
    other = Target(tiny_llama(seed=1)).fingerprint()
    with pytest.raises(ValueError) as error:
        FeatureStore.load(folder).check(other, TAPS, samples)
    assert target.fingerprint()["weights"] in str(error.value)
    assert other["weights"] in str(error.value)


def test_the_same_target_in_another_dtype_is_refused(captured):
    folder, samples = captured
    half = Target(tiny_llama().bfloat16()).fingerprint()
    with pytest.raises(ValueError, match="another target.*'dtype': 'float32'.*'dtype': 'bfloat16'"):
        FeatureStore.load(folder).check(half, TAPS, samples)


def test_other_taps_are_an_error_that_names_both(captured, target):
    folder, samples = captured
    with pytest.raises(ValueError, match=r"holds taps \[0, 2\], the drafter reads \[0, 3\]"):
        FeatureStore.load(folder).check(target.fingerprint(), (0, 3), samples)


def test_a_drafter_may_read_some_of_the_stored_taps(captured, target):
    folder, samples = captured
    store = FeatureStore.load(folder)
    store.check(target.fingerprint(), TAPS[1:], samples)
    ids = [sample.id for sample in samples[:2]]
    whole, part, none = (store.batch(ids, taps) for taps in (None, TAPS[1:], ()))
    assert (whole.tap_ids, part.tap_ids, none.tap_ids) == (TAPS, TAPS[1:], ())
    assert torch.equal(part.taps, whole.taps[:, 1:]) and torch.equal(part.final, whole.final)
    assert none.taps.shape[1] == 0


def test_samples_with_another_mask_are_refused(captured, target):
    folder, samples = captured
    changed = make_sample(samples[0].id, samples[0].ids.tolist(), "S" * len(samples[0].ids))
    with pytest.raises(ValueError, match="captured from other samples"):
        FeatureStore.load(folder).check(target.fingerprint(), TAPS, [changed, *samples[1:]])


def test_the_order_of_samples_does_not_matter(captured, target):
    folder, samples = captured
    FeatureStore.load(folder).check(target.fingerprint(), TAPS, samples[::-1])
    assert hash_samples(samples, id_order(samples)) == hash_samples(samples[::-1], id_order(samples[::-1]))


def test_an_id_that_comes_twice_is_named():
    with pytest.raises(ValueError, match="sample id 'b' comes twice"):
        id_order([make_sample(id, [1, 2], ".S") for id in "bab"])


def test_a_dtype_changes_only_its_own_entry_of_the_fingerprint(target):
    half, full = Target(tiny_llama().bfloat16()).fingerprint(), target.fingerprint()
    assert {key for key in full if full[key] != half[key]} == {"dtype"}


def test_other_bits_than_those_captured_are_refused(captured, target):
    folder, samples = captured
    store = FeatureStore.load(folder)
    with pytest.raises(ValueError, match="train.taps_bits=0, this run has train.taps_bits=8"):
        store.check(target.fingerprint(), TAPS, samples, taps_bits=8)

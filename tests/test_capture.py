"""What the target computes is what is kept: layers, teacher, documents, and shards that survive accidents."""

import os

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from spectrain import capture as module
from spectrain.artifacts import MANIFEST, read_json
from spectrain.capture import capture, capture_batch, reject_bad
from spectrain.data.packing import pack
from spectrain.features import FeatureBatch, FeatureStore
from spectrain.target import Target, TargetStates, packed_layout
from spectrain.testing import ladder_llama, make_sample, random_samples, tiny_llama


def target_of_two():
    """Every token is embedded as [1, 2]; the layers add nothing; final norm [10, 1]; the head is identity."""
    config = LlamaConfig(
        vocab_size=2, hidden_size=2, intermediate_size=2, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, tie_word_embeddings=False, rms_norm_eps=1e-6,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.tensor([[1.0, 2.0], [1.0, 2.0]]))
        model.model.norm.weight.copy_(torch.tensor([10.0, 1.0]))
        model.lm_head.weight.copy_(torch.eye(2))
    return Target(model)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def run_capture(target, samples, folder, **settings):
    return capture(target, samples, (0, 2), folder, micro_tokens=80, progress=False, **settings)


@pytest.mark.case("O-C01")
def test_layer_id_k_is_the_output_of_layer_k(tmp_path):
    batch = capture_batch(Target(ladder_llama()), [make_sample("a", [3, 5], ".S")], (0, 1, 2, 3))
    expected = torch.tensor([[301.0, 303.0, 307.0, 315.0], [501.0, 503.0, 507.0, 515.0]])
    assert torch.equal(batch.taps, expected[:, :, None].expand(2, 4, 8))
    torch.testing.assert_close(batch.final, torch.full((2, 8), 2.0))


@pytest.mark.case("O-C02")
def test_the_teacher_reads_the_state_after_the_final_norm():
    target = target_of_two()
    batch = capture_batch(target, [make_sample("a", [0, 1], ".S")], (0,))
    logits = target.logits(batch.final[0])
    torch.testing.assert_close(logits, torch.tensor([6.324554, 1.264911]), atol=1e-5, rtol=0)
    assert batch.argmax.tolist() == [0, -1]
    p = torch.exp(logits - batch.lse[0])
    torch.testing.assert_close(p, torch.tensor([0.993692, 0.006308]), atol=1e-6, rtol=0)


@pytest.mark.case("O-C02")
def test_a_teacher_without_the_final_norm_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    target = Target(tiny_llama())
    states = target.states

    def without_norm(*arguments, **settings):
        found = states(*arguments, taps=(target.num_layers - 1,))
        return TargetStates(found.taps, found.taps[:, 0])

    monkeypatch.setattr(target, "states", without_norm)
    with pytest.raises(ValueError, match="teacher logits differ from the model's own"):
        run_capture(target, random_samples(2), tmp_path / "features")
    assert not (tmp_path / "features").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_attention_that_is_not_the_models_own_is_refused_in_either_dtype(dtype, monkeypatch):
    target = Target(tiny_llama().to(dtype))
    assert target.self_test() == 0.0
    attend = packed_layout.attend

    def too_sharp(self, *arguments, scale, **settings):
        return attend(self, *arguments, scale=1.5 * scale, **settings)

    monkeypatch.setattr(packed_layout, "attend", too_sharp)
    with pytest.raises(ValueError, match=r"0.self_attn differs from eager attention by 0\.\d+ of its output"):
        target.self_test()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lse_and_argmax_are_of_the_full_vocabulary_where_the_next_token_is_supervised(dtype, monkeypatch):
    monkeypatch.setattr(module, "LAW_ROWS", 3)
    monkeypatch.setattr(module, "LAW_IDS", 37)  # does not divide 260
    target = Target(tiny_llama().to(dtype))
    samples = [make_sample("a", [1, 2, 3, 4, 5, 6], "..SS.S"), make_sample("b", [7, 8, 9], "SSS")]
    batch = capture_batch(target, samples, (0,))
    rows = [1, 2, 4, 6, 7]  # not 5: token 0 of "b" belongs to another document
    logits = batch.final[rows].float() @ target.head.weight.float().T
    torch.testing.assert_close(batch.lse[rows], logits.logsumexp(-1), rtol=1e-6, atol=1e-5)
    assert batch.argmax[rows].tolist() == logits.argmax(-1).tolist()
    rest = [0, 3, 5, 8]
    assert batch.lse[rest].tolist() == [0.0] * 4
    assert batch.argmax[rest].tolist() == [-1] * 4


def test_of_equal_logits_the_lowest_id_is_the_argmax(monkeypatch):
    monkeypatch.setattr(module, "LAW_IDS", 4)
    target = Target(tiny_llama(vocab=12))
    with torch.no_grad():
        target.head.weight.zero_()
    assert capture_batch(target, [make_sample("a", [1, 2], ".S")], (0,)).argmax.tolist() == [0, -1]


@pytest.mark.case("O-S02")
def test_a_quantised_head_is_refused():
    target = Target(tiny_llama())
    target.head.weight = torch.nn.Parameter(target.head.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(
        ValueError, match=r"target head Linear of torch.int8: expected an unquantised nn.Linear"
    ):
        module._law(target, torch.zeros(2, 32), pack([make_sample("a", [1, 2], ".S")]))


@pytest.mark.case("O-C05")
def test_states_of_a_sample_do_not_depend_on_what_it_is_packed_with():
    target = Target(tiny_llama())
    a = make_sample("a", [5, 6, 7, 8, 9], "..SSS")
    b = make_sample("b", [5, 6, 7, 1, 2, 3, 4, 5, 6], "...SSSSSS")
    alone = {"a": capture_batch(target, [a], (0, 2)), "b": capture_batch(target, [b], (0, 2))}
    assert alone["a"].taps.shape == (5, 2, 32) and alone["b"].taps.shape == (9, 2, 32)
    for row in ([a, b], [b, a], [a], [b]):
        batch = capture_batch(target, row, (0, 2))
        for d, sample in enumerate(row):
            own = batch.tokens.document_ids == d
            assert batch.tokens.ids[own].tolist() == sample.ids.tolist()
            for name in ("taps", "final", "lse"):
                expected = getattr(alone[sample.id], name)
                torch.testing.assert_close(getattr(batch, name)[own], expected, atol=1e-5, rtol=0)
            assert torch.equal(batch.argmax[own], alone[sample.id].argmax)


@pytest.mark.case("O-C05")
def test_fewer_rows_than_tokens_are_refused(monkeypatch):
    target = Target(tiny_llama())
    states = target.states

    def one_row_less(*arguments, **settings):
        found = states(*arguments, **settings)
        return TargetStates(found.taps, found.final[1:])

    monkeypatch.setattr(target, "states", one_row_less)
    with pytest.raises(RuntimeError, match=r"4 rows of final for 5 tokens \(samples a, b\)"):
        capture_batch(target, [make_sample("a", [1, 2], ".S"), make_sample("b", [1, 2, 3], ".SS")], (0,))


@pytest.mark.case("O-C06")
def test_what_overflows_float16_is_rejected_and_what_bfloat16_holds_is_kept():
    values = torch.tensor([65504.0, 65519.0, 65520.0, 70000.0])
    samples = [make_sample(id, [1, 2], ".S") for id in "ab"]
    for dtype, kept in ((torch.float16, ["a"]), (torch.bfloat16, ["a", "b"])):
        taps = values.to(dtype)[:, None, None]
        batch = FeatureBatch(
            pack(samples), (7,), taps, torch.zeros(4, 1), torch.zeros(4), torch.zeros(4).long()
        )
        left, filtered, rejected = reject_bad(samples, batch)
        assert [sample.id for sample in left] == kept
        assert rejected == ([["b", "7"]] if dtype == torch.float16 else [])
        assert filtered.taps.isfinite().all()
    assert filtered.taps[3].item() == 70144.0


def target_with_a_bad_token(bad=9):
    target = Target(tiny_llama())
    with torch.no_grad():
        target.embedding.weight[bad] = float("inf")
    return target


@pytest.mark.case("O-C06")
def test_a_sample_with_non_finite_states_is_left_out_and_counted(tmp_path):
    good = random_samples(9, vocab=200)
    bad = make_sample("bad", [1, 2, 250, 3], "..SS")
    target = target_with_a_bad_token(250)
    manifest = run_capture(target, [*good, bad], tmp_path, max_bad_fraction=0.1)
    assert manifest["rejected"] == [["bad", "0"]]
    assert manifest["samples"] == 9
    store = FeatureStore.load(tmp_path)
    assert sorted(store.lengths) == [sample.id for sample in good]
    expected = capture_batch(target, [good[0]], (0, 2)).final
    torch.testing.assert_close(store.batch(["s000"]).final, expected, atol=1e-5, rtol=0)


@pytest.mark.case("O-C06")
def test_more_bad_samples_than_allowed_stop_the_capture_by_name(tmp_path):
    samples = [*random_samples(9, vocab=200), make_sample("bad", [1, 2, 250, 3], "..SS")]
    with pytest.raises(ValueError, match=r"1 of 10 samples .*max_bad_fraction=0.05: bad \(layer 0\)"):
        run_capture(target_with_a_bad_token(250), samples, tmp_path, max_bad_fraction=0.05)
    assert not (tmp_path / MANIFEST).exists()


@pytest.mark.case("O-C06")
def test_a_row_of_bad_samples_only_leaves_a_record_without_a_file(tmp_path):
    samples = [make_sample("a", [1, 2], ".S"), make_sample("b", [250, 2], ".S")]
    capture(
        target_with_a_bad_token(250),
        samples,
        (0,),
        tmp_path,
        micro_tokens=2,
        max_bad_fraction=1,
        progress=False,
    )
    assert not (tmp_path / "shard-00001.safetensors").exists()
    assert sorted(FeatureStore.load(tmp_path).lengths) == ["a"]


@pytest.mark.case("O-C07")
def test_only_a_damaged_shard_is_written_again_and_with_the_same_bytes(tmp_path):
    target, samples = Target(tiny_llama()), random_samples(9)
    folder = tmp_path / "new" / "features"
    run_capture(target, samples, folder)
    before = contents(folder)
    times = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
    path = folder / "shard-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    run_capture(target, samples, folder)
    assert contents(folder) == before
    assert [name for name, time in times.items() if (folder / name).stat().st_mtime_ns != time] == [path.name]


@pytest.mark.case("O-C07")
def test_a_full_disk_stops_the_capture_and_leaves_whole_shards_only(tmp_path, monkeypatch):
    from spectrain import artifacts

    fsync, calls = os.fsync, []

    def full(handle):
        calls.append(handle)
        if len(calls) == 4:  # settings, shard 0, its record, shard 1
            raise OSError(28, "No space left on device")
        fsync(handle)

    monkeypatch.setattr(artifacts.os, "fsync", full)
    with pytest.raises(OSError, match="disk full: .* MiB do not fit.*shard-00001.safetensors"):
        run_capture(Target(tiny_llama()), random_samples(9), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "capture.json", "shard-00000.json", "shard-00000.safetensors",
    ]  # fmt: skip
    monkeypatch.undo()
    record = read_json(tmp_path / "shard-00000.json")
    assert module.damaged_shards(tmp_path, [record]) == {}


@pytest.mark.case("O-C07")
def test_features_that_the_disk_cannot_hold_are_refused_before_the_first_shard(tmp_path, monkeypatch):
    usage = module.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"disk full: the features need 0.00 GiB, 0.00 GiB are free"):
        run_capture(Target(tiny_llama()), random_samples(9), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["capture.json"]


def test_the_size_estimate_is_within_a_hundredth_of_the_truth(tmp_path):
    samples = random_samples(40, longest=200)
    manifest = capture(Target(tiny_llama()), samples, (0, 2), tmp_path, micro_tokens=2000, progress=False)
    estimate = manifest["tokens"] * module.bytes_per_token(2, 32, torch.float32)
    assert manifest["bytes"] == pytest.approx(estimate, rel=0.01)


def test_other_settings_never_meet_the_old_shards(tmp_path):
    target, samples = Target(tiny_llama()), random_samples(9)
    run_capture(target, samples, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    capture(target, samples[:2], (0, 2), tmp_path, micro_tokens=80, progress=False)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["shard-00000.safetensors"]
    assert sorted(FeatureStore.load(tmp_path).lengths) == ["s000", "s001"]


def test_shards_of_unknown_settings_are_refused(tmp_path):
    (tmp_path / "shard-00000.safetensors").write_bytes(b"old")
    with pytest.raises(ValueError, match="holds shards but no capture.json"):
        run_capture(Target(tiny_llama()), random_samples(2), tmp_path)


def test_a_sample_longer_than_a_row_is_refused(tmp_path):
    with pytest.raises(ValueError, match="a sample of 90 tokens does not fit train.micro_tokens=80"):
        run_capture(Target(tiny_llama()), [make_sample("a", [1] * 90, "S" * 90)], tmp_path)


def test_online_features_are_the_stored_ones_packed_otherwise(tmp_path):
    target, samples = Target(tiny_llama()), random_samples(9)
    run_capture(target, samples, tmp_path)
    order = [7, 0, 4, 8]
    stored = FeatureStore.load(tmp_path).batch([samples[i].id for i in order])
    online = capture_batch(target, [samples[i] for i in order], (0, 2))
    assert torch.equal(stored.tokens.ids, online.tokens.ids)
    for name in ("taps", "final", "lse"):
        torch.testing.assert_close(getattr(stored, name), getattr(online, name), atol=1e-5, rtol=0)
    assert torch.equal(stored.argmax, online.argmax)

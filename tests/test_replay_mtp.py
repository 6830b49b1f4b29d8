"""The reader of exported MTP weights: it gives the drafter's logits, and sees what orders and norms hide."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from spectrain.config import ExportConfig, RunConfig
from spectrain.drafters import mtp
from spectrain.drafters.mtp_weights import names_of
from spectrain.export import check, export, record
from spectrain.export_check import examine
from spectrain.testing_mtp import KINDS, mtp_target
from spectrain.testing_published import imported, nulls, same

D = 32
PROJECTION = {
    "deepseek_v3": "model.layers.2.eh_proj.weight",
    "glm4_moe": "model.layers.2.eh_proj.weight",
    "qwen3_next": "mtp.fc.weight",
    "qwen3_5": "mtp.fc.weight",
    "qwen3_5_moe": "mtp.fc.weight",
    "mimo": "model.mtp_layers.0.input_proj.weight",
}


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """Every kind's target, made when it is first asked for."""
    made = {}

    def target(kind):
        if kind not in made:
            made[kind] = mtp_target(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return target


def drafter_of(target, **settings):
    """A random drafter, every parameter of which differs from its start."""
    torch.manual_seed(0)
    order = names_of(target.config, 1).order
    config = mtp.Config(**{"unroll": 3, "order": order, **settings})
    drafter = mtp.build(config, target, torch.arange(target.vocab_size)).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        for name, buffer in drafter.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(8 + 0.01 * torch.randn(len(buffer)))  # bfloat16 has steps of 0.06 there
    return drafter


def written(drafter, target, folder, *engines):
    run = RunConfig(recipe="trial", drafter=drafter.config, export=ExportConfig(engine=list(engines)))
    return export(run, target, drafter, folder)[0]


@pytest.fixture(scope="module")
def good(targets, tmp_path_factory):
    """Every kind's folder for SGLang."""
    made = {}

    def folder(kind):
        if kind not in made:
            target = targets(kind)
            made[kind] = written(drafter_of(target), target, tmp_path_factory.mktemp("good"), "sglang")
        return made[kind]

    return folder


@pytest.fixture
def copy(good, tmp_path):
    def make(kind):
        return shutil.copytree(good(kind), tmp_path / kind, symlinks=True)

    return make


def tensors(folder, **changes):
    """Write other tensors of the shard, with __ for . in names; ... deletes one."""
    path = folder / "mtp.safetensors"
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    changed = {**load_file(path), **{name.replace("__", "."): value for name, value in changes.items()}}
    save_file({name: t.contiguous() for name, t in changed.items() if t is not ...}, path, metadata)


def faults(folder, target, engine="sglang"):
    return {f.name: " | ".join(f.faults) for f in examine(folder, target.config, [engine]) if f.faults}


@pytest.mark.case("O-E01")
@pytest.mark.parametrize("kind", KINDS)
def test_the_folder_alone_gives_the_decode_loops_logits_over_two_recurrent_steps(kind, targets, good):
    target, folder = targets(kind), good(kind)
    assert check(folder, target) <= 1e-4
    recorded = load_file(folder / "check" / "replay.safetensors")["logits"]
    assert len(recorded) == 3 and recorded.std() > 0.01
    found = examine(folder, target.config, ["sglang"])
    assert [f.faults for f in found if f.faults] == []
    assert {f.rule: f.status for f in found}[7] == {f.rule: f.status for f in found}[9] == "PASS"


def test_a_block_for_each_step_runs_on_every_row(targets, tmp_path):
    target = targets("deepseek_v3")
    folder = written(drafter_of(target, blocks=3), target, tmp_path, "vllm")
    assert check(folder, target) <= 1e-4
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 3


def test_vllms_glm_feeds_back_the_state_before_its_norm(targets, tmp_path):
    target = targets("glm4_moe")
    folder = written(drafter_of(target, feedback="pre"), target, tmp_path, "vllm")
    assert check(folder, target) <= 1e-4


def test_one_step_of_training_is_recorded_as_one_step(targets, tmp_path):
    """Engines differ in what a second step would read."""
    target = targets("glm4_moe")
    folder = written(drafter_of(target, unroll=1), target, tmp_path, "vllm", "sglang")
    assert len(load_file(folder / "check" / "replay.safetensors")["logits"]) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_blocks_of_a_folder_come_back_as_they_were_rounded(kind, targets, good):
    target, folder = targets(kind), good(kind)
    back, drafter = imported(folder, target, mtp, unroll=3), drafter_of(target)
    for name, tensor in drafter.state_dict().items():
        if not name.endswith("e_score_correction_bias"):
            tensor.copy_(tensor.bfloat16())
    assert same(drafter, back) and back.config.order == drafter.config.order


@pytest.mark.case("O-E04")
@pytest.mark.parametrize("kind", KINDS)
def test_no_key_of_a_folder_is_null_but_those_of_the_target_itself(kind, targets, good):
    target = json.loads((Path(targets(kind).path) / "config.json").read_text())
    config = json.loads((good(kind) / "config.json").read_text())
    assert sorted(nulls(config)) == sorted(nulls(target))
    (count,) = config.keys() & {"num_nextn_predict_layers", "mtp_num_hidden_layers"}
    assert (config[count], config["vocab_size"]) == (1, 260)


@pytest.mark.parametrize("kind", KINDS)
def test_swapped_halves_of_the_projection_are_found_and_named(kind, targets, copy):
    folder = copy(kind)
    weight = load_file(folder / "mtp.safetensors")[PROJECTION[kind]]
    tensors(folder, **{PROJECTION[kind]: weight.roll(D, 1)})
    found = faults(folder, targets(kind))
    assert found.keys() == {"MTP orders and norms", "numeric replay"}
    assert found["MTP orders and norms"].startswith("the halves of eh_proj are swapped")
    assert "replayed logits differ from the trained drafter's" in found["numeric replay"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_fed_back_from_the_other_side_of_the_norm_is_found_and_named(kind, targets, copy):
    """The weights of training that fed back the state before the last norm."""
    folder, target = copy(kind), targets(kind)
    other = record(drafter_of(target, feedback="pre"), target, torch.bfloat16)
    save_file(other, folder / "check" / "replay.safetensors")
    found = faults(folder, target)
    assert found.keys() == {"MTP orders and norms", "numeric replay"}
    assert found["MTP orders and norms"].startswith("a step was trained on the state on the other side")


@pytest.mark.parametrize("kind", ["qwen3_next", "glm4_moe"])
def test_norms_stored_as_the_other_of_w_and_w_minus_one_are_found_and_named(kind, targets, copy):
    folder = copy(kind)
    shift = 1.0 if kind == "qwen3_next" else -1.0
    stored = load_file(folder / "mtp.safetensors")
    norms = {name: t.float() + shift for name, t in stored.items() if "norm" in name}
    tensors(folder, **norms)
    found = faults(folder, targets(kind))
    assert found["MTP orders and norms"].startswith("norms are stored as the other of w and w - 1")


def test_a_tensor_that_is_only_in_the_index_is_named(targets, copy):
    folder = copy("qwen3_5")
    tensors(folder, mtp__layers__0__self_attn__k_norm__weight=...)
    found = faults(folder, targets("qwen3_5"))
    assert "mtp.layers.0.self_attn.k_norm.weight is only in the index" in found["tensor set"]
    assert "tensor mtp.layers.0.self_attn.k_norm.weight" in found["numeric replay"]


def test_the_correction_of_the_router_keeps_its_float32(good):
    """Rounded to bfloat16 its differences of 0.01 would be lost, and other experts chosen."""
    stored = load_file(good("deepseek_v3") / "mtp.safetensors")
    correction = stored["model.layers.2.mlp.gate.e_score_correction_bias"]
    assert correction.dtype == torch.float32 and len(correction.unique()) == 4
    assert stored["model.layers.2.mlp.gate.weight"].dtype == torch.bfloat16


def test_a_kind_that_is_not_known_is_refused(targets, copy):
    folder = copy("mimo")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "llama"}))
    with pytest.raises(ValueError, match="model_type='llama': expected one of deepseek_v3, "):
        check(folder, targets("mimo"))

"""Published EAGLE-3 drafters become ours: settings, draft vocabulary, tensors; what does not fit is named."""

import json
import logging
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from spectrain.config import ExportConfig, RunConfig, TrainConfig
from spectrain.drafters import eagle3
from spectrain.export import export
from spectrain.imports import open_import
from spectrain.stages import Road
from spectrain.target import Target
from spectrain.testing_published import imported, same, written

IDS = "eagle_aux_hidden_state_layer_ids"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def llama(**changes):
    torch.manual_seed(1)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return Target(LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **changes})))


def drafter_for(target, **settings):
    kept = torch.arange(0, target.vocab_size, 2)
    return eagle3.build(eagle3.Config(**{"draft_vocab": 20, **settings}), target, kept)


def exported(target, tmp_path, drafter, *, dtype="float32"):
    config = RunConfig(recipe="trial", drafter=drafter.config, export=ExportConfig(dtype=dtype))
    export(config, target, drafter, tmp_path / "export")
    return tmp_path / "export" / drafter.config.family


def edit_config(folder, *, drop=(), **changes):
    path = folder / "config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if key not in drop}
    path.write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"fc_norm": True, "norm_output": True},
        {"taps": [0, 3]},
        {"layers": 2},
    ],
)
def test_an_eagle3_export_comes_back_bit_for_bit(tmp_path, settings):
    target = llama()
    drafter = drafter_for(target, **settings)
    back = imported(exported(target, tmp_path, drafter), target)
    assert same(drafter, back)
    assert back.taps == drafter.taps
    expected = replace(drafter.config, taps=list(drafter.taps), init_from=back.config.init_from)
    assert back.config == expected


def test_a_bfloat16_export_comes_back_as_it_was_rounded_and_exports_to_the_same_bytes(tmp_path):
    target = llama()
    folder = exported(target, tmp_path / "1", drafter_for(target), dtype="bfloat16")
    again = exported(target, tmp_path / "2", imported(folder, target), dtype="bfloat16")
    first, second = (load_file(path / "model.safetensors") for path in (folder, again))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_form_of_speculators_is_read(tmp_path):
    target = llama()
    drafter = drafter_for(target, norm_before_residual=True)
    body = drafter.draft_config.to_dict()
    config = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": body,
        "draft_vocab_size": 20,
        "norm_before_residual": True,
        IDS: [2, 4, 5],
    }
    tensors = {name.replace("midlayer.", "layers.0."): t for name, t in drafter.state_dict().items()}
    maps = {"d2t": drafter.kept_ids - torch.arange(20), "t2d": torch.arange(40) % 2 == 0}
    embedding = {"embed_tokens.weight": target.embedding.weight.detach()}
    folder = written(tmp_path / "s", config, {**tensors, **maps, **embedding})
    back = imported(folder, target)
    assert back.taps == (1, 3, 4)
    assert same(drafter, back)
    edit_config(folder, drop=["norm_before_residual"])
    with pytest.raises(ValueError, match="key norm_before_residual is missing"):
        imported(folder, target)


@pytest.mark.case("O-E04")
def test_missing_layer_ids_are_an_error_until_the_recipe_names_them(tmp_path):
    target = llama()
    folder = exported(target, tmp_path, drafter_for(target))
    edit_config(folder, drop=[IDS, "eagle_config"])
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors")  # without our metadata
    with pytest.raises(ValueError, match=rf"key {IDS} is missing.*drafter.taps=\[1, 3, 4\]"):
        imported(folder, target)
    assert imported(folder, target, taps=[1, 2, 4]).taps == (1, 2, 4)


@pytest.mark.case("O-C01")
@pytest.mark.parametrize(
    ("model_type", "nested", "taps"),
    [
        ("llama", [1, 2, 4], (1, 2, 4)),
        ("deepseek_v3", [1, 2, 4], (1, 2, 4)),
        ("deepseek_v3", [2, 3, 5], (1, 2, 4)),
        ("gpt_oss", [2, 3, 5], (2, 3, 5)),
    ],
)
def test_the_nested_list_names_outputs_but_for_the_targets_to_which_sglang_adds_nothing(
    tmp_path, model_type, nested, taps
):
    target = llama()
    folder = exported(target, tmp_path, drafter_for(target))
    edit_config(folder, drop=[IDS], eagle_config={IDS: nested})
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors")  # without our metadata
    target.config.model_type = model_type
    assert imported(folder, target).taps == taps


def test_two_lists_that_mean_other_layers_are_an_error(tmp_path):
    target = llama()
    folder = exported(target, tmp_path, drafter_for(target))
    edit_config(folder, **{IDS: [1, 2, 3]})
    with pytest.raises(ValueError, match=r"outputs of layers \[0, 1, 2\]; eagle_config.*layers \[1, 3, 4\]"):
        imported(folder, target)


@pytest.mark.case("O-E04")
def test_a_list_that_is_not_the_one_kept_with_the_weights_is_an_error(tmp_path):
    target = llama()
    folder = exported(target, tmp_path, drafter_for(target))
    edit_config(folder, **{IDS: [1, 3, 5], "eagle_config": {IDS: [0, 2, 4]}})
    with pytest.raises(ValueError, match=r"layers \[0, 2, 4\], but the weights were trained on \[1, 3, 4\]"):
        imported(folder, target)


def test_another_target_than_the_export_names_is_told(tmp_path, caplog):
    target = llama()
    folder = exported(target, tmp_path, drafter_for(target))
    with torch.no_grad():
        target.head.weight.mul_(1.5)
    tuned = Target(target.model)
    with caplog.at_level(logging.WARNING):
        imported(folder, tuned)
    assert "trained on another target (different weights)" in caplog.text


def test_a_setting_that_the_files_decide_otherwise_is_an_error(tmp_path):
    target = llama()
    folder = exported(target, tmp_path, drafter_for(target))
    with pytest.raises(ValueError, match="drafter.draft_vocab=16: .* has 20"):
        imported(folder, target, draft_vocab=16)


@pytest.mark.case("O-E01")
def test_a_missing_head_of_a_reduced_vocabulary_is_named(tmp_path):
    target = llama()
    folder = exported(target, tmp_path, drafter_for(target))
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match="model.safetensors: tensor lm_head.weight is missing"):
        imported(folder, target)


def test_a_full_vocabulary_without_a_head_has_the_targets(tmp_path):
    target = llama()
    drafter = eagle3.build(eagle3.Config(draft_vocab=0, head="frozen"), target, torch.arange(40))
    folder = exported(target, tmp_path, drafter)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    back = imported(folder, target)
    assert (back.config.head, back.config.draft_vocab) == ("frozen", 0)
    assert same(drafter, back)


@pytest.mark.case("O-V01")
def test_absolute_ids_in_d2t_are_refused(tmp_path):
    target = llama()
    drafter = drafter_for(target)
    folder = exported(target, tmp_path, drafter)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "d2t": drafter.kept_ids}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="it must hold offsets"):
        imported(folder, target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"norm.weight": torch.ones(31)},
            r"tensor norm.weight has shape \[31\]: expected \[32\] of norm.weight",
        ),
        (
            {"midlayer.self_attn.q_norm.weight": torch.ones(8)},
            "q_norm.weight is not one that this drafter has",
        ),
        (
            {"norm.weight": torch.full((32,), torch.nan)},
            "tensor norm.weight holds values that are not finite",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named_with_its_file(tmp_path, change, message):
    target = llama()
    folder = exported(target, tmp_path, drafter_for(target))
    save_file({**load_file(folder / "model.safetensors"), **change}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"model.safetensors: tensor.*{message.removeprefix('tensor ')}"):
        imported(folder, target)


@pytest.mark.case("O-E02")
@pytest.mark.parametrize("dialect", ["new", "old", "both"])
def test_both_rotary_dialects_give_the_same_frequencies(tmp_path, dialect):
    """head_dim 8, theta 500000, llama3 scaling by 8."""
    target = llama(hidden_size=32, rope_parameters={"rope_theta": 500000.0, **LLAMA3})
    folder = exported(target, tmp_path, drafter_for(target))
    drop = {"new": ["rope_theta", "rope_scaling"], "old": ["rope_parameters"], "both": []}[dialect]
    edit_config(folder, drop=drop)
    back = imported(folder, target)
    table = back.rotary._table[0].inv_freq
    assert torch.allclose(table, torch.tensor([1.0, 0.0047007538, 0.00017677668, 6.6478697e-06]))
    assert back.config.shape == {}


def test_rotary_dialects_that_differ_are_an_error(tmp_path):
    target = llama()
    folder = exported(target, tmp_path, drafter_for(target))
    edit_config(folder, rope_theta=500000.0)
    with pytest.raises(ValueError, match="rope_parameters.rope_theta=10000.0, but 500000.0 as rope_theta"):
        imported(folder, target)


@pytest.mark.case("O-E03")
def test_a_drafter_keeps_sizes_that_are_not_its_targets(tmp_path):
    sizes = {"vocab_size": 40, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
    target = Target(Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, max_position_embeddings=64)))
    other = {
        "intermediate_size": 80,
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    }
    drafter = drafter_for(target, taps=[0, 1, 2], shape=other)
    config = {"model_type": "llama", IDS: [1, 2, 3], **drafter.draft_config.to_dict()}
    tensors = {**drafter.state_dict(), "d2t": drafter.kept_ids - torch.arange(20)}
    back = imported(written(tmp_path / "d", config, tensors), target)
    assert back.config.shape == other
    assert back.midlayer.self_attn.q_proj.weight.shape == (128, 128)
    assert back.midlayer.self_attn.k_proj.weight.shape == (64, 128)
    assert back.midlayer.self_attn.o_proj.weight.shape == (64, 128)
    assert same(drafter, back)


def test_pickled_tensors_are_read_and_pickled_code_is_refused(tmp_path):
    target = llama()
    drafter = drafter_for(target, taps=[1, 2, 4])
    config = {**drafter.draft_config.to_dict()}
    tensors = {**drafter.state_dict(), "d2t": drafter.kept_ids - torch.arange(20)}
    folder = written(tmp_path / "d", config, tensors, name="pytorch_model.bin")
    assert same(drafter, imported(folder, target, taps=[1, 2, 4]))
    torch.save({"fc.weight": print}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pytorch_model.bin: holds more than tensors, or is damaged"):
        imported(folder, target, taps=[1, 2, 4])


def test_an_embedding_that_is_not_the_targets_is_told(tmp_path, caplog):
    target = llama()
    folder = exported(target, tmp_path, drafter_for(target))
    tensors = load_file(folder / "model.safetensors")
    stored = target.embedding.weight.detach() + 0.5
    save_file({**tensors, "embed_tokens.weight": stored}, folder / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        imported(folder, target)
    assert "embed_tokens.weight differs from the target's embedding by up to 0.5" in caplog.text


def test_what_is_no_folder_and_no_hub_id_is_an_error():
    with pytest.raises(ValueError, match="drafter.init_from='./nowhere': no such folder"):
        open_import(eagle3.Config(init_from="./nowhere"), llama())


@pytest.mark.parametrize("passes", [0, 1])
def test_a_recipe_takes_over_drafter_and_draft_vocabulary(tmp_path, passes):
    target = llama()
    drafter = drafter_for(target)
    folder = exported(target, tmp_path, drafter)
    settings = eagle3.Config(init_from=str(folder))
    config = RunConfig(
        recipe="trial",
        run_dir=str(tmp_path / "run"),
        drafter=settings,
        train=TrainConfig(passes=passes),
        device="cpu",
    )
    road = Road(replace(config, target=replace(config.target, dtype="float32")))
    road._targets[f"float32 {config.target.path}"] = target
    assert same(drafter, road.new_drafter(target))
    if passes == 0:
        assert same(drafter, road.trained_drafter(target))

"""Exported folders: what is in them; one that would not serve what was trained is never written."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from spectrain.artifacts import write_json
from spectrain.checkpoint import weights_print
from spectrain.checks import CheckFailed
from spectrain.config import ExportConfig, RunConfig
from spectrain.drafters import eagle3
from spectrain.export import check, check_untrained, engine_config, export, rope_dialects
from spectrain.replay import Replay
from spectrain.target import Target
from spectrain.testing import ladder_llama, tiny_llama

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def llama(**changes):
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    return Target(LlamaForCausalLM(LlamaConfig(**sizes, **heads, **changes)))


def qwen3():
    """Eight heads of 16 in a hidden size of 64, so hidden / heads is 8."""
    config = Qwen3Config(
        vocab_size=40,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
    )
    return Target(Qwen3ForCausalLM(config))


def drafter_for(target, *, kept=None, taps=(0, 1, 2), **settings):
    kept = torch.arange(0, target.vocab_size, 2) if kept is None else kept
    return eagle3.build(eagle3.Config(taps=list(taps), **settings), target, kept)


def exported(target, tmp_path, *, dtype="bfloat16", **changes):
    drafter = drafter_for(target, **changes)
    config = RunConfig(recipe="trial", drafter=drafter.config, export=ExportConfig(dtype=dtype))
    (folder,) = export(config, target, drafter, tmp_path / "export")
    return folder


def read_config(folder):
    return json.loads((folder / "config.json").read_text())


def rewrite(folder, **changes):
    """Change tensors of a written folder, metadata kept."""
    path, metadata = folder / "model.safetensors", Replay(folder).metadata
    save_file({**load_file(path), **changes}, path, metadata)


@pytest.mark.parametrize("switch", ["norm_output", "norm_before_residual"])
def test_the_folder_of_a_drafter_of_three_layers_gives_the_decode_loops_logits(tmp_path, switch):
    """`export` compares them; the names are those that vLLM reads."""
    folder = exported(llama(), tmp_path, layers=3, **{switch: True})
    assert read_config(folder)["num_hidden_layers"] == 3
    shapes = {name: tuple(t.shape) for name, t in load_file(folder / "model.safetensors").items()}
    assert shapes["midlayer.self_attn.q_proj.weight"] == (32, 64)
    for name in ("layers.1.self_attn.q_proj.weight", "layers.2.self_attn.q_proj.weight"):
        assert shapes[name] == (32, 32)
    assert not [name for name in shapes if name.endswith("hidden_norm.weight") and "midlayer" not in name]


def test_several_layers_are_refused_for_sglang_before_training():
    target, settings = llama(), ExportConfig(engine=["vllm", "sglang"])
    with pytest.raises(
        ValueError, match="drafter.layers=2: served by vLLM alone .*expected 1 for export.engine=sglang"
    ):
        check_untrained(target, drafter_for(target, layers=2), settings)


@pytest.mark.case("O-C01")
def test_layer_outputs_0_1_2_are_capture_points_1_2_3():
    target = Target(ladder_llama())
    config = engine_config(target, drafter_for(target, taps=(0, 1, 2)), "float32", "vllm")
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("kind", "taps", "nested"),
    [
        ("deepseek_v3", (0, 1, 2), None),
        ("deepseek_v3", (1, 2, 3), [1, 2, 3]),
        ("deepseek_v32", (2, 3, 4), [3, 4, 5]),
        ("gpt_oss", (0, 1, 2), [0, 1, 2]),
        ("gpt_oss", (2, 3, 4), [2, 3, 4]),
    ],
)
def test_targets_to_which_sglang_adds_one_only_after_a_first_id_of_one(kind, taps, nested):
    """GPT-OSS is none of them: SGLang adds one unless its last layer is named, which no export does."""
    target = llama()
    target.config.model_type = kind
    drafter = drafter_for(target, taps=(0, 1, 2))
    drafter.taps = taps
    if nested is None:
        with pytest.raises(ValueError, match=r"drafter.taps=\[0, 1, 2\]"):
            drafter.engine_config(target, "sglang")
    else:
        assert (
            drafter.engine_config(target, "sglang")["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
            == nested
        )


def test_a_tap_that_no_engine_captures_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="layer 3 is tapped: engines capture 0 to 2"):
        exported(llama(), tmp_path, taps=(0, 1, 3))


def test_a_full_draft_vocabulary_has_no_maps(tmp_path):
    folder = exported(llama(), tmp_path, kept=torch.arange(40))
    assert not {"d2t", "t2d"} & set(load_file(folder / "model.safetensors"))


@pytest.mark.case("O-E01")
def test_the_embedding_is_left_to_the_target(tmp_path):
    names = load_file(exported(llama(), tmp_path) / "model.safetensors")
    assert not [name for name in names if "embed" in name]


@pytest.mark.case("O-E01")
@pytest.mark.parametrize("make", [llama, qwen3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("switch", ["", "fc_norm", "norm_output", "norm_before_residual"])
def test_the_folder_alone_gives_the_decode_loops_logits(make, dtype, switch, tmp_path):
    target = make()
    folder = exported(target, tmp_path, dtype=dtype, **{switch: True} if switch else {})
    config = read_config(folder)
    assert [
        key for key in ("fc_norm", "norm_output", "norm_before_residual") if config[key]
    ] == switch.split()
    assert check(folder, target) <= 1e-5
    recorded = load_file(folder / "check" / "replay.safetensors")["logits"]
    assert recorded.shape == (3, 20)
    assert recorded.std() > 0.01


@pytest.mark.case("O-E01")
@pytest.mark.parametrize("name", ["midlayer.self_attn.k_proj.weight", "norm.weight", "lm_head.weight"])
def test_one_random_weight_fails_the_check_with_the_difference(name, tmp_path):
    target = llama()
    folder = exported(target, tmp_path)
    weight = load_file(folder / "model.safetensors")[name]
    rewrite(folder, **{name: torch.randn_like(weight)})
    with pytest.raises(CheckFailed, match=r"replayed logits differ .* by [\d.e-]+ \(bound"):
        check(folder, target)


@pytest.mark.case("O-E02")
def test_scaled_rope_is_written_in_both_dialects(tmp_path):
    target = llama(head_dim=8, rope_parameters={**LLAMA3, "rope_theta": 5e5})
    folder = exported(target, tmp_path)
    config = read_config(folder)
    assert config["rope_theta"] == 500000.0
    assert config["rope_scaling"] == LLAMA3
    assert config["rope_parameters"] == {**LLAMA3, "rope_theta": 500000.0}
    expected = torch.tensor([1.0, 0.0047007538, 0.00017677668, 6.6478697e-06])
    torch.testing.assert_close(Replay(folder).inv_freq, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(target.decoder.rotary_emb.inv_freq, expected, rtol=1e-6, atol=0)


@pytest.mark.case("O-E02")
def test_plain_rope_has_no_rope_scaling(tmp_path):
    folder = exported(
        llama(head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 5e5}), tmp_path
    )
    config = read_config(folder)
    assert "rope_scaling" not in config
    assert config["rope_theta"] == 500000.0
    expected = torch.tensor([1.0, 0.037606031, 0.0014142134, 5.3182957e-05])
    torch.testing.assert_close(Replay(folder).inv_freq, expected, rtol=1e-6, atol=0)


@pytest.mark.case("O-E02")
def test_an_unknown_rope_type_is_an_error():
    with pytest.raises(ValueError, match="'longrope': expected one of default, linear, llama3, yarn"):
        rope_dialects({"rope_type": "longrope", "rope_theta": 1e4})


@pytest.mark.case("O-E02")
@pytest.mark.parametrize(
    ("taps", "rope", "message"),
    [
        ((0, 1, 3), {}, "layer 3 is tapped: engines capture 0 to 2"),
        (
            (0, 1),
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor is not known for rope_type='default'",
        ),
        ((0, 1), {"rope_type": "dynamic", "factor": 2.0}, "'dynamic': expected one of default, linear"),
    ],
)
def test_what_no_engine_can_serve_is_refused_before_training(taps, rope, message):
    target = llama(rope_parameters={"rope_type": "default", "rope_theta": 1e4, **rope})
    with pytest.raises(ValueError, match=message):
        check_untrained(target, drafter_for(target, taps=taps), ExportConfig())


def test_a_width_that_the_check_does_not_know_is_refused_before_training():
    target = llama()
    with pytest.raises(ValueError, match="drafter.width=16: expected 0 for the export"):
        check_untrained(target, drafter_for(target, width=16), ExportConfig())


def test_a_drafter_that_can_be_exported_passes_the_check_before_training():
    for target in (llama(), qwen3()):
        check_untrained(target, drafter_for(target), ExportConfig())


@pytest.mark.case("O-E02")
def test_a_lost_theta_fails_the_check(tmp_path):
    target = llama(head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    folder = exported(target, tmp_path)
    lost = {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    (folder / "config.json").write_text(json.dumps({**read_config(folder), **lost}))
    with pytest.raises(ValueError, match="rope_parameters=.* give frequencies"):
        check(folder, target)


@pytest.mark.case("O-E03")
def test_head_dim_is_the_targets_and_not_hidden_over_heads(tmp_path):
    folder = exported(qwen3(), tmp_path)
    assert read_config(folder)["head_dim"] == 16
    shapes = {name: list(t.shape) for name, t in load_file(folder / "model.safetensors").items()}
    assert shapes["midlayer.self_attn.q_proj.weight"] == [128, 128]
    assert shapes["midlayer.self_attn.k_proj.weight"] == [32, 128]
    assert shapes["midlayer.self_attn.v_proj.weight"] == [32, 128]
    assert shapes["midlayer.self_attn.o_proj.weight"] == [64, 128]
    assert shapes["fc.weight"] == [64, 192]


@pytest.mark.case("O-E04")
@pytest.mark.parametrize("make", [llama, qwen3])
def test_every_key_is_written_and_none_is_null(make, tmp_path):
    target = make()
    config = read_config(exported(target, tmp_path))
    assert "null" not in json.dumps(config)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["model_type"] == "llama"
    assert (config["vocab_size"], config["draft_vocab_size"]) == (40, 20)
    assert (config["dtype"], config["torch_dtype"]) == ("bfloat16", "bfloat16")
    assert config["max_position_embeddings"] == 512
    assert config["num_aux_hidden_states"] == 3
    assert "target_hidden_size" not in config, "the authors' code leaves the embedding random where it stands"
    off = (
        "attention_bias mlp_bias tie_word_embeddings norm_before_residual norm_before_fc fc_norm norm_output"
    )
    assert not any(config[key] for key in off.split())


@pytest.mark.case("O-E04")
def test_the_weights_metadata_carries_taps_and_target(tmp_path):
    target = llama()
    metadata = Replay(exported(target, tmp_path)).metadata
    assert json.loads(metadata["tap_ids"]) == [0, 1, 2]
    assert json.loads(metadata["target"]) == target.fingerprint()


def test_weights_are_of_the_export_dtype(tmp_path):
    tensors = load_file(exported(llama(), tmp_path) / "model.safetensors")
    assert {t.dtype for name, t in tensors.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}


def test_the_drafter_keeps_its_own_weights(tmp_path):
    target = llama()
    drafter = drafter_for(target)
    before = {name: t.clone() for name, t in drafter.state_dict().items()}
    export(RunConfig(recipe="trial", drafter=drafter.config), target, drafter, tmp_path)
    assert all(torch.equal(before[name], t) for name, t in drafter.state_dict().items())


def test_another_target_is_refused(tmp_path):
    folder = exported(llama(), tmp_path)
    with pytest.raises(ValueError, match="another target .*weights"):
        check(folder, llama())


def test_a_failed_export_leaves_the_older_one_and_nothing_else(tmp_path):
    target = llama()
    folder = exported(target, tmp_path)
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="layer 3 is tapped"):
        exported(target, tmp_path, taps=(0, 1, 3))
    assert (folder / "model.safetensors").read_bytes() == before
    assert [path.name for path in folder.parent.iterdir()] == ["eagle3"]


def test_a_second_export_replaces_the_first(tmp_path):
    target = llama()
    exported(target, tmp_path)
    folder = exported(target, tmp_path, kept=torch.arange(12))
    assert read_config(folder)["draft_vocab_size"] == 12


def test_a_stop_token_outside_the_draft_vocabulary_is_said(tmp_path, caplog):
    target = llama(eos_token_id=7)
    with caplog.at_level(logging.WARNING, "spectrain.export"):
        exported(target, tmp_path)
    assert "stop ids [7] are outside the draft vocabulary" in caplog.text


def test_the_model_card_says_what_was_trained_on_what(tmp_path):
    card = (exported(Target(tiny_llama(), path="tiny"), tmp_path) / "README.md").read_text()
    for text in (
        "- recipe: trial",
        "- target: tiny",
        "[0, 1, 2]",
        "130 of 260 ids",
        'num_speculative_tokens": 5',
    ):
        assert text in card
    assert "- tau:" not in card and "- certificate:" not in card


def test_the_model_card_warns_of_a_certificate_that_failed(tmp_path):
    folder = tmp_path / "eval" / "certificate"
    folder.mkdir(parents=True)
    target = llama()
    drafter = drafter_for(target)
    config = RunConfig(recipe="trial", drafter=drafter.config)
    known = weights_print(drafter)
    for drafter_print, said in ((known, "not passed: do not serve it"), ("", "of other weights or none")):
        write_json(folder / "certificate.json", {"pass": False, "drafter": drafter_print})
        (exported_to,) = export(config, target, drafter, tmp_path / "export")
        assert f"- certificate: {said}" in (exported_to / "README.md").read_text()

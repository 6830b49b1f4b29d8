"""The reader of exported folders: what it refuses, and that it computes EAGLE-3."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from spectrain.data.packing import Sample, pack
from spectrain.drafters import eagle3
from spectrain.features import FeatureBatch
from spectrain.replay import Replay, expected_shapes, inv_freq
from spectrain.target import Target
from spectrain.testing import tiny_llama

KEPT = torch.tensor([0, 2, 3, 7, 9])
METADATA = {"tap_ids": "[0, 1, 2]", "target": "{}", "target_model_type": "llama"}
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
    "vocab_size": 10,
    "draft_vocab_size": 5,
    "target_hidden_size": 16,
    "num_aux_hidden_states": 3,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "dtype": "float32",
    "torch_dtype": "float32",
}


@pytest.fixture
def folder(tmp_path):
    """A folder that keeps the contract, with random weights."""
    tensors = {name: torch.randn(shape) for name, shape in expected_shapes(CONFIG).items()}
    tensors["d2t"] = KEPT - torch.arange(5)
    tensors["t2d"] = torch.isin(torch.arange(10), KEPT)
    save_file(tensors, tmp_path / "model.safetensors", METADATA)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def change_config(folder, **changes):
    """Rewrite config.json; a value of ... deletes the key."""
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    kept = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))


def change_tensors(folder, metadata=METADATA, **changes):
    """Rewrite model.safetensors, with _ for . in names; a value of ... deletes the tensor."""
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **{name.replace("__", "."): value for name, value in changes.items()}}
    save_file({name: value for name, value in tensors.items() if value is not ...}, path, metadata)


def test_a_whole_folder_is_read(folder):
    replay = Replay(folder)
    assert replay.tap_ids == (0, 1, 2)
    assert torch.equal(replay.target_ids, KEPT)


@pytest.mark.case("O-E01")
def test_a_missing_head_is_named(folder):
    change_tensors(folder, lm_head__weight=...)
    with pytest.raises(ValueError, match=r"model.safetensors: tensor lm_head.weight is missing"):
        Replay(folder)


def test_a_tensor_that_no_engine_knows_is_named(folder):
    change_tensors(folder, midlayer__self_attn__q_proj__bias=torch.zeros(32))
    with pytest.raises(ValueError, match=r"tensor midlayer.self_attn.q_proj.bias is not part"):
        Replay(folder)


def test_a_misshapen_tensor_is_named(folder):
    change_tensors(folder, fc__weight=torch.zeros(16, 32))
    with pytest.raises(ValueError, match=r"tensor fc.weight has shape \(16, 32\): expected \(16, 48\)"):
        Replay(folder)


def test_a_tensor_of_another_dtype_than_the_config_says_is_named(folder):
    change_tensors(folder, norm__weight=torch.ones(16, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"tensor norm.weight has dtype torch.bfloat16: expected float32"):
        Replay(folder)


def test_a_value_that_is_not_finite_is_named(folder):
    change_tensors(folder, norm__weight=torch.full((16,), torch.inf))
    with pytest.raises(ValueError, match=r"tensor norm.weight holds values that are not finite"):
        Replay(folder)


@pytest.mark.case("O-E04")
@pytest.mark.parametrize("nested", [False, True])
def test_deleted_tap_layers_are_an_error_and_never_guessed(folder, nested):
    change_config(folder, **({"eagle_config": {}} if nested else {"eagle_aux_hidden_state_layer_ids": ...}))
    name = "eagle_config.eagle_aux" if nested else "key eagle_aux"
    with pytest.raises(ValueError, match=f"config.json: .*{name}_hidden_state_layer_ids is missing"):
        Replay(folder)


@pytest.mark.case("O-E04")
def test_other_tap_layers_than_in_the_weights_metadata_are_an_error(folder):
    change_config(folder, eagle_aux_hidden_state_layer_ids=[1, 2, 4])
    with pytest.raises(ValueError, match=r"outputs of layers \[0, 1, 3\], but .* on \[0, 1, 2\]"):
        Replay(folder)


def test_weights_without_tap_layers_in_their_metadata_are_refused(folder):
    change_tensors(folder, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="no tap_ids in the file's metadata"):
        Replay(folder)


@pytest.mark.parametrize(
    ("nested", "metadata_taps"),
    [([1, 3, 5], "[1, 3, 5]"), ([3, 5, 7], "[2, 4, 6]"), ([2, 3, 4], "[1, 2, 3]")],
)
def test_sglang_adds_one_for_some_targets_only_if_the_first_id_is_one(folder, nested, metadata_taps):
    taps = json.loads(metadata_taps)
    change_tensors(folder, metadata={**METADATA, "tap_ids": metadata_taps, "target_model_type": "kimi_k2"})
    change_config(
        folder,
        eagle_aux_hidden_state_layer_ids=[k + 1 for k in taps],
        eagle_config={"eagle_aux_hidden_state_layer_ids": nested},
    )
    assert Replay(folder).tap_ids == tuple(taps)


@pytest.mark.case("O-E04")
def test_null_is_refused_wherever_it_stands(folder):
    change_config(folder, eagle_config={"a": [1, None]})
    with pytest.raises(ValueError, match=r"config.json: eagle_config.a.1 is null"):
        Replay(folder)


@pytest.mark.parametrize("flag", ["norm_before_fc", "attention_bias", "mlp_bias"])
def test_another_graph_is_refused(folder, flag):
    change_config(folder, **{flag: True})
    with pytest.raises(ValueError, match=f"{flag}=True: expected False"):
        Replay(folder)


@pytest.mark.case("O-V01")
def test_absolute_ids_in_d2t_are_refused(folder):
    change_tensors(folder, d2t=KEPT)  # read as offsets: 0, 3, 5, 10, 13
    with pytest.raises(ValueError, match=r"d2t holds no offsets: .* within 0 .. 9"):
        Replay(folder)


@pytest.mark.case("O-V01")
def test_a_mask_of_other_ids_than_d2t_is_refused(folder):
    change_tensors(folder, t2d=torch.arange(10) < 5)
    with pytest.raises(ValueError, match="t2d does not mark the 5 target ids"):
        Replay(folder)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
OLDER = {"type" if key == "rope_type" else key: value for key, value in LLAMA3.items()}


@pytest.mark.case("O-E02")
@pytest.mark.parametrize(
    "config",
    [
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_theta": 5e5, "rope_scaling": OLDER},
        {"rope_theta": 5e5, "rope_scaling": {**OLDER, **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": OLDER, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
    ],
)
def test_both_rope_dialects_give_the_same_frequencies(config):
    found, scale = inv_freq({"head_dim": 8, **config})
    expected = torch.tensor([1.0, 0.0047007538, 0.00017677668, 6.6478697e-06])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert scale == 1.0


@pytest.mark.case("O-E02")
def test_plain_rope_keeps_its_theta():
    found, _ = inv_freq({"head_dim": 8, "rope_theta": 5e5})
    expected = torch.tensor([1.0, 0.037606031, 0.0014142134, 5.3182957e-05])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {**LLAMA3, "original_max_position_embeddings": 512},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "truncate": False},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "beta_fast": 16},
    ],
)
def test_frequencies_are_those_of_transformers(rope):
    rope = {**rope, "rope_theta": 10000.0}
    config = LlamaConfig(head_dim=32, max_position_embeddings=2048, rope_parameters=dict(rope))
    expected, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
    found, scale = inv_freq({"head_dim": 32, "rope_parameters": rope})
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert scale == pytest.approx(factor)


@pytest.mark.case("O-E02")
@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "longrope"}, "rope_type='longrope': expected one of default, linear, llama3, yarn"),
        ({"rope_type": "linear", "rope_theta": 1e4}, "rope_parameters.factor is missing"),
        ({"rope_type": "default"}, "rope_parameters.rope_theta is missing"),
        ({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_a_rope_setting_that_is_unknown_or_missing_is_named(rope, message):
    with pytest.raises(ValueError, match=message):
        inv_freq({"head_dim": 8, "rope_parameters": rope})


def test_rope_dialects_that_differ_are_refused(folder):
    change_config(folder, rope_theta=500000.0)
    with pytest.raises(ValueError, match="differs from rope_theta"):
        Replay(folder)


def test_replayed_logits_are_those_of_the_training_forward(tmp_path):
    """Slot k of training is draft step k of a chain whose draft tokens are the text's own next tokens."""
    target = Target(tiny_llama())
    kept = torch.arange(0, 260, 3)
    drafter = eagle3.build(eagle3.Config(unroll=3, taps=[0, 1, 2]), target, kept)
    shape = drafter.draft_config
    config = {
        **CONFIG,
        **{key: value for key, value in shape.to_dict().items() if key in CONFIG and key != "dtype"},
        "architectures": CONFIG["architectures"],
        "draft_vocab_size": len(kept),
        "target_hidden_size": shape.hidden_size,
    }
    maps = {"d2t": kept - torch.arange(len(kept)), "t2d": torch.isin(torch.arange(260), kept)}
    save_file({**drafter.state_dict(), **maps}, tmp_path / "model.safetensors", METADATA)
    (tmp_path / "config.json").write_text(json.dumps(config))

    ids, mask = torch.randint(260, (9,)), torch.ones(9, dtype=torch.bool)
    tokens = pack([Sample(id="a", ids=ids.int(), loss_mask=mask, span_ids=torch.zeros(9).int())])
    taps = torch.randn(9, 3, 32)
    empty = torch.zeros(9)
    batch = FeatureBatch(tokens, (0, 1, 2), taps, taps[:, 0], lse=empty, argmax=empty.long())
    with torch.no_grad():
        rows = drafter.rows(batch)
        trained = drafter.lm_head(rows.state)
    t = 4  # the chain starts from rows 0 .. 4 and is fed tokens 6 and 7
    embeds = target.embedding(ids)
    replayed = Replay(tmp_path).draft(
        taps[: t + 1], embeds[1 : t + 2], torch.arange(t + 1), embeds[t + 2 : t + 4]
    )
    chosen = trained[rows.index.row == t]
    assert rows.index.slot[rows.index.row == t].tolist() == [0, 1, 2]
    torch.testing.assert_close(replayed[:, kept], chosen, rtol=1e-5, atol=1e-5)
    assert (replayed > -torch.inf).sum() == 3 * len(kept)

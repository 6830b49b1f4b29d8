"""States that an engine wrote to files: which column is which layer, and which file is refused."""

import pytest
import torch
from safetensors.torch import save_file

from spectrain.state_files import (
    StateFolder,
    default_layer_ids,
    engine_layer_ids,
    read_states,
)
from spectrain.testing import make_sample

IDS = [3, 5]
# Of the ladder (embedding 100 i, layer k adds 2**k): the state in front of layers 1 to 3 and behind layer 3.
LADDER = torch.tensor([[301.0, 303.0, 307.0, 315.0], [501.0, 503.0, 507.0, 515.0]])[:, :, None].expand(
    2, 4, 8
)


def write(folder, states=LADDER, ids=IDS, name="hs_0.safetensors", metadata=None, **more):
    tensors = {"hidden_states": states.contiguous(), "token_ids": torch.tensor(ids), **more}
    save_file(tensors, folder / name, metadata)
    return folder / name


def read(path, ids=IDS, layer_ids=(1, 2, 3, 4), hidden_size=8, dtype=torch.float32):
    return read_states(path, ids, layer_ids=layer_ids, hidden_size=hidden_size, dtype=dtype)


@pytest.mark.case("O-C01")
def test_tap_k_is_the_engines_layer_id_k_plus_one(tmp_path):
    found = read(write(tmp_path))
    assert found.taps((0, 2))[:, :, 0].tolist() == [[301.0, 307.0], [501.0, 507.0]]
    assert found.before_norm(4)[:, 0].tolist() == [315.0, 515.0]
    assert engine_layer_ids((0, 1, 2), 4) == [1, 2, 3, 4]


@pytest.mark.case("O-C01")
def test_the_last_layers_tap_and_the_state_before_the_norm_are_one_layer_id():
    assert engine_layer_ids((1, 3), 4) == [2, 4]
    assert default_layer_ids(30) == engine_layer_ids((1, 14, 26), 30) == [2, 15, 27, 30]


def test_layer_ids_named_in_the_file_win(tmp_path):
    found = read(write(tmp_path, metadata={"layer_ids": "[1, 2, 3, 4]"}), layer_ids=(2, 2, 1, 4))
    assert found.layer_ids == (1, 2, 3, 4)


def test_a_tap_that_the_file_does_not_hold_is_named_with_those_it_holds(tmp_path):
    found = read(write(tmp_path), layer_ids=(2, 3, 4, 6))
    with pytest.raises(ValueError, match=r"hs_0.*tap 0 is the engine's layer id 1.*\[2, 3, 4, 6\]"):
        found.taps((0,))
    with pytest.raises(ValueError, match="the state before the final norm is the engine's layer id 5"):
        found.before_norm(5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer_ids": (1, 2, 4)}, r"shape \[2, 4, 8\], expected \[2, 3, 8\]: tokens, layers \[1, 2, 4\]"),
        ({"hidden_size": 16}, r"shape \[2, 4, 8\], expected \[2, 4, 16\]"),
        ({"dtype": torch.bfloat16}, r"hidden_states in float32, target.dtype=bfloat16"),
        ({"ids": [3, 6]}, r"states of other tokens: 5 at place 1, the sample has 6"),
        ({"ids": [3, 5, 6]}, r"states of 2 tokens, the sample has 3"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_name(settings, message, tmp_path):
    path = write(tmp_path)
    with pytest.raises(ValueError, match="hs_0.safetensors: .*" + message):
        read(path, **settings)


@pytest.mark.case("O-C05")
def test_fewer_rows_than_tokens_are_refused(tmp_path):
    path = write(tmp_path, states=LADDER[:1])
    with pytest.raises(ValueError, match=r"shape \[1, 4, 8\], expected \[2, 4, 8\]"):
        read(path)


def test_a_missing_tensor_is_named_with_those_there(tmp_path):
    save_file({"states": torch.zeros(2), "token_ids": torch.tensor(IDS)}, tmp_path / "hs_0.safetensors")
    with pytest.raises(ValueError, match="no tensor 'hidden_states', only states, token_ids"):
        read(tmp_path / "hs_0.safetensors")


@pytest.mark.case("O-C07")
def test_a_cut_file_is_refused_by_name(tmp_path):
    path = write(tmp_path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match="hs_0.safetensors: damaged safetensors file"):
        read(path)


def test_float8_states_are_multiplied_by_their_tokens_scale(tmp_path):
    states = torch.tensor([[[1.0, -2.0]], [[448.0, 0.5]]]).to(torch.float8_e4m3fn)
    scales = torch.tensor([0.5, 2.0])[:, None, None]
    path = write(tmp_path, states=states, hidden_states_scales=scales)
    found = read(path, layer_ids=(4,), hidden_size=2, dtype=torch.bfloat16).states
    assert found.dtype == torch.bfloat16
    assert found.tolist() == [[[0.5, -1.0]], [[896.0, 1.0]]]


def test_float8_states_without_scales_are_refused(tmp_path):
    path = write(tmp_path, states=LADDER.to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match="float8_e4m3fn without 'hidden_states_scales'"):
        read(path)
    path = write(tmp_path, states=LADDER.to(torch.float8_e4m3fn), hidden_states_scales=torch.ones(2))
    with pytest.raises(ValueError, match=r"scales of shape \[2\], expected \[2, 1, 1\]"):
        read(path)


def test_a_folders_files_are_found_by_their_tokens(tmp_path):
    write(tmp_path, ids=[7, 7], name="hs_0.safetensors", states=LADDER + 1)
    write(tmp_path, name="hs_12.safetensors")
    folder = StateFolder(tmp_path, (1, 2, 3, 4), 8, torch.float32)
    (answer,) = folder.read([torch.tensor(IDS)], (0,))
    assert answer.states.path.name == "hs_12.safetensors"
    assert answer.top == {}


def test_samples_without_a_file_are_named_before_anything_is_read(tmp_path):
    write(tmp_path)
    folder = StateFolder(tmp_path, (1, 2, 3, 4), 8, torch.float32)
    folder.announce([make_sample("a", IDS, ".S")])
    samples = [make_sample("a", IDS, ".S"), make_sample("b", [3, 5, 6], ".SS"), make_sample("c", [5], "S")]
    with pytest.raises(ValueError, match="2 of 3 samples have no file with their tokens: b, c"):
        folder.announce(samples)


def test_an_empty_folder_and_a_file_without_tokens_are_refused(tmp_path):
    with pytest.raises(ValueError, match="target.server.files=.*no \\*.safetensors there"):
        StateFolder(tmp_path, (4,), 8, torch.float32)
    save_file({"hidden_states": torch.zeros(1, 1, 8)}, tmp_path / "hs_0.safetensors")
    with pytest.raises(ValueError, match="hs_0.safetensors: no tensor 'token_ids'"):
        StateFolder(tmp_path, (4,), 8, torch.float32)

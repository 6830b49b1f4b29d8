"""A target that cannot be loaded or served is told in one line; the keyword that carries a cache."""

import pytest
import torch
from torch import nn
from transformers import Llama4ForCausalLM, Llama4TextConfig

from spectrain import target as module
from spectrain.config import TargetConfig
from spectrain.target import Call, Target, load_target, packed_layout
from spectrain.target_kinds import cache_keyword, layer_kinds
from spectrain.testing import tiny_llama


def test_a_hub_id_that_does_not_exist_is_one_line(monkeypatch):
    words = "me/no-such-model is not a local folder and is not a valid model identifier\nIs it private?"

    def fail(*args, **settings):
        raise OSError(words)

    monkeypatch.setattr(module.AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(ValueError) as error:
        load_target(TargetConfig(path="me/no-such-model"))
    assert str(error.value) == f"target.path='me/no-such-model': {words.splitlines()[0]}"


def test_a_folder_that_is_no_model_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="^target.path='empty': no config.json there$"):
        load_target(TargetConfig(path="empty"))
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="^target.path='empty': .+$") as error:
        load_target(TargetConfig(path="empty"))
    assert "\n" not in str(error.value)


def test_a_disk_that_fails_is_no_wrong_input(monkeypatch):
    def fail(*args, **settings):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(OSError, match="No space left"):
        load_target(TargetConfig(path="me/model"))


def llama4(**settings):
    return Llama4TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, intermediate_size_mlp=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=2, attention_chunk_size=8,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, **settings,
    )  # fmt: skip


def test_attention_within_chunks_is_refused():
    """Its layers see the tokens of their chunk of 8 only, which no layout tells them."""
    model = Llama4ForCausalLM(llama4(layer_types=["chunked_attention", "full_attention"]))
    with pytest.raises(
        ValueError, match="target Llama4ForCausalLM: layers of type chunked_attention are not"
    ):
        Target(model)


def test_queries_scaled_by_their_row_in_the_call_are_refused():
    config = llama4(layer_types=["full_attention"] * 2, attn_temperature_tuning=True)
    with pytest.raises(ValueError, match="target me/model: attn_temperature_tuning=True is not supported"):
        layer_kinds(config, "me/model")


def test_every_layer_of_a_llama_keeps_keys_and_none_is_recurrent():
    assert layer_kinds(tiny_llama(layers=3).config, "llama") == (False, frozenset({0, 1, 2}))


class Old(nn.Module):
    def forward(self, input_ids, past_key_values=None, use_cache=None, **kwargs):
        return "past_key_values", past_key_values, kwargs


class New(nn.Module):
    def forward(self, input_ids, cache=None, use_cache=None, **kwargs):
        return "cache", cache, kwargs


class Mixer(nn.Module):
    def forward(self, input_ids, cache_params=None, **kwargs):
        return None


class Neither(nn.Module):
    def forward(self, input_ids, **kwargs):
        return None


def test_the_keyword_of_the_cache_is_read_from_the_signature():
    assert [cache_keyword(module()) for module in (Old, New, Mixer)] == [
        "past_key_values",
        "cache",
        "cache_params",
    ]
    with pytest.raises(
        ValueError, match="^Neither.forward: no parameter named cache, past_key_values, cache"
    ):
        cache_keyword(Neither())


@pytest.mark.parametrize("form", [Old, New])
def test_a_state_reaches_the_decoder_by_either_keyword(form):
    """The decoder of each version around the same layers: the state arrives under its name alone."""
    target = Target(tiny_llama(layers=1))
    inner, seen = target.decoder, []

    class Stub(form):
        def forward(self, *args, **kwargs):
            seen.append(form.forward(self, *args, **kwargs))
            kept = ("position_ids", "layout", "input_ids")
            return inner(use_cache=False, **{name: kwargs[name] for name in kept})

    Stub.forward.__wrapped__ = form.forward
    target.decoder, state = Stub(), object()
    target._cache_keyword = cache_keyword(target.decoder)
    row = torch.arange(3)
    states = target._run(Call(row, row, packed_layout((0, 3)), state), ())
    ((name, found, rest),) = seen
    assert found is state and not {"cache", "past_key_values"} & rest.keys() and len(states.final) == 3
    assert name == ("cache" if form is New else "past_key_values")

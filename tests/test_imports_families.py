"""Published drafters of every family but EAGLE-3 (test_imports.py) become ours."""

import json

import pytest
import torch
from safetensors.torch import save_file

from spectrain.drafters import eagle1, medusa, mtp
from spectrain.target import Target
from spectrain.testing import tiny_llama
from spectrain.testing_published import imported, same, written


@pytest.fixture
def target():
    return Target(tiny_llama(layers=8, vocab=40))


@pytest.mark.parametrize("bias", [False, True])
def test_eagle1_files_are_read_with_and_without_a_bias(tmp_path, target, bias):
    drafter = eagle1.build(eagle1.Config(layers=2, bias=bias), target, torch.arange(40))
    if bias:
        torch.nn.init.ones_(drafter.fc.bias)
    config = {**drafter.draft_config.to_dict(), "bias": True}
    extra = {"embed_tokens.weight": target.embedding.weight.detach()}
    extra |= {} if bias else {"fc.bias": torch.zeros(32)}
    folder = written(tmp_path / "d", config, {**drafter.state_dict(), **extra})
    back = imported(folder, target, eagle1)
    assert (back.config.layers, back.config.bias) == (2, bias)
    assert same(drafter, back)


def test_a_bias_of_eagle1_goes_to_sglang_as_it_is_and_is_refused_for_vllm(target):
    drafter = eagle1.build(eagle1.Config(bias=True), target, torch.arange(40))
    torch.nn.init.ones_(drafter.fc.bias)
    assert torch.equal(drafter.export_tensors("sglang")["fc.bias"], torch.ones(32))
    assert drafter.engine_config(target, "sglang")["hidden_size"] == 32
    with pytest.raises(ValueError, match="drafter.bias=true: vLLM leaves the bias out"):
        drafter.engine_config(target, "vllm")


def trained_medusa(target, **settings):
    drafter = medusa.build(medusa.Config(heads=3, blocks=2, **settings), target, torch.arange(40))
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter)
    return drafter


@pytest.mark.parametrize(
    ("prefix", "name"), [("", "medusa_lm_head.pt"), ("medusa_head.", "model.safetensors")]
)
def test_medusa_files_of_both_versions_are_read_and_the_tensors_count_the_heads(
    tmp_path, target, prefix, name
):
    drafter = trained_medusa(target)
    tensors = {}
    for ours, tensor in drafter.state_dict().items():
        kind, h, *rest = ours.split(".")
        theirs = f"{h}.{rest[1]}.linear.{rest[2]}" if kind == "blocks" else f"{h}.2.weight"
        tensors[prefix + theirs] = tensor
    beside = {"model.norm.weight": torch.ones(32)} if prefix else {}
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1}
    folder = written(tmp_path / "d", config, {**tensors, **beside}, name=name)
    back = imported(folder, target, medusa)
    assert (back.config.heads, back.config.blocks) == (3, 2)
    assert same(drafter, back)


def test_medusa_files_of_vllm_are_read_with_a_shared_head_and_a_token_map(tmp_path, target):
    kept = torch.arange(0, 40, 4)
    drafter = medusa.build(medusa.Config(heads=3, head="frozen", draft_vocab=10), target, kept)
    torch.nn.init.normal_(drafter.blocks[1].layers[0].weight)
    tensors = {name: tensor for name, tensor in drafter.state_dict().items() if not name.endswith("bias")}
    tensors |= {"lm_heads.0.weight": target.head.weight.detach()[kept], "token_map": kept}
    config = {"model_type": "medusa", "original_lm_head": True, "truncated_vocab_size": 10}
    back = imported(written(tmp_path / "d", config, tensors), target, medusa)
    assert (back.config.head, back.config.draft_vocab) == ("frozen", 10)
    assert same(drafter, back)


def test_mtp_weights_are_read_from_a_targets_shards_and_from_the_form_of_speculators(tmp_path, target):
    target.config.model_type = "deepseek_v3"
    drafter = mtp.build(mtp.Config(), target, torch.arange(40))
    parts = {"enorm": "enorm.", "hnorm": "hnorm.", "eh_proj": "eh_proj.", "norm": "shared_head.norm."}
    pairs = {"own": {}, "speculators": {}}
    other = {"enorm": "token_layernorm.", "hnorm": "hidden_layernorm.", "eh_proj": "input_proj."}
    other |= {"norm": "final_layernorm."}
    for name, tensor in drafter.state_dict().items():
        _, _, part, rest = name.split(".", 3)
        pairs["own"][f"model.layers.8.{parts.get(part, '')}{rest}"] = tensor
        pairs["speculators"][f"mtp_layers.0.{other.get(part, '')}{rest}"] = tensor
    own = written(tmp_path / "own", {"model_type": "deepseek_v3"}, {})
    save_file({"model.embed_tokens.weight": torch.ones(2)}, own / "one.safetensors")
    save_file(pairs["own"], own / "two.safetensors")
    (own / "model.safetensors").unlink()
    files = {"model.embed_tokens.weight": "one.safetensors", **dict.fromkeys(pairs["own"], "two.safetensors")}
    (own / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert same(drafter, imported(own, target, mtp))
    folder = written(tmp_path / "s", {"speculators_model_type": "mtp"}, pairs["speculators"])
    assert same(drafter, imported(folder, target, mtp))
    with pytest.raises(ValueError, match="drafter.weights=target: no effect with drafter.init_from"):
        imported(own, target, mtp, weights="target")

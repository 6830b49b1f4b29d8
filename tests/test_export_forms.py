"""Exports of every family but EAGLE-3 (test_export.py): their folders compute what was trained."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM

from spectrain.checks import CheckFailed
from spectrain.config import ExportConfig, RunConfig
from spectrain.drafters import eagle1, eagle3, medusa, mtp, standalone
from spectrain.export import check, export
from spectrain.export_forms import PAGE, page, table
from spectrain.target import Target
from spectrain.testing import byte_tokenizer, tiny_llama

V, D = 260, 32


@pytest.fixture(scope="module")
def llama():
    return Target(tiny_llama(layers=2), byte_tokenizer(), path="tiny")


def drafter_of(family, target, *, kept=None, **settings):
    """A random drafter whose every parameter differs from its start."""
    torch.manual_seed(0)
    drafter = family.build(family.Config(**settings), target, torch.arange(V) if kept is None else kept)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return drafter.eval()


def exported(drafter, target, tmp_path, *engines):
    settings = ExportConfig(engine=list(engines or ("vllm",)))
    config = RunConfig(recipe="trial", drafter=drafter.config, export=settings)
    return export(config, target, drafter, tmp_path / "export")


def read(folder):
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def test_the_table_of_families_and_engines_is_current():
    assert PAGE.read_text() == page(PAGE.read_text()), "run python -m spectrain.export_forms"


def test_the_table_says_which_families_come_later():
    assert "\nP-EAGLE, DFlash and DSpark" in table()


@pytest.mark.parametrize("layers", [1, 2])
def test_eagle1_has_a_folder_for_each_engine_which_replays(llama, layers, tmp_path):
    drafter = drafter_of(eagle1, llama, layers=layers)
    folders = exported(drafter, llama, tmp_path, "vllm", "sglang")
    assert [folder.name for folder in folders] == ["eagle1", "eagle1-sglang"]
    for folder, architecture in zip(folders, ("EagleLlamaForCausalLM", "LlamaForCausalLMEagle"), strict=True):
        config, tensors = read(folder)
        assert config["architectures"] == [architecture]
        assert (config["vocab_size"], config["num_hidden_layers"]) == (V, layers)
        assert "layers.0.input_layernorm.weight" not in tensors and "null" not in json.dumps(config)
        assert check(folder, llama) < 1e-4
    biases = [read(folder)[1].get("fc.bias") for folder in folders]
    assert biases[0] is None and torch.equal(biases[1], torch.zeros(D, dtype=torch.bfloat16))


def test_a_changed_weight_of_eagle1_fails_its_replay(llama, tmp_path):
    (folder,) = exported(drafter_of(eagle1, llama), llama, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    swapped = tensors["fc.weight"].roll(D, 1).contiguous()
    metadata = {"target": json.dumps(llama.fingerprint())}
    save_file({**tensors, "fc.weight": swapped}, folder / "model.safetensors", metadata)
    with pytest.raises(CheckFailed, match="replayed logits differ"):
        check(folder, llama)


def test_eagle1_with_a_reduced_vocabulary_is_refused(llama, tmp_path):
    drafter = drafter_of(eagle1, llama, kept=torch.arange(100))
    with pytest.raises(ValueError, match="drafter.draft_vocab=100: expected 0 for the export of EAGLE-1"):
        exported(drafter, llama, tmp_path)


@pytest.mark.parametrize("settings", [{"head": "trained"}, {"head": "frozen"}])
def test_medusa_with_a_reduced_vocabulary_is_refused(llama, settings, tmp_path):
    drafter = drafter_of(medusa, llama, kept=torch.arange(100), **settings)
    with pytest.raises(ValueError, match="drafter.draft_vocab=100: expected 0 for the export of Medusa"):
        exported(drafter, llama, tmp_path)


@pytest.mark.parametrize(
    ("settings", "heads"), [({"heads": 3, "blocks": 2}, 3), ({"heads": 2, "head": "frozen"}, 1)]
)
def test_medusas_folder_replays(llama, settings, heads, tmp_path):
    drafter = drafter_of(medusa, llama, kept=torch.arange(V), **settings)
    (folder,) = exported(drafter, llama, tmp_path)
    config, tensors = read(folder)
    assert sum(name.startswith("lm_heads") for name in tensors) == heads
    assert config["architectures"] == ["MedusaModel"] and config["medusa_fc_bias"] is True
    assert (config["vocab_size"], config["truncated_vocab_size"]) == (V, V)
    assert check(folder, llama) < 1e-4


def test_an_engine_that_serves_no_such_drafter_is_refused_with_the_reason(llama, tmp_path):
    with pytest.raises(ValueError, match="export.engine=sglang: no export of medusa: it has no Medusa"):
        exported(drafter_of(medusa, llama), llama, tmp_path, "vllm", "sglang")
    assert not (tmp_path / "export").exists()


def test_a_normed_residual_is_not_exported_for_sglang(llama, tmp_path):
    drafter = drafter_of(eagle3, llama, taps=[0], norm_before_residual=True)
    assert exported(drafter, llama, tmp_path)[0].name == "eagle3"
    with pytest.raises(ValueError, match="drafter.norm_before_residual=true: SGLang does not know it"):
        exported(drafter, llama, tmp_path, "vllm", "sglang")


def test_a_standalone_drafter_is_an_ordinary_model_with_the_targets_tokenizer(llama, tmp_path):
    drafter = drafter_of(standalone, llama, hidden=64)
    (folder,) = exported(drafter, llama, tmp_path, "vllm", "sglang")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16 and (folder / "tokenizer.json").exists()
    weights = drafter.decoder.embed_tokens.weight
    assert torch.equal(model.model.embed_tokens.weight, weights.to(torch.bfloat16))
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


@pytest.mark.case("O-E04")
@pytest.mark.parametrize("family", [eagle1, medusa, standalone])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_no_typed_key_of_any_folder_is_null_and_both_dtype_keys_are_there(llama, family, engine, tmp_path):
    if engine not in family.SERVED:
        pytest.skip("not served")
    settings = {standalone: {"hidden": 64}, medusa: {"heads": 2}}.get(family, {})
    (folder,) = exported(drafter_of(family, llama, **settings), llama, tmp_path, engine)
    config = json.loads((folder / "config.json").read_text())
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")  # null: an ordinary model that has none
    typed = {key: value for key, value in config.items() if family is not standalone or key not in ids}
    assert "null" not in json.dumps(typed)
    assert (config["vocab_size"], config["dtype"], config["torch_dtype"]) == (V, "bfloat16", "bfloat16")


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    """A GLM-4-MoE folder whose own MTP tensors lie in the shard of the rest."""
    folder = tmp_path_factory.mktemp("glm")
    config = Glm4MoeConfig(
        vocab_size=V, hidden_size=D, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, moe_intermediate_size=16, num_experts_per_tok=2, max_position_embeddings=128,
        num_hidden_layers=2, first_k_dense_replace=1, n_routed_experts=4, n_shared_experts=1, n_group=1,
        topk_group=1,
    )  # fmt: skip
    model = Glm4MoeForCausalLM(config).float()
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    stored = {**load_file(path), "model.layers.2.enorm.weight": torch.full((D,), 7.0)}
    save_file(stored, path, {"format": "pt"})
    return Target(model, path=str(folder))


def test_mtp_is_the_targets_folder_with_its_blocks_in_a_shard_of_their_own(glm, tmp_path):
    drafter = drafter_of(mtp, glm, unroll=1)
    (folder,) = exported(drafter, glm, tmp_path, "vllm", "sglang", "trtllm")
    weights = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    block, kept = load_file(folder / "mtp.safetensors"), load_file(folder / "model.safetensors")
    assert weights == dict.fromkeys(kept, "model.safetensors") | dict.fromkeys(block, "mtp.safetensors")
    assert not kept.keys() & block.keys(), "an engine reads every tensor of every file"
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 1
    name = "model.layers.2."
    assert torch.equal(block[f"{name}enorm.weight"], drafter.blocks[0].enorm.weight.to(torch.bfloat16))
    experts = drafter.blocks[0].layer.mlp.experts
    assert torch.equal(
        block[f"{name}mlp.experts.3.up_proj.weight"], experts.gate_up_proj[3, 16:].to(torch.bfloat16)
    )
    assert torch.equal(block[f"{name}shared_head.head.weight"], glm.head.weight.to(torch.bfloat16))


def test_a_target_without_its_own_mtp_weights_is_linked(glm, tmp_path):
    source = tmp_path / "target"
    glm.model.save_pretrained(source)
    target = Target(glm.model, path=str(source))
    (folder,) = exported(drafter_of(mtp, target, unroll=1), target, tmp_path)
    assert (folder / "model.safetensors").resolve() == (source / "model.safetensors").resolve()


def test_exported_mtp_weights_are_a_start_for_training(glm, tmp_path):
    drafter = drafter_of(mtp, glm, unroll=1)
    (folder,) = exported(drafter, glm, tmp_path)
    again = mtp.build(
        mtp.Config(unroll=1, weights="target"), Target(glm.model, path=str(folder)), torch.arange(V)
    )
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, drafter.state_dict()[name].to(torch.bfloat16).float()), name


@pytest.mark.parametrize(
    ("settings", "engine", "message"),
    [
        ({"unroll": 2}, "vllm", "drafter.feedback=post: expected pre, which vllm has"),
        ({"unroll": 2, "blocks": 2}, "vllm", "drafter.feedback=post: expected pre, which vllm has"),
        ({"unroll": 2, "feedback": "pre"}, "sglang", "drafter.feedback=pre: expected post, which sglang has"),
        ({"unroll": 2, "blocks": 2}, "sglang", "drafter.blocks=2: expected 1 for sglang"),
        ({"order": "hidden_first"}, "vllm", "drafter.order=hidden_first: expected embedding_first"),
    ],
)
def test_an_mtp_that_the_engine_would_compute_otherwise_is_refused(glm, settings, engine, message):
    with pytest.raises(ValueError, match=message):
        drafter_of(mtp, glm, **settings).engine_config(glm, engine)


def test_a_kind_of_target_without_mtp_weights_is_refused(llama):
    with pytest.raises(ValueError, match="engines know no MTP weights of a llama target"):
        drafter_of(mtp, llama).engine_config(llama, "vllm")

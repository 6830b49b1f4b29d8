"""The forms of speculators, TensorRT-LLM and the authors' own code: keys, names, refusals; every head's form
comes back bit for bit and passes the checker."""

import json
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from spectrain.checks import CheckFailed
from spectrain.config import ExportConfig, RunConfig
from spectrain.drafters import eagle1, eagle3, hydra, medusa, mtp, standalone
from spectrain.export import check, export
from spectrain.export_check import examine
from spectrain.imports import open_import
from spectrain.target import Target
from spectrain.testing import byte_tokenizer, tiny_llama
from spectrain.testing_published import imported, nulls, same

V, D, N = 260, 32, 8
KEPT, EVERY = torch.arange(0, V, 2), torch.arange(V)
IDS = "eagle_aux_hidden_state_layer_ids"
TAPS = [1, 3, 4]  # inputs of layers 2, n/2 and n-3 of 8


@cache
def llama():
    return Target(tiny_llama(layers=N), byte_tokenizer(), path="OWNER/tiny")


@cache
def qwen3():
    """Heads of 16 in a hidden size of 32 with 4 heads, and norms on queries and keys."""
    config = Qwen3Config(
        vocab_size=V, hidden_size=D, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
    )  # fmt: skip
    return Target(Qwen3ForCausalLM(config).float(), path="OWNER/tiny")


def drafter_of(family, target, kept=EVERY, **settings):
    """A random drafter whose every parameter differs from its start."""
    drafter = family.build(family.Config(**settings), target, kept)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return drafter.eval()


def exported(drafter, target, tmp_path, *engines):
    settings = ExportConfig(engine=list(engines), dtype="float32")
    config = RunConfig(recipe="trial", drafter=drafter.config, export=settings)
    (folder,) = export(config, target, drafter, tmp_path / "export")
    return folder


def read(folder):
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


CASES = {  # folder below export/: family, target, kept ids, settings, engines
    "eagle3": (eagle3, llama, KEPT, {"taps": TAPS, "draft_vocab": 130}, ("reference", "trtllm", "vllm")),
    "eagle3-speculators": (
        eagle3,
        llama,
        KEPT,
        {"taps": [0, 2], "draft_vocab": 130, "norm_before_residual": True, "fc_norm": True},
        ("speculators",),
    ),
    "eagle1": (eagle1, llama, EVERY, {"layers": 2}, ("reference", "vllm")),
    "eagle1 with a bias": (eagle1, llama, EVERY, {"bias": True}, ("reference",)),
    "eagle1-sglang": (eagle1, llama, EVERY, {"layers": 2}, ("sglang",)),
    "eagle1-sglang with a bias": (eagle1, llama, EVERY, {"bias": True}, ("sglang",)),
    "medusa": (medusa, llama, EVERY, {"heads": 3, "blocks": 2}, ("vllm",)),
    "medusa with the target's head": (medusa, llama, EVERY, {"heads": 2, "head": "frozen"}, ("vllm",)),
    "medusa-reference": (medusa, llama, EVERY, {"heads": 5}, ("reference",)),
    "hydra-reference": (hydra, llama, EVERY, {"heads": 3}, ("reference",)),
    "mtp-speculators": (mtp, qwen3, EVERY, {"unroll": 2}, ("speculators",)),
}


@pytest.mark.parametrize("case", CASES)
def test_an_export_comes_back_bit_for_bit_and_passes_every_rule(case, tmp_path):
    family, make, kept, settings, engines = CASES[case]
    target = make()
    drafter = drafter_of(family, target, kept, **settings)
    folder = exported(drafter, target, tmp_path, *engines)
    assert folder.name == case.split()[0]
    findings = examine(folder, target.config, engines)
    assert [f for f in findings if f.faults] == []
    replayed = next(f for f in findings if f.name == "numeric replay")
    assert replayed.status == ("none" if family is mtp else "PASS")
    back = imported(folder, target, family)
    assert same(drafter, back)
    assert (back.taps, back.config.family) == (drafter.taps, drafter.config.family)
    for setting in settings.keys() & {"layers", "bias", "heads", "blocks", "head"}:
        assert getattr(back.config, setting) == settings[setting]


@pytest.mark.case("O-E04")
@pytest.mark.parametrize("case", CASES)
def test_no_key_of_any_head_is_null_at_any_depth(case, tmp_path):
    family, make, kept, settings, engines = CASES[case]
    folder = exported(drafter_of(family, make(), kept, **settings), make(), tmp_path, *engines)
    config = json.loads((folder / "config.json").read_text())
    assert nulls(config) == []
    layer = config.get("transformer_layer_config", config)
    assert layer["vocab_size"] == V and config.get("draft_vocab_size", len(kept)) == len(kept)


def test_a_standalone_folder_is_a_model_that_a_drafter_starts_from(tmp_path):
    drafter = drafter_of(standalone, llama(), hidden=64)
    folder = exported(drafter, llama(), tmp_path, "reference", "trtllm")
    back = standalone.build(standalone.Config(path=str(folder)), llama(), EVERY)
    own, theirs = drafter.state_dict(), back.state_dict()
    assert own.keys() == theirs.keys() and all(torch.equal(own[name], theirs[name]) for name in own)


def test_speculators_finds_its_keys_and_names_in_an_eagle3_folder(tmp_path):
    target = llama()
    drafter = drafter_of(eagle3, target, KEPT, taps=TAPS, unroll=4)
    config, tensors = read(exported(drafter, target, tmp_path, "speculators"))
    layer = config.pop("transformer_layer_config")
    assert config == {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 4,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "OWNER/tiny", "architectures": ["LlamaForCausalLM"]},
        },
        "draft_vocab_size": 130,
        IDS: [2, 4, 5],
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    assert (layer["model_type"], layer["num_hidden_layers"], layer["vocab_size"]) == ("llama", 1, V)
    assert "null" not in json.dumps(layer)
    assert torch.equal(tensors["embed_tokens.weight"], target.embedding.weight)
    assert tensors["layers.0.self_attn.q_proj.weight"].shape == (D, 2 * D)
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert not [name for name in tensors if "midlayer" in name]


def test_speculators_finds_its_names_in_an_mtp_folder(tmp_path):
    drafter = drafter_of(mtp, qwen3())
    config, tensors = read(exported(drafter, qwen3(), tmp_path, "speculators"))
    assert config["speculators_model_type"] == "mtp" and config["num_nextn_predict_layers"] == 1
    assert config["transformer_layer_config"]["model_type"] == "qwen3"
    block = drafter.blocks[0]
    for name, own in {
        "input_proj": block.eh_proj,
        "token_layernorm": block.enorm,
        "hidden_layernorm": block.hnorm,
        "final_layernorm": block.norm,
        "self_attn.q_norm": block.layer.self_attn.q_norm,
    }.items():
        assert torch.equal(tensors[f"mtp_layers.0.{name}.weight"], own.weight), name
    assert all(name.startswith("mtp_layers.0.") for name in tensors)


def test_the_authors_medusa_is_a_pickle_of_numbered_heads(tmp_path):
    drafter = drafter_of(medusa, llama(), heads=5, head="frozen")
    folder = exported(drafter, llama(), tmp_path, "reference")
    tensors = torch.load(folder / "medusa_lm_head.pt", weights_only=True)
    assert not (folder / "model.safetensors").exists()
    assert set(tensors) == {
        f"{h}.{name}" for h in range(5) for name in ("0.linear.weight", "0.linear.bias", "1.weight")
    }
    assert torch.equal(tensors["3.1.weight"], llama().head.weight), "every head is its own there"
    config = json.loads((folder / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (5, 1)
    assert config["base_model_name_or_path"] == "OWNER/tiny"


def test_the_authors_hydra_has_biases_of_zero(tmp_path):
    drafter = drafter_of(hydra, llama(), heads=2)
    folder = exported(drafter, llama(), tmp_path, "reference")
    tensors = torch.load(folder / "hydra_lm_head.pt", weights_only=True)
    assert tensors["hydra_mlp.1.0.res_connection.weight"].shape == (D, 3 * D)
    assert tensors["hydra_lm_head.1.weight"].shape == (V, D)
    assert not tensors["hydra_mlp.1.0.res_connection.bias"].any() and tensors[
        "hydra_lm_head.0.bias"
    ].shape == (V,)
    tensors["hydra_lm_head.0.bias"][7] = 1.0
    torch.save(tensors, folder / "hydra_lm_head.pt")
    with pytest.raises(
        ValueError, match="tensor hydra_lm_head.0.bias is not zero: our heads have no such bias"
    ):
        open_import(hydra.Config(init_from=str(folder)), llama())
    with pytest.raises(CheckFailed, match="replayed logits differ"):
        check(folder, llama())


def test_the_authors_eagle1_is_told_that_it_has_no_bias(tmp_path):
    plain = exported(drafter_of(eagle1, llama()), llama(), tmp_path / "1", "reference", "vllm")
    assert read(plain)[0]["bias"] is False
    config, tensors = read(
        exported(drafter_of(eagle1, llama(), bias=True), llama(), tmp_path / "2", "reference")
    )
    assert "bias" not in config and tensors["fc.bias"].any()


REFUSED = [
    (eagle3, "trtllm", {"taps": [2]}, r"drafter.taps=\[2\]: TensorRT-LLM has no fc for a single tap"),
    (
        eagle3,
        "trtllm",
        {"norm_before_residual": True},
        "norm_before_residual=true: TensorRT-LLM does not know",
    ),
    (eagle3, "reference", {"taps": [1, 2, 3]}, r"taps=\[1, 2, 3\]: expected \[1, 3, 4\], which the authors'"),
    (
        eagle3,
        "reference",
        {"norm_output": True},
        "drafter.norm_output=true: the authors' code does not know it",
    ),
    (eagle3, "reference", {"shape": {"head_dim": 16}}, "head_dim=16: the authors' code takes 32 / 4"),
    (
        eagle1,
        "reference",
        {"shape": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}},
        "rope_type='linear': the authors' code knows 'default'",
    ),
    (medusa, "reference", {"heads": 4}, "drafter.heads=4: expected 5 for the authors' code"),
    (medusa, "reference", {"blocks": 2}, "drafter.blocks=2: expected 1 for the authors' code"),
    (hydra, "reference", {"blocks": 2}, "drafter.blocks=2: expected 1 for the authors' code"),
    (mtp, "speculators", {}, "no MTP weights of a llama target; expected one of qwen3, qwen3_next"),
    (mtp, "reference", {}, "export.engine=reference: no export of mtp: its form is the target's own files"),
    (mtp, "trtllm", {}, "no MTP weights of a llama target; expected one of deepseek_v3"),
]


@pytest.mark.parametrize(("family", "engine", "settings", "message"), REFUSED)
def test_a_drafter_that_is_computed_otherwise_there_is_refused(family, engine, settings, message):
    with pytest.raises(ValueError, match=message):
        drafter_of(family, llama(), **settings).engine_config(llama(), engine)


@pytest.mark.parametrize(
    ("change", "rule", "message"),
    [
        ({"speculators_model_type": None}, "config keys", "takes it for a foreign form"),
        ({"speculators_config": None}, "config keys", "verifier.name_or_path is missing"),
        ({"norm_before_residual": None}, "config keys", "key norm_before_residual is missing"),
        (
            {IDS: [3, 5, 6]},
            "layer convention",
            r"speculators captures the inputs of layers \[3, 5, 6\]: trained",
        ),
        ({"norm_output": True}, "numeric replay", "replayed logits differ"),
    ],
)
def test_a_fault_in_the_form_of_speculators_is_found(change, rule, message, tmp_path):
    folder = exported(drafter_of(eagle3, llama(), KEPT, taps=TAPS), llama(), tmp_path, "speculators")
    config, _ = read(folder)
    config = {key: value for key, value in {**config, **change}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    found = {f.name: " | ".join(f.faults) for f in examine(folder, llama().config, ["speculators"])}
    assert message.replace("\\", "") in found[rule], found


def test_the_authors_taps_and_a_missing_bias_are_found(tmp_path):
    folder = exported(drafter_of(eagle3, llama(), KEPT, taps=[1, 2, 3]), llama(), tmp_path, "vllm")
    found = {f.name: f.faults for f in examine(folder, llama().config, ["reference"])}
    assert found["layer convention"] == (
        "reference captures the inputs of layers [2, 4, 5]: trained were [2, 3, 4]",
    )
    folder = exported(drafter_of(eagle1, llama()), llama(), tmp_path, "vllm")
    config, tensors = read(folder)
    del config["bias"]
    (folder / "config.json").write_text(json.dumps(config))
    found = {f.name: f.faults for f in examine(folder, llama().config, ["reference"])}
    assert found["EAGLE-1's bias and norms"] == (
        "fc.bias is missing and bias is not false: the authors' code leaves it random",
    )
    save_file({**tensors, "fc.bias": torch.ones(D)}, folder / "model.safetensors")
    found = {f.name: f.faults for f in examine(folder, llama().config, ["reference"])}
    assert found["EAGLE-1's bias and norms"] == ()


def test_the_model_card_names_the_layers_for_tensorrt_llm(tmp_path):
    folder = exported(drafter_of(eagle3, llama(), KEPT, taps=TAPS), llama(), tmp_path, "trtllm", "reference")
    card = (folder / "README.md").read_text()
    assert '"decoding_type": "Eagle3"' in card and '"eagle3_layers_to_capture": [1, 3, 4]' in card
    assert "`EaModel, use_eagle3=True`" in card

"""Planted faults in exported folders: the checker finds each by its rule's name."""

import json
import re
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from spectrain.checks import CheckFailed
from spectrain.config import ExportConfig, RunConfig
from spectrain.drafters import eagle1, eagle3, medusa
from spectrain.export import export
from spectrain.export_check import RULES, examine, examine_all
from spectrain.target import Target
from spectrain.testing import tiny_llama

V, D = 260, 32
ENGINES = ["vllm", "sglang"]
KEPT = torch.arange(0, V, 2)


@pytest.fixture(scope="module")
def target():
    return Target(tiny_llama(layers=6), path="tiny")


@pytest.fixture(scope="module")
def good(target, tmp_path_factory):
    """Every head's folders, by name."""
    root = tmp_path_factory.mktemp("good")
    made = {
        eagle3: (KEPT, ENGINES, {"taps": [1, 2, 4]}),
        eagle1: (torch.arange(V), ENGINES, {}),
        medusa: (torch.arange(V), ["vllm"], {"heads": 2}),
    }
    for family, (kept, engines, settings) in made.items():
        torch.manual_seed(0)
        drafter = family.build(family.Config(**settings), target, kept).eval()
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        config = RunConfig(recipe="trial", drafter=drafter.config, export=ExportConfig(engine=engines))
        export(config, target, drafter, root)
    return root


ENGINE = {"eagle3": ENGINES, "eagle1": ["vllm"], "eagle1-sglang": ["sglang"], "medusa": ["vllm"]}


class Copy:
    """A copy of a good folder to plant a fault in."""

    def __init__(self, path, name, target):
        self.path, self.name, self.target = path, name, target

    def config(self, **changes):
        """Change keys; ... deletes one."""
        path = self.path / "config.json"
        config = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))

    def tensors(self, change):
        """`change` takes the tensors by name and returns others."""
        path = self.path / "model.safetensors"
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        changed = change(load_file(path))
        save_file({name: t.contiguous() for name, t in changed.items()}, path, metadata)

    def failed(self):
        """Names and faults of the rules that failed."""
        findings = examine(self.path, self.target.config, ENGINE[self.name])
        return {finding.name: " | ".join(finding.faults) for finding in findings if finding.faults}


@pytest.fixture
def copy(good, target, tmp_path):
    def make(name):
        return Copy(shutil.copytree(good / name, tmp_path / name), name, target)

    return make


@pytest.mark.parametrize("name", ENGINE)
def test_a_good_folder_passes_every_rule(copy, name):
    assert copy(name).failed() == {}


def test_there_are_eleven_rules_and_the_replay_is_not_skipped(good, target):
    findings = examine(good / "eagle3", target.config, ENGINES)
    assert [f.rule for f in findings] == list(range(1, 12)) and len(RULES) == 11
    absent = {f.name for f in findings if f.status == "none"}
    assert absent == {"EAGLE-1's bias and norms", "MTP orders and norms", "block families"}


def halves(tensors):
    """The halves of each projection over [embedding, state] swapped."""
    names = [f"midlayer.self_attn.{kind}_proj.weight" for kind in "qkv"]
    return {name: t.roll(D, 1) if name in names else t for name, t in tensors.items()}


def prefixed(tensors):
    return {f"model.{name}": t for name, t in tensors.items()}


def drop(*names):
    return lambda tensors: {name: t for name, t in tensors.items() if name not in names}


def put(**changes):
    """Tensors by their names with __ for dots."""
    return lambda tensors: {**tensors, **{name.replace("__", "."): t for name, t in changes.items()}}


def nested(ids):
    return {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids}


PLANTED = {  # what, folder, how, the rule that finds it and what it says
    "another architecture": (
        "eagle3", lambda c: c.config(architectures=["LlamaForCausalLM"]), "config keys", "sglang wants Llama",
    ),
    "another context": (
        "eagle3", lambda c: c.config(max_position_embeddings=256), "config keys", "the target has 512",
    ),
    "a missing key": (
        "eagle3", lambda c: c.config(draft_vocab_size=...), "config keys", "draft_vocab_size is missing",
    ),
    "a normed residual for SGLang": (
        "eagle3", lambda c: c.config(norm_before_residual=True), "config keys", "SGLang does not know it",
    ),
    "a lost theta": (
        "eagle3",
        lambda c: c.config(rope_theta=5e5, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        "config keys", "rotary frequencies",
    ),
    "model. prefixes": (
        "eagle3", lambda c: c.tensors(prefixed), "tensor set", "model.fc.weight: the prefix is the engine's",
    ),
    "model. prefixes of EAGLE-1": (
        "eagle1-sglang", lambda c: c.tensors(prefixed), "tensor set", "model.fc.bias: the prefix is the",
    ),
    "model. prefixes of Medusa": (
        "medusa", lambda c: c.tensors(prefixed), "tensor set", "model.lm_heads.0.weight: the prefix is",
    ),
    "EAGLE-1's architecture of the other engine": (
        "eagle1", lambda c: c.config(architectures=["LlamaForCausalLMEagle"]),
        "config keys", "vllm wants LlamaForCausalLM or EagleLlamaForCausalLM",
    ),
    "a trained fc.bias for vLLM": (
        "eagle1", lambda c: c.tensors(put(fc__bias=torch.ones(D))),
        "EAGLE-1's bias and norms", "fc.bias is not zero: vLLM leaves it out",
    ),
    "a token_map of offsets": (
        "medusa",
        lambda c: (c.config(truncated_vocab_size=130), c.tensors(put(token_map=torch.full((130,), 130)))),
        "vocabulary maps", "expected strictly rising ids below 260$",
    ),
    "a tensor of nobody": (
        "eagle3", lambda c: c.tensors(put(fc__bias=torch.zeros(D))), "tensor set", "fc.bias is not part",
    ),
    "one tap too few": (
        "eagle3", lambda c: c.tensors(lambda t: {**t, "fc.weight": t["fc.weight"][:, : 2 * D]}),
        "width of fc", "fc reads 64: expected 3 x 32",
    ),
    "layer ids + 1 for vLLM": (
        "eagle3", lambda c: c.config(eagle_aux_hidden_state_layer_ids=[3, 4, 5]),
        "layer convention", r"vllm captures the inputs of layers \[3, 4, 5\]: trained were \[2, 3, 5\]",
    ),
    "layer ids + 1 for SGLang": (
        "eagle3", lambda c: c.config(eagle_config=nested([2, 3, 5])),
        "layer convention", r"sglang captures the inputs of layers \[3, 4, 6\]: trained were \[2, 3, 5\]",
    ),
    "absolute d2t": (
        "eagle3", lambda c: c.tensors(put(d2t=KEPT)), "vocabulary maps", "must hold offsets",
    ),
    "a t2d of other ids": (
        "eagle3", lambda c: c.tensors(lambda t: {**t, "t2d": ~t["t2d"]}),
        "vocabulary maps", "t2d does not mark",
    ),
    "a missing fc.bias": (
        "eagle1-sglang", lambda c: c.tensors(drop("fc.bias")),
        "EAGLE-1's bias and norms", "fc.bias is missing: SGLang leaves it random",
    ),
    "a norm in front of EAGLE-1's first layer": (
        "eagle1", lambda c: c.tensors(put(layers__0__input_layernorm__weight=torch.ones(D))),
        "EAGLE-1's bias and norms", "the first layer has no norm",
    ),
    "swapped halves of EAGLE-3": (
        "eagle3", lambda c: c.tensors(halves), "numeric replay", "replayed logits differ",
    ),
    "swapped halves of EAGLE-1": (
        "eagle1", lambda c: c.tensors(lambda t: {**t, "fc.weight": t["fc.weight"].roll(D, 1)}),
        "numeric replay", "replayed logits differ",
    ),
    "the state after the norm fed back": (
        "eagle3", lambda c: c.config(norm_output=True), "numeric replay", "replayed logits differ",
    ),
    "taps in another order": (
        "eagle3", lambda c: c.tensors(lambda t: {**t, "fc.weight": t["fc.weight"].roll(D, 1)}),
        "numeric replay", "replayed logits differ",
    ),
    "a missing head": (
        "eagle3", lambda c: c.tensors(drop("lm_head.weight")),
        "random parameters", "lm_head.weight is missing: an engine leaves it random",
    ),
    "a missing head of Medusa": (
        "medusa", lambda c: c.tensors(drop("lm_heads.1.weight")),
        "random parameters", "lm_heads.1.weight is missing",
    ),
    "a value that is no number": (
        "medusa", lambda c: c.tensors(put(lm_heads__0__weight=torch.full((V, D), torch.nan))),
        "values", "lm_heads.0.weight holds values that are not finite",
    ),
    "a matrix that was never trained": (
        "medusa", lambda c: c.tensors(put(blocks__1__layers__0__weight=torch.zeros(D, D))),
        "values", "blocks.1.layers.0.weight holds one value",
    ),
}  # fmt: skip


@pytest.mark.case("O-E01")
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found_by_its_rule(copy, fault):
    name, plant, rule, message = PLANTED[fault]
    folder = copy(name)
    plant(folder)
    found = folder.failed()
    assert re.search(message, found[rule]), found


@pytest.mark.case("O-V01")
def test_ids_given_as_offsets_are_refused_with_what_they_would_mean(copy):
    """Kept 0, 2, 3, 7, 9 as offsets are ids 0, 3, 5, 10, 13; as offsets they are 0, 1, 1, 4, 5."""
    folder = copy("eagle3")
    kept, small = torch.tensor([0, 2, 3, 7, 9]), torch.zeros(V, dtype=torch.bool)
    small[kept] = True
    folder.tensors(put(d2t=kept - torch.arange(5), t2d=small))
    assert "vocabulary maps" not in folder.failed()
    folder.tensors(put(d2t=kept))
    folder.target = type("OfTen", (), {"config": Config(folder.target.config)})
    assert folder.failed()["vocabulary maps"].startswith("d2t gives target ids [0, 3, 5] .. 13: expected")


class Config:
    """A target's config with ten ids."""

    def __init__(self, config):
        self.config = config

    def __getattr__(self, name):
        return 10 if name == "vocab_size" else getattr(self.config, name)


@pytest.mark.case("O-E02")
def test_a_rope_in_one_dialect_only_is_named(copy):
    folder = copy("eagle3")
    folder.config(rope_theta=...)
    assert "key rope_theta is missing" in folder.failed()["config keys"]


@pytest.fixture
def foreign(copy):
    """A good folder as others write it: no recorded draft, no metadata, the layer's other name."""
    folder = copy("eagle3")
    shutil.rmtree(folder.path / "check")
    tensors = load_file(folder.path / "model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}
    save_file(renamed, folder.path / "model.safetensors")
    return folder


@pytest.mark.parametrize("nothing", [..., None])
def test_a_folder_of_others_has_no_recorded_draft_and_engines_must_agree(foreign, nothing):
    assert foreign.failed() == {}
    foreign.config(eagle_config=nothing)
    assert foreign.failed() == {
        "layer convention": "sglang captures the inputs of layers [2, 3, 3]: vllm of [2, 3, 5]"
    }
    foreign.config(eagle_aux_hidden_state_layer_ids=nothing, num_aux_hidden_states=nothing)
    assert foreign.failed() == {}, "both engines take the same three layers"


def test_sections_that_are_null_are_as_if_they_were_not_there(foreign):
    foreign.config(text_config=None)
    assert foreign.failed() == {}
    foreign.config(speculators_model_type="eagle3", transformer_layer_config=None)
    assert foreign.failed() == {}


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_a_rope_of_older_readers_alone_is_read_by_either_key(foreign, key):
    foreign.config(rope_parameters=..., rope_scaling={key: "default"})
    assert foreign.failed() == {}
    foreign.config(rope_scaling={key: "linear", "factor": 2.0})
    assert foreign.failed()["config keys"].startswith("rotary frequencies [0.5, ")


def test_all_exports_below_a_folder_are_examined_and_failures_are_named(good, target, tmp_path, capsys):
    copied = shutil.copytree(good, tmp_path / "export")
    examine_all(copied, target.config, ENGINES)
    (copied / "medusa" / "medusa_lm_head.pt").write_bytes(b"")
    with pytest.raises(CheckFailed, match="medusa: rule 11, values$"):
        examine_all(copied, target.config, ENGINES)
    assert "FAIL 11 values" in capsys.readouterr().out
    with pytest.raises(CheckFailed, match="eagle1: rule 1, config keys; eagle1: rule 6"):
        examine_all(copied / "eagle1", target.config, ENGINES)


def test_a_folder_without_an_export_is_an_error(tmp_path, target):
    with pytest.raises(ValueError, match="export.path=.*: no config.json there"):
        examine_all(tmp_path, target.config, ENGINES)

"""What engines read of an export, held against a table written down from their sources.

engine_contracts.json says for each kind of drafter which keys and which tensors of what shape a loader reads
and where each goes. An exported tensor must go to one place, fit it, and none may be left to chance: SGLang
passes over names that it does not know and leaves what is missing random; vLLM refuses them.
"""

import itertools
import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spectrain.artifacts import read_json
from spectrain.config import ExportConfig, RunConfig
from spectrain.drafters import eagle1, eagle3, mtp, standalone
from spectrain.drafters.mtp_weights import names_of
from spectrain.export import export
from spectrain.target import Target
from spectrain.testing import tiny_llama
from spectrain.testing_mtp import KINDS, mtp_target

CONTRACTS = json.loads(Path(__file__).with_name("engine_contracts.json").read_text())["kinds"]
ENGINES = ("sglang", "vllm")
WHOLE = torch.arange(260)
# what is exported: the contract's kind, family, draft vocabulary, settings, conditions of the contract
HEADS = {
    "eagle3": ("eagle3", eagle3, WHOLE[::2], {}, ["reduced"]),
    "eagle3 with a norm for each tap": (
        "eagle3",
        eagle3,
        WHOLE[::2],
        {"fc_norm": True},
        ["reduced", "fc_norm"],
    ),
    "eagle3 that feeds back behind its norm": ("eagle3", eagle3, WHOLE, {"norm_output": True}, []),
    "eagle1": ("eagle1", eagle1, WHOLE, {}, []),
    "eagle1 of two layers": ("eagle1", eagle1, WHOLE, {"layers": 2}, ["deeper"]),
    "standalone": ("standalone", standalone, WHOLE, {"hidden": 64, "layers": 2}, []),
}
CONDITIONS = {"glm4_moe": ["qk_norm", "attention_bias"], "qwen3_5": ["dense"], "qwen3_5_moe": ["moe"]}


def expected(kind, conditions, sizes):
    """Every name that the contract has, with all its numbers: name to shape, place in SGLang, use in vLLM."""
    contract, rows = CONTRACTS[kind], {}
    groups = [contract["tensors"], *(contract["tensors_if"][condition] for condition in conditions)]
    numbers = {"i": range(sizes["layers"]), "j": range(1, sizes["layers"]), "n": [sizes["n"]]}
    numbers |= {"e": range(sizes.get("N", 0)), "l": range(sizes.get("L", 0))}
    for name, (shape, place, use) in itertools.chain(*(group.items() for group in groups)):
        keys = sorted(set(re.findall(r"\{(\w)\}", name)))
        for chosen in itertools.product(*(numbers[key] for key in keys)):
            filled = dict(zip(keys, chosen, strict=True))
            size = tuple(evaluated(part, sizes) for part in shape.split(","))
            rows[name.format(**filled)] = (size, place.format(**filled), use)
    return rows


def evaluated(text, sizes):
    """A sum of products of sizes: 2*D, C+R, H*P+H*U."""
    products = [part.split("*") for part in text.split("+")]
    return sum(math.prod(int(x) if x.isdigit() else sizes[x] for x in product) for product in products)


def check_tensors(stored, rows, engine):
    """Every stored tensor has one place and its shape there; nothing is unknown, nothing is missing."""
    wanted = {name: row for name, row in rows.items() if engine == "sglang" or row[2] != "absent"}
    assert stored.keys() == wanted.keys()
    assert {name: tuple(t.shape) for name, t in stored.items()} == {n: row[0] for n, row in wanted.items()}
    places = Counter(row[1] for row in wanted.values() if row[1] != "skip")
    assert set(places.values()) == {1}


def in_numbers(meant, values):
    """What a symbol stands for; anything else is itself."""
    return values.get(meant, meant) if isinstance(meant, str) else meant


def check_keys(config, kind, values):
    """Each key that SGLang reads has the value that it must have, or the engine's own where it is absent."""
    for key, (meant, *default) in CONTRACTS[kind]["config"].items():
        found = config
        for part in key.split("."):
            found = found.get(part, ...) if isinstance(found, dict) else ...
        if found is ...:
            assert default, f"{key} is missing"
            found = in_numbers(default[0], values)
        assert found == in_numbers(meant, values), key


def written(family, target, kept, folder, engine, settings):
    drafter = family.build(family.Config(**settings), target, kept).eval()
    config = RunConfig(recipe="trial", drafter=drafter.config, export=ExportConfig(engine=[engine]))
    return export(config, target, drafter, folder)[0], drafter


@pytest.fixture(scope="module")
def llama():
    return Target(tiny_llama(layers=6), path="tiny")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_what_the_engine_reads(name, engine, llama, tmp_path):
    kind, family, kept, settings, conditions = HEADS[name]
    folder, drafter = written(family, llama, kept, tmp_path, engine, settings)
    config = read_json(folder / "config.json")
    target, taps = llama.config, list(getattr(drafter, "taps", ()))
    own = target if kind != "standalone" else drafter.decoder.config
    sizes = {
        "D": own.hidden_size, "E": target.hidden_size, "V": 260, "W": len(kept), "F": own.intermediate_size,
        "H": own.num_attention_heads, "G": own.num_key_value_heads, "K": own.head_dim, "L": len(taps),
        "layers": settings.get("layers", 1), "n": 6,
    }  # fmt: skip
    rows = expected(kind, conditions, sizes)
    check_tensors(load_file(folder / "model.safetensors"), rows, engine)
    if engine == "sglang":
        assert config["architectures"] == [CONTRACTS[kind]["architecture"]]
        switches = {
            "fc_norm": settings.get("fc_norm", False),
            "norm_output": settings.get("norm_output", False),
        }
        values = {**sizes, **switches, "taps": taps, "eps": 1e-6, "theta": 10000.0, "reach": 512}
        check_keys(config, kind, values)


@pytest.fixture(scope="module")
def mtp_targets(tmp_path_factory):
    return {kind: mtp_target(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_targets_mtp_weights_are_what_the_engine_reads(kind, engine, mtp_targets, tmp_path):
    target, contract = mtp_targets[kind], "qwen3_5" if kind == "qwen3_5_moe" else kind
    own = target.config
    feedback = names_of(own, 1).feedback[engine]
    settings = {"unroll": 2, "feedback": feedback, "order": names_of(own, 1).order}
    folder, _ = written(mtp, target, WHOLE, tmp_path, engine, settings)
    config = read_json(folder / "config.json")
    keys = {
        "D": "hidden_size", "H": "num_attention_heads", "G": "num_key_value_heads", "F": "intermediate_size",
        "M": "moe_intermediate_size", "Q": "q_lora_rank", "C": "kv_lora_rank", "R": "qk_rope_head_dim",
        "P": "qk_nope_head_dim", "U": "v_head_dim", "n": "num_hidden_layers",
    }  # fmt: skip
    sizes = {symbol: config[key] for symbol, key in keys.items() if key in config}
    experts = config.get("n_routed_experts", config.get("num_experts", 0))
    shared = config.get("shared_expert_intermediate_size", config.get("moe_intermediate_size"))
    sizes |= {"V": 260, "N": experts, "S": shared, "K": config.get("head_dim", 8), "layers": 0}
    rows = expected(contract, CONDITIONS.get(kind, []), sizes)
    check_tensors(load_file(folder / "mtp.safetensors"), rows, engine)
    if engine == "sglang":
        check_keys(config, contract, sizes)
        (named,) = config["architectures"]
        assert named == CONTRACTS[contract]["architecture"].replace("5For", "5MoeFor" if experts else "5For")


def test_an_unknown_a_missing_and_a_misshapen_tensor_are_found():
    rows = {"fc.weight": ((2, 4), "model.fc.weight", "read"), "fc.bias": ((2,), "model.fc.bias", "absent")}
    whole = {"fc.weight": torch.zeros(2, 4), "fc.bias": torch.zeros(2)}
    check_tensors(whole, rows, "sglang")
    for changed in (
        {**whole, "model.fc.weight": torch.zeros(2, 4)},
        {"fc.weight": whole["fc.weight"]},
        {**whole, "fc.weight": torch.zeros(2, 2)},
    ):
        with pytest.raises(AssertionError):
            check_tensors(changed, rows, "sglang")

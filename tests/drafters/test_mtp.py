"""MTP: both forms on several kinds of target, the target's own weights, and what FastMTP is for."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import (
    Gemma3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GPT2LMHeadModel,
    GptOssForCausalLM,
    MistralForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    StableLmForCausalLM,
    Starcoder2ForCausalLM,
)

from spectrain import checkpoint
from spectrain.capture import capture_batch
from spectrain.config import ObjectiveConfig, RunConfig, TrainConfig, WandbConfig
from spectrain.decode.engine import generate
from spectrain.decode.sampling import Sampling
from spectrain.drafters.mtp import Config, build
from spectrain.drafters.mtp_weights import names_of
from spectrain.imports import load, open_import
from spectrain.proposal import Plan
from spectrain.target import Target
from spectrain.testing import make_sample, tiny_llama
from spectrain.testing_chains import assert_slots, drafted, observed, text, trained_logits
from spectrain.train import train

V = 260
KEPT = torch.arange(0, V, 3)
SIZES = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 16, "num_experts_per_tok": 2,
    "max_position_embeddings": 128, "initializer_range": 0.2,
}  # fmt: skip


def qwen3_next():
    """Three recurrent layers and one of gated attention; (1 + w) norms, four experts."""
    heads = {"linear_num_value_heads": 2, "linear_num_key_heads": 2}
    dims = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 16}
    config = Qwen3NextConfig(num_hidden_layers=4, num_experts=4, **SIZES, **heads, **dims)
    return Qwen3NextForCausalLM(config).float()


def glm4_moe():
    """A dense layer, then one with four experts; half of each head is rotated."""
    groups = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
    config = Glm4MoeConfig(num_hidden_layers=2, first_k_dense_replace=1, **SIZES, **groups)
    return Glm4MoeForCausalLM(config).float()


TARGETS = {"llama": lambda: tiny_llama(layers=2), "qwen3_next": qwen3_next, "glm4_moe": glm4_moe}


@pytest.fixture(scope="module", params=TARGETS)
def target(request):
    torch.manual_seed(0)
    return Target(TARGETS[request.param]())


@pytest.fixture(scope="module")
def llama():
    return Target(tiny_llama(layers=2))


def drafter_of(target, *, kept=KEPT, **settings):
    """A random drafter whose every parameter, norms included, differs from its start."""
    torch.manual_seed(0)
    drafter = build(Config(**{"unroll": 4} | settings), target, kept)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return drafter.eval()


FORMS = {"shared": {}, "by depth": {"blocks": 4}}


@pytest.mark.case("O-T02")
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_training_logits_equal_those_of_the_decode_loop_after_rejections(target, form):
    drafter = drafter_of(target, **form)
    ids = text(20, 5)
    batch = capture_batch(target, [make_sample("a", ids, "." + "S" * 19)], ())
    trained = trained_logits(drafter, batch)
    drafting = drafter.start(1, 40)
    drafting.observe([observed(batch, 0, 0, 6)])
    wrong = [ids[7], ids[8], (ids[9] + 1) % V, 3]
    assert_slots(drafted(drafting, [0], {0: wrong})[:, 0], trained, row=5, slots=3)
    drafting.observe([observed(batch, 0, 6, 9)])
    assert_slots(drafted(drafting, [0], {0: ids[10:14]})[:, 0], trained, row=8, slots=4)


@pytest.mark.parametrize("settings", [{"feedback": "pre"}, {"order": "hidden_first"}])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_feedback_and_order_are_the_same_in_training_and_decoding(llama, form, settings):
    drafter = drafter_of(llama, **form, **settings)
    ids = text(12, 5)
    batch = capture_batch(llama, [make_sample("a", ids, "." + "S" * 11)], ())
    drafting = drafter.start(1, 20)
    drafting.observe([observed(batch, 0, 0, 4)])
    trained = trained_logits(drafter, batch)
    assert_slots(drafted(drafting, [0], {0: ids[5:9]})[:, 0], trained, row=3, slots=4)


def test_prompts_shorter_than_the_blocks_and_of_unequal_length_are_drafted_as_trained(llama):
    """Request 2 begins with one row, request 0 with five; both go on, by two rows and by one."""
    drafter = drafter_of(llama, blocks=4)
    texts = {0: text(16, 6), 2: text(12, 7)}
    batches = {
        r: capture_batch(llama, [make_sample("a", ids, "." + "S" * (len(ids) - 1))], ())
        for r, ids in texts.items()
    }
    trained = {r: trained_logits(drafter, batch) for r, batch in batches.items()}
    drafting = drafter.start(3, 40)
    for begin, end in (((0, 0), (5, 1)), ((5, 1), (6, 3))):
        drafting.observe([observed(batches[r], r, a, b) for r, a, b in zip((0, 2), begin, end, strict=True)])
        forced = {r: texts[r][b + 1 : b + 5] for r, b in zip((0, 2), end, strict=True)}
        logits = drafted(drafting, [2, 0], {2: forced[2], 0: forced[0]})
        assert_slots(logits[:, 0], trained[2], row=end[1] - 1, slots=4)
        assert_slots(logits[:, 1], trained[0], row=end[0] - 1, slots=4)


def test_a_step_by_depth_reads_its_own_path_only(llama):
    """Two children of the root, then a child of each: the logits are those of the two chains."""
    drafter = drafter_of(llama, blocks=4)
    ids = text(12, 8)
    batch = capture_batch(llama, [make_sample("a", ids, "." + "S" * 11)], ())

    def begun():
        drafting = drafter.start(1, 40)
        drafting.observe([observed(batch, 0, 0, 5)])
        return drafting

    chains = {first: drafted(begun(), [0], {0: [first, ids[7], 0]})[:, 0] for first in (ids[6], 9)}
    drafting = begun()
    for slot, parents, tokens in ((1, [-1, -1], [ids[6], 9]), (2, [0, 1], [ids[7], ids[7]])):
        level = drafting.step([0, 0], parents, torch.tensor(tokens))
        expected = torch.stack([chains[ids[6]][slot], chains[9][slot]])
        torch.testing.assert_close(level, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.case("O-T08")
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_logits_of_a_document_packed_behind_another_equal_those_alone(llama, form):
    drafter = drafter_of(llama, **form)
    a, b = make_sample("a", text(13, 1), "...SSSSSS.TTT"), make_sample("b", text(9, 2), "SSSS..UUU")
    packed = trained_logits(drafter, capture_batch(llama, [a, b], ()))
    alone = trained_logits(drafter, capture_batch(llama, [b], ()))
    assert alone
    for (row, slot), logits in alone.items():
        torch.testing.assert_close(packed[row + 13, slot], logits, atol=1e-5, rtol=1e-5)


def test_a_chain_longer_than_the_blocks_is_refused(llama):
    drafting = drafter_of(llama, blocks=4).start(1, 20)
    with pytest.raises(ValueError, match=r"eval.runs: length=5: the drafter has 4 blocks .*drafter.blocks"):
        drafting.propose([0], Plan(shape="chain", length=5), None)


# the target's own weights


def own_weights(target, names, generator):
    """MTP tensors as a checkpoint holds them, experts one by one; the target's folder gets its config."""
    (Path(target.path) / "config.json").write_text("{}")
    stored = {}
    for ours, like in build(Config(unroll=1), target, KEPT).state_dict().items():
        value = 0.3 * torch.randn(like.shape, generator=generator)
        name = names.name(ours)
        if ".experts." not in name:
            stored[name] = value
            continue
        parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
        for e, expert in enumerate(value):
            for part, rows in zip(parts, expert.chunk(len(parts)), strict=True):
                stored[f"{name.rpartition('.')[0]}.{e}.{part}.weight"] = rows.contiguous()
    return stored


@pytest.mark.parametrize(
    ("kind", "norm", "projection"),
    [
        ("glm4_moe", "model.layers.2.enorm.weight", "model.layers.2.eh_proj.weight"),
        ("qwen3_next", "mtp.pre_fc_norm_embedding.weight", "mtp.fc.weight"),
    ],
)
def test_a_targets_own_weights_give_its_law_of_the_token_after_next(kind, norm, projection, tmp_path):
    """The input of the block, written out from the checkpoint: norms of embedding and state, embedding first;
    Qwen's norms multiply by 1 + w. Files: an index and a shard."""
    torch.manual_seed(0)
    target = Target(TARGETS[kind](), path=str(tmp_path))
    stored = own_weights(target, names_of(target.config, 1), torch.Generator().manual_seed(1))
    save_file(stored, tmp_path / "mtp.safetensors")
    index = {"weight_map": dict.fromkeys(stored, "mtp.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    drafter = build(Config(unroll=1, weights="target"), target, torch.arange(V)).eval()
    seen = []
    drafter.blocks[0].layer.register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))
    ids = text(8, 3)
    batch = capture_batch(target, [make_sample("a", ids, "S" * 8)], ())
    drafter.rows(batch)

    one = 1.0 if kind == "qwen3_next" else 0.0
    state_norm = norm.replace("embedding", "hidden").replace("enorm", "hnorm")
    embedded = target.embedding(torch.tensor(ids))[1:]

    def normed(x, name):
        return F.rms_norm(x, (32,), eps=target.config.rms_norm_eps) * (one + stored[name])

    joined = torch.cat((normed(embedded, norm), normed(batch.final[:-1], state_norm)), -1)
    torch.testing.assert_close(seen[0][:-1], joined @ stored[projection].T, atol=1e-5, rtol=1e-5)
    experts = drafter.blocks[0].layer.mlp.experts
    (gate,) = (t for name, t in stored.items() if name.endswith("experts.3.gate_proj.weight"))
    (down,) = (t for name, t in stored.items() if name.endswith("experts.3.down_proj.weight"))
    assert torch.equal(experts.gate_up_proj[3, :16], gate) and torch.equal(experts.down_proj[3], down)


def test_the_targets_folder_may_lie_below_the_users_home(tmp_path, monkeypatch):
    target = Target(glm4_moe(), path=str(tmp_path))
    stored = own_weights(target, names_of(target.config, 1), torch.Generator())
    save_file(stored, tmp_path / "model.safetensors")
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    target.path = f"~/{tmp_path.name}"
    drafter = build(Config(unroll=1, weights="target"), target, KEPT)
    assert torch.equal(drafter.blocks[0].eh_proj.weight, stored["model.layers.2.eh_proj.weight"])


def test_a_tensor_that_is_not_there_is_named(tmp_path):
    target = Target(glm4_moe(), path=str(tmp_path))
    stored = own_weights(target, names_of(target.config, 1), torch.Generator())
    del stored["model.layers.2.mlp.experts.0.gate_proj.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"tensor model.layers.2.mlp.experts.gate_up_proj is not in"):
        build(Config(unroll=1, weights="target"), target, KEPT)


FP8 = {"layers.2.eh_proj.weight": torch.float8_e4m3fn}
EXPERT = {"layers.2.mlp.experts.1.down_proj.weight": torch.float8_e4m3fn}
SCALED = {"layers.2.eh_proj.weight_scale_inv": torch.float32}


@pytest.mark.parametrize("imports", [False, True])
@pytest.mark.parametrize(
    ("stored_as", "message"),
    [
        (FP8, r"model.safetensors: tensor model.layers.2.eh_proj.weight is float8_e4m3fn: expected float16"),
        (EXPERT, r"model.safetensors: tensor model.layers.2.mlp.experts.1.down_proj.weight is float8_e4m3fn"),
        (SCALED, r"tensor model.layers.2.eh_proj.weight has a scale, .*eh_proj.weight_scale_inv: expected"),
    ],
)
def test_quantised_weights_are_refused_by_file_and_tensor(stored_as, message, imports, tmp_path):
    target = Target(glm4_moe(), path=str(tmp_path))
    stored = own_weights(target, names_of(target.config, 1), torch.Generator())
    for name, dtype in stored_as.items():
        stored[f"model.{name}"] = stored.get(f"model.{name}", torch.ones(1)).to(dtype)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        if imports:
            config, found = open_import(Config(init_from=str(tmp_path)), target)
            load(found, build(config, target, KEPT))
        else:
            build(Config(unroll=1, weights="target"), target, KEPT)


def test_names_of_mimo_have_the_state_first():
    config = SimpleNamespace(model_type="mimo", num_hidden_layers=36)
    names = names_of(config, 1)
    assert names.order == "hidden_first"
    assert names.name("blocks.0.eh_proj.weight") == "model.mtp_layers.0.input_proj.weight"
    assert names.name("blocks.0.layer.self_attn.q_proj.bias") == "model.mtp_layers.0.self_attn.q_proj.bias"


def test_own_weights_in_another_order_or_of_an_unknown_kind_are_refused(llama):
    with pytest.raises(ValueError, match="drafter.order=hidden_first: .*embedding_first"):
        build(Config(weights="target", order="hidden_first"), Target(glm4_moe()), KEPT)
    with pytest.raises(ValueError, match="drafter.weights=target: .*'llama' has none for 1 blocks"):
        build(Config(weights="target"), llama, KEPT)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"unroll": 0}, "drafter.unroll=0: expected at least 1"),
        ({"blocks": 2}, "drafter.blocks=2: expected 1 or drafter.unroll=3"),
        ({"order": "either"}, "drafter.order='either': expected one of embedding_first, hidden_first"),
        ({"feedback": "none"}, "drafter.feedback='none': expected one of post, pre"),
    ],
)
def test_settings_out_of_range_are_refused_with_key_and_value(settings, message):
    with pytest.raises(ValueError, match=message):
        Config(**settings)


MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
UNFIT = {
    "window": (MistralForCausalLM, {"sliding_window": 8}, "Mistral.* has a sliding window of 8; expected"),
    "sinks": (GptOssForCausalLM, {"num_local_experts": 4}, "GptOss.* has sinks in its attention; expected"),
    "rotary": (Gemma3ForCausalLM, MIXED, "Gemma3.* has a rotary embedding for each kind of layer; expected"),
    "starcoder2": (Starcoder2ForCausalLM, {}, "Starcoder2.* has no RMS norms; expected"),
    "stablelm": (StableLmForCausalLM, {}, "StableLm.* has no RMS norms; expected"),
    "gpt2": (GPT2LMHeadModel, {}, "GPT2.* has no rotary embedding and no norm in front .* and no RMS norms"),
}


@pytest.mark.parametrize(("kind", "settings", "message"), UNFIT.values(), ids=UNFIT)
def test_a_target_that_a_block_cannot_be_made_of_is_refused_by_what_does_not_fit(kind, settings, message):
    layers = {"num_hidden_layers": 2, "pad_token_id": 0}
    model = kind(kind.config_class(**SIZES, **layers, **settings))
    with pytest.raises(ValueError, match=f"drafter.family=mtp: target {message}"):
        build(Config(), Target(model), KEPT)


# what it is for


STEPS = 25
REPLY = 64


def accepted_by_slot(target, prompt, reply, unroll, folder):
    """Share of rounds that accept the first, the first two, the first three draft tokens, once one block has
    learnt one conversation, unrolled `unroll` steps."""
    sample = make_sample("a", prompt + reply, "." * len(prompt) + "S" * REPLY)
    settings = TrainConfig(
        passes=STEPS, learning_rate=1e-2, clip=1.0, dtype="float32", features="online",
        batch_tokens=128, micro_tokens=128, save_every=STEPS,
    )  # fmt: skip
    config = RunConfig(
        recipe="overfit", device="cpu", drafter=Config(unroll=unroll), train=settings,
        objective=ObjectiveConfig(terms={"ce": 1.0}, slot_decay=0.6), wandb=WandbConfig(enabled=False),
    )  # fmt: skip
    drafter = checkpoint.build_drafter(config.drafter, target, torch.arange(V))
    train(config, target, SimpleNamespace(train=[sample]), None, drafter, folder)
    plan = Plan(shape="chain", length=3)
    found, _ = generate(
        target, [prompt], sampling=Sampling(), max_new_tokens=REPLY, stop_ids=[], batch_size=1,
        drafter=drafter.eval(), plan=plan,
    )  # fmt: skip
    assert list(found[0].ids) == reply
    accepted = torch.tensor([r.accepted for r in found[0].rounds if r.drafted == 3])
    return [(accepted > slot).float().mean().item() for slot in range(3)]


def test_one_block_trained_three_steps_deep_drafts_three_tokens_and_one_step_does_not(tmp_path):
    """FastMTP, section 4: a block trained for the next token alone loses the tokens behind it."""
    target = Target(tiny_llama(hidden=64))
    prompt = list(range(40, 60))
    plain, _ = generate(
        target, [prompt], sampling=Sampling(), max_new_tokens=REPLY, stop_ids=[], batch_size=1
    )
    reply = list(plain[0].ids)
    deep, shallow = (
        accepted_by_slot(target, prompt, reply, unroll, tmp_path / str(unroll)) for unroll in (3, 1)
    )
    assert deep[0] > 0.9 and shallow[0] > 0.9
    assert deep[2] > 0.9
    assert shallow[2] < 0.75 * deep[2]

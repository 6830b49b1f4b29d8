"""A smaller language model as drafter: one law in training and drafting, fresh starts, refusals."""

import pytest
import torch

from spectrain.capture import capture_batch
from spectrain.checkpoint import build_drafter
from spectrain.config import ObjectiveConfig
from spectrain.data.packing import pack
from spectrain.decode.engine import generate
from spectrain.decode.sampling import Sampling, Streams
from spectrain.drafters.standalone import Config, Standalone, build, check_tokenizer
from spectrain.objectives import Objective
from spectrain.optim import trainable
from spectrain.proposal import Observation, Plan
from spectrain.target import Target, packed_layout
from spectrain.testing import byte_tokenizer, make_sample, tiny_llama

V = 260
TEXT = torch.randint(0, V, (14,), generator=torch.Generator().manual_seed(1)).tolist()
SHAPES = {"tied": {"tied": True}, "untied, fewer rows": {"tied": False, "vocab": 200}}


@pytest.fixture(scope="module")
def target():
    return Target(tiny_llama(layers=3, hidden=48), byte_tokenizer())


@pytest.fixture(params=SHAPES)
def drafter(request):
    model = tiny_llama(layers=2, hidden=32, seed=5, **SHAPES[request.param])
    if not SHAPES[request.param]["tied"]:  # it may know fewer ids than the target, but reads all of the text
        model.set_input_embeddings(tiny_llama(hidden=32, seed=6).get_input_embeddings())
    return Standalone(Config(), Target(model), V)


def whole(drafter, ids):
    """Logits [T, W] of one plain pass over a text."""
    ids = torch.tensor(ids)
    states = drafter.states(ids, torch.arange(len(ids)), packed_layout((0, len(ids))))
    return (states @ drafter.head_weight().t()).detach()


def seen(ids, *, start=0, request=0):
    none = torch.empty(len(ids) - 1, 0, 1)
    return Observation(request, start, torch.tensor(ids[1:]), none, none, first_id=ids[0])


def test_rows_give_the_logits_that_drafting_starts_from(target, drafter):
    sample = make_sample("a", TEXT, "...SSSSSSSS.TT")
    rows = drafter.rows(capture_batch(target, [sample], drafter.taps))
    logits = rows.state @ drafter.head_weight().t()
    assert rows.index.row.tolist() == [2, 3, 4, 5, 6, 7, 8, 11]
    assert rows.index.source.tolist() == [3, 4, 5, 6, 7, 8, 9, 12]
    for row, found in zip(rows.index.row.tolist(), logits, strict=True):
        work = drafter.start(1, 40)
        work.observe([seen(TEXT[: row + 2])])
        torch.testing.assert_close(work.root_logits([0])[0], found, atol=1e-5, rtol=0)


@pytest.mark.case("O-T01", "O-T08")
def test_a_root_needs_a_token_before_it_and_its_label_in_the_same_span(drafter):
    samples = [make_sample("a", [0] * 5, "SSSTT"), make_sample("b", [0] * 4, "..SS")]
    index = drafter.index(pack(samples))
    assert (index.source.tolist(), index.slots) == ([1, 3, 7], 1)


@pytest.mark.case("O-T08")
def test_packing_changes_no_state(target, drafter):
    a, b = make_sample("a", TEXT, "..SSSSSSSSSSSS"), make_sample("b", TEXT[3:], "..SSSSSSSSS")
    together = drafter.rows(capture_batch(target, [a, b], ())).state
    apart = [drafter.rows(capture_batch(target, [one], ())).state for one in (a, b)]
    torch.testing.assert_close(together, torch.cat(apart), atol=1e-5, rtol=0)


def test_a_step_gives_the_logits_of_a_plain_pass_over_its_path(drafter):
    work = drafter.start(2, 40)
    work.observe([seen(TEXT[:6]), seen(TEXT[2:9], request=1)])
    first = work.step([0, 0, 1], [-1, -1, -1], torch.tensor([7, 8, 9]))
    second = work.step([0, 1], [1, 0], torch.tensor([10, 11]))
    for found, path in zip(
        [*first, *second],
        ([*TEXT[:6], 7], [*TEXT[:6], 8], [*TEXT[2:9], 9], [*TEXT[:6], 8, 10], [*TEXT[2:9], 9, 11]),
        strict=True,
    ):
        torch.testing.assert_close(found, whole(drafter, path)[-1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("plan", [Plan("chain", 4), Plan("tree", 3, nodes=6, top_k=2)])
def test_after_a_rejection_it_drafts_as_from_a_fresh_start(drafter, plan):
    used, fresh, sampler = drafter.start(1, 60), drafter.start(1, 60), Streams(Sampling(), [0])
    used.observe([seen(TEXT[:5])])
    used.propose([0], plan, sampler)
    used.observe([seen(TEXT[4:8], start=4)])  # none of the draft is in it
    fresh.observe([seen(TEXT[:8])])
    (a,), (b,) = (work.propose([0], plan, sampler) for work in (used, fresh))
    assert (a.tokens.tolist(), a.parents) == (b.tokens.tolist(), b.parents)
    torch.testing.assert_close(used.root_logits([0]), fresh.root_logits([0]), atol=1e-5, rtol=0)
    assert used.root_positions([0]) == [7]


@pytest.mark.parametrize(
    ("law", "plan"), [("rejection", Plan("chain", 3)), ("target_only", Plan("tree", 3, nodes=6, top_k=2))]
)
def test_greedy_text_equals_plain_decoding(target, drafter, law, plan):
    prompts = [TEXT[:6], TEXT[:3], TEXT[4:9]]
    settings = {"sampling": Sampling(), "max_new_tokens": 16, "stop_ids": ()}
    plain, _ = generate(target, prompts, batch_size=3, **settings)
    found, _ = generate(target, prompts, batch_size=2, drafter=drafter, plan=plan, law=law, **settings)
    assert [text.ids for text in found] == [text.ids for text in plain]


def test_the_target_as_its_own_drafter_is_always_right(target):
    drafter = Standalone(Config(frozen=True), Target(tiny_llama(layers=3, hidden=48)), V)
    settings = {"sampling": Sampling(temperature=1.0), "max_new_tokens": 17, "stop_ids": (), "batch_size": 2}
    plan = Plan("chain", 3)
    found, _ = generate(target, [TEXT[:6], TEXT], drafter=drafter, plan=plan, law="rejection", **settings)
    assert [[record.accepted for record in text.rounds] for text in found] == [[3] * 4] * 2


def test_the_gradient_is_that_of_the_models_own_forward(target):
    """Distillation by kl over the whole vocabulary, against transformers' eager pass."""
    model = tiny_llama(layers=2, hidden=32, tied=True, seed=5)
    drafter = Standalone(Config(), Target(model), V)
    batch = capture_batch(target, [make_sample("a", TEXT, "..SSSSSSSSSSSS")], ())
    rows = drafter.rows(batch)
    objective = Objective(ObjectiveConfig(terms={"kl": 1.0}), drafter, target)
    counts = objective.count(rows.index, batch)
    objective.loss(rows, batch, drafter.head_weight(), counts).loss.backward()

    plain = tiny_llama(layers=2, hidden=32, tied=True, seed=5)
    logits = plain(torch.tensor([TEXT])).logits[0, rows.index.source]
    p = torch.softmax(target.logits(batch.final[rows.index.source]), -1)
    loss = (p * (p.log() - torch.log_softmax(logits, -1))).sum(-1).mean()
    loss.backward()
    expected = dict(plain.model.named_parameters())
    for name, parameter in drafter.decoder.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, atol=1e-6, rtol=1e-4)


# names, weights, shapes


def test_a_tied_head_is_stored_once(drafter):
    assert list(drafter.state_dict()) == list(trainable(drafter))
    assert ("head.weight" in drafter.state_dict()) == (drafter.head is not None)


def test_the_lookup_of_an_embedding_is_not_read_at_each_step(drafter):
    weights = sum(p.numel() for p in drafter.parameters())
    assert drafter.weights_read() == (weights - (0 if drafter.head is None else V * 32), 0)


def test_a_frozen_model_has_nothing_to_train():
    assert not trainable(Standalone(Config(frozen=True), Target(tiny_llama()), V))


def test_bfloat16_leaves_the_rotary_frequencies_exact(drafter):
    before = drafter.decoder.rotary_emb.inv_freq.clone()
    moved = drafter.to(torch.bfloat16)
    assert moved.head_weight().dtype == torch.bfloat16
    assert torch.equal(moved.decoder.rotary_emb.inv_freq, before)


def test_a_model_from_scratch_follows_the_target_and_the_seed(target):
    one, two, other = (
        build_drafter(Config(layers=2), target, torch.arange(V), seed=seed) for seed in (1, 1, 2)
    )
    config = one.decoder.config
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (64, 192, 2)
    assert (config.vocab_size, config.max_position_embeddings, config.num_attention_heads) == (V, 512, 1)
    assert torch.equal(one.head_weight(), two.head_weight())
    assert not torch.equal(one.head_weight(), other.head_weight())


# refusals


def saved(folder, tokenizer, **settings):
    tiny_llama(layers=1, **settings).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_model_with_the_targets_tokenizer_is_read_from_a_folder(target, tmp_path):
    drafter = build(Config(path=saved(tmp_path, byte_tokenizer())), target, torch.arange(V))
    assert torch.equal(drafter.head_weight(), tiny_llama(layers=1).lm_head.weight)


def test_a_folder_without_a_model_is_refused_under_its_own_key(target, tmp_path):
    with pytest.raises(ValueError, match=r"^drafter.path='.*': no config.json there"):
        build(Config(path=str(tmp_path)), target, torch.arange(V))


def changed(kind):
    """The byte tokenizer with one more token, one more special token, or one merge."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = byte_tokenizer()
    if kind == "vocabulary":
        tokenizer.add_tokens(["new"])
    elif kind == "special tokens":
        tokenizer.add_special_tokens({"additional_special_tokens": ["a"]})
    else:
        import json

        from tokenizers import Tokenizer

        core = json.loads(tokenizer.backend_tokenizer.to_str())
        core["model"]["vocab"]["ab"] = 260
        theirs = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(core)))
        core["model"]["merges"] = [["a", "b"]]
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(core))), theirs
    return tokenizer, byte_tokenizer()


@pytest.mark.parametrize(
    ("kind", "detail"),
    [
        ("vocabulary", "'new' is 260 there, None in the target"),
        ("special tokens", "97 is a there, None in the target"),
        ("merges", r"0 is \['a', 'b'\] there, None in the target"),
    ],
)
def test_another_tokenizer_is_refused_with_its_first_difference(kind, detail):
    with pytest.raises(ValueError, match=f"^drafter.path='x': another {kind} than the target's: {detail}"):
        check_tokenizer("x", *changed(kind))


def test_a_target_without_a_tokenizer_cannot_be_compared():
    with pytest.raises(ValueError, match="the target has no tokenizer to compare with"):
        check_tokenizer("x", byte_tokenizer(), None)


def test_more_positions_than_the_model_has_are_refused(drafter):
    with pytest.raises(ValueError, match="decoding needs 513 positions, it has 512"):
        drafter.start(1, 513)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "x", "layers": 2}, "drafter.layers=2, drafter.hidden=0: no effect with drafter.path='x'"),
        ({"layers": 0}, "drafter.layers=0: expected at least 1"),
        ({"hidden": 100}, "drafter.hidden=100: expected a multiple of 64, or 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        Config(**settings)

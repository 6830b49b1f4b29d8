"""EAGLE-3: which rows exist, that packing changes none, names, starts and refusals."""

import pytest
import torch

from spectrain.capture import capture_batch
from spectrain.data.packing import pack
from spectrain.drafters.eagle3 import Config, build, default_taps
from spectrain.target import Target
from spectrain.testing import make_sample, tiny_llama

V = 260
KEPT = torch.arange(0, V, 3)


def text(length, seed):
    return torch.randint(0, V, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def index_of(marks, *, unroll, documents=None):
    """(row, slot, source) of documents whose supervised spans are drawn."""
    drafter = build(Config(unroll=unroll), Target(tiny_llama()), KEPT)
    samples = [make_sample(f"s{i}", [0] * len(m), m) for i, m in enumerate(documents or [marks])]
    index = drafter.index(pack(samples))
    assert index.slots == unroll
    return list(zip(index.row.tolist(), index.slot.tolist(), index.source.tolist(), strict=True))


# which rows exist


@pytest.mark.case("O-T01")
def test_a_row_counts_iff_its_root_and_its_label_lie_in_the_span():
    assert index_of("...SSS..", unroll=3) == [(2, 0, 3), (3, 0, 4), (2, 1, 4)]


def test_a_span_at_the_beginning_of_a_document_starts_with_row_0():
    assert index_of("SSSS..", unroll=2) == [(0, 0, 1), (1, 0, 2), (0, 1, 2)]


def test_a_row_never_reaches_from_one_span_into_the_next():
    rows = [(0, 0, 1), (1, 0, 2), (4, 0, 5), (0, 1, 2)]
    assert index_of(".SSS.TT", unroll=2) == rows
    assert index_of(".SSSTT", unroll=2) == [(0, 0, 1), (1, 0, 2), (3, 0, 4), (0, 1, 2)]


def test_a_span_of_one_token_has_no_row():
    assert index_of("..S..T", unroll=3) == []
    assert index_of("..S.TT", unroll=3) == [(3, 0, 4)]


def test_a_row_never_reaches_into_the_document_before():
    assert index_of("", unroll=2, documents=["..SS", "SSS"]) == [(1, 0, 2), (4, 0, 5)]


@pytest.mark.case("O-T08")
def test_documents_of_5_and_4_tokens_give_each_root_its_labels():
    """The first token of a document is no root: no row with a state lies before it."""
    samples = [make_sample("a", [0] * 5, "SSSSS"), make_sample("b", [0] * 4, "SSSS")]
    assert pack(samples).positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    roots = [row + 1 for row, _, _ in index_of("", unroll=3, documents=["SSSSS", "SSSS"])]
    assert [roots.count(n) for n in range(9)] == [0, 3, 2, 1, 0, 0, 2, 1, 0]


# packing


def states_of(drafter, target, samples):
    """(sample id, row in the sample, slot) -> state."""
    batch = capture_batch(target, samples, drafter.taps)
    rows = drafter.rows(batch)
    found = {}
    for row, slot, state in zip(rows.index.row.tolist(), rows.index.slot.tolist(), rows.state, strict=True):
        document = int(batch.tokens.document_ids[row])
        found[batch.tokens.sample_ids[document], int(batch.tokens.positions[row]), slot] = state
    return found


def of_sample(states, sample_id):
    return {key: state for key, state in states.items() if key[0] == sample_id}


def assert_same(ours, theirs, *, atol=1e-5):
    assert ours.keys() == theirs.keys() and ours
    for key, state in ours.items():
        torch.testing.assert_close(state, theirs[key], atol=atol, rtol=0)


A = make_sample("a", text(13, 1), "...SSSSSS.TTT")
B = make_sample("b", text(9, 2), "SSSS..UUU")


@pytest.mark.case("O-T08")
def test_states_of_a_document_packed_behind_another_equal_those_alone(drafter_of, target):
    drafter = drafter_of(target)
    packed = states_of(drafter, target, [A, B])
    assert_same(of_sample(packed, "b"), states_of(drafter, target, [B]))


@pytest.mark.case("O-T08")
def test_states_of_a_document_do_not_change_with_the_other_documents_tokens(drafter_of, target):
    drafter = drafter_of(target)
    other = make_sample("a", text(13, 3), "...SSSSSS.TTT")
    first, second = (of_sample(states_of(drafter, target, [x, B]), "b") for x in (A, other))
    assert all(torch.equal(state, second[key]) for key, state in first.items())


def test_the_order_of_documents_changes_no_state(drafter_of, target):
    drafter = drafter_of(target)
    assert_same(states_of(drafter, target, [A, B]), states_of(drafter, target, [B, A]))


def test_a_batch_without_rows_gives_an_empty_state_with_a_graph(drafter_of, llama):
    drafter = drafter_of(llama)
    rows = drafter.rows(capture_batch(llama, [make_sample("a", text(6, 1), "..S...")], drafter.taps))
    assert rows.state.shape == (0, 32)
    rows.state.sum().backward()
    assert drafter.fc.weight.grad.abs().max() == 0


# names, starts, refusals


def test_the_trained_tensors_have_the_names_and_shapes_that_engines_read(target):
    drafter = build(Config(taps=[0, 2, 3]), target, KEPT)
    heads, groups, width = (
        target.config.num_attention_heads, target.config.num_key_value_heads, target.config.head_dim,
    )  # fmt: skip
    assert {name: tuple(t.shape) for name, t in drafter.state_dict().items()} == {
        "fc.weight": (32, 3 * 32),
        "midlayer.self_attn.q_proj.weight": (heads * width, 64),
        "midlayer.self_attn.k_proj.weight": (groups * width, 64),
        "midlayer.self_attn.v_proj.weight": (groups * width, 64),
        "midlayer.self_attn.o_proj.weight": (32, heads * width),
        "midlayer.input_layernorm.weight": (32,),
        "midlayer.hidden_norm.weight": (32,),
        "midlayer.post_attention_layernorm.weight": (32,),
        "midlayer.mlp.gate_proj.weight": (64, 32),
        "midlayer.mlp.up_proj.weight": (64, 32),
        "midlayer.mlp.down_proj.weight": (32, 64),
        "norm.weight": (32,),
        "lm_head.weight": (len(KEPT), 32),
    }
    assert [name for name, _ in drafter.named_parameters()] == list(drafter.state_dict())


def test_the_head_starts_from_the_targets_rows_at_the_kept_ids(target):
    assert torch.equal(build(Config(), target, KEPT).lm_head.weight, target.head.weight[KEPT])


def test_attention_starts_on_the_token_itself(target):
    attn = build(Config(), target, KEPT).midlayer.self_attn
    q, k = (part.weight.unflatten(0, (-1, attn.head_dim)) for part in (attn.q_proj, attn.k_proj))
    shared = len(q) // len(k)
    assert all(torch.equal(q[head], k[head // shared] / 2) for head in range(len(q)))


def test_training_leaves_the_target_as_it_is(drafter_of, llama):
    drafter = drafter_of(llama)
    drafter.rows(capture_batch(llama, [A], drafter.taps)).state.sum().backward()
    assert all(p.grad is None and not p.requires_grad for p in llama.model.parameters())


@pytest.mark.parametrize(
    ("layers", "taps"), [(32, (1, 15, 28)), (30, (1, 14, 26)), (4, (0, 1)), (2, (0, 1)), (1, (0,))]
)
def test_default_taps_are_one_low_one_middle_one_high_layer(layers, taps):
    assert default_taps(layers) == taps


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"unroll": 0}, r"drafter.unroll=0.*at least 1"),
        ({"layers": 0}, r"drafter.layers=0.*at least 1"),
        ({"taps": [2, 1]}, r"drafter.taps=\[2, 1\].*strictly increasing"),
        ({"taps": [1, 1]}, r"drafter.taps=\[1, 1\].*strictly increasing"),
    ],
)
def test_settings_out_of_range_are_refused_with_key_and_value(settings, message):
    with pytest.raises(ValueError, match=message):
        Config(**settings)


@pytest.mark.parametrize("taps", [[1, 5], [-1, 2]])
def test_taps_that_the_target_does_not_have_are_refused(llama, taps):
    with pytest.raises(ValueError, match=r"drafter.taps=\[.*layers 0 to 4"):
        build(Config(taps=taps), llama, KEPT)


def test_a_frozen_head_stays_the_targets_rows_and_the_rest_learns(llama):
    drafter = build(Config(unroll=2, head="frozen"), llama, KEPT)
    assert torch.equal(drafter.head_weight(), llama.head.weight[KEPT])
    assert not drafter.head_weight().requires_grad
    assert {name for name, p in drafter.named_parameters() if not p.requires_grad} == {"lm_head.weight"}


def test_an_unknown_way_of_the_head_is_refused():
    with pytest.raises(ValueError, match="drafter.head='thawed': expected one of trained, frozen"):
        Config(head="thawed")


def test_a_drafter_of_half_the_width_has_half_of_everything_and_an_embedding_of_its_own(llama):
    drafter = build(Config(width=16), llama, KEPT)
    shapes = {name: tuple(t.shape) for name, t in drafter.state_dict().items()}
    taps = len(drafter.taps)
    assert shapes["fc.weight"] == (16, 32 * taps) and shapes["embed_tokens.weight"] == (V, 16)
    assert shapes["midlayer.self_attn.q_proj.weight"] == (2 * 8, 32)
    assert shapes["midlayer.self_attn.k_proj.weight"] == (1 * 8, 32)
    assert shapes["midlayer.mlp.up_proj.weight"] == (32, 16) and shapes["lm_head.weight"] == (len(KEPT), 16)


def test_a_width_that_splits_heads_is_refused(llama):
    with pytest.raises(ValueError, match="drafter.width=24: expected 0 or a multiple of 16"):
        build(Config(width=24), llama, KEPT)


def test_rotary_frequencies_stay_float32_in_a_bfloat16_drafter(llama):
    drafter = build(Config(), llama, KEPT)
    positions = torch.arange(512)
    cos, _ = drafter.rotary(positions, drafter.fc.weight)
    drafter.to(torch.bfloat16)
    rounded, _ = drafter.rotary(positions, drafter.fc.weight)
    torch.testing.assert_close(rounded, cos.to(torch.bfloat16), atol=0, rtol=0)

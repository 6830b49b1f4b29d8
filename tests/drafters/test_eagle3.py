"""EAGLE-3: which rows exist, that packing changes none, and that what is trained is what decodes."""

from dataclasses import dataclass, field

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from spectrain.capture import capture_batch
from spectrain.config import ObjectiveConfig
from spectrain.data.packing import pack
from spectrain.drafters.eagle3 import Config, build, default_taps
from spectrain.objectives import Objective
from spectrain.proposal import Observation, Plan
from spectrain.target import Target
from spectrain.testing import make_sample, tiny_llama

V = 260
KEPT = torch.arange(0, V, 3)  # a reduced draft vocabulary
UNROLL = 4


def qwen3():
    """Qwen3-shaped: heads wider than hidden / heads, and norms of q and k that the drafter does not have."""
    config = Qwen3Config(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        initializer_range=0.2,
    )
    return Qwen3ForCausalLM(config).float()


TARGETS = {"llama": lambda: tiny_llama(layers=5), "qwen3": qwen3}


@pytest.fixture(scope="module", params=TARGETS)
def target(request):
    torch.manual_seed(0)
    return Target(TARGETS[request.param]())


@pytest.fixture(scope="module")
def llama():
    return Target(TARGETS["llama"]())


def drafter_of(target, *, kept=KEPT, seed=0, **settings):
    """A random drafter whose every parameter, norms included, differs from its start."""
    torch.manual_seed(seed)
    drafter = build(Config(**{"unroll": UNROLL, "init": "random"} | settings), target, kept)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return drafter


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
def test_states_of_a_document_packed_behind_another_equal_those_alone(target):
    drafter = drafter_of(target)
    packed = states_of(drafter, target, [A, B])
    assert_same(of_sample(packed, "b"), states_of(drafter, target, [B]))


@pytest.mark.case("O-T08")
def test_states_of_a_document_do_not_change_with_the_other_documents_tokens(target):
    drafter = drafter_of(target)
    other = make_sample("a", text(13, 3), "...SSSSSS.TTT")
    first, second = (of_sample(states_of(drafter, target, [x, B]), "b") for x in (A, other))
    assert all(torch.equal(state, second[key]) for key, state in first.items())


def test_the_order_of_documents_changes_no_state(target):
    drafter = drafter_of(target)
    assert_same(states_of(drafter, target, [A, B]), states_of(drafter, target, [B, A]))


def test_a_batch_without_rows_gives_an_empty_state_with_a_graph(llama):
    drafter = drafter_of(llama)
    rows = drafter.rows(capture_batch(llama, [make_sample("a", text(6, 1), "..S...")], drafter.taps))
    assert rows.state.shape == (0, 32)
    rows.state.sum().backward()
    assert drafter.fc.weight.grad.abs().max() == 0


# training and decoding


@dataclass
class Forced:
    """A sampler that drafts what it is told, request after request and slot after slot, and keeps the
    logits."""

    tokens: list[list[int]]
    logits: list[torch.Tensor] = field(default_factory=list)
    greedy: bool = False

    def draft_law(self, logits):
        self.logits.append(logits)
        return torch.softmax(logits, -1)

    def draw(self, law, *, requests, root_positions, slots):
        return [self.tokens[request][slots[0]] for request in requests]


def drafted(drafting, requests, tokens):
    """Logits over the kept ids, [slots, requests, W], of a chain whose draft tokens are `tokens` (by
    request)."""
    sampler = Forced(tokens)
    plan = Plan(shape="chain", length=len(next(iter(tokens.values()))))
    proposals = drafting.propose(requests, plan, sampler)
    assert [p.tokens.tolist() for p in proposals] == [tokens[r] for r in requests]
    by_slot = torch.cat(sampler.logits).unflatten(0, (plan.length, len(requests)))
    outside = torch.ones(V, dtype=torch.bool)
    outside[drafting.kept_ids] = False
    assert (by_slot[..., outside] == -torch.inf).all()
    return by_slot[..., drafting.kept_ids]


def observed(batch, request, first, last):
    """Rows first .. last - 1 of the batch, of a document that begins at its token 0."""
    rows = slice(first, last)
    return Observation(
        request, first, batch.tokens.ids[first + 1 : last + 1], batch.taps[rows], batch.final[rows]
    )


def trained_logits(drafter, batch):
    """(row, slot) -> logits of the unrolled training forward."""
    rows = drafter.rows(batch)
    logits = rows.state @ drafter.head_weight().T
    keys = zip(rows.index.row.tolist(), rows.index.slot.tolist(), strict=True)
    return dict(zip(keys, logits.detach(), strict=True))


def assert_slots(logits, trained, row, slots):
    for k in range(slots):
        torch.testing.assert_close(logits[k], trained[row, k], atol=1e-5, rtol=0)


@pytest.mark.case("O-T02")
@pytest.mark.parametrize("kept", [KEPT, torch.arange(V)], ids=["reduced", "whole"])
def test_training_logits_equal_those_of_the_decode_loop_in_each_round(target, kept):
    """Round 1 from root x_6; two of its draft tokens are taken, the others rejected; round 2 from root x_9;
    then one after a rejection of all, from root x_10."""
    drafter = drafter_of(target, kept=kept)
    ids = text(20, 5)
    batch = capture_batch(target, [make_sample("a", ids, "." + "S" * 19)], drafter.taps)
    trained = trained_logits(drafter, batch)
    drafting = drafter.start(1, 40)
    drafting.observe([observed(batch, 0, 0, 6)])
    assert drafting.root_positions([0]) == [6]
    assert_slots(drafted(drafting, [0], {0: ids[7:11]})[:, 0], trained, row=5, slots=4)

    wrong = [ids[7], ids[8], (ids[9] + 1) % V, 3]
    assert_slots(
        drafted(drafting, [0], {0: wrong})[:, 0], trained, row=5, slots=3
    )  # slot 3 follows a wrong token
    drafting.observe([observed(batch, 0, 6, 9)])
    assert drafting.root_positions([0]) == [9]
    assert_slots(drafted(drafting, [0], {0: [7, *ids[11:14]]})[:, 0], trained, row=8, slots=1)
    drafting.observe([observed(batch, 0, 9, 10)])
    assert_slots(drafted(drafting, [0], {0: ids[11:15]})[:, 0], trained, row=9, slots=4)


def test_training_logits_equal_those_of_a_decode_loop_with_several_requests(target):
    """Requests 2 and 0 of three, at roots x_4 and x_7; then request 2 alone goes on, then begins anew."""
    drafter = drafter_of(target)
    texts = {0: text(16, 6), 2: text(12, 7)}
    batches, trained = {}, {}
    for r, ids in texts.items():
        batches[r] = capture_batch(
            target, [make_sample(f"s{r}", ids, "." + "S" * (len(ids) - 1))], drafter.taps
        )
        trained[r] = trained_logits(drafter, batches[r])
    drafting = drafter.start(3, 40)
    drafting.observe([observed(batches[2], 2, 0, 4), observed(batches[0], 0, 0, 7)])
    logits = drafted(drafting, [2, 0], {2: texts[2][5:9], 0: texts[0][8:12]})
    assert_slots(logits[:, 0], trained[2], row=3, slots=4)
    assert_slots(logits[:, 1], trained[0], row=6, slots=4)
    drafting.observe([observed(batches[2], 2, 4, 6)])
    assert_slots(drafted(drafting, [2], {2: texts[2][7:11]})[:, 0], trained[2], row=5, slots=4)
    drafting.observe([observed(batches[0], 2, 0, 3)])
    logits = drafted(drafting, [0, 2], {0: texts[0][8:12], 2: texts[0][4:8]})
    assert_slots(logits[:, 0], trained[0], row=6, slots=4)
    assert_slots(logits[:, 1], trained[0], row=2, slots=4)


def test_a_step_from_a_sibling_reads_its_own_path_only(target):
    """Two children of the root, then a child of each: the logits are those of the two chains."""
    drafter = drafter_of(target)
    ids = text(12, 8)
    batch = capture_batch(target, [make_sample("a", ids, "." + "S" * 11)], drafter.taps)
    chains = {}
    for first in (ids[6], 9):
        drafting = drafter.start(1, 40)
        drafting.observe([observed(batch, 0, 0, 5)])
        chains[first] = drafted(drafting, [0], {0: [first, ids[7], 0]})[:, 0]
    drafting = drafter.start(1, 40)
    drafting.observe([observed(batch, 0, 0, 5)])
    drafting.states = torch.cat((drafting.states, torch.zeros(1, 4, 32)), 1)
    level = drafting.step([0, 0], [-1, -1], torch.tensor([ids[6], 9]))
    torch.testing.assert_close(level, torch.stack([chains[ids[6]][1], chains[9][1]]), atol=1e-5, rtol=0)
    level = drafting.step([0, 0], [0, 1], torch.tensor([ids[7], ids[7]]))
    torch.testing.assert_close(level, torch.stack([chains[ids[6]][2], chains[9][2]]), atol=1e-5, rtol=0)


def test_every_call_of_the_layer_is_counted(llama):
    drafter = drafter_of(llama)
    batch = capture_batch(llama, [make_sample("a", text(9, 1), "." * 9)], drafter.taps)
    drafting = drafter.start(1, 20)
    assert drafting.steps == 0
    drafting.observe([observed(batch, 0, 0, 5)])
    drafted(drafting, [0], {0: [1, 2, 3, 4]})
    assert drafting.steps == 1 + 3


# the loss against the paper's description, written out token by token in float64


def rms(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x_NHK, positions_N, theta):
    """Rotary embedding: channel pairs (j, j + K/2) turn by position / theta^(2j/K)."""
    half = x_NHK.shape[-1] // 2
    rate = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = positions_N.double()[:, None, None] * rate
    a, b = x_NHK[..., :half], x_NHK[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def dense_states(p, embedding, taps, shape):
    """The unroll of one document: [steps, rows, D] before the final norm. Row t of step k exists while token
    t + 1 + k does."""
    heads, groups, width, eps, theta = shape
    length = len(embedding)
    name = "midlayer.self_attn."
    state = taps.flatten(1)[: length - 1] @ p["fc.weight"].T
    keys, values, states = [], [], []
    for k in range(UNROLL):
        rows = length - 1 - k
        state = state[:rows]
        token = rms(embedding[1 + k :], p["midlayer.input_layernorm.weight"], eps)
        x = torch.cat((token, rms(state, p["midlayer.hidden_norm.weight"], eps)), -1)
        q, key, value = (
            (x @ p[f"{name}{kind}_proj.weight"].T).view(rows, -1, width) for kind in ("q", "k", "v")
        )
        positions = torch.arange(rows) + k
        q, key = turned(q, positions, theta), turned(key, positions, theta)
        keys.append(key.repeat_interleave(heads // groups, 1))
        values.append(value.repeat_interleave(heads // groups, 1))
        mixed = []
        for i in range(rows):  # the row's own past: base keys 0 .. i, then its own column of each later step
            seen = [*(keys[0][j] for j in range(i + 1)), *(keys[s][i] for s in range(1, k + 1))]
            read = [*(values[0][j] for j in range(i + 1)), *(values[s][i] for s in range(1, k + 1))]
            scores = torch.stack([(q[i] * key).sum(-1) for key in seen]) / width**0.5
            mixed.append((torch.softmax(scores, 0)[..., None] * torch.stack(read)).sum(0).flatten())
        state = state + torch.stack(mixed) @ p[f"{name}o_proj.weight"].T
        x = rms(state, p["midlayer.post_attention_layernorm.weight"], eps)
        gate, up = (x @ p[f"midlayer.mlp.{kind}_proj.weight"].T for kind in ("gate", "up"))
        state = state + gate / (1 + (-gate).exp()) * up @ p["midlayer.mlp.down_proj.weight"].T
        states.append(state)
    return states


def dense_loss(drafter, target, samples, terms, decay):
    """The loss of all documents and its gradients by parameter."""
    p = {name: t.detach().double().requires_grad_() for name, t in drafter.named_parameters()}
    config = target.config
    shape = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.rms_norm_eps,
        config.rope_parameters["rope_theta"],
    )
    kept = drafter.kept_ids.tolist()
    lost = {(term, k): [] for term in terms for k in range(UNROLL)}
    for sample in samples:
        batch = capture_batch(target, [sample], drafter.taps)
        embedding = target.embedding.weight[sample.ids.long()].double()
        states = dense_states(p, embedding, batch.taps.double(), shape)
        law = torch.softmax(batch.final.double() @ target.head.weight.double().T, -1)
        span = sample.span_ids.tolist()
        for k, state in enumerate(states):
            logits = rms(state, p["norm.weight"], shape[3]) @ p["lm_head.weight"].T
            for t in range(len(state) - 1):
                if span[t + 1] < 0 or span[t + 1] != span[t + 2 + k]:
                    continue
                full = law[t + 1 + k]
                log_q, kept_p = torch.log_softmax(logits[t], -1), full[drafter.kept_ids]
                if int(full.argmax()) in kept:
                    renormalised = kept_p / kept_p.sum()
                    lost["kl", k].append((renormalised * (renormalised.log() - log_q)).sum())
                if int(sample.ids[t + 2 + k]) in kept:
                    lost["ce", k].append(-log_q[kept.index(int(sample.ids[t + 2 + k]))])
                lost["tv", k].append(1 - torch.minimum(kept_p, log_q.exp()).sum())
    total = sum(
        weight * decay**k * torch.stack(lost[term, k]).mean()
        for term, weight in terms.items()
        for k in range(UNROLL)
    )
    return total.item(), dict(zip(p, torch.autograd.grad(total, list(p.values())), strict=True))


def test_loss_and_every_gradient_equal_the_papers_description(target):
    drafter = drafter_of(target)
    terms = {"kl": 1.0, "ce": 0.5, "tv": 0.3}
    samples = [
        make_sample("a", text(19, 1), "..SSSSSSSSSS.TTTTTT"),
        make_sample("b", text(9, 2), "SSSSSSSSS"),
    ]
    batch = capture_batch(target, samples, drafter.taps)
    objective = Objective(ObjectiveConfig(terms=terms), drafter, target)
    index = drafter.index(batch.tokens)
    result = objective.loss(drafter.rows(batch), batch, drafter.head_weight(), objective.count(index, batch))
    result.loss.backward()
    loss, gradients = dense_loss(drafter, target, samples, terms, decay=0.8)
    assert result.loss.item() == pytest.approx(loss, rel=1e-5)
    for name, parameter in drafter.named_parameters():
        worst = (parameter.grad.double() - gradients[name]).abs().max() / gradients[name].abs().max()
        assert worst < 1e-4, (name, worst)


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


def test_the_layer_starts_from_the_targets_last_one(target):
    drafter, last = build(Config(), target, KEPT), target.layers[-1]
    layer = drafter.midlayer
    for kind in ("q", "k", "v"):
        ours, theirs = (getattr(x.self_attn, f"{kind}_proj").weight for x in (layer, last))
        assert torch.equal(ours[:, 32:], theirs)
    assert torch.equal(layer.mlp.down_proj.weight, last.mlp.down_proj.weight)
    assert torch.equal(layer.self_attn.o_proj.weight, last.self_attn.o_proj.weight)


def test_training_leaves_the_target_as_it_is(llama):
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
        ({"init": "zero"}, r"drafter.init='zero'.*target.*random"),
        ({"unroll": 0}, r"drafter.unroll=0.*at least 1"),
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

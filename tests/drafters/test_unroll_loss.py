"""EAGLE-3 and MTP: the loss and every gradient against the papers, written out token by token in float64."""

import pytest
import torch

from spectrain.capture import capture_batch
from spectrain.config import ObjectiveConfig
from spectrain.drafters import mtp
from spectrain.objectives import Objective
from spectrain.target import Target
from spectrain.testing import make_sample, tiny_llama

V = 260
UNROLL = 4


def text(length, seed):
    return torch.randint(0, V, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def rms(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x_NHK, positions_N, theta):
    """Rotary embedding: channel pairs (j, j + K/2) turn by position / theta^(2j/K)."""
    half = x_NHK.shape[-1] // 2
    rate = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = positions_N.double()[:, None, None] * rate
    a, b = x_NHK[..., :half], x_NHK[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def mixed_values(p, name, x, step, past, shape):
    """Attention of step `step` on inputs x [rows, ..], after the output projection; past: keys and values of
    the layer's steps so far, to which this one's are added."""
    heads, groups, width, _, theta = shape
    rows = len(x)
    q, key, value = (
        (x @ p[f"{name}.{kind}_proj.weight"].T).view(rows, -1, width) for kind in ("q", "k", "v")
    )
    positions = torch.arange(rows) + step
    q, key = turned(q, positions, theta), turned(key, positions, theta)
    past.append([part.repeat_interleave(heads // groups, 1) for part in (key, value)])
    mixed = []
    for i in range(rows):  # the row's own past: base keys 0 .. i, then its own column of each later step
        keys, values = (
            torch.stack([*past[0][part][: i + 1], *(own[part][i] for own in past[1:])]) for part in (0, 1)
        )
        scores = (q[i] * keys).sum(-1) / width**0.5
        mixed.append((torch.softmax(scores, 0)[..., None] * values).sum(0).flatten())
    return torch.stack(mixed) @ p[f"{name}.o_proj.weight"].T


def after_mlp(p, layer, state, eps):
    x = rms(state, p[f"{layer}.post_attention_layernorm.weight"], eps)
    gate, up = (x @ p[f"{layer}.mlp.{kind}_proj.weight"].T for kind in ("gate", "up"))
    return state + gate / (1 + (-gate).exp()) * up @ p[f"{layer}.mlp.down_proj.weight"].T


def eagle3_states(p, drafter, embedding, batch):
    """The unroll of one document: [steps, rows, D] ready for the head. Row t of step k exists while token
    t + 1 + k does."""
    switches, shape, ids = drafter.config, shape_of(drafter.draft_config), batch.tokens.ids
    eps, taps = shape[3], batch.taps.double()
    embedding = p["embed_tokens.weight"][ids] if switches.width else embedding
    if switches.fc_norm:
        normed = [rms(taps[:, i], p[f"fc_norm.{i}.weight"], eps) for i in range(taps.shape[1])]
        taps = torch.stack(normed, 1)
    state = taps.flatten(1)[: len(ids) - 1] @ p["fc.weight"].T
    first, later, states = [], {i: [] for i in range(1, switches.layers)}, []
    for k in range(UNROLL):
        state = state[: len(ids) - 1 - k]
        token = rms(embedding[1 + k :], p["midlayer.input_layernorm.weight"], eps)
        normed = rms(state, p["midlayer.hidden_norm.weight"], eps)
        added = mixed_values(p, "midlayer.self_attn", torch.cat((token, normed), -1), k, first, shape)
        state = after_mlp(p, "midlayer", (normed if switches.norm_before_residual else state) + added, eps)
        for number, past in later.items():
            layer = f"layers.{number}"
            x = rms(state, p[f"{layer}.input_layernorm.weight"], eps)
            added = mixed_values(p, f"{layer}.self_attn", x, k, past, shape)
            state = after_mlp(p, layer, state + added, eps)
        states.append(rms(state, p["norm.weight"], eps))
        state = states[-1] if switches.norm_output else state
    return states


def mtp_states(p, drafter, embedding, batch):
    """The same of MTP behind a Llama. A block of its own for each step sees its own rows alone, of which
    each is at its row's position; one block for all sees what EAGLE-3's layer sees."""
    config, shape = drafter.config, shape_of(drafter._target_config)
    eps, state, past, states = shape[3], batch.final.double(), [], []
    for k in range(UNROLL):
        block, step = ("blocks.0", k) if config.blocks == 1 else (f"blocks.{k}", 0)
        state = state[: len(embedding) - 1 - k]
        parts = [
            rms(embedding[1 + k :], p[f"{block}.enorm.weight"], eps),
            rms(state, p[f"{block}.hnorm.weight"], eps),
        ]
        if config.order == "hidden_first":
            parts.reverse()
        state = torch.cat(parts, -1) @ p[f"{block}.eh_proj.weight"].T
        layer = f"{block}.layer"
        x = rms(state, p[f"{layer}.input_layernorm.weight"], eps)
        past = past if step else []
        state = after_mlp(p, layer, state + mixed_values(p, f"{layer}.self_attn", x, step, past, shape), eps)
        states.append(rms(state, p[f"{block}.norm.weight"], eps))
        state = states[-1] if config.feedback == "post" else state
    return states


def shape_of(config):
    heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    return *heads, config.rms_norm_eps, config.rope_parameters["rope_theta"]


def dense_loss(drafter, target, samples, terms, dense_states):
    """The loss of all documents and its gradients by parameter."""
    p = {name: t.detach().double().requires_grad_() for name, t in drafter.named_parameters()}
    head = p.get("lm_head.weight", target.head.weight[drafter.kept_ids].double())
    kept = drafter.kept_ids.tolist()
    lost = {(term, k): [] for term in terms for k in range(UNROLL)}
    for sample in samples:
        batch = capture_batch(target, [sample], drafter.taps)
        embedding = target.embedding.weight[sample.ids.long()].double()
        law = torch.softmax(batch.final.double() @ target.head.weight.double().T, -1)
        span = sample.span_ids.tolist()
        for k, state in enumerate(dense_states(p, drafter, embedding, batch)):
            logits = state @ head.T
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
        weight * 0.8**k * torch.stack(lost[term, k]).mean()
        for term, weight in terms.items()
        for k in range(UNROLL)
    )
    return total.item(), dict(zip(p, torch.autograd.grad(total, list(p.values())), strict=True))


def assert_equals_dense(drafter, target, dense_states):
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
    loss, gradients = dense_loss(drafter, target, samples, terms, dense_states)
    assert result.loss.item() == pytest.approx(loss, rel=1e-5)
    for name, parameter in drafter.named_parameters():
        worst = (parameter.grad.double() - gradients[name]).abs().max() / gradients[name].abs().max()
        assert worst < 1e-4, (name, worst)


SWITCHES = {
    "plain": {},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "norm_before_residual": {"norm_before_residual": True},
    "two layers": {"layers": 2},
    "another width": {"width": 48},
    "all": {"fc_norm": True, "norm_output": True, "norm_before_residual": True, "layers": 3, "width": 48},
}


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_eagle3_loss_and_every_gradient_equal_the_papers_description(drafter_of, target, switches):
    assert_equals_dense(drafter_of(target, **switches), target, eagle3_states)


@pytest.mark.parametrize("settings", [{}, {"feedback": "pre"}, {"order": "hidden_first"}])
@pytest.mark.parametrize("blocks", [1, UNROLL])
def test_mtp_loss_and_every_gradient_equal_the_papers_description(blocks, settings):
    target = Target(tiny_llama(layers=2))
    torch.manual_seed(0)
    drafter = mtp.build(mtp.Config(unroll=UNROLL, blocks=blocks, **settings), target, torch.arange(0, V, 3))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    assert_equals_dense(drafter, target, mtp_states)

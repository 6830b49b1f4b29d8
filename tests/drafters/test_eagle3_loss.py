"""EAGLE-3: the loss and every gradient against the paper, written out token by token in float64."""

import pytest
import torch

from spectrain.capture import capture_batch
from spectrain.config import ObjectiveConfig
from spectrain.objectives import Objective
from spectrain.testing import make_sample

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


def test_loss_and_every_gradient_equal_the_papers_description(drafter_of, target):
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

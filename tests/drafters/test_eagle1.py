"""EAGLE-1: the published network and loss, HASS's context, noise, and what the decode loop computes."""

import pytest
import torch

from spectrain.capture import capture_batch
from spectrain.config import ObjectiveConfig
from spectrain.data.packing import pack
from spectrain.drafters import eagle3
from spectrain.drafters.eagle1 import Config, build
from spectrain.objectives import Objective
from spectrain.target import Target
from spectrain.testing import make_sample, tiny_llama
from spectrain.testing_chains import assert_slots, drafted, observed, text, trained_logits

V = 260
KEPT = torch.arange(0, V, 3)


@pytest.fixture(scope="module")
def target():
    return Target(tiny_llama(layers=2))


def drafter_of(target, *, kept=KEPT, **settings):
    """A random drafter whose every parameter, norms included, differs from its start."""
    torch.manual_seed(0)
    drafter = build(Config(**settings), target, kept)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return drafter.eval()


def rms(x, weight, eps=1e-6):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x_NHK, positions_N):
    half = x_NHK.shape[-1] // 2
    rate = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = positions_N.double()[:, None, None] * rate
    a, b = x_NHK[..., :half], x_NHK[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def dense_features(p, embedding, features, steps):
    """Predicted features of one document, [steps, rows, D]; four heads of 8, two for keys. Step k of row t
    reads the feature of step k - 1 there; behind position t it sees what its earlier steps gave, no more."""
    name = "layers.0.self_attn."
    state, keys, values, found = features[:-1], [], [], []
    for k in range(steps):
        rows = len(embedding) - 1 - k
        x = torch.cat((embedding[1 + k :], state[:rows].detach()), -1) @ p["fc.weight"].T
        q, key, value = ((x @ p[f"{name}{kind}_proj.weight"].T).view(rows, -1, 8) for kind in "qkv")
        q, key = turned(q, torch.arange(rows) + k), turned(key, torch.arange(rows) + k)
        keys.append(key.repeat_interleave(2, 1))
        values.append(value.repeat_interleave(2, 1))
        mixed = []
        for i in range(rows):
            seen = [*((0, j) for j in range(i + 1)), *((s, i) for s in range(1, k + 1))]
            scores = torch.stack([(q[i] * keys[s][j]).sum(-1) for s, j in seen]) / 8**0.5
            read = torch.stack([values[s][j] for s, j in seen])
            mixed.append((torch.softmax(scores, 0)[..., None] * read).sum(0).flatten())
        x = x + torch.stack(mixed) @ p[f"{name}o_proj.weight"].T
        y = rms(x, p["layers.0.post_attention_layernorm.weight"])
        gate, up = (y @ p[f"layers.0.mlp.{kind}_proj.weight"].T for kind in ("gate", "up"))
        state = x + gate / (1 + (-gate).exp()) * up @ p["layers.0.mlp.down_proj.weight"].T
        found.append(state)
    return found


@pytest.mark.parametrize("unroll", [1, 3])
def test_loss_and_every_gradient_equal_the_papers_description(target, unroll):
    """Smooth-L1 to the next feature, divergence through the target's head, HASS's ten likeliest tokens."""
    drafter = drafter_of(target, unroll=unroll)
    sample = make_sample("a", text(14, 1), "..SSSSSSSS.TTT")
    batch = capture_batch(target, [sample], drafter.taps)
    terms = {"smooth_l1": 1.0, "kl": 0.1, "topk": 0.5}
    objective = Objective(ObjectiveConfig(terms=terms), drafter, target)
    counts = objective.count(drafter.index(batch.tokens), batch)
    result = objective.loss(drafter.rows(batch), batch, drafter.head_weight(), counts)
    result.loss.backward()

    p = {name: t.detach().double().requires_grad_() for name, t in drafter.named_parameters()}
    embedding = target.embedding.weight[sample.ids.long()].double()
    final, head = batch.final.double(), target.head.weight.double()
    law, span = torch.softmax(final @ head.T, -1), sample.span_ids.tolist()
    total = torch.zeros((), dtype=torch.float64)
    for k, feature in enumerate(dense_features(p, embedding, final, unroll)):
        lost = {term: [] for term in terms}
        for t in range(len(feature) - 1):
            if span[t + 1] < 0 or span[t + 1] != span[t + 2 + k]:
                continue
            distance = (feature[t] - final[t + 1 + k]).abs()
            lost["smooth_l1"].append(torch.where(distance < 1, distance**2 / 2, distance - 0.5).mean())
            log_q, kept_p = torch.log_softmax(feature[t] @ head[KEPT].T, -1), law[t + 1 + k][KEPT]
            lost["topk"].append(-(kept_p * log_q)[kept_p.topk(10).indices].sum())
            if int(law[t + 1 + k].argmax()) % 3 == 0:
                r = kept_p / kept_p.sum()
                lost["kl"].append((r * (r.log() - log_q)).sum())
        total += sum(0.8**k * w * torch.stack(lost[term]).mean() for term, w in terms.items() if lost[term])
    expected = dict(zip(p, torch.autograd.grad(total, list(p.values())), strict=True))
    assert result.loss.item() == pytest.approx(total.item(), rel=1e-5)
    assert result.stats["loss"].sum().item() == pytest.approx(total.item(), rel=1e-5)
    for name, parameter in drafter.named_parameters():
        worst = (parameter.grad.double() - expected[name]).abs().max() / expected[name].abs().max()
        assert worst < 1e-4, (name, worst)


@pytest.mark.case("O-T02")
@pytest.mark.parametrize("layers", [1, 2])
def test_training_logits_equal_those_of_the_decode_loop_after_rejections(target, layers):
    drafter = drafter_of(target, unroll=4, layers=layers)
    ids = text(20, 5)
    batch = capture_batch(target, [make_sample("a", ids, "." + "S" * 19)], drafter.taps)
    trained = trained_logits(drafter, batch)
    drafting = drafter.start(1, 40)
    drafting.observe([observed(batch, 0, 0, 6)])
    wrong = [ids[7], ids[8], (ids[9] + 1) % V, 3]
    assert_slots(drafted(drafting, [0], {0: wrong})[:, 0], trained, row=5, slots=3)
    drafting.observe([observed(batch, 0, 6, 9)])
    assert_slots(drafted(drafting, [0], {0: ids[10:14]})[:, 0], trained, row=8, slots=4)


@pytest.mark.case("O-T08")
def test_logits_of_a_document_packed_behind_another_equal_those_alone(target):
    drafter = drafter_of(target, unroll=3)
    a, b = make_sample("a", text(13, 1), "...SSSSSS.TTT"), make_sample("b", text(9, 2), "SSSS..UUU")
    packed = trained_logits(drafter, capture_batch(target, [a, b], ()))
    alone = trained_logits(drafter, capture_batch(target, [b], ()))
    assert alone
    for (row, slot), logits in alone.items():
        torch.testing.assert_close(packed[row + 13, slot], logits, atol=1e-5, rtol=1e-5)


def test_noise_halves_in_a_document_of_1024_tokens_and_keeps_its_width_in_a_short_one(target):
    drafter = drafter_of(target, noise=0.1)
    tokens = pack([make_sample(name, [0] * n, "S" * n) for name, n in (("a", 1024), ("b", 100))])
    noise = drafter._noise(tokens, torch.zeros(1124, 32))
    for part, width in ((noise[:1024], 0.05), (noise[1024:], 0.1)):
        assert 0.99 * width < part.max() <= width and -width <= part.min() < -0.99 * width
        assert abs(part.mean()) < 0.02 * width


def test_noise_comes_in_training_alone(target):
    drafter = drafter_of(target, noise=0.5)
    batch = capture_batch(target, [make_sample("a", text(9, 1), "S" * 9)], ())
    calm = [drafter.rows(batch).state for _ in range(2)]
    noisy = drafter.train().rows(batch).state
    assert torch.equal(*calm) and not torch.equal(calm[0], noisy)


def test_the_trained_tensors_have_the_names_and_shapes_that_engines_read(target):
    drafter = drafter_of(target, layers=2)
    shapes = {name: tuple(t.shape) for name, t in drafter.state_dict().items()}
    layer = {
        "self_attn.q_proj.weight": (32, 32), "self_attn.k_proj.weight": (16, 32),
        "self_attn.v_proj.weight": (16, 32), "self_attn.o_proj.weight": (32, 32),
        "mlp.gate_proj.weight": (64, 32), "mlp.up_proj.weight": (64, 32), "mlp.down_proj.weight": (32, 64),
        "post_attention_layernorm.weight": (32,),
    }  # fmt: skip
    expected = {f"layers.{i}.{name}": shape for i in (0, 1) for name, shape in layer.items()}
    assert shapes == {"fc.weight": (32, 64), "layers.1.input_layernorm.weight": (32,), **expected}
    full = drafter_of(target, layers=2, kept=torch.arange(V))
    assert full.engine_config(target, "vllm")["num_hidden_layers"] == 2


def test_a_regression_to_features_is_refused_under_a_trained_head(target):
    drafter = eagle3.build(eagle3.Config(), target, KEPT)
    with pytest.raises(ValueError, match="objective.terms.smooth_l1: family eagle3 trains its head"):
        Objective(ObjectiveConfig(terms={"smooth_l1": 1.0}), drafter, target)


def test_a_target_that_scales_its_logits_is_refused():
    scaled = Target(tiny_llama(layers=2))
    scaled.config.logit_scale = 0.25
    with pytest.raises(ValueError, match="drafter.family=eagle1: the target scales"):
        build(Config(), scaled, KEPT)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"unroll": 0}, "drafter.unroll=0: expected at least 1"),
        ({"layers": 0}, "drafter.layers=0: expected at least 1"),
        ({"noise": -0.1}, "drafter.noise=-0.1: expected at least 0"),
    ],
)
def test_settings_out_of_range_are_refused_with_key_and_value(settings, message):
    with pytest.raises(ValueError, match=message):
        Config(**settings)

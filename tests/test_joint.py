"""Joint training of drafter and target: what moves, what does not, and that a stopped run goes on exactly."""

import json
from types import SimpleNamespace

import pytest
import torch

from spectrain import checkpoint
from spectrain.capture import capture_batch
from spectrain.config import CorpusConfig, ObjectiveConfig, RunConfig, TrainConfig, WandbConfig
from spectrain.drafters import hydra, medusa, standalone
from spectrain.joint import ADAPTERS, Joint, Shift, answer_rows, merge
from spectrain.joint_settings import JointConfig
from spectrain.optim import build_optimizer, trainable
from spectrain.target import Target
from spectrain.testing import make_sample, random_samples, tiny_llama
from spectrain.train import train
from spectrain.tuned import measure

V = 96
SAMPLES = random_samples(4, vocab=V)


def run_config(drafter=None, *, joint=None, **settings):
    fixed = {"dtype": "float32", "features": "online", "batch_tokens": 160, "micro_tokens": 80, "clip": 1.0}
    return RunConfig(
        recipe="joint",
        device="cpu",
        drafter=drafter or medusa.Config(heads=2),
        objective=ObjectiveConfig(terms={"kl": 1.0}),
        train=TrainConfig(**fixed | settings),
        joint=JointConfig(**{"rank": 2, **(joint or {})}),
        wandb=WandbConfig(enabled=False),
    )


def new(config):
    target = Target(tiny_llama(vocab=V))
    return target, checkpoint.build_drafter(config.drafter, target, torch.arange(V))


def opened(config=None, *, steps=8):
    """A target with adapters that change it, their drafter, and the joint training of both."""
    config = config or run_config()
    target, drafter = new(config)
    joint = Joint(config, target, drafter, steps=steps)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in joint.parameters:
            parameter += 0.2 * torch.randn(parameter.shape, generator=draw)
    return target, drafter, joint


def run(config, folder, *, evaluate=None):
    target, drafter = new(config)
    result = train(config, target, SimpleNamespace(train=SAMPLES), None, drafter, folder, evaluate)
    return target, drafter, result


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def tensors(folder, step, name="drafter"):
    return checkpoint.read_checked(checkpoint.step_folder(folder, step), f"{name}.safetensors")


def adapters(found):
    return {name: tensor for name, tensor in found.items() if name.startswith(ADAPTERS)}


def finals(target):
    return capture_batch(target, SAMPLES, ()).final


# Adapters


def test_with_adapters_off_the_target_is_the_original_bit_for_bit():
    target, _, joint = opened()
    before = finals(Target(tiny_llama(vocab=V)))
    assert torch.equal(finals(target), before)
    with joint.tuned():
        assert not torch.equal(finals(target), before)
    assert torch.equal(finals(target), before)


def test_new_adapters_change_nothing_and_closing_gives_the_model_back():
    config = run_config()
    target, drafter = new(config)
    names, print_ = list(target.model.state_dict()), target.fingerprint()
    joint = Joint(config, target, drafter, steps=8)
    with joint.tuned():
        assert torch.equal(finals(target), finals(Target(tiny_llama(vocab=V))))
    joint.close()
    assert list(target.model.state_dict()) == names and target.fingerprint() == print_
    assert not adapters(dict(drafter.named_parameters()))


def test_adapters_lie_on_every_linear_map_of_the_layers_and_nowhere_else():
    target, drafter, joint = opened()
    maps = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    maps += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert set(joint.layers) == {f"layers.{i}.{name}" for i in range(4) for name in maps}
    shapes = {name: tuple(p.shape) for name, p in drafter.adapters.named_parameters()}
    assert shapes["layers.0.mlp.down_proj.A"] == (2, 64) and shapes["layers.0.mlp.down_proj.B"] == (32, 2)


def test_merged_weights_are_the_tuned_target():
    target, drafter, joint = opened()
    with joint.tuned():
        expected = finals(target)
    merged = Target(tiny_llama(vocab=V))
    merge(merged, dict(drafter.adapters.named_parameters()), joint.settings.scale)
    assert (finals(target) - expected).abs().max() > 0.1
    torch.testing.assert_close(finals(merged), expected, atol=5e-4, rtol=1e-4)  # sums in another order


# The loss


def test_answer_rows_are_the_tokens_before_those_of_an_answer():
    samples = [make_sample("a", [1] * 5, "..SS."), make_sample("b", [1] * 3, "SSS")]
    assert answer_rows(capture_batch(new(run_config())[0], samples, ()).tokens).tolist() == [1, 2, 5, 6]


def test_the_loss_on_the_target_is_the_mean_divergence_from_the_original():
    target, _, joint = opened()
    original = capture_batch(target, SAMPLES, ())
    tuned = joint.states(original)
    row = answer_rows(original.tokens)
    p, q = (torch.log_softmax(target.head(batch.final[row]).double(), -1) for batch in (original, tuned))
    expected = 5.0 * (p.exp() * (p - q)).sum(-1).mean()
    loss = joint.shift.loss(tuned, original, len(row)).loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    ours = torch.autograd.grad(loss, joint.parameters, retain_graph=True)
    theirs = torch.autograd.grad(expected, joint.parameters)
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).abs().max() <= 1e-3 * other.abs().max()


@pytest.mark.parametrize("family", [medusa.Config(heads=2), hydra.Config(heads=2)])
def test_gradients_reach_adapters_and_heads_and_nothing_else(family):
    config = run_config(family)
    target, drafter, joint = opened(config)
    original = capture_batch(target, SAMPLES, drafter.taps)
    drafter.rows(joint.states(original)).state.square().sum().backward()
    blocks = [p for name, p in trainable(drafter).items() if name.startswith("blocks")]
    assert blocks and all(p.grad.abs().max() > 0 for p in (*joint.parameters, *blocks))
    named = dict(target.model.named_parameters())
    assert {name for name, p in named.items() if p.grad is not None} == {
        name for name in named if "lora" in name
    }


def test_the_target_moves_back_where_its_loss_alone_counts():
    target, _, joint = opened()
    original = capture_batch(target, SAMPLES, ())
    optimizer = torch.optim.Adam(joint.parameters, 1e-2)
    seen = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = joint.shift.loss(joint.states(original), original, len(answer_rows(original.tokens))).loss
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    assert seen[-1] < 0.5 * seen[0]


# The run


def test_warm_up_moves_no_adapter_and_then_both_are_trained(tmp_path):
    config = run_config(max_steps=4, passes=9, save_every=1, keep=9, joint={"drafter_first": 0.5})
    run(config, tmp_path)
    at = [tensors(tmp_path, step) for step in (1, 2, 3, 4)]
    moments = [tensors(tmp_path, step, "optimizer") for step in (2, 3)]
    first, second = (adapters(found) for found in at[:2])
    assert first and all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert not any(tensor.any() for tensor in adapters(moments[0]).values())
    assert all(tensor.any() for name, tensor in adapters(moments[1]).items() if name.endswith("B/exp_avg"))
    assert not torch.equal(at[2]["adapters.layers.0.mlp.up_proj.B"], at[3]["adapters.layers.0.mlp.up_proj.B"])
    assert not torch.equal(at[0]["blocks.0.layers.0.weight"], at[1]["blocks.0.layers.0.weight"])
    assert not torch.equal(at[2]["blocks.0.layers.0.weight"], at[3]["blocks.0.layers.0.weight"])
    shifts = [line["train/target_kl"] for line in lines(tmp_path)]
    assert shifts[:2] == [0.0, 0.0] and shifts[2] == pytest.approx(0, abs=1e-6) and shifts[3] > 1e-6


def test_adapters_learn_at_their_share_of_the_rate_and_without_decay():
    config = run_config(learning_rate=1e-2, weight_decay=0.1, joint={"rate_share": 0.5})
    target, drafter = new(config)
    own = build_optimizer(drafter, config.train)
    joint = Joint(config, target, drafter, steps=8)
    *_, last = joint.optimizer(own, config).param_groups
    assert (last["share"], last["weight_decay"]) == (0.5, 0.0)
    assert [id(p) for p in last["params"]] == [id(p) for p in joint.parameters]


class Stop(Exception):
    pass


@pytest.mark.parametrize("stop_at", [1, 3])
def test_stop_and_resume_equal_the_uninterrupted_run_bit_for_bit(tmp_path, stop_at):
    config = run_config(max_steps=4, passes=9, save_every=1, keep=9, eval_every=1)

    def stopping(folder):
        def scores(drafter):
            if len(checkpoint.complete(folder)) == stop_at:
                raise Stop
            return {"tau": 1.0}

        return scores

    run(config, tmp_path / "whole", evaluate=lambda drafter: {"tau": 1.0})
    with pytest.raises(Stop):
        run(config, tmp_path / "stopped", evaluate=stopping(tmp_path / "stopped"))
    run(config, tmp_path / "stopped", evaluate=lambda drafter: {"tau": 1.0})
    whole, stopped = (
        {path.name: path.read_bytes() for path in checkpoint.latest(tmp_path / name).iterdir()}
        for name in ("whole", "stopped")
    )
    assert stopped == whole


def test_evaluation_while_training_sees_the_tuned_target(tmp_path):
    config = run_config(max_steps=3, passes=9, eval_every=1, joint={"drafter_first": 0.0})
    target, drafter = new(config)
    seen = []
    prepared = SimpleNamespace(train=SAMPLES)
    train(config, target, prepared, None, drafter, tmp_path, lambda d: seen.append(finals(target)) or {})
    assert not torch.equal(seen[0], seen[2])
    assert torch.equal(finals(target), finals(Target(tiny_llama(vocab=V))))


def test_a_checkpoint_of_joint_training_is_not_taken_for_one_of_the_original(tmp_path):
    target, _, _ = run(run_config(max_steps=1), tmp_path)
    with pytest.raises(ValueError, match=r"tensor adapters\..* is not one of the drafter's"):
        checkpoint.load_drafter(tmp_path, target)


def test_other_joint_settings_are_not_mixed_in(tmp_path):
    run(run_config(max_steps=1), tmp_path)
    with pytest.raises(ValueError, match="trained with other settings .joint.weight: 5.0 there, 2.0 here"):
        run(run_config(max_steps=1, joint={"weight": 2.0}), tmp_path)


def test_the_change_of_a_target_is_measured_on_every_token_of_the_answers():
    original, tuned = Target(tiny_llama(vocab=V)), Target(tiny_llama(vocab=V))
    with torch.no_grad():
        tuned.layers[3].mlp.down_proj.weight *= 1.5
    found = measure(original, tuned, SAMPLES)
    one, two = (capture_batch(target, SAMPLES, ()) for target in (original, tuned))
    row = answer_rows(one.tokens)
    p, q = (torch.log_softmax(original.head(batch.final[row]).double(), -1) for batch in (one, two))
    label = one.tokens.ids[row + 1][:, None]
    expected = {
        "kl": (p.exp() * (p - q)).sum(-1).mean(),
        "agreement": (p.argmax(-1) == q.argmax(-1)).double().mean(),
        "loss_original": -p.gather(1, label).mean(),
        "loss_tuned": -q.gather(1, label).mean(),
    }
    assert found["tokens"] == len(row) and found["kl"] > 0.01
    assert {name: found[name] for name in expected} == pytest.approx(
        {name: value.item() for name, value in expected.items()}, rel=1e-4
    )
    assert measure(original, original, SAMPLES)["kl"] == pytest.approx(0, abs=1e-6)


# Refusals


def test_a_drafter_that_does_not_read_the_targets_states_is_refused():
    config = run_config(standalone.Config())
    target, drafter = new(config)
    with pytest.raises(ValueError, match="drafter standalone does not read the target's states"):
        Joint(config, target, drafter, steps=8)


def test_a_target_with_other_logits_than_its_heads_is_refused():
    config = run_config()
    target, drafter = new(config)
    target.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="joint.rank=2: the target scales, caps or shifts its logits"):
        Joint(config, target, drafter, steps=8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": TrainConfig()}, "train.features=stored: the states change"),
        ({"train": TrainConfig(features="online", passes=0)}, "train.passes=0: nothing is trained"),
        ({"corpus": CorpusConfig(eval_fraction=0.0)}, "corpus.eval_fraction=0: the target's change"),
    ],
)
def test_what_joint_training_cannot_do_is_refused_by_its_key(change, message):
    sections = {"train": TrainConfig(features="online"), **change}
    with pytest.raises(ValueError, match=f"joint.rank=2, {message}"):
        RunConfig(recipe="joint", drafter=medusa.Config(), joint=JointConfig(rank=2), **sections)


def test_a_setting_of_joint_training_without_a_rank_is_refused():
    with pytest.raises(ValueError, match="joint.weight=2.0: no effect without joint.rank"):
        JointConfig(weight=2.0)


def test_shift_weighs_as_it_is_told():
    target, _, joint = opened()
    original = capture_batch(target, SAMPLES, ())
    tuned = joint.states(original)
    once, twice = (Shift(target, weight=w).loss(tuned, original, 1.0).loss.item() for w in (1.0, 2.0))
    assert twice == pytest.approx(2 * once, rel=1e-6)

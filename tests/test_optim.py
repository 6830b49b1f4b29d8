"""Learning rates as closed forms; float32 masters that move."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from spectrain import optim
from spectrain.config import TrainConfig
from spectrain.optim import (
    SharedMuon,
    build_optimizer,
    learning_rate,
    load_optimizer,
    optimizer_tensors,
    set_learning_rate,
)


@pytest.mark.case("O-T07")
def test_the_linear_schedule_is_a_function_of_the_step_alone():
    config = TrainConfig(learning_rate=1e-3, warmup_ratio=0.1, schedule="linear")
    assert learning_rate(500, 1000, config) == pytest.approx(5.55556e-4, rel=1e-5)
    assert learning_rate(501, 1000, config) == pytest.approx(5.54444e-4, rel=1e-5)


def test_a_linear_schedule_rises_over_the_warm_up_then_falls():
    config = TrainConfig(learning_rate=1.0, warmup_ratio=2 / 6, schedule="linear")
    assert [learning_rate(step, 6, config) for step in range(6)] == [1 / 2, 1, 1, 3 / 4, 1 / 2, 1 / 4]


def test_a_cosine_passes_its_middle_at_the_mean_of_both_ends():
    config = TrainConfig(learning_rate=2.0, warmup_ratio=0.0, min_ratio=0.1)
    rates = [learning_rate(step, 8, config) for step in range(8)]
    assert rates[0] == 2.0
    assert rates[4] == pytest.approx(1.1)
    assert rates[6] == pytest.approx(2 * (0.1 + 0.9 * (1 + math.cos(math.pi * 6 / 8)) / 2))
    assert rates == sorted(rates, reverse=True)


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="train.schedule='step': expected one of cosine, linear"):
        TrainConfig(schedule="step")


def test_weight_decay_touches_matrices_only():
    module = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    optimizer = build_optimizer(module, TrainConfig(weight_decay=0.5))
    assert [(len(g["params"]), g["weight_decay"]) for g in optimizer.param_groups] == [(1, 0.5), (3, 0.0)]


def test_parameters_of_lower_precision_are_refused_by_name():
    with pytest.raises(ValueError, match="drafter parameter weight is torch.bfloat16"):
        build_optimizer(nn.Linear(2, 2).bfloat16(), TrainConfig())


def constant_gradient_steps(module, optimizer, steps, rate=1e-3):
    for _ in range(steps):
        module.weight.grad = torch.full_like(module.weight, 0.01)
        set_learning_rate(optimizer, rate)
        optimizer.step()


@pytest.mark.case("O-T05")
@pytest.mark.parametrize("stop", [None, 50])
def test_a_weight_of_one_moves_by_the_learning_rate_also_across_a_reload(stop):
    module = nn.LayerNorm(1, bias=False)
    optimizer = build_optimizer(module, TrainConfig(betas=[0.9, 0.999]))
    constant_gradient_steps(module, optimizer, stop or 100)
    if stop:
        saved = {name: tensor.clone() for name, tensor in optimizer_tensors(module, optimizer).items()}
        weight = module.weight.detach().clone()
        module = nn.LayerNorm(1, bias=False)
        module.load_state_dict({"weight": weight})
        optimizer = build_optimizer(module, TrainConfig(betas=[0.9, 0.999]))
        load_optimizer(module, optimizer, saved)
        constant_gradient_steps(module, optimizer, 100 - stop)
    assert module.weight.item() == pytest.approx(0.9, abs=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.update(other=torch.zeros(1)), "optimizer state other: unknown"),
        (lambda state: state.pop("bias/exp_avg"), "optimizer state bias/exp_avg: missing"),
        (lambda state: state.update({"bias/step": torch.zeros(3)}), r"bias/step: shape \[3\]: expected \[\]"),
    ],
)
def test_optimizer_state_of_another_drafter_is_named(change, message):
    module = nn.Linear(2, 2)
    optimizer = build_optimizer(module, TrainConfig())
    state = dict(optimizer_tensors(module, optimizer))
    change(state)
    with pytest.raises(ValueError, match=message):
        load_optimizer(module, optimizer, state)


def test_two_processes_turn_half_of_the_matrices_each_and_keep_every_momentum(monkeypatch):
    """Each process is tried alone; what it would get from the other is missing from its parameters."""

    def stepped(index, processes):
        torch.manual_seed(0)
        matrices = [torch.nn.Parameter(torch.randn(*shape)) for shape in ((8, 4), (6, 6), (4, 4))]
        optimizer = SharedMuon([{"params": matrices}], lr=0.1, momentum=0.9)
        for matrix in matrices:
            optimizer.state[matrix] = {"momentum_buffer": torch.zeros_like(matrix)}
            matrix.grad = torch.randn(matrix.shape)
        state = SimpleNamespace(process_index=index, num_processes=processes)
        monkeypatch.setattr(optim, "PartialState", lambda: state)
        sent: list[int] = []
        monkeypatch.setattr(optim, "broadcast", lambda tensor, from_process: sent.append(from_process))
        before = [matrix.detach().clone() for matrix in matrices]
        optimizer.step()
        momenta = [optimizer.state[matrix]["momentum_buffer"] for matrix in matrices]
        return [m.detach() for m in matrices], momenta, before, sent

    alone, momenta, _, none = stepped(0, 1)
    assert none == []
    for index, mine in ((0, [1]), (1, [0, 2])):  # products 128, 216, 64
        matrices, kept, before, sent = stepped(index, 2)
        assert sent == [0, 1, 1]
        assert all(torch.equal(a, b) for a, b in zip(momenta, kept, strict=True))
        for i, matrix in enumerate(matrices):
            assert torch.equal(matrix, alone[i] if i in mine else before[i])


class TwoMatrices(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6, bias=False)
        self.second = nn.Linear(6, 4, bias=False)
        self.scale = nn.Parameter(torch.ones(4))

    def slow_rows(self):
        return {"first.weight": 2}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_slow_rows_take_a_tenth_of_what_they_would_have_taken(optimizer):
    moved = []
    for slow in ({"first.weight": 2}, {}):
        torch.manual_seed(0)
        drafter = TwoMatrices()
        drafter.slow_rows = lambda slow=slow: slow
        before = [p.detach().clone() for p in drafter.parameters()]
        optimizers = build_optimizer(drafter, TrainConfig(optimizer=optimizer))
        for i, p in enumerate(drafter.parameters()):
            p.grad = torch.arange(1, p.numel() + 1, dtype=torch.float32).view_as(p) + i
        optimizers.step()
        moved.append([p.detach() - old for p, old in zip(drafter.parameters(), before, strict=True)])
    (_, first, second), (_, first_plain, second_plain) = moved
    torch.testing.assert_close(first[:2], optim.SLOW * first_plain[:2], rtol=1e-3, atol=1e-8)
    assert torch.equal(first[2:], first_plain[2:])
    assert torch.equal(second, second_plain)
    assert float(first_plain[:2].abs().min()) > 1e-5

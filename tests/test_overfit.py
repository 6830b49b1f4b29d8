"""A drafter that has learnt one conversation by heart drafts it."""

import json
from types import SimpleNamespace

import pytest
import torch

from spectrain import checkpoint
from spectrain.config import ObjectiveConfig, RunConfig, TrainConfig, WandbConfig
from spectrain.decode.engine import generate
from spectrain.decode.sampling import Sampling
from spectrain.drafters.eagle3 import Config
from spectrain.proposal import Plan
from spectrain.target import Target
from spectrain.testing import make_sample, tiny_llama
from spectrain.train import train

STEPS = 120
REPLY = 64


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """Target, prompt, its greedy reply, and a drafter that the training loop has shown nothing else."""
    target = Target(tiny_llama(hidden=64))
    prompt = list(range(40, 60))
    plain, _ = generate(
        target, [prompt], sampling=Sampling(), max_new_tokens=REPLY, stop_ids=[], batch_size=1
    )
    reply = list(plain[0].ids)
    assert len(set(reply)) > REPLY // 3  # a text, not a loop
    sample = make_sample("a", prompt + reply, "." * len(prompt) + "S" * REPLY)
    settings = TrainConfig(
        passes=STEPS,
        learning_rate=1e-2,
        clip=1.0,
        dtype="float32",
        features="online",
        batch_tokens=128,
        micro_tokens=128,
        save_every=STEPS,
    )
    config = RunConfig(
        recipe="overfit",
        device="cpu",
        drafter=Config(unroll=5),
        objective=ObjectiveConfig(terms={"ce": 1.0}),
        train=settings,
        wandb=WandbConfig(enabled=False),
    )
    drafter = checkpoint.build_drafter(config.drafter, target, torch.arange(260))
    folder = tmp_path_factory.mktemp("overfit")
    result = train(config, target, SimpleNamespace(train=[sample]), None, drafter, folder)
    assert result.step == STEPS <= 300
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return SimpleNamespace(target=target, prompt=prompt, reply=reply, drafter=drafter.eval(), lines=lines)


def test_the_loss_falls_within_ten_steps_and_to_almost_nothing(learnt):
    losses = [line["train/loss"] for line in learnt.lines]
    assert len(losses) == STEPS
    assert losses[9] < 0.5 * losses[0]
    assert losses[-1] < 0.001 * losses[0]


def test_decoding_the_prompt_accepts_almost_every_draft_token(learnt):
    found, _ = generate(
        learnt.target,
        [learnt.prompt],
        sampling=Sampling(),
        max_new_tokens=REPLY,
        stop_ids=[],
        batch_size=1,
        drafter=learnt.drafter,
        plan=Plan(shape="chain", length=5),
    )
    assert list(found[0].ids) == learnt.reply
    drafted = sum(r.drafted for r in found[0].rounds)
    accepted = sum(r.accepted for r in found[0].rounds)
    assert drafted >= 50
    assert accepted >= 0.95 * drafted

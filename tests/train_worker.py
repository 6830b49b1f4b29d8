"""Run as a program, alone or under torchrun: one small training run, or one that is killed."""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import PartialState

from spectrain import checkpoint
from spectrain import train as module
from spectrain.capture import capture
from spectrain.checks import CheckFailed
from spectrain.config import RunConfig, TrainConfig, WandbConfig
from spectrain.drafters.eagle3 import Config
from spectrain.features import FeatureStore
from spectrain.target import Target
from spectrain.testing import GainConfig, GainDrafter, TableObjective, make_sample, random_samples, tiny_llama


def settings(drafter, **train):
    defaults = {"batch_tokens": 160, "micro_tokens": 80, "passes": 2, "dtype": "float32", "save_every": 3}
    return RunConfig(
        recipe="test",
        device="cpu",
        drafter=drafter,
        train=TrainConfig(**(defaults | train)),
        wandb=WandbConfig(enabled=False),
    )


def run(config, samples, drafter, target, folder, *, store=None, evaluate=None):
    """Train and say what came out, one line of JSON per process."""
    result = module.train(config, target, SimpleNamespace(train=samples), store, drafter, folder, evaluate)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in drafter.parameters())).hexdigest()
    print(json.dumps({"step": result.step, "counters": result.counters, "tau": result.tau, "digest": digest}))


def kill_before_marker_of_step_6(folder):
    write = checkpoint.write_json

    def write_or_die(path, value):
        if path.name == "manifest.json" and path.parent.name == "step-000006":
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, value)

    checkpoint.write_json = write_or_die
    target, config = Target(tiny_llama()), settings(Config(unroll=2), features="online")
    drafter = checkpoint.build_drafter(config.drafter, target, torch.arange(0, 260, 3))
    run(config, random_samples(20), drafter, target, folder)


def twenty_steps_on_uneven_shards(folder, optimizer="adamw"):
    target = Target(tiny_llama())
    config = settings(Config(unroll=2), batch_tokens=90, passes=9, max_steps=20, optimizer=optimizer)
    drafter = checkpoint.build_drafter(config.drafter, target, torch.arange(0, 260, 3))
    samples = random_samples(13)
    capture(target, samples, drafter.taps, folder / "features", micro_tokens=80, progress=False)
    run(config, samples, drafter, target, folder, store=FeatureStore.load(folder / "features"))


def seven_samples_one_masked(folder):
    """Samples listed backwards on the second process; the held-out loss is the gain itself."""
    module.Objective = TableObjective
    samples = [make_sample(f"{i}", [9, 9, 2], "..." if i == 4 else ".SS") for i in range(7)]
    samples = samples[::-1] if os.environ.get("RANK") == "1" else samples
    config = settings(GainConfig(), features="online", batch_tokens=6, micro_tokens=3, passes=1)
    evaluate = lambda drafter: {"tau": 1 + float(drafter.gain)}  # noqa: E731
    run(config, samples, GainDrafter(), Target(tiny_llama()), folder, evaluate=evaluate)


def loss_of_two_micro_batches(folder):
    module.Objective = TableObjective
    samples = [make_sample("a", [9, 9, 1, 1, 1], ".SSSS"), make_sample("b", [9, 9, 5], ".SS")]
    config = settings(GainConfig(), features="online", batch_tokens=8, micro_tokens=5, passes=1, clip=100)
    run(config, samples, GainDrafter(), Target(tiny_llama()), folder)


def nan_on_one_process(folder):
    module.Objective = TableObjective
    samples = [make_sample("a", [9, 9, 2], ".SS"), make_sample("bad", [9, 9, 4], ".SS")]
    config = settings(GainConfig(), features="online", batch_tokens=6, micro_tokens=3, passes=1)
    try:
        run(config, samples, GainDrafter(), Target(tiny_llama()), folder)
    except CheckFailed as error:
        print(json.dumps({"error": str(error)}))


if __name__ == "__main__":
    globals()[sys.argv[2]](Path(sys.argv[1]), *sys.argv[3:])
    PartialState().destroy_process_group()  # as the command does: threads that outlive it abort the process

"""Seconds and peak extra memory of one EAGLE-3 training step on CPU, float32.

    python benchmarks/train_step.py                            S and M at density 100% and 40%
    python benchmarks/train_step.py --cfg S --density 0.4      one of them

A step is the teacher's draft-vocabulary rows from its final states, the unroll, the loss (kl, slot k weighs
0.8^k) and backward; no optimizer. The target's log-sum-exp and arg-max are part of the features, as in
training, and not timed. Tensors are synthetic: random states, a head whose arg-max is always kept. At 40% the
last 26 of each 64 tokens are supervised, at 100% all are.

Each configuration runs in a process of its own. CPU seconds are those of all threads; memory is the peak
resident size (VmHWM, reset after one warm-up step) less what was resident before the step: activations,
gradients, scratch.

PROTOTYPE holds what a throwaway prototype of the same step took on another machine (2-core AMD EPYC Zen 4 at
96 GFLOP/s per core, torch 2.13, 2026-11-29), for orientation. At 100% its work is ours; at 40% it trains
slightly more rows, since a row of ours also needs its own root in the span.
"""

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ("linear_divergence", "ttt_attention", "gated_mlp", "rms_norm")
TESTS = [f"tests/kernels/test_{name}.py" for name in KERNELS]


@dataclass(frozen=True)
class Shape:
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    tokens: int
    vocab: int
    kept: int
    unroll: int
    threads: int


SHAPES = {
    "S": Shape(512, 1536, 8, 4, 512, 32000, 8000, 7, threads=1),
    "M": Shape(1024, 3072, 16, 8, 1024, 49152, 16000, 7, threads=2),
}
DENSITIES = (1.0, 0.4)
TURN = 64  # tokens of a question with its answer
PROTOTYPE = {  # CPU seconds, MB
    ("S", 1.0): ("2.02", 256),
    ("S", 0.4): ("0.92", 152),
    ("M", 1.0): ("16.0-16.3", 1018),
    ("M", 0.4): ("7.38", 599),
}


def build(shape: Shape, density: float, device="cpu"):
    """Drafter, objective and features of one step."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from spectrain.config import ObjectiveConfig
    from spectrain.data.packing import pack
    from spectrain.drafters import eagle3
    from spectrain.features import FeatureBatch
    from spectrain.objectives import Objective
    from spectrain.target import Target
    from spectrain.testing import make_sample

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        num_hidden_layers=3,
        max_position_embeddings=4096,
    )
    with torch.device(device):
        target = Target(LlamaForCausalLM(config).float())
    kept = torch.randperm(shape.vocab)[: shape.kept].sort().values
    head = target.head.weight.data.normal_(std=2 * shape.hidden**-0.5)
    dropped = torch.ones(shape.vocab, dtype=torch.bool)
    dropped[kept] = False
    head[dropped] *= 0.1
    drafter = eagle3.build(eagle3.Config(unroll=shape.unroll, taps=[0, 1, 2]), target, kept)
    answer = round(TURN * density)
    marks = ("." * (TURN - answer) + "S" * answer) * (shape.tokens // TURN)
    tokens = pack([make_sample("a", torch.randint(shape.vocab, (shape.tokens,)).tolist(), marks)])
    final = torch.nn.functional.rms_norm(torch.randn(shape.tokens, shape.hidden), (shape.hidden,)).to(head)
    laws = [part @ head.T for part in final.split(128)]
    features = FeatureBatch(
        tokens=tokens,
        tap_ids=drafter.taps,
        taps=torch.randn(shape.tokens, 3, shape.hidden),
        final=final,
        lse=torch.cat([law.logsumexp(-1) for law in laws]),
        argmax=torch.cat([law.argmax(-1) for law in laws]),
    )
    return drafter, Objective(ObjectiveConfig(), drafter, target), features.to(torch.device(device))


def step_of(shape: Shape, density: float, device="cpu", *, half: bool = False):
    """One step, to be run as often as wanted: its rows and loss; half: under bfloat16 autocast, as training
    on a GPU with train.dtype=bfloat16."""
    import torch

    drafter, objective, features = build(shape, density, device)

    def step() -> tuple[int, float]:
        index = drafter.index(features.tokens)
        counts = objective.count(index, features)
        with torch.autocast(features.final.device.type, torch.bfloat16, enabled=half):
            rows = drafter.rows(features)
            result = objective.loss(rows, features, drafter.head_weight(), counts)
        result.loss.backward()
        drafter.zero_grad()
        return len(index.row), result.loss.item()

    return step


def measure(shape: Shape, density: float, runs: int) -> dict:
    """Seconds of each run, peak extra MB over them, rows and loss."""
    step = step_of(shape, density)
    step()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again at VmRSS
    wall, cpu = [], []
    for _ in range(runs):
        began = time.perf_counter(), time.process_time()
        rows, loss = step()
        wall.append(time.perf_counter() - began[0])
        cpu.append(time.process_time() - began[1])
    return {"wall": wall, "cpu": cpu, "peak": resident("VmHWM") - before, "rows": rows, "loss": loss}


def resident(name: str) -> float:
    """VmRSS or VmHWM of this process in MB (2**20 bytes)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024
    raise ValueError(f"/proc/self/status has no {name}: this benchmark needs Linux")


def in_own_process(cfg: str, density: float, runs: int) -> dict:
    threads = str(SHAPES[cfg].threads)
    environment = os.environ | {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])))
    settings = {"--cfg": cfg, "--density": str(density), "--runs": str(runs)}
    command = [sys.executable, __file__, "--worker", *(word for pair in settings.items() for word in pair)]
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def middle(values: list[float]) -> str:
    """Median and 20th to 80th percentile."""
    ordered = sorted(values)
    low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.2, 0.8))
    return f"{statistics.median(ordered):.2f} ({low:.2f}-{high:.2f})"


def conditions() -> str:
    """What a number must be read with: CPU, versions, load, revision, date, command."""
    from importlib.metadata import version

    cpu = next((x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), "")
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    revision = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "no git"
    machine = f"{cpu.partition(': ')[2]}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    made_by = f"torch {version('torch')}, float32, batch 1; {revision}, {date.today()}"
    return f"{machine}; {made_by}; python {' '.join(sys.argv)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cfg", choices=SHAPES, help="default: all")
    parser.add_argument("--density", type=float, choices=DENSITIES, help="default: all")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(measure(SHAPES[args.cfg], args.density, args.runs)))
        return
    tests = [sys.executable, "-m", "pytest", "-q", *TESTS]
    if subprocess.run(tests, cwd=ROOT, stdout=subprocess.DEVNULL).returncode:
        sys.exit(f"the tests of the kernels fail, so no time is taken: {' '.join(tests[1:])}")
    print(conditions())
    print(
        "CPU s, wall s: median (p20-p80). The prototype ran on another machine (EPYC Zen 4): compare memory."
    )
    columns = f"{'':9} {'threads':>7} {'rows':>5} {'CPU s':>18} {'wall s':>18} {'peak MB':>8}"
    print(f"{columns}   prototype's CPU s, MB")
    for cfg in [args.cfg] if args.cfg else SHAPES:
        for density in [args.density] if args.density else DENSITIES:
            found = in_own_process(cfg, density, args.runs)
            seconds, memory = PROTOTYPE[cfg, density]
            print(
                f"{cfg} {density:6.0%} {SHAPES[cfg].threads:8} {found['rows']:6} {middle(found['cpu']):>18} "
                f"{middle(found['wall']):>18} {found['peak']:8.0f}   {seconds}, {memory}",
                flush=True,
            )


if __name__ == "__main__":
    main()

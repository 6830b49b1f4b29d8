"""CPU seconds and peak extra memory of one training step, float32: ours, the floor, other projects' own.

    python benchmarks/train_step.py                                   ours and the floor, EAGLE-3 and Medusa
    python benchmarks/train_step.py --rivals FOLDER                   beside the steps of benchmarks/rivals.py
    python benchmarks/train_step.py --family medusa --cfg S --density 0.4 --rivals FOLDER

benchmarks/rivals.py says how FOLDER is obtained and what is called; benchmarks/train_tensors.py makes the
tensors, which are the same for all, and says what a step of ours is. Each contender is a process of its own,
all of one table are alive at once and take one step each in turn, so that a busy machine slows all alike. CPU
seconds are those of all threads; a ratio is the median over the rounds of the ratio within a round. Memory is
the peak resident size (VmHWM, reset after the warm-up) less what was resident before: activations, gradients,
scratch.

Ours comes in several forms, so that equal work is compared as well:
    ours             the target's log-sum-exp and arg-max are read from the features
    ours_statistics  the target's whole head is run in the step, as in SpecForge and TorchSpec
    ours_frozen      the draft head is not trained, as in speculators and DeepSpec; Medusa: one for all heads
    ours_pairs       below 100%: longer spans, so that as many (row, slot) pairs are trained as by the others.
                     A row of ours counts only if its root lies in the span of its label, since no other is
                     met in decoding
"x ours" is a contender's time over that of `ours`, "x same" over that of the form that does the same work.
`floor` is the lean floor: the step's products alone (train_tensors.py: Floor), one after the other.
`dense` is our Medusa in plain torch; its loss must be ours to 1e-5. At 100% all train the same pairs, and
each rival's loss must be what our divergences per slot say it is under its definition (SAME_LOSS).
"""

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ("linear_divergence", "ttt_attention", "gated_mlp", "rms_norm")
TESTS = [f"tests/kernels/test_{name}.py" for name in KERNELS]
CONFIGURATIONS = ("S", "M")
DENSITIES = (1.0, 0.4)
OWN = {
    "eagle3": ("ours", "floor", "ours_statistics", "ours_frozen", "ours_pairs"),
    "medusa": ("ours", "floor", "ours_frozen", "dense"),
}
RIVALS = {"eagle3": ("SpecForge", "TorchSpec", "speculators", "DeepSpec"), "medusa": ("Medusa",)}
SAME_WORK = {
    "SpecForge": "ours_statistics",
    "TorchSpec": "ours_statistics",
    "speculators": "ours_frozen",
    "DeepSpec": "ours_frozen",
}
# from a slot's mean kl, mean teacher entropy and share of supervised rows
SAME_LOSS = {
    "SpecForge": lambda kl, entropy, share: (kl + entropy) * share,
    "TorchSpec": lambda kl, entropy, share: kl + entropy,
    "speculators": lambda kl, entropy, share: kl,
    "DeepSpec": lambda kl, entropy, share: (kl + entropy) * share,
}


def contender(name: str, family: str, cfg: str, density: float, folder: Path):
    """(step, what is known of it once it has run) by name."""
    import train_tensors as t

    shape = t.SHAPES[cfg]
    make, floor = {"eagle3": (t.eagle3_step, t.eagle3_floor), "medusa": (t.medusa_step, t.medusa_floor)}[
        family
    ]
    if name in RIVALS[family]:
        import rivals

        rivals.find(name, folder)
        given = t.given(make(shape, density), shape.unroll if family == "eagle3" else t.HEADS)
        step = t.training(*rivals.STEPS[name](given))
        return step, lambda: {"pairs": given.pairs()}
    if name == "ours_pairs":
        density += (shape.unroll + 1) / 2 / t.TURN
    ours = make(shape, density, form=name)
    pairs = len(ours.drafter.index(ours.features.tokens).row)
    if name == "floor":
        found = floor(shape, ours)
        return t.Contender(None, found.run), lambda: {"pairs": pairs, "gflop": found.flop / 1e9}
    if name == "dense":
        return t.training(ours.drafter, lambda: t.medusa_dense(ours)), lambda: {"pairs": pairs}
    return t.training(ours.drafter, ours.loss), lambda: {"pairs": pairs, **t.slot_means(ours)}


def serve(args) -> None:
    """Warm up, say READY, take a step for every line read, then print what was found."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    step, facts = contender(args.worker, args.family, args.cfg, args.density, args.rivals)
    for _ in range(2):  # the second runs what the first compiled
        loss = step.run()
        drop_gradients(step.module)
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again at VmRSS
    print("READY", flush=True)
    wall, cpu = [], []
    for _ in sys.stdin:
        began = time.perf_counter(), time.process_time()
        loss = step.run()
        wall.append(time.perf_counter() - began[0])
        cpu.append(time.process_time() - began[1])
        drop_gradients(step.module)
        print("STEP", flush=True)
    peak = resident("VmHWM") - before
    print(json.dumps({"wall": wall, "cpu": cpu, "peak": peak, "loss": loss, **facts()}))


def drop_gradients(module) -> None:
    if module is not None:
        module.zero_grad()


def resident(name: str) -> float:
    """VmRSS or VmHWM of this process in MB (2**20 bytes)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024
    raise ValueError(f"/proc/self/status has no {name}: this benchmark needs Linux")


def start(name: str, threads: int, args) -> subprocess.Popen:
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
    }
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])))
    settings = {"--worker": name, "--family": args.family, "--cfg": args.cfg, "--density": str(args.density)}
    settings |= {"--rivals": str(args.rivals)} if args.rivals else {}
    command = [sys.executable, __file__, *(word for pair in settings.items() for word in pair)]
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )


def wait_for(word: str, name: str, process: subprocess.Popen) -> None:
    for line in process.stdout:
        if line.strip() == word:
            return
    sys.exit(f"{name} ended before it said {word} (its own words are above): exit code {process.wait()}")


def interleaved(names: list[str], threads: int, args) -> dict[str, dict]:
    """Results by name, after `runs` rounds of one step each."""
    processes = {}
    for name in names:  # one after the other: what they compile would disturb the rest
        processes[name] = start(name, threads, args)
        wait_for("READY", name, processes[name])
    for i in range(args.runs):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            processes[name].stdin.write("\n")
            wait_for("STEP", name, processes[name])
    return {name: json.loads(process.communicate()[0]) for name, process in processes.items()}


def middle(values: list[float]) -> str:
    """Median and 20th to 80th percentile."""
    ordered = sorted(values)
    low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.2, 0.8))
    return f"{statistics.median(ordered):.2f} ({low:.2f}-{high:.2f})"


def ratio(this: dict, that: dict) -> float:
    return statistics.median(a / b for a, b in zip(this["cpu"], that["cpu"], strict=True))


def loss_apart(name: str, found: dict[str, dict], density: float) -> str:
    """Relative distance of a contender's loss from what ours says it must be; "" where pairs or definitions
    differ."""
    ours, loss = found["ours"], found[name]["loss"]
    if name in SAME_LOSS and density == 1:
        slots = zip(ours["kl"], ours["entropy"], ours["share"], strict=True)
        expected = sum(0.8**k * SAME_LOSS[name](*means) for k, means in enumerate(slots))
    elif name == "dense" or (name == "Medusa" and density == 1):
        expected = ours["loss"]
    else:
        return ""
    return f"{abs(loss / expected - 1):.0e}"


def table(args) -> None:
    from train_tensors import SHAPES

    names = [name for name in OWN[args.family] if args.rivals or name in ("ours", "floor", "dense")]
    names = [name for name in names if name != "ours_pairs" or args.density < 1]
    names += RIVALS[args.family] if args.rivals else ()
    threads = SHAPES[args.cfg].threads
    found = interleaved(names, threads, args)
    ours = found["ours"]
    print(f"\n{args.family} {args.cfg}, {args.density:.0%}, {threads} threads, {args.runs} rounds")
    print(
        f"{'':16} {'pairs':>6} {'CPU s':>18} {'wall s':>18} {'x ours':>7} {'x same':>7} {'peak MB':>8} "
        f"{'ours/peak':>9} {'loss apart':>10}"
    )
    for name, row in found.items():
        same = f"{ratio(row, found[SAME_WORK[name]]):.2f}" if name in SAME_WORK else ""
        memory = ("", "") if name == "floor" else (f"{row['peak']:.0f}", f"{ours['peak'] / row['peak']:.2f}")
        print(
            f"{name:16} {row['pairs']:6} {middle(row['cpu']):>18} {middle(row['wall']):>18} "
            f"{ratio(row, ours):7.2f} {same:>7} {memory[0]:>8} {memory[1]:>9} "
            f"{loss_apart(name, found, args.density):>10}"
        )
    floor = found["floor"]
    speed = floor["gflop"] / statistics.median(floor["cpu"])
    print(
        f"ours takes {ratio(ours, floor):.2f} times the lean floor ({floor['gflop']:.0f} GFLOP at "
        f"{speed:.0f} GFLOP per CPU-second)",
        flush=True,
    )


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
    parser.add_argument("--family", choices=OWN, help="default: all")
    parser.add_argument("--cfg", choices=CONFIGURATIONS, help="default: all")
    parser.add_argument("--density", type=float, choices=DENSITIES, help="default: all")
    parser.add_argument("--rivals", type=Path, help="folder of source trees, see benchmarks/rivals.py")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve(args)
        return
    tests = [sys.executable, "-m", "pytest", "-q", *TESTS]
    if subprocess.run(tests, cwd=ROOT, stdout=subprocess.DEVNULL).returncode:
        sys.exit(f"the tests of the kernels fail, so no time is taken: {' '.join(tests[1:])}")
    print(conditions())
    print("CPU s, wall s: median (p20-p80)")
    for family in [args.family] if args.family else OWN:
        for cfg in [args.cfg] if args.cfg else CONFIGURATIONS:
            for density in [args.density] if args.density else DENSITIES:
                table(argparse.Namespace(**vars(args) | {"family": family, "cfg": cfg, "density": density}))


if __name__ == "__main__":
    main()

"""Whether the budget rule (`adaptive`) earns what the best fixed chain earns, on a real target and drafter.

    python benchmarks/budget.py --run runs/quickstart [--prompts-count 20 --tokens 64 --dtype float32]

Chains of 1 to 5 draft tokens and an adaptive chain of at most 5 decode the same prompts in turns with plain
decoding, batch 1; the adaptive one's costs are measured before on other prompts. Prints one JSON line per arm
(tau, eta with its 95% interval over prompts) and one with the difference to the fixed chain that turned out
best, its interval drawn over the same prompts for both. The best of five is chosen on the very prompts it is
measured on, which favours it. Exit code 1 where the whole interval lies below zero.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from spectrain.checkpoint import load_drafter
from spectrain.config import TargetConfig
from spectrain.decode_settings import DecodeRunConfig
from spectrain.eval.costs import measure_costs
from spectrain.eval.prompts import load_prompts, render
from spectrain.eval.records import Text, counters
from spectrain.eval.run import decode_in_turns
from spectrain.eval.speed import Arms, EngineArm
from spectrain.metrics import ratios
from spectrain.target import load_target

COST_PROMPTS = 4


def decoded(args: argparse.Namespace) -> list[tuple[DecodeRunConfig, list[Text]]]:
    """Texts of every chain and of the adaptive one, last; its costs are measured before on other prompts."""
    target = load_target(TargetConfig(path=args.target, dtype=args.dtype))
    drafter = load_drafter(Path(args.run), target).to(target.dtype)
    prompts = load_prompts(args.prompts, limit=args.prompts_count + COST_PROMPTS)

    def encode(turns, answers):
        return render(target.tokenizer, [{"role": "user", "content": turns[0]}], {})

    limits = (args.tokens, 1, 0)
    chains = [
        DecodeRunConfig(name=f"chain{n}", dtype=args.dtype, length=n, temperature=args.temperature)
        for n in range(1, 6)
    ]
    adaptive = replace(chains[-1], name="adaptive", adaptive=True)
    plain = EngineArm(target, None, chains[0], *limits)
    asked = [encode(p.turns, []) for p in prompts[:COST_PROMPTS]]
    costs = measure_costs(plain, EngineArm(target, drafter, adaptive, *limits), asked, range(COST_PROMPTS))
    runs = [*chains, replace(adaptive, costs=costs)]
    found = decode_in_turns(
        Arms(plain, [EngineArm(target, drafter, run, *limits) for run in runs]),
        [replace(p, turns=p.turns[:1]) for p in prompts[COST_PROMPTS:]],
        batch=1,
        encode=encode,
        decode=lambda ids: "",
        title=f"{args.dtype}, T={args.temperature:g}",
    )
    return list(zip(runs, found, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--run", default="runs/quickstart", help="run folder with checkpoints")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--prompts", default="quickstart", help="JSONL file, or quickstart")
    parser.add_argument("--prompts-count", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    arms = decoded(args)
    count = len(arms[0][1])
    draws = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=2000).astype(float)
    etas = {}
    for run, texts in arms:
        sums = counters(texts, slots=run.length)
        point = ratios(sums.pooled(), length=run.length)
        spread = ratios(sums.total(draws), length=run.length)["eta"]
        etas[run.name] = float(point["eta"][0]), spread
        low, high = np.percentile(spread, [2.5, 97.5])
        line = {"tau": point["tau"][0], "eta": point["eta"][0], "low": low, "high": high}
        print(json.dumps({"arm": run.name} | {k: round(float(v), 3) for k, v in line.items()}), flush=True)
    *chains, (adaptive, _) = arms
    best = max((run.name for run, _ in chains), key=lambda name: etas[name][0])
    value, spread = (etas["adaptive"][i] - etas[best][i] for i in (0, 1))
    low, high = np.percentile(spread, [2.5, 97.5])
    summary = {
        "dtype": args.dtype,
        "temperature": args.temperature,
        "costs": [round(c, 3) for c in adaptive.costs],
    }
    summary |= {
        "best": best,
        "adaptive_minus_best": round(value, 3),
        "low": round(low, 3),
        "high": round(high, 3),
    }
    print(json.dumps(summary))
    return 0 if high >= 0 else 1


if __name__ == "__main__":
    sys.exit(main())

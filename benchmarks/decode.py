"""How fast the engine decodes: plainly against transformers' generate, and speculatively against plainly.

    python benchmarks/decode.py --run runs/quickstart [--prompts-count 16 --tokens 64]

For float32 and bfloat16, batch 1 and 8: tokens per second of plain decoding by ours and by `generate` with a
dynamic and with a static cache, the arms in turns on the same prompts, prefill included on all sides, greedy,
the length fixed by ignoring stop tokens; the best of the turns of each batch counts, since the machine's
other work only slows. Then eta of a chain of 5, paired with plain decoding prompt by prompt, and what the
measured tau, c and r promise, tau / (r + gamma c), without the rest of a round that `eta_model` counts; a
batch of 8 is kept full from one queue of 72 prompts. Prints one JSON line per setting; exit code 1 where ours
is below --least of the faster `generate`, or eta below 0.9 of the promise.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from spectrain.checkpoint import load_drafter
from spectrain.config import TargetConfig
from spectrain.decode.engine import generate
from spectrain.decode.sampling import Sampling
from spectrain.decode_settings import DecodeRunConfig
from spectrain.eval.prompts import load_prompts, render
from spectrain.eval.records import counters
from spectrain.eval.run import decode_in_turns
from spectrain.eval.speed import Arms, EngineArm
from spectrain.metrics import estimate
from spectrain.target import Target, load_target

QUEUED = 9  # prompts per place: the requests that end last decode in a batch which is no longer full


def ours(target: Target, prompts: list[list[int]], tokens: int) -> None:
    generate(
        target, prompts, sampling=Sampling(), max_new_tokens=tokens, stop_ids=(), batch_size=len(prompts)
    )


def theirs(target: Target, prompts: list[list[int]], tokens: int, cache: str) -> None:
    """transformers' own attention and loop on the same weights, prompts padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    model = target.model
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        with torch.no_grad():
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
                cache_implementation=cache,
                disable_compile=True,
            )
    finally:
        model.set_attn_implementation(before)


def plain(target: Target, prompts: list[list[int]], batch: int, tokens: int, turns: int) -> dict[str, float]:
    """Tokens per second of each arm."""
    arms = {
        "ours": lambda part: ours(target, part, tokens),
        "dynamic": lambda part: theirs(target, part, tokens, "dynamic"),
        "static": lambda part: theirs(target, part, tokens, "static"),
    }
    parts = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
    seconds = dict.fromkeys(arms, 0.0)
    for part in parts:
        taken: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(turns):
            for name, decode in arms.items():
                began = time.perf_counter()
                decode(part)
                taken[name].append(time.perf_counter() - began)
        for name in arms:
            seconds[name] += min(taken[name])
    return {name: len(prompts) * tokens / seconds[name] for name in arms}


def speculative(target: Target, drafter, prompts, batch: int, tokens: int) -> dict[str, float]:
    """tau, c, r, gamma and eta of a chain of 5, greedy, and what the first four promise."""
    run = DecodeRunConfig(name="chain5", dtype=str(target.dtype).removeprefix("torch."), batch=batch)
    limits = (tokens, batch, 0)
    [texts] = decode_in_turns(
        Arms(EngineArm(target, None, run, *limits), [EngineArm(target, drafter, run, *limits)]),
        prompts,
        batch=batch,
        encode=lambda turns, answers: render(target.tokenizer, [{"role": "user", "content": turns[0]}], {}),
        decode=lambda ids: "",
        title=f"{run.dtype}, batch {batch}",
        queued=QUEUED,
    )
    found = estimate(
        counters(texts, slots=run.length),
        prompts=[t.id for t in texts],
        units=[t.unit for t in texts],
        length=run.length,
        resamples=1000,
        seed=0,
    )
    numbers = {name: found[name].value for name in ("tau", "c", "r", "gamma", "eta")}
    numbers["promised"] = numbers["tau"] / (numbers["r"] + numbers["gamma"] * numbers["c"])
    return numbers | {"eta_low": found["eta"].low, "eta_high": found["eta"].high}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--run", default="runs/quickstart", help="run folder with checkpoints")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--prompts", default="quickstart", help="JSONL file, or quickstart")
    parser.add_argument("--prompts-count", type=int, default=16, help="at batch 1")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--least", type=float, default=1.0)
    args = parser.parse_args()
    passed = True
    for dtype in ("float32", "bfloat16"):
        target = load_target(TargetConfig(path=args.target, dtype=dtype))
        drafter = load_drafter(Path(args.run), target).to(target.dtype)
        for batch in (1, 8):
            count = args.prompts_count if batch == 1 else QUEUED * batch
            prompts = load_prompts(args.prompts, limit=count)
            single = [replace(p, turns=p.turns[:1]) for p in prompts]
            ids = [render(target.tokenizer, [{"role": "user", "content": p.turns[0]}], {}) for p in single]
            speeds = plain(target, ids, batch, args.tokens, args.turns)
            share = speeds["ours"] / max(speeds["dynamic"], speeds["static"])
            numbers = speculative(target, drafter, single, batch, args.tokens)
            kept = numbers["eta"] / numbers["promised"]
            line = {"dtype": dtype, "batch": batch, "threads": torch.get_num_threads()}
            line |= {f"{name}_tok_s": round(speed, 2) for name, speed in speeds.items()}
            line |= {"ours_over_faster": round(share, 3)} | {
                k: None if v is None else round(v, 3) for k, v in numbers.items()
            }
            print(json.dumps(line | {"eta_over_promised": round(kept, 3)}), flush=True)
            passed &= share >= args.least and kept >= 0.9
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())

"""The certificate at length on a real model: greedy by batch size, sampled by law.

    python benchmarks/certify.py --run runs/quickstart --prompts PROMPTS.jsonl

Greedy, float32: chain of 5 and tree of 24 against plain decoding, in batches of 1 and of 8, token by token;
plain text against the arg-max of one fresh forward over it. Sampled, T=1 and top-p 0.9: the tests of
eval/pit.py on at least --sampled tokens for each law. A prompt is a JSONL line with `turns`; the first is
asked. One JSON line per result; exit code 3 where something fails.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from spectrain.checkpoint import load_drafter
from spectrain.config import EvalConfig, TargetConfig
from spectrain.decode_settings import DecodeRunConfig
from spectrain.eval.certificate import sampling_certificate
from spectrain.eval.greedy import Question, greedy_certificate
from spectrain.eval.prompts import load_prompts, render
from spectrain.target import load_target

CHAIN = DecodeRunConfig(name="chain5", dtype="float32")
TREE = DecodeRunConfig(name="tree24", dtype="float32", proposal="tree", law="target_only")
SAMPLED = [
    DecodeRunConfig(name=f"chain5_{law}", dtype="float32", law=law, temperature=1.0, top_p=0.9)
    for law in ("rejection", "block", "target_only")
]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--run", default="runs/quickstart", help="run folder with checkpoints")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--prompts", default="quickstart", help="JSONL file, or quickstart")
    parser.add_argument("--prompts-count", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--sampled", type=int, default=5000)
    args = parser.parse_args()
    target = load_target(TargetConfig(path=args.target, dtype="float32"))
    drafter = load_drafter(Path(args.run), target)
    questions = [
        Question(p.id, tuple(render(target.tokenizer, [{"role": "user", "content": p.turns[0]}], {})), i)
        for i, p in enumerate(load_prompts(args.prompts, limit=args.prompts_count))
    ]
    config = EvalConfig(
        max_new_tokens=args.tokens,
        runs=[CHAIN],
        greedy_prompts=len(questions),
        greedy_tokens=args.tokens,
        sampling_tokens=args.sampled,
    )
    passed = True
    for batch in (1, 8):
        began = time.perf_counter()
        found = greedy_certificate(target, {"": drafter}, questions, config, [CHAIN, TREE], batch=batch)
        keys = ("dtype", "prompts", "tokens", "differences", "ties", "pass")
        show({"greedy": "chain of 5, tree of 24", "batch": batch, **{k: found[k] for k in keys}}, began)
        passed &= found["pass"]
    for run in SAMPLED:
        began = time.perf_counter()
        found = sampling_certificate(target, {"": drafter}, questions, config, [run])
        show({"sampled": run.law, **{k: found[k] for k in ("tokens", "statistic", "p_value", "pass")}}, began)
        passed &= found["pass"]
    return 0 if passed else 3


def show(result: dict, began: float) -> None:
    print(json.dumps({**result, "seconds": round(time.perf_counter() - began, 1)}), flush=True)


if __name__ == "__main__":
    sys.exit(main())

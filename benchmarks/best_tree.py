"""The best static tree for a trained drafter: its accuracies by rank and depth, and the paths for a recipe.

    python benchmarks/best_tree.py --run runs/medusa_smollm2 --nodes 24 [--prompts quickstart --depth 4]

Decodes the prompts greedily with chains and counts at each depth that a round reaches how often the target's
token had rank 0, 1, .. with the drafter (`spectrain/eval/ranks.py`), then takes the tree with the most
accepted tokens (`spectrain.trees.best_paths`). Prints the accuracies, the accepted tokens that they promise
for the tree and for the chain, and `paths` as a run of eval.runs takes them. The accuracies of later depths
are those behind accepted rank-0 tokens; the tree takes them for all. Measure the tree on other prompts.
"""

import argparse
import json
from pathlib import Path

from spectrain.checkpoint import load_drafter
from spectrain.config import TargetConfig
from spectrain.decode.engine import generate
from spectrain.decode.sampling import Sampling
from spectrain.eval.prompts import load_prompts, render
from spectrain.eval.ranks import count_ranks, rounds_of
from spectrain.proposal import Plan
from spectrain.target import load_target
from spectrain.trees import best_paths, expected_accepted


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--run", required=True, help="run folder with checkpoints")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--prompts", default="quickstart", help="JSONL file, or quickstart")
    parser.add_argument("--prompts-count", type=int, default=0, help="0: all")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4, help="levels of the tree")
    parser.add_argument("--ranks", type=int, default=10, help="children of a node at most")
    parser.add_argument("--nodes", type=int, default=24)
    args = parser.parse_args()
    target = load_target(TargetConfig(path=args.target, dtype=args.dtype))
    drafter = load_drafter(Path(args.run), target).to(target.dtype)
    prompts = load_prompts(args.prompts, limit=args.prompts_count)
    texts, _ = generate(
        target,
        [render(target.tokenizer, [{"role": "user", "content": p.turns[0]}], {}) for p in prompts],
        sampling=Sampling(),
        max_new_tokens=args.tokens,
        stop_ids=target.stop_ids(),
        batch_size=16,
        drafter=drafter,
        plan=Plan(shape="chain", length=args.depth),
        record_orders=True,
    )
    found = count_ranks(
        (places for text in texts for places in rounds_of(text)), depth=args.depth, ranks=args.ranks
    )
    accuracies = found.accuracies()
    paths = best_paths(accuracies, args.nodes)
    chain = tuple((0,) * (d + 1) for d in range(len(accuracies)))
    for depth, (row, seen) in enumerate(zip(accuracies, found.seen, strict=False), 1):
        print(f"depth {depth}, {seen} places:", " ".join(f"{a:.3f}" for a in row))
    for name, tree in (("chain", chain), (f"tree of {len(paths)}", paths)):
        print(f"{name}: {expected_accepted(tree, accuracies):.3f} accepted tokens a round by these")
    print("paths:", json.dumps([list(path) for path in paths]))


if __name__ == "__main__":
    main()

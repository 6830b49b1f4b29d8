"""Does vLLM accept as many draft tokens of each family as we do? The figures of docs/export.md but EAGLE-3's.

    python benchmarks/serve_families.py --python vllm-env/bin/python [--folder runs/serve_families]

For EAGLE-1, Medusa with the target's own head, a standalone drafter (all of SmolLM2) and MTP (of a random
GLM-4-MoE, which is made here): a short training on the quickstart's conversations, the export, and
`stages=serve_check`, chains of 3, greedy, bfloat16. Prints its table for each family: mean acceptance length,
share of verifications that accepted each position, and texts, there and here. What a run says is in
FOLDER/FAMILY.log; finished trainings are reused. Exit code 1 where the mean lengths of a family differ by
more than --most of vLLM's, where a text leaves plain vLLM's other than at a tie, or where a run fails.
EAGLE-3's row: `make quickstart serve-test`.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from spectrain.artifacts import read_json
from spectrain.serve_check import table
from spectrain.testing import byte_tokenizer

TARGET = "glm4_moe"
WORDS = [
    "stages=[prepare,train,export,serve_check]",
    "export.engine=[vllm]",
    "processes=1",
    "train.features=online",
    "train.max_steps=40",
    "train.eval_every=0",
    "train.batch_tokens=1024",
    "train.micro_tokens=1024",
    "wandb.enabled=false",
]
FAMILIES = {
    "eagle1": ["recipe=eagle1_smollm2", "drafter.draft_vocab=0"],
    "medusa": ["recipe=medusa_smollm2", "drafter.draft_vocab=0", "drafter.head=frozen"],
    "standalone": ["recipe=standalone_smollm2"],
    "mtp": [
        "recipe=mtp_smollm2",
        "drafter.draft_vocab=0",
        "drafter.feedback=pre",
        "train.max_steps=60",
        "corpus.path=quickstart",
        "corpus.max_length=256",
    ],
}


def make_target(folder: Path) -> None:
    """A GLM-4-MoE of 128 dimensions and three layers with random weights, and a tokenizer of bytes."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    config = Glm4MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        attention_bias=True,
        use_qk_norm=True,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        max_position_embeddings=2048,
        initializer_range=0.08,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Glm4MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def words(family: str, args: argparse.Namespace) -> list[str]:
    """The words of the command line of one family's run; the last of a key wins."""
    found = [*WORDS, *FAMILIES[family], f"run_dir={args.folder / family}", f"serve.python={args.python}"]
    found += [f"serve.prompts={args.prompts}", f"serve.tokens={args.tokens}", f"serve.bound={args.most}"]
    return [*found, f"target.path={args.folder / TARGET}"] if family == "mtp" else found


def agrees(family: str, args: argparse.Namespace) -> bool:
    """Run one family and print its table; whether its run found both engines to agree."""
    result, log = args.folder / family / "serve_check.json", args.folder / f"{family}.log"
    result.unlink(missing_ok=True)
    with open(log, "wb") as said:
        command = [sys.executable, "-m", "spectrain", *words(family, args)]
        code = subprocess.run(command, stdout=said, stderr=subprocess.STDOUT).returncode
    print(f"-- {family}: {log}", table(read_json(result)) if result.exists() else "no result", sep="\n")
    if code:
        print(log.read_text(errors="replace").rstrip().rpartition("\n")[2])
    sys.stdout.flush()
    return code == 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True, help="of an environment with vLLM")
    parser.add_argument("--folder", type=Path, default=Path("runs/serve_families"))
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--most", type=float, default=0.03, help="of vLLM's mean acceptance length")
    args = parser.parse_args()
    make_target(args.folder / TARGET)
    return int(not all([agrees(family, args) for family in FAMILIES]))


if __name__ == "__main__":
    sys.exit(main())

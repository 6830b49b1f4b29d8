"""How fast the prepare stage renders and tokenises, with SmolLM2's tokenizer and template.

    python benchmarks/prepare.py [--processes 2 --corpus quickstart,smollm2_long]

Prepares the corpora from nothing, hashing and writing of shards included, and prints one JSON line: tokens
and supervised tokens per minute of wall clock, and tokens per minute of the CPU time that all processes took
(which other work on the machine hardly slows). Exit code 1 where the first is below --least.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

from transformers import AutoTokenizer

from spectrain.config import CorpusConfig
from spectrain.data.prepare import prepare
from spectrain.smollm2 import converted_folder


def cpu_seconds() -> float:
    """CPU time of this process and of those that it started and that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--corpus", default="quickstart,smollm2_long", help="corpus.path, comma between several"
    )
    parser.add_argument("--least", type=float, default=1e6)
    args = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizer = AutoTokenizer.from_pretrained(converted_folder())
    config = CorpusConfig(path=args.corpus.split(","), processes=args.processes)
    import datasets  # noqa: F401  imported before the clock starts, as a run has it by then

    with tempfile.TemporaryDirectory() as folder:
        cpu, start = cpu_seconds(), time.perf_counter()
        summary = prepare(config, tokenizer, Path(folder)).summary
        seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    total, supervised = (sum(summary[key].values()) for key in ("tokens", "supervised"))
    line = {
        "processes": args.processes,
        "seconds": round(seconds, 2),
        "cpu_s": round(cpu, 2),
        "tokens": total,
    }
    line |= {
        "throughput_tok_min": round(60 * total / seconds),
        "supervised_tok_min": round(60 * supervised / seconds),
        "per_cpu_tok_min": round(60 * total / cpu),
    }
    print(json.dumps(line))
    return 0 if 60 * total / seconds >= args.least else 1


if __name__ == "__main__":
    sys.exit(main())

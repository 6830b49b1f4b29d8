"""How fast the target's states are captured, beside a bare forward of the target over the same packed rows.

    python benchmarks/capture.py [--rows 8 --turns 3 --row-tokens 2048]

Three arms take turns on each row of the quickstart corpus, in one process and with the same threads:
    bare     model.model with transformers' own attention (sdpa), documents told by positions; nothing kept
    decoder  the same layers through spectrain's packed attention, nothing kept
    capture  what stages=capture does: taps, log-sum-exp and arg-max over the full vocabulary where the next
             token is supervised, the check for non-finite states, the shard written and flushed
Prints tokens per second (median, p20 to p80, over rows and turns), peak memory above what was resident before
the call, and capture / bare, the median of the ratios of each pair. Exit code 1 where that is below --least.
The log-sum-exp is work that no bare forward does: a head's product per supervised token.
"""

import argparse
import ctypes
import json
import os
import statistics
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import torch

from spectrain.capture import capture_batch, reject_bad
from spectrain.config import CorpusConfig, TargetConfig
from spectrain.data.chat import Chat
from spectrain.data.packing import Sample, pack, plan_rows
from spectrain.data.rendering import conversations
from spectrain.data.sources import open_sources
from spectrain.drafters.eagle3 import default_taps
from spectrain.features import shard_path, write_shard
from spectrain.target import ATTENTION, Target, load_target, packed_layout


def packed_rows(target: Target, row_tokens: int, count: int) -> list[list[Sample]]:
    """The first `count` rows of the quickstart corpus."""
    settings = CorpusConfig()
    chat = Chat(
        target.tokenizer,
        max_length=min(settings.max_length, row_tokens),
        min_supervised=settings.min_supervised,
        template_arguments=settings.template_arguments,
        stop_ids=target.stop_ids(),
    )
    enough = count * row_tokens // 40  # no conversation is shorter
    found = islice(conversations(open_sources(settings.path)), enough)
    samples = [sample for conversation in found for sample in chat.samples(conversation)[0]]
    plan = plan_rows([len(sample.ids) for sample in samples], range(len(samples)), row_tokens)
    return [[samples[i] for i in row] for row in plan[:count]]


def bare(target: Target, row: list[Sample]) -> torch.Tensor:
    tokens = pack(row)
    target.model.set_attn_implementation("sdpa")
    try:
        with torch.no_grad():
            return target.decoder(
                input_ids=tokens.ids[None], position_ids=tokens.positions[None], use_cache=False
            ).last_hidden_state[0]
    finally:
        target.model.set_attn_implementation(ATTENTION)


def decoder(target: Target, row: list[Sample]) -> torch.Tensor:
    tokens = pack(row)
    return target.states(tokens.ids, tokens.positions, packed_layout(tokens.offsets)).final


def resident(name: str) -> float:
    """VmRSS or VmHWM of this process in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def middle(values: list[float]) -> str:
    ordered = sorted(values)
    low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.2, 0.8))
    return f"{statistics.median(ordered):.0f} ({low:.0f}-{high:.0f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--row-tokens", type=int, default=2048)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--taps-bits", type=int, default=0)
    parser.add_argument("--least", type=float, default=0.9)
    args = parser.parse_args()
    target = load_target(TargetConfig(path=args.target, dtype=args.dtype))
    rows = packed_rows(target, args.row_tokens, args.rows)
    taps = default_taps(target.num_layers)
    with tempfile.TemporaryDirectory() as folder:

        def captured(target: Target, row: list[Sample]) -> torch.Tensor:
            kept, batch, bad = reject_bad(row, capture_batch(target, row, taps))
            assert batch is not None and not bad
            write_shard(shard_path(Path(folder), 0), kept, batch, bad, taps_bits=args.taps_bits)
            return batch.final

        arms = {"bare": bare, "decoder": decoder, "capture": captured}
        finals = [arm(target, rows[0]).float() for arm in arms.values()]  # also the warm-up
        apart = max(((f - finals[0]).norm() / finals[0].norm()).item() for f in finals[1:])
        speeds: dict[str, list[float]] = {name: [] for name in arms}
        peaks = dict.fromkeys(arms, 0.0)
        trim = ctypes.CDLL("libc.so.6").malloc_trim
        for turn in range(args.turns):
            for number, row in enumerate(rows):
                names = list(arms)[(turn + number) % 3 :] + list(arms)[: (turn + number) % 3]
                for name in names:
                    trim(0)
                    before = resident("VmRSS")
                    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again at VmRSS
                    began = time.perf_counter()
                    arms[name](target, row)
                    seconds = time.perf_counter() - began
                    speeds[name].append(sum(len(sample.ids) for sample in row) / seconds)
                    peaks[name] = max(peaks[name], resident("VmHWM") - before)
    tokens = sum(len(sample.ids) for row in rows for sample in row)
    supervised = sum(int(sample.loss_mask.sum()) for row in rows for sample in row)
    print(f"{len(rows)} rows, {tokens} tokens, {supervised / tokens:.0%} supervised; taps {list(taps)}")
    print(f"final states of the arms are {apart:.2g} apart (norm)")
    for name, found in speeds.items():
        print(f"{name:8} {middle(found):>20} tok/s   peak {peaks[name]:6.0f} MiB")
    ratios = {
        f"capture_over_{name}": round(
            statistics.median(a / b for a, b in zip(speeds["capture"], speeds[name], strict=True)), 3
        )
        for name in ("bare", "decoder")
    }
    ratio = ratios["capture_over_bare"]
    machine = {"dtype": args.dtype, "threads": torch.get_num_threads(), "load": round(os.getloadavg()[0], 1)}
    print(json.dumps(ratios | machine | {"torch": torch.__version__, "passed": ratio >= args.least}))
    return 0 if ratio >= args.least else 1


if __name__ == "__main__":
    sys.exit(main())

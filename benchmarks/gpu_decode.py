"""The decode loop with and without CUDA graphs, for benchmarks/gpu.py: a random target of 8 billion weights
with a random EAGLE-3, greedy, prompts of random ids.

A random drafter is hardly ever right, so tau is about 1 and eta below it. What counts is the price of a round
in plain steps against the least one that bandwidth and arithmetic allow (eval/limit.py): eta / eta_limit at
the same tau is the ratio of the two, whatever tau is. Plain decoding runs through the same engine, with
graphs where the other does.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from unittest import mock

import torch

from spectrain import graphs
from spectrain.decode.engine import generate
from spectrain.decode.sampling import Sampling
from spectrain.drafters import eagle3
from spectrain.eval.limit import GPUS, DraftShape, Load, eta_limit, target_shape
from spectrain.eval.speed import total
from spectrain.proposal import Plan
from spectrain.target import Target

GPU = "h200_measured"
PLANS = {"chain of 5": Plan("chain", 5), "tree of 59": Plan("tree", 6, nodes=59, top_k=10)}
SMALL_PLANS = {"chain of 2": Plan("chain", 2)}


def models(small: bool):
    """Target and drafter, made on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192}
    if small:
        shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 96}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
    config = LlamaConfig(**shape, **heads, dtype=torch.float32 if small else torch.bfloat16)
    before = torch.get_default_dtype()
    torch.set_default_dtype(config.dtype)
    try:
        with torch.device("cpu" if small else "cuda"):
            target = Target(LlamaForCausalLM(config))
    finally:
        torch.set_default_dtype(before)
    taps = [0, 1] if small else []
    kept = torch.arange(0, target.vocab_size, 4)
    drafter = eagle3.build(eagle3.Config(taps=taps), target, kept).to(target.dtype)
    return target, drafter


def called(function):
    """Stands for a capture where there is no device to capture on."""
    out = function()

    def replay():
        for held, new in zip(out, function(), strict=True):
            held.copy_(new)

    return replay, out


def lines(bench) -> Iterator[dict]:
    """A line per batch, plan and loop."""
    target, drafter = models(bench.small)
    length, tokens, batches = bench.pick((1024, 64, (1, 8)), (5, 5, (2,)))
    shape, drafted = target_shape(target), DraftShape(*drafter.weights_read())
    capturing: AbstractContextManager = nullcontext()
    if bench.small:
        capturing = mock.patch.multiple(graphs, DEVICES=("cpu",), CudaCapture=lambda: called)
    with capturing:
        for batch in batches:
            prompts = torch.randint(target.vocab_size, (batch, length)).tolist()
            texts: dict[str, list[tuple[int, ...]]] = {}
            for replayed in (False, True):
                loop = "graphs" if replayed else "eager"
                settings = {
                    "sampling": Sampling(),
                    "max_new_tokens": tokens,
                    "stop_ids": (),
                    "batch_size": batch,
                }
                plain = _decoded(target, prompts, settings, replayed)
                texts.setdefault("plain", plain["ids"])
                step = plain["decode_s"] / plain["steps"]
                yield _line(f"plain, batch {batch}, {loop}", step, _same(plain["ids"], texts["plain"]))
                for name, plan in bench.pick(PLANS, SMALL_PLANS).items():
                    fast = _decoded(target, prompts, settings, replayed, drafter=drafter, plan=plan)
                    texts.setdefault(name, fast["ids"])
                    cost = fast["decode_s"] / fast["steps"] / step
                    tau = fast["tau"]
                    load = Load(batch, length + tokens / 2, fast["drafted"], plan.length, tau)
                    limit = eta_limit(tau, GPUS[GPU], shape, drafted, load)
                    note = (
                        f"tau {tau:.2f}, r {fast['verify_s'] / fast['steps'] / step:.2f}, "
                        f"c {fast['draft_s'] / fast['draft_steps'] / step:.3f}, eta {tau / cost:.2f}, "
                        f"eta_limit {limit:.2f} ({GPU}), {tau / cost / limit:.0%} of it; "
                    )
                    note += _same(fast["ids"], texts[name])
                    yield _line(f"{name}, batch {batch}, {loop}", fast["decode_s"] / fast["steps"], note)


def _decoded(target, prompts, settings, replayed, **drafting) -> dict:
    """Texts, seconds and counters of the second of two runs; the first compiles what is compiled."""
    for _ in range(2):
        found, timings = generate(target, prompts, **settings, **drafting, graphs=replayed)
    rounds = [r for g in found for r in g.rounds]
    counts = {
        "ids": [g.ids for g in found],
        "tau": sum(r.emitted for r in rounds) / len(rounds) if rounds else 1.0,
        "drafted": sum(r.drafted for r in rounds) / len(rounds) if rounds else 0.0,
    }
    return vars(total(timings)) | counts


def _same(found, first) -> str:
    """Loops differ in shapes, so in rounding: in bfloat16 a tie may fall the other way."""
    same = sum(a == b for a, b in zip(found, first, strict=True))
    return f"{same} of {len(first)} texts as without graphs"


def _line(what: str, seconds: float, note: str) -> dict:
    return {"what": what, "ms": (1e3 * seconds,), "note": note}

"""Can the sampling certificate fail? Six bugs of the field, planted in the real engine one at a time.

    python benchmarks/planted_bugs.py            writes docs/planted_bugs.md; about a minute on one idle core

Each bug replaces one function or class that the engine uses and leaves everything else as it is; the same
settings, prompts and seed also go through the engine as it stands, which has to pass. The target is a Llama
of two layers with random weights, small enough for thousands of tokens in seconds, its attention strong
enough that the last token does not tell the next one; the drafter knows the last token alone. Tests are those
of `eval/certificate.py: examine`. Exit code 1 if a bug is missed or the right engine fails.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from unittest import mock

import torch

from spectrain import recurrent
from spectrain.artifacts import write_bytes
from spectrain.cache import CacheLayout, KVCache
from spectrain.decode import engine
from spectrain.decode.sampling import BONUS, COIN, RESIDUAL, Streams, law
from spectrain.decode_settings import DecodeRunConfig
from spectrain.eval.certificate import LEVEL, examine
from spectrain.eval.speed import EngineArm
from spectrain.proposal import Drafter, Proposal
from spectrain.target import Target
from spectrain.testing import Bigram, tiny_llama

TEXTS, LENGTH = 32, 125  # 4,000 tokens
TESTS = {
    "uniformity": "uniform, by q",
    "uniformity_by_target": "uniform, by p",
    "serial_correlation": "serial",
    "acceptance": "accepts",
}
CHAIN = DecodeRunConfig(name="chain of 4, T = 1", dtype="float32", length=4, temperature=1.0)
COLD = DecodeRunConfig(name="chain of 1, T = 0.5", dtype="float32", length=1, temperature=0.5)
NUCLEUS = DecodeRunConfig(name="chain of 4, top-p 0.6", dtype="float32", length=4, temperature=1.0, top_p=0.6)


PAGE = """# Six planted bugs, and what the certificate says

Made by `python benchmarks/planted_bugs.py --texts {texts}` on {date}
(CPU, float32, torch {torch}), never edited.

Each row plants one bug in the real engine and decodes with it; target, drafter and patches are described in
that file. The test named saw most of the four that `eval/certificate.py` makes: u in the order of the drafter
or of the target (Kolmogorov-Smirnov distance), correlation of successive u (normal score), accepted drafts
against expectation (chi-square). The p-value is the certificate's, its smallest times four; below 1e-4 it
fails. The last column is the engine without the bug under the same settings, prompts and seed.

| bug | settings | tokens | test that saw most | statistic | p-value | p-value without the bug |
| --- | --- | --- | --- | --- | --- | --- |
{rows}
"""


@contextmanager
def same_coin() -> Iterator[None]:
    """The uniform of the first level decides every level: who passed it passes the next too easily."""

    class SameCoin(Streams):
        def uniform(self, request: int, root_position: int, slot: int, purpose: int) -> float:
            return super().uniform(request, root_position, 0 if purpose == COIN else slot, purpose)

    with mock.patch.object(engine, "Streams", SameCoin):
        yield


@contextmanager
def one_sided_filter() -> Iterator[None]:
    """Draft tokens are drawn from the filtered q; ratio and residual read q as it was before the filter."""

    class OneSided(Streams):
        def draft_law(self, logits_MV: torch.Tensor) -> torch.Tensor:
            return law(logits_MV, temperature=self.sampling.temperature)

        def draw(self, law_MV: torch.Tensor, *, requests, root_positions, slots) -> list[int]:
            filtered = law(law_MV.log(), temperature=1.0, top_p=self.sampling.top_p)
            return super().draw(filtered, requests=requests, root_positions=root_positions, slots=slots)

    with mock.patch.object(engine, "Streams", OneSided):
        yield


@contextmanager
def unwarped_bonus() -> Iterator[None]:
    """After a wholly accepted path the bonus comes from the raw logits, whose law is p ** T renormalised."""

    class Unwarped(Streams):
        def pick(self, law_MV: torch.Tensor, requests, root_positions, slots, purpose: int) -> list[int]:
            if purpose == BONUS:
                warmth = [self.sampling.temperature if slot else 1.0 for slot in slots]
                law_MV = law_MV ** torch.tensor(warmth, device=law_MV.device)[:, None]
            return super().pick(law_MV, requests, root_positions, slots, purpose)

    with mock.patch.object(engine, "Streams", Unwarped):
        yield


@contextmanager
def residual_from_p() -> Iterator[None]:
    """After a rejection the token is drawn from p in place of (p - q)+."""
    newest: dict[int, torch.Tensor] = {}  # p where each request stands
    verify = engine.verify

    def remembering(proposals, laws, *, requests: Sequence[int], **rest):
        def remember(which: Sequence[int], nodes: Sequence[int]) -> torch.Tensor:
            p_RV = laws(which, nodes)
            newest.update(zip([requests[i] for i in which], p_RV.clone(), strict=True))
            return p_RV

        return verify(proposals, remember, requests=requests, **rest)

    class FromP(Streams):
        def pick(self, law_MV: torch.Tensor, requests, root_positions, slots, purpose: int) -> list[int]:
            if purpose == RESIDUAL:
                law_MV = torch.stack([newest[request] for request in requests])
            return super().pick(law_MV, requests, root_positions, slots, purpose)

    with mock.patch.object(engine, "Streams", FromP), mock.patch.object(engine, "verify", remembering):
        yield


@contextmanager
def pruning_by_value() -> Iterator[None]:
    """A draft token whose own q is small is dropped before verification, and all after it: the rest was not
    drawn from q."""
    clamp = engine.clamp

    def prune(proposal: Proposal, depth: int) -> Proposal:
        assert proposal.q is not None
        sure = [float(q[x]) >= 0.2 for q, x in zip(proposal.q, proposal.tokens.tolist(), strict=True)]
        return clamp(proposal, min(depth, [*sure, False].index(False)))

    with mock.patch.object(engine, "clamp", prune):
        yield


class StaleLayout:
    """A layout that leaves slots alone which hold keys and values already."""

    def __init__(self, layout: CacheLayout, held: list[tuple[int, int]]):
        self.layout, self.held = layout, held
        self.positions = layout.positions

    def attend(self, layer: int, q_HTK, k_GTK, v_GTK, **forms) -> torch.Tensor:
        if self.held:
            rows, slots = map(list, zip(*self.held, strict=True))
            for new, old in zip((k_GTK, v_GTK), self.layout.cache.layer(layer, k_GTK), strict=True):
                new[:, rows] = old.flatten(0, 1)[slots].transpose(0, 1)
        return self.layout.attend(layer, q_HTK, k_GTK, v_GTK, **forms)


class StaleCache(KVCache):
    """filled[r]: slots of request r that hold something, rejected draft tokens included."""

    def __init__(self, num_requests: int, capacity: int):
        super().__init__(num_requests, capacity)
        self.filled = [0] * num_requests

    def truncate(self, request: int, length: int) -> None:
        super().truncate(request, length)
        self.filled[request] = length

    def grow(self, requests_T: Sequence[int], parents_T: Sequence[int]) -> StaleLayout:  # type: ignore[override]
        held = []
        taken = [c + len(p) for c, p in zip(self.committed, self.pending, strict=True)]
        for row, request in enumerate(requests_T):
            if taken[request] < self.filled[request]:
                held.append((row, request * self.capacity + taken[request]))
            taken[request] += 1
        self.filled = [max(pair) for pair in zip(self.filled, taken, strict=True)]
        return StaleLayout(super().grow(requests_T, parents_T), held)


@contextmanager
def stale_cache() -> Iterator[None]:
    """Keys and values of rejected draft tokens stay in the cache, as the text's own."""
    with mock.patch.object(recurrent, "KVCache", StaleCache):
        yield


@dataclass(frozen=True)
class Bug:
    """words: what is wrong; run: settings under which it matters; plant: the patch, a context manager."""

    words: str
    run: DecodeRunConfig
    plant: Callable[[], AbstractContextManager[None]]


BUGS = (
    Bug("uniform reused across levels", CHAIN, same_coin),
    Bug("top-p on one side", NUCLEUS, one_sided_filter),
    Bug("bonus from unwarped logits", COLD, unwarped_bonus),
    Bug("residual without (p - q)+", CHAIN, residual_from_p),
    Bug("acceptance after value-dependent pruning", CHAIN, pruning_by_value),
    Bug("stale KV after a rejection", CHAIN, stale_cache),
)


def make_target() -> Target:
    """Random weights, 48 tokens, no stop token; attention outweighs the token's own embedding."""
    model = tiny_llama(layers=2, vocab=48)
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(6)
    return Target(model, path="random Llama, 2 layers, 48 tokens")


def examined(
    target: Target, drafter: Drafter, run: DecodeRunConfig, plant: AbstractContextManager, texts: int
) -> dict:
    """`examine` of `texts` texts of LENGTH tokens, decoded under `plant`."""
    arm = EngineArm(target, drafter, run, LENGTH, texts, seed=1, record_orders=True)
    prompts = [[1 + i % 40, 7 + i // 40, 3] for i in range(texts)]
    with plant:
        found, _ = arm.decode(prompts, range(texts))
    return examine(target, found, [str(i) for i in range(texts)], arm.sampling)


def line(words: str, run: DecodeRunConfig, bad: dict, right: dict) -> str:
    """One row of the table: the test that saw most, its statistic, and the certificate's p-values."""
    test = min(TESTS, key=lambda name: bad[name]["p_value"])
    cells = [words, run.name, f"{bad['tokens']:,}", TESTS[test], f"{bad[test]['statistic']:.3g}"]
    return "| " + " | ".join([*cells, f"{bad['p_value']:.1e}", f"{right['p_value']:.2f}"]) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--texts", type=int, default=TEXTS, help=f"texts of {LENGTH} tokens for each row")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "planted_bugs.md")
    arguments = parser.parse_args()
    target = make_target()
    drafter = Bigram(target)
    right: dict[str, dict] = {}
    lines, failed = [], []
    for bug in BUGS:
        if bug.run.name not in right:
            right[bug.run.name] = examined(target, drafter, bug.run, nullcontext(), arguments.texts)
        passed, bad = right[bug.run.name], examined(target, drafter, bug.run, bug.plant(), arguments.texts)
        lines.append(line(bug.words, bug.run, bad, passed))
        failed += [bug.words] if bad["p_value"] >= LEVEL or passed["p_value"] < LEVEL else []
        print(lines[-1], flush=True)
    page = PAGE.format(
        texts=arguments.texts, rows="\n".join(lines), date=date.today(), torch=torch.__version__
    )
    write_bytes(arguments.out, page.encode())
    if failed:
        print(f"missed, or the right engine failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

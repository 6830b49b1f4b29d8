"""What `train_step.py` and `train_memory.py` run: the tensors of one packed row, our steps on them, a dense
Medusa and the floor.

Tensors are synthetic: random states, a target's head whose arg-max is always kept. At 40% the last 26 of each
64 tokens are supervised, at 100% all are. A step is the loss and its backward; no optimizer. The target's
log-sum-exp and arg-max are part of the features, as in training, and not timed unless a step says so.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from spectrain.capture import _law
from spectrain.config import ObjectiveConfig
from spectrain.data.packing import pack
from spectrain.drafters import eagle3, medusa
from spectrain.features import FeatureBatch
from spectrain.objectives import Objective
from spectrain.target import Target
from spectrain.testing import make_sample

TURN = 64  # tokens of a question with its answer
HEADS = 4  # of Medusa
FLOOR_ROWS = 512  # of the head at a time: as many as its products need to run at full speed


@dataclass(frozen=True)
class Shape:
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    tokens: int
    vocab: int
    kept: int
    unroll: int
    threads: int


SHAPES = {
    "S": Shape(512, 1536, 8, 4, 512, 32000, 8000, 7, threads=1),
    "M": Shape(1024, 3072, 16, 8, 1024, 49152, 16000, 7, threads=2),
}


@dataclass
class Ours:
    """A drafter on its features. statistics: the target's whole head is run in the step, for its log-sum-exp
    and arg-max."""

    target: Target
    drafter: nn.Module
    objective: Objective
    features: FeatureBatch
    statistics: bool = False

    def loss(self) -> torch.Tensor:
        features = self.features
        if self.statistics:
            with torch.no_grad():
                _law(self.target, features.final, features.tokens)
        index = self.drafter.index(features.tokens)
        counts = self.objective.count(index, features)
        rows = self.drafter.rows(features)
        result = self.objective.loss(rows, features, self.drafter.head_weight(), counts)
        self.stats = result.stats
        return result.loss


def target_of(shape: Shape, kept: torch.Tensor, device: str) -> Target:
    """A random target of three layers; the rows of its head that are not kept are small."""
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        num_hidden_layers=3,
        max_position_embeddings=max(4096, shape.tokens),
    )
    with torch.device(device):
        target = Target(LlamaForCausalLM(config).float())
    head = target.head.weight.data.normal_(std=2 * shape.hidden**-0.5)
    dropped = torch.ones(shape.vocab, dtype=torch.bool)
    dropped[kept] = False
    head[dropped] *= 0.1
    return target


def features_of(shape: Shape, density: float, target: Target, taps: tuple[int, ...]) -> FeatureBatch:
    answer = round(TURN * density)
    marks = ("." * (TURN - answer) + "S" * answer) * (shape.tokens // TURN)
    ids = torch.randint(shape.vocab, (shape.tokens,), generator=torch.Generator().manual_seed(1))
    tokens = pack([make_sample("a", ids.tolist(), marks)])
    draw = torch.Generator().manual_seed(2)
    states = torch.randn(shape.tokens, len(taps) + 1, shape.hidden, generator=draw)
    final = F.rms_norm(states[:, -1], (shape.hidden,)).to(target.device)
    lse, argmax = _law(target, final, tokens)
    features = FeatureBatch(tokens, taps, states[:, :-1].contiguous(), final, lse, argmax)
    return features.to(target.device)


def eagle3_step(shape: Shape, density: float, *, form: str = "ours", device: str = "cpu") -> Ours:
    """Ours in one of the forms of `train_step.py`."""
    torch.manual_seed(0)
    kept = torch.randperm(shape.vocab)[: shape.kept].sort().values
    target = target_of(shape, kept, device)
    head = "frozen" if form == "ours_frozen" else "trained"
    drafter = eagle3.build(eagle3.Config(unroll=shape.unroll, taps=[0, 1, 2], head=head), target, kept)
    features = features_of(shape, density, target, drafter.taps)
    objective = Objective(ObjectiveConfig(), drafter, target)
    return Ours(target, drafter, objective, features, statistics=form == "ours_statistics")


def medusa_step(shape: Shape, density: float, *, form: str = "ours") -> Ours:
    """Cross-entropy of every head with the same weight over the whole vocabulary, as in the reference."""
    torch.manual_seed(0)
    kept = torch.arange(shape.vocab)
    target = target_of(shape, kept, "cpu")
    head = "frozen" if form == "ours_frozen" else "trained"
    drafter = medusa.build(medusa.Config(heads=HEADS, head=head), target, kept)
    for parameter in drafter.blocks.parameters():
        nn.init.normal_(parameter, std=0.02)
    features = features_of(shape, density, target, drafter.taps)
    settings = ObjectiveConfig(terms={"ce": 1.0}, slot_decay=1.0)
    return Ours(target, drafter, Objective(settings, drafter, target), features)


def medusa_dense(ours: Ours) -> torch.Tensor:
    """Ours in plain torch, all logits of a head at once."""
    drafter, features = ours.drafter, ours.features
    index = drafter.index(features.tokens)
    total = torch.zeros(())
    for k, (blocks, head) in enumerate(zip(drafter.blocks, drafter.head_weight(), strict=True)):
        rows = index.row[index.slot == k]
        labels = features.tokens.ids[rows + 2 + k].long()
        total = total + F.cross_entropy(F.linear(blocks(features.final[rows]), head), labels)
    return total


def slot_means(ours: Ours) -> dict[str, list[float]]:
    """Per slot: kl and the entropy of the target's law renormalised on the kept ids, mean over its rows;
    share of the tokens that are its rows."""
    index, stats = ours.drafter.index(ours.features.tokens), ours.stats
    found = []
    for part in ours.features.final.split(128):
        law = (part @ ours.objective.teacher_head.T).log_softmax(-1)
        found.append(-(law.exp() * law).sum(-1))
    entropy = torch.zeros(index.slots).index_add_(0, index.slot, torch.cat(found)[index.source])
    decay = ours.objective.config.slot_decay ** torch.arange(index.slots)
    return {
        "kl": (stats["loss"] / decay).tolist(),
        "entropy": (entropy / stats["count"]).tolist(),
        "share": (stats["count"] / len(ours.features.final)).tolist(),
    }


def given(ours: Ours, slots: int):
    """Ours as the rivals read it."""
    from rivals import Given

    features = ours.features
    ids, supervised = features.tokens.ids.long()[None], features.tokens.loss_mask[None]
    return Given(
        config=ours.target.config,
        slots=slots,
        ids=ids,
        rows=F.pad(supervised[:, 2:], (0, 2)).long(),
        labels=ids.masked_fill(~supervised, -100),
        taps=features.taps.flatten(1)[None],
        final=features.final[None],
        head=ours.target.head.weight.data,
        embedding=ours.target.embedding.weight.data,
        kept=ours.drafter.kept_ids,
        weights=ours.drafter.state_dict(),
    )


Product = tuple[int, int, int]  # rows, width in, width out of a linear map


class Floor:
    """The products that a step cannot do without, at its own row counts, on random matrices, and nothing
    else.

    maps: (map, how many of its three products are needed: forward, gradient of its weights, gradient of its
    rows). The head runs supervised rows only, a token's embedding half of q, k and v runs once for all steps,
    and at step 0 only keys and values run every token. Attention counts as products over half the tokens.
    """

    def __init__(self, maps: list[tuple[Product, int]]):
        self.maps = maps
        self.flop = sum(2.0 * n * a * b * times for (n, a, b), times in maps)
        self.known: dict[tuple[str, int, int], torch.Tensor] = {}

    def matrix(self, role: str, rows: int, width: int) -> torch.Tensor:
        if (role, rows, width) not in self.known:
            self.known[role, rows, width] = torch.randn(rows, width)
        return self.known[role, rows, width]

    def run(self) -> None:
        for (n, a, b), times in self.maps:
            x, weight, y = self.matrix("in", n, a), self.matrix("weight", b, a), self.matrix("out", n, b)
            torch.mm(x, weight.t(), out=y)
            if times > 1:
                torch.mm(y.t(), x, out=self.matrix("weight's gradient", b, a))
            if times > 2:
                torch.mm(y, weight, out=self.matrix("in's gradient", n, a))


def head_maps(rows: int, width: int, kept: int, times: int) -> list[tuple[Product, int]]:
    whole, rest = divmod(rows, FLOOR_ROWS)
    return [((n, width, kept), times) for n in [FLOOR_ROWS] * whole + [rest] * bool(rest)]


def eagle3_floor(shape: Shape, ours: Ours) -> Floor:
    index = ours.drafter.index(ours.features.tokens)
    D, T = shape.hidden, shape.tokens
    K = D // shape.heads
    kv = 2 * shape.kv_heads * K
    maps: list[tuple[Product, int]] = [((T, 3 * D, D), 2), ((T, D, D + kv), 3), ((T, D, kv), 3)]
    for k in range(index.slots):
        n = int((index.slot == k).sum())
        maps.append(((n, D, D + kv if k else D), 3))
        # scores and mix; backward: scores again, and two products for each
        maps += [((n, K, T // 2), 1)] * (7 * shape.heads)
        maps += [((n, D, D), 3), ((n, D, shape.inner), 3), ((n, D, shape.inner), 3), ((n, shape.inner, D), 3)]
    maps += head_maps(len(index.row), D, shape.kept, 3)
    maps += head_maps(len(index.source.unique()), D, shape.kept, 1)
    return Floor(maps)


def medusa_floor(shape: Shape, ours: Ours) -> Floor:
    index = ours.drafter.index(ours.features.tokens)
    maps: list[tuple[Product, int]] = []
    for k in range(index.slots):
        n = int((index.slot == k).sum())
        maps += [((n, shape.hidden, shape.hidden), 2), *head_maps(n, shape.hidden, shape.vocab, 3)]
    return Floor(maps)


@dataclass(frozen=True)
class Contender:
    """A step by name: the module whose gradients are dropped after it, and what runs it once."""

    module: nn.Module | None
    run: Callable[[], float | None]


def training(module: nn.Module, loss: Callable[[], torch.Tensor]) -> Contender:
    def run() -> float:
        found = loss()
        found.backward()
        return found.item()

    return Contender(module, run)

"""The law of the text that a verification law emits, by enumeration: every outcome of every draw and coin.

For vocabularies of a few tokens. A random number is an interval of [0, 1) here: a choice cuts it into one
part per outcome, and the outcomes are followed one after the other, each with its probability. A number that
is read again under the same key is still in the part that it was cut down to, so a law that reads a number
twice shows the error which that makes. Knows no model.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from random import Random
from typing import Any

import torch

from spectrain.decode.sampling import BONUS, COIN, DRAFT, Sampling, Streams
from spectrain.decode.verify import DEFAULT, check_proposal, verify
from spectrain.laws import Leniency
from spectrain.proposal import Proposal, Verdict

Text = tuple[int, ...]
Propose = Callable[[Streams, Text], Proposal]
"""propose(streams, text): the proposal behind `text`, whose length is the root position; it draws from
`streams`."""


class Enumeration(Streams):
    """Streams that follow a script of outcomes and keep each one's probability and number of alternatives.

    key(root_position, slot, purpose): what tells one random number from another.
    """

    def __init__(self, script: Sequence[int], key: Callable[[int, int, int], Any] = lambda *where: where):
        super().__init__(Sampling(temperature=1.0), [0])
        self.script, self.key = script, key
        self.trail: list[tuple[int, int]] = []
        self.probability = 1.0
        self.within: dict[Any, tuple[float, float]] = {}

    def outcome(self, weights: Sequence[float], root_position: int, slot: int, purpose: int) -> int:
        """Index of a weight above 0, by the script as far as it goes, then the first."""
        name = self.key(root_position, slot, purpose)
        low, high = self.within.get(name, (0.0, 1.0))
        parts, total, below = [], sum(weights), 0.0
        for i, weight in enumerate(weights):
            part = max(low, below / total), min(high, (below + weight) / total)
            below += weight
            if part[1] > part[0]:
                parts.append((i, part))
        step = len(self.trail)
        chosen = self.script[step] if step < len(self.script) else 0
        self.trail.append((chosen, len(parts)))
        found, self.within[name] = parts[chosen]
        self.probability *= (self.within[name][1] - self.within[name][0]) / (high - low)
        return found

    def choose(self, weights: Sequence[float], request: int, root_position: int, slot: int) -> int:
        return self.outcome(weights, root_position, slot, COIN)

    def pick(self, law_MV, requests, root_positions, slots, purpose: int) -> list[int]:
        rows = zip(law_MV.double().tolist(), root_positions, slots, strict=True)
        return [self.outcome(row, root, slot, purpose) for row, root, slot in rows]


def outcomes(run: Callable[[Streams], Any], **settings: Any) -> Iterator[tuple[Any, float]]:
    """(result, probability) of every way `run` can go; settings: those of `Enumeration`."""
    scripts: list[list[int]] = [[]]
    while scripts:
        streams = Enumeration(scripts.pop(), **settings)
        yield run(streams), streams.probability
        for i in range(len(streams.script), len(streams.trail)):
            head = [chosen for chosen, _ in streams.trail[:i]]
            scripts += [[*head, other] for other in range(1, streams.trail[i][1])]


class Process:
    """Laws p and q, float32 [V], behind every text: random with zeros and equal entries, or the same given
    ones everywhere."""

    def __init__(
        self, seed: int, vocab: int, *, p: Sequence[float] | None = None, q: Sequence[float] | None = None
    ):
        self.vocab = vocab
        self.p = cache(lambda text: _law(f"{seed} p {text}", vocab, p))
        self.q = cache(lambda text: _law(f"{seed} q {text}", vocab, q))

    def chain(self, length: int) -> Propose:
        """Chains of `length` tokens drawn from q."""

        def propose(streams: Streams, text: Text) -> Proposal:
            tokens: list[int] = []
            laws = []
            for slot in range(length):
                laws.append(self.q((*text, *tokens)))
                tokens += streams.pick(laws[-1][None], [0], [len(text)], [slot], DRAFT)
            return Proposal(torch.tensor(tokens, dtype=torch.int64), tuple(range(-1, length - 1)), q=laws)

        return propose

    def verdict(
        self, proposal: Proposal, text: Text, law: str, streams: Streams, leniency: Leniency = DEFAULT
    ) -> Verdict:
        """What `law` decides on a proposal behind `text`."""
        check_proposal(proposal, self.vocab, law)
        texts = [text]
        for token, parent in zip(proposal.tokens.tolist(), proposal.parents, strict=True):
            texts.append((*texts[parent + 1], token))
        (found,) = verify(
            [proposal],
            lambda which, nodes: torch.stack([self.p(texts[node + 1]) for node in nodes]),
            law=law,
            streams=streams,
            requests=[0],
            root_positions=[len(text)],
            leniency=leniency,
        )
        return found

    def one_round(self, propose: Propose, law: str, **settings: Any) -> list[tuple[Text, Verdict, float]]:
        """Text, verdict and probability of every outcome of one round behind the empty text."""

        def run(streams: Streams) -> tuple[Text, Verdict]:
            proposal = propose(streams, ())
            verdict = self.verdict(proposal, (), law, streams, **settings)
            return emitted(proposal, verdict), verdict

        return [(*found, chance) for found, chance in outcomes(run)]

    def distance(
        self, propose: Propose, law: str, *, length: int, rounds: int = 1, key=None, **settings: Any
    ) -> float:
        """Total variation between the first `length` tokens of `rounds` rounds, plain draws behind them, and
        of the target alone."""

        def run(streams: Streams) -> Text:
            text: Text = ()
            for _ in range(rounds):
                if len(text) < length:
                    proposal = propose(streams, text)
                    text += emitted(proposal, self.verdict(proposal, text, law, streams, **settings))
            while len(text) < length:
                text += tuple(streams.pick(self.p(text)[None], [0], [len(text)], [0], BONUS))
            return text[:length]

        found: dict[Text, float] = defaultdict(float)
        for text, chance in outcomes(run, **({} if key is None else {"key": key})):
            found[text] += chance
        texts = product(range(self.vocab), repeat=length)
        return sum(abs(found[text] - self.chance(text)) for text in texts) / 2

    def chance(self, text: Text) -> float:
        """Probability of a text under p alone."""
        found = 1.0
        for i, token in enumerate(text):
            p = self.p(text[:i]).double()
            found *= (p[token] / p.sum()).item()
        return found


def _law(seed: str, vocab: int, given: Sequence[float] | None) -> torch.Tensor:
    random = Random(seed)
    weights = given or [random.randint(1, 4) * (random.random() > 0.3) for _ in range(vocab)]
    law = torch.tensor(weights if any(weights) else [1] * vocab, dtype=torch.float32)
    return law if given else law / law.sum()


def emitted(proposal: Proposal, verdict: Verdict) -> Text:
    """The tokens of a round: the accepted path and the bonus token."""
    return (*proposal.tokens[list(verdict.path)].tolist(), verdict.bonus)

"""Suffix matching: draft the most frequent continuation of the longest match in prompt, text and a corpus.

The newest tokens are matched against everything before them, and against the answers of a corpus file where
one is given; the longer match counts, the request's own where they are equal. Behind a match a token's share
is its count among all that followed there, and a draft token's survival is the product of the shares on its
path. Drafting goes on with the longest known suffix of match and path, so that it passes the end of the text,
and stops at `tokens_per_match` draft tokens per matched token or at a survival below `min_share`:

    text a b c a b d a b c a b, max_match 2    match "a b": followed by c twice, by d once
    chain: c a, survivals 2/3 2/3    tree, top_k 2: c, its a, then d, its a, survivals 2/3 2/3 1/3 1/3

A tree takes the candidates of the largest survival, `top_k` children each. Knows no target state, has no
weights and is never trained. Source: Oliaro et al. 2025, SuffixDecoding (arXiv 2411.04975), section 3; the
defaults are those of vLLM's `suffix`.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import nn

from spectrain.data.rendering import conversations
from spectrain.data.sources import open_sources
from spectrain.drafters.automaton import Automaton
from spectrain.drafters.lookup import chosen, new_tokens
from spectrain.proposal import Observation, Plan, Proposal, Sampler
from spectrain.target import Target

BREAK = -1  # between the answers of a corpus: no token, so nothing matches across it


SERVED: dict[str, tuple[str, str]] = {}
NOT_SERVED = {
    "vllm": "no weights, it matches suffixes itself",
    "sglang": "it has no such method",
    "speculators": "no weights",
    "trtllm": "no weights, it matches suffixes itself",
    "reference": "no weights",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    family: str = "suffix"
    max_match: int = 24
    """Most newest tokens that are matched."""
    tokens_per_match: float = 1.0
    """Draft tokens of a path per matched token, at least one in all."""
    min_share: float = 0.1
    """Least survival of a draft token."""
    corpus: str = ""
    """JSONL file of conversations, or one that the package carries, whose answers are matched too."""
    draft_vocab: ClassVar[int] = 0

    def __post_init__(self):
        if self.max_match < 1:
            raise ValueError(f"drafter.max_match={self.max_match}: expected at least 1")
        if not self.tokens_per_match > 0:
            raise ValueError(f"drafter.tokens_per_match={self.tokens_per_match}: expected above 0")
        if not 0 <= self.min_share <= 1:
            raise ValueError(f"drafter.min_share={self.min_share}: expected 0 to 1")


class Suffix(nn.Module):
    """A drafter without weights; corpus_ids: int32 [N], the corpus with BREAK behind each answer."""

    taps: tuple[int, ...] = ()
    corpus_ids: torch.Tensor

    def __init__(self, config: Config, vocab_size: int, corpus_ids: torch.Tensor):
        super().__init__()
        self.config, self.vocab_size = config, vocab_size
        self.register_buffer("corpus_ids", corpus_ids.to(torch.int32))

    def start(self, num_requests: int, capacity: int) -> "SuffixDrafting":
        return SuffixDrafting(self.config, self.vocab_size, self.corpus)

    @cached_property
    def corpus(self) -> Automaton:
        found = Automaton(self.config.max_match + 1)
        for token in self.corpus_ids.tolist():
            found.extend(token)
        return found

    def weights_read(self) -> tuple[int, int]:
        return 0, 0

    def engine_config(self, target: Target, engine: str) -> dict[str, Any]:
        """Refused: there is nothing to write."""
        settings = (
            '{"method": "suffix", "num_speculative_tokens": N, '
            f'"suffix_decoding_max_tree_depth": {self.config.max_match}, '
            f'"suffix_decoding_max_spec_factor": {self.config.tokens_per_match}, '
            f'"suffix_decoding_min_token_prob": {self.config.min_share}}}'
        )
        raise ValueError(
            "stages: export: suffix has no weights to export; vLLM matches suffixes itself: "
            f"--speculative-config '{settings}'"
        )


class _Text:
    """What is known of one request: its own automaton, and its newest tokens' place in the corpus."""

    def __init__(self, most: int, corpus: Automaton):
        self.most, self.corpus = most, corpus
        self.own = Automaton(most + 1)
        self.in_corpus = (0, 0)

    def append(self, token: int) -> None:
        self.own.extend(token)
        self.in_corpus = self.corpus.behind(*self.in_corpus, token, self.most)

    def match(self) -> tuple[Automaton, int, int]:
        """Where the longest match lies: automaton, state, matched tokens."""
        state, size = self.own.earlier(self.most)
        if self.in_corpus[1] > size:
            return self.corpus, *self.in_corpus
        return self.own, state, size


class SuffixDrafting:
    """The texts of several requests (`spectrain.proposal.Drafting`); steps counts lookups."""

    def __init__(self, config: Config, vocab_size: int, corpus: Automaton):
        self.config, self.vocab_size, self.corpus = config, vocab_size, corpus
        self.texts: dict[int, _Text] = {}
        self.steps = 0

    def observe(self, observations: Sequence[Observation]) -> None:
        for seen in observations:
            if seen.start == 0:
                self.texts[seen.request] = _Text(self.config.max_match, self.corpus)
            for token in new_tokens(seen):
                self.texts[seen.request].append(token)

    def propose(self, requests: Sequence[int], plan: Plan, sampler: Sampler) -> list[Proposal]:
        if plan.shape == "static":
            raise ValueError("proposal=static: suffix proposes chains and trees")
        self.steps += 1
        return [self._proposal(row, request, plan) for row, request in enumerate(requests)]

    def _proposal(self, row: int, request: int, plan: Plan) -> Proposal:
        automaton, state, size = self.texts[request].match()
        depth = min(plan.length, max(1, int(self.config.tokens_per_match * size))) if size else 0
        nodes, width = (plan.length, 1) if plan.shape == "chain" else (plan.nodes, plan.top_k)
        tokens: list[int] = []
        parents: list[int] = []
        order = 0  # decides between equal survivals: the one found first
        # (-survival, order, depth, parent, token, state and size behind it)
        heap = [(-1.0, order, 0, -1, BREAK, state, size)]
        while heap and len(tokens) < nodes:
            loss, _, level, parent, token, state, size = heapq.heappop(heap)
            if level:
                if plan.budget is not None and not plan.budget.keeps(row, -loss):
                    break
                tokens.append(token)
                parents.append(parent)
            if level == depth:
                continue
            for child, share, behind in self._children(automaton, state, size, width):
                if -loss * share >= self.config.min_share:
                    order += 1
                    heapq.heappush(heap, (loss * share, order, level + 1, len(tokens) - 1, child, *behind))
        return chosen(tokens, parents, num_ids=self.vocab_size, ranked=plan.ranked > 0)

    def _children(
        self, automaton: Automaton, state: int, size: int, width: int
    ) -> Iterator[tuple[int, float, tuple[int, int]]]:
        """The most frequent tokens behind a string, newest first among equals: token, share, and where the
        string with it behind lies. A string that nothing follows gives way to its longest suffix that
        something does; the empty one has no children."""
        while state and not any(token >= 0 for token in automaton.follows[state]):
            state = automaton.link[state]
            size = automaton.length[state]
        if not state:
            return
        follows = {token: after for token, after in automaton.follows[state].items() if token >= 0}
        total = sum(automaton.count[after] for after in follows.values())
        best = heapq.nsmallest(
            width, follows.items(), key=lambda item: (-automaton.count[item[1]], -automaton.newest[item[1]])
        )
        for token, after in best:
            behind = automaton.behind(state, size, token, self.config.max_match)
            yield token, automaton.count[after] / total, behind


def build(config: Config, target: Target, kept_ids: torch.Tensor) -> Suffix:
    """A drafter that may propose every id of the target; kept_ids plays no part. Raises ValueError for a
    corpus that cannot be read."""
    ids: list[int] = []
    if config.corpus:
        if target.tokenizer is None:
            raise ValueError(f"drafter.corpus={config.corpus!r}: the target has no tokenizer to read it with")
        for conversation in conversations(open_sources(config.corpus, "drafter.corpus")):
            for turn in conversation.messages:
                if turn["role"] == "assistant":
                    ids += target.tokenizer(turn["content"], add_special_tokens=False)["input_ids"] + [BREAK]
    return Suffix(config, target.vocab_size, torch.tensor(ids, dtype=torch.int32))

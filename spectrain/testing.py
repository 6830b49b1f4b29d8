"""Small targets and tokenizers whose every number can be worked out by hand; for tests and benchmarks.

Knows nothing of training or decoding. In `byte_tokenizer` one byte is one token, its id the byte's value.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from spectrain.data.packing import Sample
from spectrain.drafters.layers import spans
from spectrain.objectives import ObjectiveResult, RowIndex, Rows
from spectrain.proposal import Plan, Proposal
from spectrain.target import Target, packed_layout

MARKERS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>")  # ids 256, 257, 258, 259

GENERATION_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"

CHATML = (
    "{% for turn in messages %}<|im_start|>{{ turn.role }}\n{{ turn.content }}<|im_end|>\n{% endfor %}"
    + GENERATION_PROMPT
)
"""Append-only: a later turn never changes what an earlier one looks like."""

THINK = (
    "{% set seen = namespace(user=-1) %}"
    "{% for turn in messages %}"
    "{% if turn.role == 'user' %}{% set seen.user = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for turn in messages %}<|im_start|>{{ turn.role }}\n"
    "{% if turn.role == 'assistant' and loop.index0 > seen.user %}"
    "<think>{{ turn.reasoning_content | default('') }}</think>{% endif %}"
    "{{ turn.content }}<|im_end|>\n{% endfor %}" + GENERATION_PROMPT
)
"""Rewrites history: reasoning is shown only after the newest user turn."""

NOTHINK = (
    "{% for turn in messages %}<|im_start|>{{ turn.role }}\n"
    "{% if turn.role == 'assistant' and not turn.reasoning_content %}" + EMPTY_THOUGHT + "{% endif %}"
    "{{ turn.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n" + EMPTY_THOUGHT + "{% endif %}"
)
"""The generation prompt itself writes an empty thought."""

TOOL = (
    "{% for turn in messages %}<|im_start|>{{ turn.role }}\n{{ turn.content or '' }}"
    "{% for call in turn.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}" + GENERATION_PROMPT
)
"""Writes tool calls with their arguments as JSON."""


def byte_tokenizer(template: str = CHATML, *, auto_bos: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer of 260 ids: the bytes, then MARKERS; with `auto_bos`, plain encoding puts <s> in front."""
    spare = count(256)
    symbols = [chr(b) if chr(b).isprintable() and b != 32 else chr(next(spare)) for b in range(256)]
    vocabulary = {symbol: b for b, symbol in enumerate(symbols)}
    vocabulary |= {marker: 256 + i for i, marker in enumerate(MARKERS)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(MARKERS))
    if auto_bos:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 259)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
    )


def tiny_llama(
    *,
    layers: int = 4,
    hidden: int = 32,
    vocab: int = 260,
    heads: int = 4,
    kv_heads: int = 2,
    tied: bool = False,
    seed: int = 0,
) -> LlamaForCausalLM:
    """A random float32 Llama; equal arguments give equal weights, the global random state stays as it is."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.2,  # wide enough that greedy text does not repeat one token
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).float().eval()


@torch.no_grad()
def ladder_llama(*, layers: int = 4, hidden: int = 8, vocab: int = 16, norm: float = 2.0) -> LlamaForCausalLM:
    """A Llama that climbs: id i is embedded as 100 i in every channel, layer k adds 2**k."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=8,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        mlp_bias=True,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).float().eval()
    for parameter in model.parameters():
        parameter.zero_()
    tokens = torch.arange(vocab)
    model.model.embed_tokens.weight.copy_(100.0 * tokens[:, None].expand(vocab, hidden))
    model.lm_head.weight[tokens, tokens % hidden] = 1.0
    model.model.norm.weight.fill_(norm)
    for k, layer in enumerate(model.model.layers):
        layer.mlp.down_proj.bias.fill_(2.0**k)
        layer.input_layernorm.weight.fill_(1.0)
        layer.post_attention_layernorm.weight.fill_(1.0)
    return model


def make_sample(id: str, ids: list[int], supervised: str) -> Sample:
    """A sample whose mask is drawn: "..SS.T" supervises tokens 2 and 3 as one span and token 5 as another."""
    span_ids = torch.tensor([-1 if mark == "." else ord(mark) for mark in supervised], dtype=torch.int32)
    return Sample(id, torch.tensor(ids, dtype=torch.int32), span_ids >= 0, span_ids)


def random_samples(number: int, *, vocab: int = 260, longest: int = 40, seed: int = 0) -> list[Sample]:
    """Samples of 8 to `longest` random tokens; the last two thirds of each are one span."""
    draw = torch.Generator().manual_seed(seed)
    samples = []
    for i in range(number):
        length = int(torch.randint(8, longest + 1, (1,), generator=draw))
        ids = torch.randint(0, vocab, (length,), generator=draw).tolist()
        samples.append(make_sample(f"s{i:03d}", ids, "." * (length // 3) + "S" * (length - length // 3)))
    return samples


@dataclass(frozen=True)
class GainConfig:
    family: str = "gain"


class GainDrafter(nn.Module):
    """The least a loop can train: one slot, a row's state is `gain`; row t counts iff t + 1 and t + 2 share a
    span."""

    def __init__(self):
        super().__init__()
        self.config = GainConfig()
        self.taps = (0,)
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("kept_ids", torch.arange(4), persistent=False)

    def index(self, tokens) -> RowIndex:
        pieces = [torch.arange(max(a, d + 1), b - 1) for d, a, b in spans(tokens)]
        source = torch.cat([torch.empty(0, dtype=torch.long), *pieces])
        return RowIndex(row=source - 1, slot=torch.zeros_like(source), source=source, slots=1)

    def rows(self, batch) -> Rows:
        index = self.index(batch.tokens)
        return Rows(index, self.gain.expand(len(index.row), 1))

    def head_weight(self) -> torch.Tensor:
        return self.gain


class TableObjective:
    """A loss that can be added up by hand: a row costs `gain` times its label's id, label 4 costs NaN, 7
    infinity."""

    def __init__(self, config, drafter, target):
        self.table = torch.arange(260.0)
        self.table[4] = float("nan")

    def count(self, index, batch) -> torch.Tensor:
        return torch.tensor([[float(len(index.row))]], dtype=torch.float64)

    def loss(self, rows, batch, head, counts) -> ObjectiveResult:
        cost = self.table[batch.tokens.ids[rows.index.source + 1]] * rows.state[:, 0] / counts[0, 0].float()
        zero = torch.zeros(1, dtype=torch.float64)
        stats = {
            "loss": cost.detach().double().sum()[None],
            "count": zero + len(cost),
            "alpha": zero,
            "agree": zero,
        }
        return ObjectiveResult(cost.sum(), stats)


class Bigram(nn.Module):
    """q of the next token depends on the last one only: what the target says after that token alone.

    A chain is drawn from q; a tree of depth d has top_k siblings at each level below the best one of the
    level before.
    """

    taps: tuple[int, ...] = ()
    logits_VV: torch.Tensor

    def __init__(self, target: Target):
        super().__init__()
        V = target.vocab_size
        ids, positions = torch.arange(V), torch.zeros(V, dtype=torch.int64)
        states = target.states(ids, positions, packed_layout(range(V + 1)))
        self.register_buffer("logits_VV", target.logits(states.final).float())

    def weights_read(self) -> tuple[int, int]:
        return self.logits_VV.shape[1], 0

    def start(self, num_requests: int, capacity: int) -> "BigramDrafting":
        return BigramDrafting(self.logits_VV)


class BigramDrafting:
    def __init__(self, logits_VV: torch.Tensor):
        self.logits_VV = logits_VV
        self.roots: dict[int, tuple[int, int]] = {}
        self.steps = 0

    def observe(self, observations) -> None:
        self.steps += 1
        for seen in observations:
            self.roots[seen.request] = (int(seen.next_ids[-1]), seen.start + len(seen.next_ids))

    def propose(self, requests, plan: Plan, sampler) -> list[Proposal]:
        make = self.chain if plan.shape == "chain" else self.tree
        return [make(request, plan, sampler) for request in requests]

    def chain(self, request: int, plan: Plan, sampler) -> Proposal:
        token, position = self.roots[request]
        tokens, laws = [], []
        for slot in range(plan.length):
            law = sampler.draft_law(self.logits_VV[token][None])
            [token] = sampler.draw(law, requests=[request], root_positions=[position], slots=[slot])
            tokens.append(token)
            laws.append(law)
            self.steps += 1
        return Proposal(
            torch.tensor(tokens),
            tuple(range(-1, plan.length - 1)),
            q=torch.cat(laws),
            ranked=self._ranked([self.roots[request][0], *tokens]),
        )

    def tree(self, request: int, plan: Plan, sampler) -> Proposal:
        token, parent = self.roots[request][0], -1
        tokens: list[int] = []
        parents: list[int] = []
        for _ in range(plan.length):
            best = self.logits_VV[token].topk(plan.top_k).indices.tolist()
            parents += [parent] * plan.top_k
            parent, token = len(tokens), best[0]
            tokens += best
            self.steps += 1
        return Proposal(
            torch.tensor(tokens), tuple(parents), ranked=self._ranked([self.roots[request][0], *tokens])
        )

    def _ranked(self, tokens: list[int]) -> torch.Tensor:
        return self.logits_VV[tokens].sort(descending=True, stable=True).indices[:, :20]


class TableStepper:
    """A drafter for `drafters.autoregressive.grow` whose logits are written down by path, the tokens from the
    root's child on; unknown paths get the logits of (). calls: what it was asked to step."""

    def __init__(self, table, *, kept_ids=None, vocab_size=None):
        self.table = {path: torch.tensor(logits) for path, logits in table.items()}
        width = len(next(iter(table.values())))
        self.kept_ids = torch.arange(width) if kept_ids is None else torch.tensor(kept_ids)
        self.vocab_size = vocab_size or width
        self.nodes, self.calls = {}, []

    def root_positions(self, requests):
        return [10 + request for request in requests]

    def root_logits(self, requests):
        self.nodes = {request: [] for request in requests}
        return torch.stack([self.table[()]] * len(requests))

    def step(self, requests, parents, tokens):
        assert len(requests) == len(parents) == len(tokens)
        self.calls.append((list(requests), list(parents), tokens.tolist()))
        rows = []
        for request, parent, token in zip(requests, parents, tokens.tolist(), strict=True):
            before = () if parent < 0 else self.nodes[request][parent]
            self.nodes[request].append((*before, token))
            rows.append(self.table.get((*before, token), self.table[()]))
        return torch.stack(rows)


class LawStepper:
    """A drafter for `drafters.autoregressive.grow` of one request with the text `text`; q(text): the law
    float32 [V] of the token behind a text."""

    def __init__(self, q: Callable[[tuple[int, ...]], torch.Tensor], text: tuple[int, ...]):
        self.q, self.text, self.vocab_size = q, text, len(q(text))
        self.kept_ids = torch.arange(self.vocab_size)
        self.nodes: list[tuple[int, ...]] = []

    def root_positions(self, requests) -> list[int]:
        return [len(self.text)]

    def root_logits(self, requests) -> torch.Tensor:
        return self.q(self.text).log()[None]

    def step(self, requests, parents, tokens) -> torch.Tensor:
        rows = []
        for parent, token in zip(parents, tokens.tolist(), strict=True):
            self.nodes.append((*(self.text if parent < 0 else self.nodes[parent]), token))
            rows.append(self.q(self.nodes[-1]).log())
        return torch.stack(rows)


class KnowingDrafter:
    """Knows the whole text (prompt and answer) of each request and is right as often as it is told.

    right(n): how many draft tokens behind a root at position n are right. A chain holds them and then wrong
    tokens; a tree holds at each depth a wrong token in front of the chain's, both behind the chain's last.
    """

    taps = (0,)

    def __init__(self, texts: list[list[int]], right, vocab: int):
        self.texts, self.right, self.vocab, self.steps = texts, right, vocab, 0
        self.known: dict[int, list[int]] = {}  # tokens 1 .. root of each request

    def start(self, num_requests, capacity):
        return self

    def observe(self, observations):
        for seen in observations:
            old = [] if seen.start == 0 else self.known[seen.request]
            assert len(old) == seen.start and len(seen.taps) == len(seen.final) == len(seen.next_ids)
            self.known[seen.request] = [*old, *seen.next_ids.tolist()]

    def propose(self, requests, plan, sampler):
        return [self._proposal(self.known[request], plan) for request in requests]

    def _proposal(self, known, plan) -> Proposal:
        n = len(known)
        text = next(text for text in self.texts if text[1 : n + 1] == known)
        ahead = (text[n + 1 :] + [0] * plan.length)[: plan.length]
        spoiled = [token + (depth >= self.right(n)) for depth, token in enumerate(ahead)]
        if plan.shape == "chain":
            tokens, parents = spoiled, list(range(-1, plan.length - 1))
        else:
            tokens = [token for right in spoiled for token in (right + 1, right)]
            parents = [2 * depth - 1 for depth in range(plan.length) for _ in range(2)]
        return Proposal(torch.tensor(tokens) % self.vocab, tuple(parents))

"""Eight architectures: the cache after every commit, and greedy text by chain and tree."""

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from spectrain.cache import KVCache
from spectrain.decode.engine import generate
from spectrain.decode.sampling import Sampling
from spectrain.proposal import Plan
from spectrain.target import Target, packed_layout
from spectrain.testing import KnowingDrafter

TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}  # float32; sums of another order
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SHAPE = SPECIAL | {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
HEADS = SHAPE | {"head_dim": 16}  # not hidden / heads
MIXED = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
BUILD = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**HEADS)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**HEADS, **EXPERTS)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **HEADS,
            **MIXED,
            attn_logit_softcapping=20.0,
            final_logit_softcapping=10.0,
            query_pre_attn_scalar=8,
        )
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            **SPECIAL, vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=128, initializer_range=0.3
        )
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**HEADS, sliding_window=5)),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(**HEADS, **MIXED, num_local_experts=4, num_experts_per_tok=2, rope_parameters=ROPE)
    ),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SHAPE)),
}
PROMPTS = [[5, 9, 13, 7, 3, 22, 41, 8, 30, 11, 12, 6], [7, 3, 22, 41, 8], [17], [60, 1, 33]]


@pytest.fixture(params=BUILD)
def target(request):
    return Target(BUILD[request.param]().float())


def run(target, ids, layout):
    return target.logits(target.states(torch.tensor(ids), layout.positions, layout).final)


def poison(cache):
    """NaN in every slot that holds no text, rejected nodes included."""
    for tensors in cache.layers.values():
        for tensor in tensors:
            for request in range(cache.num_requests):
                tensor[request, cache.committed[request] :] = float("nan")
    cache.written = list(cache.committed)


def path_to(node, parents):
    return [] if node < 0 else [*path_to(parents[node], parents), node]


def test_five_rounds_of_random_trees_leave_the_cache_of_a_fresh_run(target):
    """Four requests of unequal length, tree and acceptance; every slot without text is NaN before each call.

    After each commit: keys and values of each request equal those of its text run alone, and the logits along
    the committed path were those of that run.
    """
    generator = torch.Generator().manual_seed(2)
    draw = lambda low, high: int(torch.randint(low, high, (1,), generator=generator))  # noqa: E731
    cache, requests, accepted = KVCache(4, 64), [0, 1, 2, 3], []
    texts = [list(prompt) for prompt in PROMPTS]
    run(target, sum(texts, []), cache.extend(requests, [len(text) for text in texts]))
    cache.commit_all(requests, [range(len(text)) for text in texts])
    for sizes in ((5, 5, 5, 5), (1, 4, 4, 7), (6, 6, 2, 2), (1, 1, 1, 1), (7, 3, 5, 5)):
        poison(cache)
        trees = [[draw(-1, i) if i else -1 for i in range(size)] for size in sizes]
        tokens = [[draw(1, 64) for _ in tree] for tree in trees]
        flat = [request for request in requests for _ in trees[request]]
        logits = run(target, sum(tokens, []), cache.grow(flat, sum(trees, []))).split(list(sizes))
        paths = [path_to(draw(-1, size), tree) for size, tree in zip(sizes, trees, strict=True)]
        cache.commit_all(requests, paths)
        for r in requests:
            texts[r] += [tokens[r][node] for node in paths[r]]
            fresh, length = KVCache(1, 64), len(texts[r])
            expected = run(target, texts[r], fresh.extend([0], [length]))
            torch.testing.assert_close(logits[r][paths[r]], expected[length - len(paths[r]) :], **TOLERANCE)
            for layer, (keys, values) in fresh.layers.items():
                torch.testing.assert_close(cache.layers[layer][0][r, :length], keys[0, :length], **TOLERANCE)
                torch.testing.assert_close(
                    cache.layers[layer][1][r, :length], values[0, :length], **TOLERANCE
                )
        assert cache.committed == [len(text) for text in texts]
        accepted.append([len(path) for path in paths])
    assert all(len(set(counts)) > 1 for counts in accepted), accepted


def recomputed_text(target, prompt, length):
    """Greedy text, the whole of it run again for every token."""
    ids = list(prompt)
    for _ in range(length):
        ids.append(int(run(target, ids, Alone(len(ids)))[-1].argmax()))
    return ids


class Alone(packed_layout):
    def __init__(self, length):
        super().__init__((0, length))
        self.positions = torch.arange(length)


@pytest.mark.parametrize(
    "plan", [Plan("chain", 4), Plan("tree", 3, nodes=6, top_k=2)], ids=lambda plan: plan.shape
)
def test_greedy_text_equals_plain_text(target, plan):
    """Four prompts, three places; of 3 or 4 draft tokens 0, 1, 2 or all are right."""
    texts = [recomputed_text(target, prompt, 14) for prompt in PROMPTS]
    drafter = KnowingDrafter(texts, lambda n: (0, 2, 1, 9, 0)[n % 5], vocab=64)
    settings = {"sampling": Sampling(), "max_new_tokens": 14, "stop_ids": (), "batch_size": 3}
    plain, _ = generate(target, PROMPTS, **settings)
    fast, _ = generate(target, PROMPTS, **settings, drafter=drafter, plan=plan)
    assert [[*g.prompt_ids, *g.ids] for g in plain] == texts
    assert [g.ids for g in fast] == [g.ids for g in plain]
    assert {0, 1, 2, plan.length} <= {round.accepted for g in fast for round in g.rounds}

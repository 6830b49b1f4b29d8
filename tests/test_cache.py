"""The cache: what a node sees, what a commit keeps, on four architectures."""

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from spectrain.cache import KVCache, ancestors
from spectrain.target import Target, packed_layout

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
BUILD = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=8)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SHAPE,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            attn_logit_softcapping=20.0,
        )
    ),
}


@pytest.fixture(params=BUILD)
def target(request):
    return Target(BUILD[request.param]().float())


def run(target, ids, layout):
    return target.states(torch.tensor(ids), layout.positions, layout).final


def recomputed(target, ids):
    """States after the final norm of a text run alone in one call."""
    positions = torch.arange(len(ids))
    return target.states(torch.tensor(ids), positions, packed_layout((0, len(ids)))).final


def poison(cache):
    """NaN in every slot that holds no text, rejected nodes included, as in memory that nobody wrote."""
    for keys, values in cache.layers.values():
        for request in range(cache.num_requests):
            keys[request, cache.committed[request] :] = float("nan")
            values[request, cache.committed[request] :] = float("nan")
    cache.written = list(cache.committed)


def tree(nodes, generator):
    return [int(torch.randint(-1, i, (1,), generator=generator)) if i else -1 for i in range(nodes)]


def test_ancestors_of_a_small_tree():
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
    assert ancestors([-1, 0, 0, 2]).astype(int).tolist() == expected


def test_positions_are_committed_plus_depth():
    cache = KVCache(2, 16)
    assert cache.extend([1], [5]).positions.tolist() == [0, 1, 2, 3, 4]
    cache.commit(1, range(5))
    assert cache.grow([1, 1, 1, 0], [-1, 0, 0, -1]).positions.tolist() == [5, 6, 6, 0]
    assert cache.grow([1, 1], [1, 3]).positions.tolist() == [7, 8]


def test_a_full_cache_is_refused():
    cache = KVCache(1, 4)
    cache.extend([0], [4])
    with pytest.raises(ValueError, match="request 0: its cache of 4 slots is full"):
        cache.grow([0], [3])


def test_a_path_must_go_from_parent_to_child():
    cache = KVCache(1, 8)
    cache.grow([0, 0, 0], [-1, 0, 0])
    with pytest.raises(AssertionError, match="path"):
        cache.commit(0, [0, 1, 2])


def test_five_rounds_of_random_trees_equal_recomputation(target):
    """Four requests of unequal length and acceptance; stale slots are ruined before every call."""
    generator = torch.Generator().manual_seed(1)
    draw = lambda n: torch.randint(1, 40, (n,), generator=generator).tolist()  # noqa: E731
    cache, requests = KVCache(4, 64), [0, 1, 2, 3]
    texts = [draw(n) for n in (3, 11, 1, 6)]
    run(target, sum(texts, []), cache.extend(requests, [len(text) for text in texts]))
    cache.commit_all(requests, [range(len(text)) for text in texts])
    for nodes in (5, 1, 7, 4, 6):
        poison(cache)
        trees, tokens = [tree(nodes, generator) for _ in requests], [draw(nodes) for _ in requests]
        flat = [request for request in requests for _ in range(nodes)]
        states = run(target, sum(tokens, []), cache.grow(flat, sum(trees, []))).view(4, nodes, -1)
        paths = []
        for r in requests:
            for node in range(nodes):
                path = [node]
                while trees[r][path[0]] >= 0:
                    path.insert(0, trees[r][path[0]])
                expected = recomputed(target, texts[r] + [tokens[r][i] for i in path])[-1]
                torch.testing.assert_close(states[r, node], expected, atol=2e-4, rtol=2e-4)
            paths.append(path[: int(torch.randint(0, len(path) + 1, (1,), generator=generator))])
            texts[r] += [tokens[r][i] for i in paths[-1]]
        cache.commit_all(requests, paths)
        assert cache.committed == [len(text) for text in texts]


def test_commit_leaves_the_keys_of_a_fresh_run(target):
    cache, fresh = KVCache(1, 32), KVCache(1, 32)
    run(target, [5, 6, 7], cache.extend([0], [3]))
    cache.commit(0, range(3))
    run(target, [8, 9, 10, 11, 12], cache.grow([0] * 5, [-1, -1, 1, 1, 3]))
    cache.commit(0, [1, 3, 4])
    run(target, [5, 6, 7, 9, 11, 12], fresh.extend([0], [6]))
    for layer, tensors in cache.layers.items():
        for ours, expected in zip(tensors, fresh.layers[layer], strict=True):
            torch.testing.assert_close(ours[0, :6], expected[0, :6], atol=2e-4, rtol=2e-4)


def test_a_tree_grown_level_by_level_equals_the_tree_in_one_call(target):
    """Requests 0 and 2 of three, so that their slots are not neighbours."""
    parents, tokens = [-1, -1, 0, 1, 1, 4], [3, 4, 5, 6, 7, 8]
    caches = [KVCache(3, 32) for _ in range(2)]
    for cache in caches:
        run(target, [1, 2, 9, 8, 7], cache.extend([0, 2], [2, 3]))
        cache.commit_all([0, 2], [range(2), range(3)])
    whole = run(target, tokens * 2, caches[0].grow([0] * 6 + [2] * 6, parents * 2)).view(2, 6, -1)
    levels = []
    for level in ([0, 1], [2, 3, 4], [5]):
        some = [parents[i] for i in level]
        layout = caches[1].grow([0] * len(level) + [2] * len(level), some * 2)
        levels.append(run(target, [tokens[i] for i in level] * 2, layout).view(2, len(level), -1))
    torch.testing.assert_close(torch.cat(levels, 1), whole, atol=2e-4, rtol=2e-4)


def test_a_window_counts_depth_not_slots(target):
    """A branch of 9 nodes beside one twin: its slots are one more than its positions."""
    cache, tokens = KVCache(1, 32), list(range(20, 30))
    run(target, [5, 6, 7], cache.extend([0], [3]))
    cache.commit(0, range(3))
    states = run(target, tokens, cache.grow([0] * 10, [-1, -1, *range(1, 9)]))
    torch.testing.assert_close(
        states[-1], recomputed(target, [5, 6, 7, *tokens[1:]])[-1], atol=2e-4, rtol=2e-4
    )


def test_stale_slots_of_a_lone_chain_may_hold_nan():
    """Without a batch nothing behind the chain is read at all."""
    target = Target(BUILD["mistral"]().float())
    cache = KVCache(1, 32)
    text = list(range(1, 12))
    run(target, text, cache.extend([0], [11]))
    cache.commit(0, range(11))
    for keys, values in cache.layers.values():
        keys[0, 11:] = values[0, 11:] = float("nan")
    for token in (12, 13, 14):
        text.append(token)
        state = run(target, [token], cache.extend([0], [1]))
        cache.commit(0, [0])
        torch.testing.assert_close(state[0], recomputed(target, text)[-1], atol=2e-4, rtol=2e-4)


def test_a_token_outside_the_branch_changes_nothing(target):
    states = []
    for other in (20, 21):
        cache = KVCache(1, 32)
        run(target, [5, 6, 7], cache.extend([0], [3]))
        cache.commit(0, range(3))
        states.append(run(target, [8, other, 9], cache.grow([0] * 3, [-1, -1, 0])))
    assert torch.equal(states[0][[0, 2]], states[1][[0, 2]])


def test_a_new_request_at_a_used_place_starts_from_nothing(target):
    cache = KVCache(1, 32)
    run(target, list(range(1, 20)), cache.extend([0], [19]))
    cache.commit(0, range(19))
    cache.truncate(0, 0)
    poison(cache)
    state = run(target, [3, 4, 5], cache.extend([0], [3]))
    torch.testing.assert_close(state, recomputed(target, [3, 4, 5]), atol=2e-4, rtol=2e-4)

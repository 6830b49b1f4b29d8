"""What samples begin with alike is run once, and nobody can tell from the states."""

from dataclasses import replace

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
)

from spectrain import capture as module
from spectrain.capture import capture_batch
from spectrain.data.packing import pack
from spectrain.shared_prefix import LEAST, prefix_length, share
from spectrain.target import Target
from spectrain.testing import make_sample, tiny_llama

SIZES = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip
SYSTEM = list(range(20, 32))


def sample(name: str, *ids: int):
    return make_sample(name, [*SYSTEM, *ids], "." * (len(SYSTEM) + 1) + "S" * (len(ids) - 1))


SAMPLES = [sample("a", 5, 6, 7, 8), sample("b", 9, 1, 2), sample("c", 5, 6, 1, 4, 11, 12, 13)]


def windowed_with_soft_cap() -> Gemma2ForCausalLM:
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, sliding_window=6, query_pre_attn_scalar=8))


def windowed_with_sinks() -> GptOssForCausalLM:
    config = GptOssConfig(**SIZES, sliding_window=6, num_local_experts=2, num_experts_per_tok=1)
    return GptOssForCausalLM(config)


def test_the_row_run_holds_the_beginning_once():
    samples = [make_sample("x", [1, 2, 3, 4, 5], "..SSS"), make_sample("y", [1, 2, 6], "..S")]
    run, places, layout = share(pack(samples), 2)
    assert run.tolist() == [0, 1, 2, 3, 4, 7]
    assert places.tolist() == [0, 1, 2, 3, 4, 0, 1, 5]
    assert layout.offsets == (2, 5, 6)


def test_a_prefix_is_what_all_share_and_shorter_than_each():
    assert prefix_length(SAMPLES) == len(SYSTEM)
    assert prefix_length([SAMPLES[0], SAMPLES[2]]) == len(SYSTEM) + 2
    assert prefix_length(SAMPLES[:1]) == 0
    assert prefix_length([SAMPLES[0], make_sample("z", [1, *SYSTEM, 2], "." * 13 + "S")]) == 0
    equal = replace(SAMPLES[1], id="b2")
    assert prefix_length([SAMPLES[1], equal]) == len(SAMPLES[1].ids) - 1
    short = [
        make_sample(i, [*SYSTEM[: LEAST - 1], *ids], "." * 7 + "SS")
        for i, ids in (("s", [1, 2]), ("t", [3, 4]))
    ]
    assert prefix_length(short) == 0


@pytest.mark.parametrize("build", [tiny_llama, windowed_with_soft_cap, windowed_with_sinks])
def test_states_are_those_of_documents_run_whole(build, monkeypatch):
    torch.manual_seed(0)
    target = Target(build())
    rows = []
    states = target.states

    def counted(ids, *arguments, **settings):
        rows.append(len(ids))
        return states(ids, *arguments, **settings)

    monkeypatch.setattr(target, "states", counted)
    shared = capture_batch(target, SAMPLES, (0, 2))
    monkeypatch.setattr(module, "prefix_length", lambda samples: 0)
    whole = capture_batch(target, SAMPLES, (0, 2))
    assert rows == [len(SYSTEM) + 4 + 3 + 7, 3 * len(SYSTEM) + 4 + 3 + 7]
    assert torch.equal(shared.tokens.ids, whole.tokens.ids)
    for name in ("taps", "final", "lse"):
        torch.testing.assert_close(getattr(shared, name), getattr(whole, name), atol=2e-6, rtol=1e-5)
    assert torch.equal(shared.argmax, whole.argmax)


def test_fewer_rows_than_were_run_are_refused(monkeypatch):
    target = Target(tiny_llama())
    states = target.states

    def one_less(*arguments, **settings):
        found = states(*arguments, **settings)
        return replace(found, final=found.final[1:])

    monkeypatch.setattr(target, "states", one_less)
    with pytest.raises(RuntimeError, match=r"25 rows of final for 26 tokens \(samples a, b, c\)"):
        capture_batch(target, SAMPLES, (0,))


def test_a_recurrent_target_runs_documents_whole():
    torch.manual_seed(0)
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    kinds = ["conv", "full_attention"] * 2
    target = Target(Lfm2ForCausalLM(Lfm2Config(**sizes, layer_types=kinds, block_multiple_of=8)))
    row = capture_batch(target, SAMPLES, (0, 2))
    alone = torch.cat([capture_batch(target, [one], (0, 2)).final for one in SAMPLES])
    torch.testing.assert_close(row.final, alone, atol=2e-6, rtol=1e-5)
    tokens = pack(SAMPLES)
    run, places, layout = share(tokens, len(SYSTEM))
    shared = target.states(tokens.ids[run], tokens.positions[run], layout).final[places]
    torch.testing.assert_close(shared, alone, atol=2e-6, rtol=1e-5)

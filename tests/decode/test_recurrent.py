"""Targets with recurrent layers: text by chain, saved and replayed states, documents in one row, refusals."""

import pytest
import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from spectrain import recurrent
from spectrain.decode.engine import generate
from spectrain.decode.sampling import Sampling, law
from spectrain.proposal import Plan, Proposal
from spectrain.recurrent import RecurrentCache, check_state
from spectrain.target import Target, packed_layout
from spectrain.testing import KnowingDrafter

SPECIAL = {"vocab_size": 64, "hidden_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SHAPE = SPECIAL | {
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
LINEAR = ["linear_attention", "full_attention"] * 2


def lfm2(layers=4):
    shape = SHAPE | {"num_hidden_layers": layers, "layer_types": ["conv", "full_attention"] * (layers // 2)}
    return Lfm2ForCausalLM(Lfm2Config(**shape, conv_L_cache=3, block_multiple_of=8))


def mamba2(layers=3):
    return Mamba2ForCausalLM(
        Mamba2Config(
            **SPECIAL, num_hidden_layers=layers, num_heads=4, head_dim=16, state_size=8, n_groups=1,
            chunk_size=8, initializer_range=0.3,
        )
    )  # fmt: skip


BUILD = {
    "qwen3_next": lambda: Qwen3NextForCausalLM(
        Qwen3NextConfig(**SHAPE, **DELTA, head_dim=8, layer_types=LINEAR)
    ),
    "bamba": lambda: BambaForCausalLM(BambaConfig(**SHAPE, **MAMBA, attn_layer_indices=[1, 3])),
    "falcon_h1": lambda: FalconH1ForCausalLM(FalconH1Config(**SHAPE, **MAMBA, mamba_d_ssm=64, head_dim=8)),
    "granite_moe_hybrid": lambda: GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(
            **SHAPE, **MAMBA, layer_types=["mamba", "attention"] * 2, num_local_experts=4,
            num_experts_per_tok=2, shared_intermediate_size=32,
        )
    ),
    "lfm2": lfm2,
    "mamba2": mamba2,
}  # fmt: skip
PROMPT = [5, 9, 13, 7, 3, 22, 41, 8, 30, 11, 12, 6]
PROMPTS = [PROMPT, PROMPT[3:8], [17]]
CHAIN = Plan("chain", 4)
RIGHT = {"always": lambda n: 9, "never": lambda n: 0, "sometimes": lambda n: n % 3}


@pytest.fixture(params=BUILD)
def target(request):
    return Target(BUILD[request.param]().float())


def own_logits(target, ids):
    """The model's own logits on a text, by its own call without a cache of ours."""
    return target.model(
        input_ids=torch.tensor([ids]), use_cache=False, layout=packed_layout((0, len(ids)))
    ).logits[0]


@torch.no_grad()
def greedy_text(target, prompt, length):
    ids = list(prompt)
    for _ in range(length):
        ids.append(int(own_logits(target, ids)[-1].argmax()))
    return ids


@pytest.mark.case("O-X07")
def test_greedy_text_equals_plain_text_whatever_the_drafter(target, monkeypatch):
    """Three prompts at two places; tokens that wait for their replay run alone once three of them wait."""
    monkeypatch.setattr(recurrent, "REPLAY", 2)
    texts = [greedy_text(target, prompt, 24) for prompt in PROMPTS]
    settings = {"sampling": Sampling(), "max_new_tokens": 24, "stop_ids": (), "batch_size": 2}
    plain, _ = generate(target, PROMPTS, **settings)
    assert [[*g.prompt_ids, *g.ids] for g in plain] == texts
    for name, right in RIGHT.items():
        drafter = KnowingDrafter(texts, right, vocab=64)
        fast, _ = generate(target, PROMPTS, **settings, drafter=drafter, plan=CHAIN, law="rejection")
        assert [g.ids for g in fast] == [g.ids for g in plain], name
        counts = [r.accepted for r in fast[0].rounds]
        assert name != "always" or counts == [4, 4, 4, 4, 2]
        assert name != "never" or counts == [0] * 23


def test_few_tokens_run_twice_and_none_when_all_are_accepted(monkeypatch):
    """Sizes of the calls of a prompt of 12 that is continued by 6 tokens, chains of 2; at most two wait."""
    monkeypatch.setattr(recurrent, "REPLAY", 2)
    target = Target(mamba2().float())
    text = greedy_text(target, PROMPT, 7)
    calls, run = [], target._run

    def logged(call, taps):
        calls.append((call.replayed, len(call.ids) - call.replayed))
        return run(call, taps)

    monkeypatch.setattr(recurrent, "check_state", lambda target: None)
    monkeypatch.setattr(target, "_run", logged)
    for name, expected in {
        "never": [(0, 12), (0, 3), (1, 3), (2, 3), (3, 0), (0, 3), (1, 2), (2, 1)],
        "always": [(0, 12), (0, 3), (0, 3)],
    }.items():
        calls.clear()
        drafter = KnowingDrafter([text], RIGHT[name], vocab=64)
        generate(
            target, [PROMPT], sampling=Sampling(), max_new_tokens=7, stop_ids=(), batch_size=1,
            drafter=drafter, plan=Plan("chain", 2),
        )  # fmt: skip
        assert calls == expected, name


class Drawn(KnowingDrafter):
    """Draft tokens drawn from one fixed law."""

    q = torch.softmax(torch.arange(64) / 20.0, 0)

    def propose(self, requests, plan, sampler):
        roots, tokens = [len(self.known[r]) for r in requests], []
        for k in range(plan.length):
            q, slots = self.q.expand(len(requests), 64), [k] * len(requests)
            tokens.append(sampler.draw(q, requests=requests, root_positions=roots, slots=slots))
        parents, laws = tuple(range(-1, plan.length - 1)), self.q.expand(plan.length, 64)
        return [Proposal(torch.tensor(column), parents, q=laws) for column in zip(*tokens, strict=True)]


SAMPLED = {"temperature": 1.0, "top_k": 12}


def test_rejection_sampling_judges_by_the_targets_law_on_the_text_so_far(target):
    """The acceptance of every reached slot, sum min(p, q), against p by the model's own call."""
    sampling = Sampling(**SAMPLED, seed=3)
    texts, _ = generate(
        target, PROMPTS, sampling=sampling, max_new_tokens=12, stop_ids=(), batch_size=2,
        drafter=Drawn([], None, 64), plan=Plan("chain", 3), law="rejection",
    )  # fmt: skip
    for text in texts:
        ids, at = [*text.prompt_ids, *text.ids], len(text.prompt_ids) + 1
        with torch.no_grad():
            p = law(own_logits(target, ids), **SAMPLED)
        alphas = torch.minimum(p, Drawn.q).sum(-1)
        for round in text.rounds:
            expected = alphas[at - 1 : at - 1 + len(round.alphas)]
            torch.testing.assert_close(torch.tensor(round.alphas), expected, atol=1e-3, rtol=0)
            at += round.emitted
    assert {0, 1} <= {r.accepted for text in texts for r in text.rounds}


def test_sampled_tokens_follow_the_targets_law_through_a_drafter():
    """Chi-square of the third token given the first two, which a rejected or accepted draft lies between."""
    target = Target(lfm2(layers=2).float())
    n = 300
    texts, _ = generate(
        target, [[5, 6]] * n, sampling=Sampling(temperature=1.0, top_k=3, seed=2), max_new_tokens=3,
        stop_ids=(), batch_size=150, drafter=Drawn([], None, 64), plan=Plan("chain", 1), law="rejection",
    )  # fmt: skip
    seen = {}
    for text in texts:
        seen.setdefault(text.ids[:2], []).append(text.ids[2])
    head = max(seen, key=lambda ids: len(seen[ids]))
    with torch.no_grad():
        p = law(own_logits(target, [5, 6, *head])[-1:], temperature=1.0, top_k=3)[0]
    counts, expected = torch.bincount(torch.tensor(seen[head]), minlength=64), len(seen[head]) * p
    assert len(seen[head]) >= 60 and not counts[p == 0].any()
    assert ((counts - expected)[p > 0] ** 2 / expected[p > 0]).sum() < 13.8  # 2 degrees of freedom, 0.1%


@pytest.mark.case("O-C05")
def test_documents_of_one_row_do_not_reach_each_other(target):
    documents = [PROMPT, PROMPT[3:8], [17], PROMPT[::-1]]
    offsets = [0, 12, 17, 18, 30]
    positions = torch.cat([torch.arange(len(ids)) for ids in documents])
    row = torch.tensor(sum(documents, []))
    states = target.states(row, positions, packed_layout(offsets), taps=(0, 2))
    assert states.taps.shape == (30, 2, 32) and len(states.final) == 30
    for a, b, ids in zip(offsets, offsets[1:], documents, strict=False):
        alone = target.states(torch.tensor(ids), torch.arange(b - a), packed_layout((0, b - a)), taps=(0, 2))
        assert torch.equal(states.taps[a:b], alone.taps) and torch.equal(states.final[a:b], alone.final)
        torch.testing.assert_close(
            target.logits(states.final[a:b]), own_logits(target, ids), atol=1e-5, rtol=1e-5
        )


def test_a_tree_is_refused():
    target = Target(mamba2().float())
    with pytest.raises(
        ValueError, match="^plan.shape='tree': the target has recurrent layers.*expected chain$"
    ):
        generate(
            target, [PROMPT], sampling=Sampling(), max_new_tokens=3, stop_ids=(), batch_size=1,
            drafter=KnowingDrafter([], None, 64), plan=Plan("tree", 2, nodes=3, top_k=2),
        )  # fmt: skip
    with pytest.raises(AssertionError, match="request 0: no chain"):
        RecurrentCache(target, 1, 8).grow([0, 0, 0], [-1, 0, 0])


@pytest.mark.parametrize("build", [mamba2, lfm2])
def test_a_state_that_cannot_be_saved_is_refused(build, monkeypatch):
    """A saved state that the rejected draft runs on, in place of its copy."""
    target = Target(build().float())
    check_state(target)
    monkeypatch.setattr(recurrent, "deepcopy", lambda state: state)
    with pytest.raises(ValueError, match="its recurrent state cannot be saved and replayed$"):
        generate(target, [PROMPT], sampling=Sampling(), max_new_tokens=3, stop_ids=(), batch_size=1)

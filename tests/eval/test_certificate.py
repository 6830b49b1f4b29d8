"""The certificate passes the right engine, fails wrong texts, and excuses only what arithmetic explains."""

from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tqdm import tqdm

from spectrain.config import EvalConfig
from spectrain.decode.generation import Generation, Timing
from spectrain.decode.sampling import Sampling
from spectrain.decode_settings import DecodeRunConfig
from spectrain.eval import certificate, greedy
from spectrain.eval.certificate import certify, deal, examine
from spectrain.eval.greedy import (
    Difference,
    Question,
    bf16_step,
    compare_run,
    first_difference,
    greedy_certificate,
    merge,
)
from spectrain.eval.records import Text
from spectrain.eval.speed import EngineArm
from spectrain.target import Target, TargetStates
from spectrain.testing import Bigram

CHAIN = DecodeRunConfig(name="chain", dtype="float32", length=3)
TREE = replace(CHAIN, name="tree", proposal="tree", law="target_only", nodes=6, top_k=2)
QUESTIONS = [Question(f"q{i}", (5 + i, 9, 13 * i + 7), 64 * i) for i in range(6)]
UNTIMED = Timing(0.0, 0.0, 0.0, 0.0, 0, 0)


class Table:
    """A target that says fixed logits: row t of the table at place t of any text, whatever the tokens."""

    def __init__(self, rows: list[list[float]], dtype=torch.float32):
        self.rows, self.dtype, self.device = torch.tensor(rows, dtype=dtype), dtype, torch.device("cpu")

    def states(self, ids, positions, layout, *, taps=()):
        return TargetStates(self.rows[:0], self.rows[: len(ids)])

    def logits(self, final):
        return final


def text(*ids: int) -> Generation:
    return Generation((0,), ids, "length")


def decoded(
    target, drafter, run: DecodeRunConfig, tokens: int = 40, *, batch: int = 4, **changes
) -> list[Generation]:
    arm = EngineArm(target, drafter, replace(run, **changes), tokens, batch, seed=3, record_orders=True)
    return arm.decode([q.ids for q in QUESTIONS], [q.key for q in QUESTIONS])[0]


@pytest.mark.case("O-X09")
def test_a_bfloat16_tie_is_told_from_a_real_difference():
    assert bf16_step(10.03) == 0.0625
    rows = torch.tensor([[10.0, 10.03]])
    assert rows.argmax() == 1 and rows.bfloat16().argmax() == 0
    for gap, is_tie in ((0.03, True), (0.5, False)):
        found = first_difference(Table([[10.0, 10.0 + gap]]), "q", text(1), text(0), dtype="bfloat16")
        assert found.margin == pytest.approx(gap, abs=1e-5)
        assert found.is_tie == is_tie


@pytest.mark.case("O-X09")
def test_in_float32_only_a_gap_below_a_ten_thousandth_is_excused():
    for gap, is_tie in ((5e-5, True), (2e-4, False)):
        found = first_difference(Table([[1.0, 1.0 + gap]]), "q", text(1), text(0))
        assert found.is_tie == is_tie


def test_a_token_far_below_two_tied_ones_is_no_tie():
    found = first_difference(Table([[1.0, 1.0, -5.0]]), "q", text(0), text(2))
    assert found == Difference("q", 0, 0, 2, 6.0, greedy.MARGIN)
    assert not found.is_tie


def test_the_margin_is_taken_at_the_first_difference():
    rows = [[9.0, 0.0], [3.0, 1.0], [0.0, 0.0]]
    assert first_difference(Table(rows), "q", text(0, 0, 0), text(0, 1, 1)) == Difference(
        "q", 1, 0, 1, 2.0, greedy.MARGIN
    )


def test_a_text_that_ends_early_is_a_difference_without_excuse():
    found = first_difference(Table([[0.0, 0.0]] * 3), "q", text(0, 1, 1), text(0, 1))
    assert (found.place, found.is_tie) == (2, False)


def test_the_right_engine_passes(target, drafter):
    sampled = [replace(CHAIN, name="chain_t1", temperature=1.0)]
    sampled += [replace(TREE, name="tree_t1", temperature=1.0, top_p=0.9)]
    config = EvalConfig(
        runs=[CHAIN, TREE, *sampled],
        max_new_tokens=60,
        greedy_prompts=4,
        greedy_tokens=30,
        sampling_tokens=1500,
        seed=4,
    )
    texts = {
        run.name: [
            Text(q.id, "chat", 0, i, a, b, UNTIMED, UNTIMED)
            for i, (q, a, b) in enumerate(
                zip(QUESTIONS, decoded(target, drafter, run), decoded(target, None, run), strict=True)
            )
        ]
        for run in (CHAIN, TREE)
    }
    found = certify(target, {"": drafter}, QUESTIONS, config, texts)
    greedy, sampling = found["greedy"], found["sampling"]
    assert found["pass"] and greedy["pass"] and sampling["pass"]
    assert (greedy["dtype"], greedy["differences"], greedy["ties"]) == ("float32", 0, [])
    assert greedy["prompts"] == 4 and greedy["tokens"] == 120
    assert [(r["name"], r["identical"]) for r in greedy["runs"]] == [("chain", 6), ("tree", 6)]
    assert sampling["tokens"] >= 3000 and sampling["p_value"] > 0.01
    assert not any(r["impossible"] for r in sampling["runs"])
    assert all(r["acceptance"]["p_value"] < 1 for r in sampling["runs"])
    assert found["seconds"] > 0


@pytest.fixture(scope="module")
def two_dtypes(target):
    """The target with smaller embeddings, so that ties come up, and the same with its weights in bfloat16."""
    exact = deepcopy(target.model)
    with torch.no_grad():
        exact.model.embed_tokens.weight.mul_(3 / 8)
    rounded = deepcopy(exact)
    for parameter in rounded.parameters():  # not the rotary frequencies, which a loaded target has in float32
        parameter.data = parameter.bfloat16()
    return Target(exact), Target(rounded)


@pytest.mark.case("O-X09")
@pytest.mark.parametrize("run", [CHAIN, TREE], ids=["chain", "tree"])
def test_greedy_bfloat16_text_is_that_of_plain_bfloat16_decoding_but_for_ties(two_dtypes, run):
    exact, rounded = two_dtypes
    assert rounded.dtype == torch.bfloat16
    settings = {"dtype": "bfloat16", "tokens": 60, "batch": 2}
    plain, fast = (decoded(rounded, drafter, run, **settings) for drafter in (None, Bigram(rounded)))
    texts = [
        Text(q.id, "chat", 0, i, b, a, UNTIMED, UNTIMED)
        for i, (q, a, b) in enumerate(zip(QUESTIONS, plain, fast, strict=True))
    ]
    found = compare_run(exact, replace(run, dtype="bfloat16"), texts)
    assert found["difference_list"] == []
    ties = {tie["text"]: tie["place"] for tie in found["ties"]}  # a text is compared up to its first tie
    assert found["identical"] == len(QUESTIONS) - len(ties)
    assert sum(ties.get(text.id, len(text.plain.ids)) for text in texts) > 180  # of about 360 tokens
    assert sum(r.accepted for text in fast for r in text.rounds) > 20


def test_the_certificate_ends_where_progress_bars_are_switched_off(target, drafter, monkeypatch):
    # as TQDM_DISABLE=1 does
    monkeypatch.setattr(certificate, "progress_bar", lambda title, **kw: tqdm(disable=True, **kw))
    runs = [replace(CHAIN, name="chain_t1", temperature=1.0)]
    config = EvalConfig(runs=runs, max_new_tokens=10, sampling_tokens=40)
    assert 40 <= certify(target, {"": drafter}, QUESTIONS, config, {})["sampling"]["tokens"] < 60


def test_as_many_more_prompts_as_needed_are_taken_where_texts_stop_early(target, drafter, monkeypatch):
    stop = decoded(target, None, CHAIN)[0].ids[4]
    monkeypatch.setattr(type(target), "stop_ids", lambda self: (stop,))
    config = EvalConfig(runs=[CHAIN], greedy_prompts=1, greedy_tokens=30)
    found = certify(target, {"": drafter}, QUESTIONS, config, {"chain": []})["greedy"]
    lengths = [min(len(generation.ids), 30) for generation in decoded(target, None, CHAIN)]
    needed = next((n for n in range(1, len(lengths)) if sum(lengths[:n]) >= 30), len(lengths))
    assert found["prompts"] == needed > 1 and found["pass"]


def test_a_wrong_greedy_text_fails(target, drafter):
    plain = decoded(target, None, CHAIN)[0]
    wrong = replace(plain, ids=(*plain.ids[:10], (plain.ids[10] + 1) % 260, *plain.ids[11:]))
    found = first_difference(target, "q", plain, wrong)
    assert (found.place, found.is_tie) == (10, False)
    assert [d.place for d in greedy.not_argmax(target, "q", wrong)][0] == 10


def test_a_target_that_skips_its_filter_emits_impossible_tokens(target, drafter):
    texts = decoded(target, drafter, CHAIN, 60, temperature=1.0)
    found = examine(target, texts, [q.id for q in QUESTIONS], Sampling(temperature=1.0, top_p=0.5))
    assert found["p_value"] == 0.0 and found["impossible"]


def test_plain_decoding_is_held_to_the_largest_logit_of_an_independent_forward():
    rows = [[1.0, 1.00005], [0.0, 2.0], [3.0, 3.0]]
    found = greedy.not_argmax(Table(rows), "q", text(0, 0, 0))
    assert [(d.place, d.expected, d.found, d.is_tie) for d in found] == [(0, 1, 0, True), (1, 1, 0, False)]


def test_another_temperature_is_caught(target, drafter):
    texts = decoded(target, drafter, CHAIN, 400, temperature=1.5)
    names = [q.id for q in QUESTIONS]
    assert examine(target, texts, names, Sampling(temperature=1.5))["p_value"] > 0.01
    assert examine(target, texts, names, Sampling(temperature=1.0))["p_value"] < 1e-4


def test_a_token_at_the_edge_of_a_filter_is_listed_and_not_failed():
    law = torch.tensor([0.5, 0.3, 0.1999, 0.0001])
    logits = law.log()
    edge = Sampling(temperature=1.0, top_p=0.7995)
    assert sum(edge.law(logits[None])[0] > 0) == 2
    assert certificate.near_boundary(logits, 2, edge)
    assert not certificate.near_boundary(logits, 3, edge)
    assert not certificate.near_boundary(logits, 2, Sampling(temperature=1.0, top_p=0.79))
    for temperature in (0.5, 1.0):  # laws of ratio 0.9992 after the temperature
        tied = torch.tensor([0.5, 0.2501, 0.2499, 0.0]).log() * temperature
        assert certificate.near_boundary(tied, 2, Sampling(temperature=temperature, top_k=2))
    few = torch.tensor([0.9988, 0.0004, 0.0002, 0.0006]).log()  # near in mass, half as likely
    assert not certificate.near_boundary(few, 2, Sampling(temperature=1.0, top_k=3))
    assert not certificate.near_boundary(logits, 2, Sampling(temperature=1.0, top_k=2))


def test_work_goes_to_the_process_with_the_fewest_tokens_to_decode():
    assert deal(2, [6, 2, 2, 2, 2]) == ([0, 1, 1, 1, 0], [8, 6])
    assert deal(2, [2, 2, 2], [6, 0]) == ([1, 1, 1], [6, 6])
    assert deal(1, [5, 1]) == ([0, 0], [6])


def test_greedy_certificates_of_two_halves_of_the_prompts_are_that_of_all(target, drafter):
    config = EvalConfig(runs=[CHAIN, TREE], greedy_prompts=4, greedy_tokens=30)
    half = replace(config, greedy_prompts=2)
    whole = greedy_certificate(target, {"": drafter}, QUESTIONS, config, [CHAIN, TREE])
    parts = [
        greedy_certificate(target, {"": drafter}, questions, half, [CHAIN, TREE])
        for questions in (QUESTIONS[0:4:2], QUESTIONS[1:4:2])
    ]
    assert merge(parts) == whole
    assert (whole["prompts"], whole["tokens"], [p["tokens"] for p in whole["plans"]]) == (4, 120, [120, 120])


def test_a_difference_on_one_process_fails_the_certificate():
    part = {"prompts": 2, "tokens": 60, "differences": 0, "difference_list": [], "ties": [], "pass": True}
    part["plans"] = [{"proposal": "chain", "length": 3, "tokens": 60}]
    wrong = part | {"differences": 1, "difference_list": [{"text": "q1"}], "pass": False, "tokens": 40}
    wrong["plans"] = [part["plans"][0] | {"tokens": 40}]
    found = merge([part, wrong])
    assert (found["pass"], found["differences"], found["difference_list"]) == (False, 1, [{"text": "q1"}])
    assert (found["tokens"], found["prompts"]) == (100, 4)


def test_two_processes_share_prompts_and_sampled_runs(monkeypatch):
    done: dict[str, list] = {"greedy": [], "sampled": []}

    def greedy_part(target, drafters, questions, config, plans):
        done["greedy"].append([config.greedy_prompts, [q.id for q in questions]])
        plan = {"proposal": "chain", "length": 3, "tokens": 30 * config.greedy_prompts}
        found = {"prompts": config.greedy_prompts, "differences": 0, "difference_list": [], "ties": []}
        return {**found, "plans": [plan], "pass": True}

    def sampled(target, drafters, questions, config, run):
        done["sampled"].append(run.name)
        return {"name": run.name, "p_value": 0.5, "tokens": 100, "statistic": 0.1}

    monkeypatch.setattr(certificate, "greedy_certificate", greedy_part)
    monkeypatch.setattr(certificate, "sampled_run", sampled)
    sampling = replace(CHAIN, name="t1", temperature=1.0)
    config = EvalConfig(runs=[CHAIN, sampling], greedy_prompts=4, greedy_tokens=30, sampling_tokens=130)
    gathered: list[list] = []
    for rank in (0, 1):
        process = SimpleNamespace(process_index=rank, num_processes=2)
        monkeypatch.setattr(certificate, "PartialState", lambda process=process: process)
        monkeypatch.setattr(certificate, "gather_object", lambda mine: gathered.append(mine) or mine)
        certify(SimpleNamespace(dtype=torch.float32), {}, QUESTIONS, config, {"chain": []})
    # 130 tokens of sampling on the first; two arms of 30 tokens for each of four prompts: three on the second
    assert done["sampled"] == ["t1"]
    assert done["greedy"] == [[1, ["q3", "q4"]], [3, ["q0", "q1", "q2", "q5"]]]
    greedy_parts = [part for parts in (gathered[0], gathered[2]) for found in parts for part in found]
    assert merge(greedy_parts)["prompts"] == 4

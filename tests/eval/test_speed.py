"""Two arms under equal conditions, in turns."""

import numpy as np
import pytest

from spectrain.decode.generation import Generation, Round, Timing
from spectrain.decode_settings import DecodeRunConfig
from spectrain.eval.prompts import Prompt
from spectrain.eval.records import counters
from spectrain.eval.run import decode_in_turns
from spectrain.eval.speed import Arms, EngineArm
from spectrain.metrics import ratios

FULL = Round(drafted=3, depth=3, accepted=3, emitted=4, alphas=(1.0, 1.0, 1.0), bonus_cut=False)


class StopWatch:
    """An arm that emits 400 tokens after the prefill's in the seconds it is told, one entry per call."""

    def __init__(self, name: str, seconds: list[float], log: list[str], **conditions):
        self.name, self.seconds, self.log = name, iter(seconds), log
        self.told = {"dtype": "float32", "mode": "eager", **conditions}

    def decode(self, prompts, keys):
        self.log.append(self.name)
        rounds = (FULL,) * 100 if self.name == "speculative" else ()
        texts = [Generation((1,), tuple(range(401)), "length", rounds) for _ in prompts]
        steps = 100 if rounds else 400
        return texts, [Timing(0.5, next(self.seconds), 0.0, 0.0, steps, 0)]

    def warm_up(self, prompts, keys):
        self.decode(prompts, keys)

    def conditions(self):
        return self.told


def run_pairs(plain_s, fast_s, prompts: int, *, batch: int = 1, mode: str = "eager"):
    log: list[str] = []
    arms = Arms(StopWatch("plain", plain_s, log), [StopWatch("speculative", fast_s, log, mode=mode)])
    asked = [Prompt(f"p{i}", "chat", ("x",)) for i in range(prompts)]
    [texts] = decode_in_turns(
        arms, asked, batch=batch, encode=lambda *_: [1], decode=lambda ids: "", title="test"
    )
    return texts, log


def speeds(texts):
    found = ratios(counters(texts, slots=3).pooled(), length=3)
    return [found[name].item() for name in ("plain_throughput_tok_s", "throughput_tok_s", "eta")]


@pytest.mark.case("O-X10")
def test_warm_up_is_left_out_of_the_speed_up():
    texts, _ = run_pairs([9.0, 4.0, 4.1, 3.9], [12.0, 2.0, 2.1, 1.9], 3)
    np.testing.assert_allclose(speeds(texts), [100, 200, 2.0], rtol=1e-12)


@pytest.mark.case("O-X10")
def test_warm_up_left_in_would_be_wrong():
    texts, _ = run_pairs([0.0, 9.0, 4.0, 4.1, 3.9], [0.0, 12.0, 2.0, 2.1, 1.9], 4)
    np.testing.assert_allclose(speeds(texts), [76.19, 88.89, 1.167], rtol=1e-3)


@pytest.mark.case("O-X10")
def test_arms_in_different_modes_are_refused():
    with pytest.raises(ValueError, match=r"eta refused.*mode: 'eager' \(plain\), 'compiled' \(speculative\)"):
        run_pairs([9.0, 4.0], [12.0, 2.0], 1, mode="compiled")


def test_the_arms_take_turns_and_rotate_who_is_first():
    _, log = run_pairs([1.0] * 4, [1.0] * 4, 3)
    warm_up, *turns = (log[i : i + 2] for i in range(0, 8, 2))
    assert warm_up == turns[0] == turns[2] == ["plain", "speculative"]
    assert turns[1] == ["speculative", "plain"]


def test_a_queue_of_four_prompts_per_place_is_one_unit_and_shares_its_seconds():
    texts, _ = run_pairs([9.0, 4.0, 2.0], [9.0, 2.0, 1.0], 9, batch=2)
    assert [t.unit for t in texts] == [0] * 8 + [1]
    assert [t.timing.decode_s for t in texts] == [0.25] * 8 + [1.0]
    assert [t.plain_timing.steps for t in texts] == [50] * 8 + [400]


def test_a_later_turn_sees_the_plain_answers():
    asked = []

    def encode(turns, answers):
        asked.append((list(turns), list(answers)))
        return [1]

    log: list[str] = []
    arms = Arms(StopWatch("plain", [1.0] * 3, log), [StopWatch("speculative", [1.0] * 3, log)])
    [texts] = decode_in_turns(
        arms, [Prompt("p", "chat", ("a", "b"))], batch=1, encode=encode, decode=lambda ids: "yes", title="t"
    )
    assert asked == [(["a"], []), (["a"], []), (["a", "b"], ["yes"])]  # the first is the warm-up
    assert [(t.turn, t.unit) for t in texts] == [(0, 0), (1, 0)]


def test_one_baseline_serves_several_runs():
    log: list[str] = []
    fast = [StopWatch("speculative", [9.0, s], log) for s in (2.0, 1.0)]
    found = decode_in_turns(
        Arms(StopWatch("plain", [9.0, 4.0], log), fast),
        [Prompt("p", "chat", ("x",))],
        batch=1,
        encode=lambda *_: [1],
        decode=lambda ids: "",
        title="t",
    )
    assert [speeds(texts)[2] for texts in found] == [2.0, 4.0]


def test_a_cpu_is_warmed_up_with_the_first_tokens_of_the_texts(target, drafter, monkeypatch):
    decoded = []
    decode = EngineArm.decode
    monkeypatch.setattr(
        EngineArm, "decode", lambda arm, *a: decoded.append(found := decode(arm, *a)) or found
    )
    for limit in (8, 40):
        run = DecodeRunConfig(name="chain", dtype="float32", length=3)
        EngineArm(target, drafter, run, limit, 1, 0).warm_up([[5, 9, 13]], [0])
    assert [len(texts[0].ids) for texts, _ in decoded] == [8, 16]


def test_the_arms_of_the_engine_have_equal_conditions(target, drafter):
    run = DecodeRunConfig(name="chain", dtype="float32", length=3)
    plain, fast = (EngineArm(target, d, run, 8, 1, 0) for d in (None, drafter))
    assert plain.conditions() == fast.conditions()
    (plain_texts, plain_s), (texts, fast_s) = Arms(plain, [fast]).decode([[5, 9, 13]], [0])
    assert plain_texts[0].ids == texts[0].ids
    assert plain_s.steps == 7 and sum(r.emitted for r in texts[0].rounds) == 7
    assert min(plain_s.decode_s, fast_s.decode_s) > 0

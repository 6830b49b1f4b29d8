"""The axes of the report's pictures."""

from spectrain.eval.plots import ticks


def test_ticks_are_round_and_span_the_values():
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(1, 2.79) == [1, 1.5, 2, 2.5, 3]
    assert ticks(2, 2) == sorted(ticks(2, 2)) and len(ticks(2, 2)) >= 2

"""The plan of a training run: which samples an optimizer step reads, and in which rows."""

import pytest

from spectrain.batches import deal, plan_steps, shuffled
from spectrain.config import TrainConfig
from spectrain.testing import random_samples


def test_a_pass_reads_every_sample_once_in_an_order_of_seed_and_pass():
    lengths = [len(sample.ids) for sample in random_samples(20)]
    config = TrainConfig(batch_tokens=100, micro_tokens=50, passes=2)
    plan = plan_steps(lengths, config)
    for number in (0, 1):
        assert sorted(i for s in plan if s.pass_number == number for i in s.samples) == list(range(20))
    assert all(sum(lengths[i] for i in step.samples) <= 100 for step in plan)
    assert shuffled(20, 0, 0) != shuffled(20, 0, 1) != shuffled(20, 1, 1)
    assert shuffled(6, 0, 0) == [0, 2, 1, 5, 4, 3]


@pytest.mark.parametrize(("passes", "max_steps", "steps"), [(1, 0, 5), (2.5, 0, 13), (0.1, 0, 1), (4, 7, 7)])
def test_passes_and_max_steps_cut_the_plan(passes, max_steps, steps):
    config = TrainConfig(batch_tokens=20, micro_tokens=20, passes=passes, max_steps=max_steps)
    assert len(plan_steps([10] * 10, config)) == steps


def test_rows_are_dealt_about_equally():
    assert deal([0, 1, 2, 3], [5, 4, 3, 3], 8, 2) == [[[0, 3]], [[1, 2]]]
    assert deal([0, 1], [5, 4], 8, 3) == [[[0]], [[1]], []]
    assert deal([0, 1, 2], [3, 3, 3], 6, 1) == [[[0, 2], [1]]]


def test_rows_hold_no_more_than_micro_tokens():
    lengths = [5, 5, 5, 5]
    rows = deal(range(4), lengths, 8, 1)[0]
    assert sorted(map(tuple, rows)) == [(0,), (1,), (2,), (3,)]

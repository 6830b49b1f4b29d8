import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrain.data.packing import Sample, pack, plan_rows


def sample(name, span_ids):
    span_ids = torch.tensor(span_ids, dtype=torch.int32)
    ids = torch.arange(len(span_ids), dtype=torch.int32) + 10 * int(name)
    return Sample(name, ids, span_ids >= 0, span_ids)


@pytest.mark.case("O-T08")
def test_positions_restart_in_every_document():
    batch = pack([sample("0", [0] * 5), sample("1", [0] * 4)])
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert batch.document_ids.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert batch.offsets == (0, 5, 9)


@pytest.mark.case("O-T08")
def test_spans_that_meet_at_a_seam_stay_two():
    batch = pack([sample("0", [-1, 0, 0]), sample("1", [0, -1, 1])])
    assert batch.span_ids.tolist() == [-1, 0, 0, 1, -1, 2]
    assert batch.loss_mask.tolist() == [False, True, True, True, False, True]


def test_a_sample_without_spans_takes_no_span_number():
    assert pack([sample("0", [-1, -1]), sample("1", [-1, 0])]).span_ids.tolist() == [-1, -1, -1, 0]


def test_rows_are_consecutive_and_closed_when_the_next_does_not_fit():
    assert plan_rows([3, 2, 4, 1], range(4), 5) == [[0, 1], [2, 3]]
    assert plan_rows([3, 2, 4, 1], [2, 0, 1, 3], 5) == [[2], [0, 1], [3]]


def test_a_sample_longer_than_a_row_is_an_error_that_names_the_key():
    with pytest.raises(ValueError, match=r"6 tokens .*train\.micro_tokens=5"):
        plan_rows([1, 6], range(2), 5)


@st.composite
def some_samples(draw):
    lists = st.lists(st.integers(0, 2).map(lambda k: k - 1), min_size=1, max_size=9)
    return [
        sample(str(i), span_ids) for i, span_ids in enumerate(draw(st.lists(lists, min_size=1, max_size=12)))
    ]


@pytest.mark.case("O-T08")
@settings(deadline=None, max_examples=100)
@given(samples=some_samples(), max_tokens=st.integers(9, 30), seed=st.integers(0, 99))
def test_packing_keeps_every_sample_whole_and_apart(samples, max_tokens, seed):
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed)).tolist()
    rows = plan_rows([len(s.ids) for s in samples], order, max_tokens)
    assert [i for row in rows for i in row] == order
    for row in rows:
        batch = pack([samples[i] for i in row])
        assert len(batch) <= max_tokens
        seen: set[int] = set()
        for d, i in enumerate(row):
            a, b = batch.offsets[d : d + 2]
            assert batch.sample_ids[d] == samples[i].id
            assert batch.ids[a:b].tolist() == samples[i].ids.tolist()
            assert batch.loss_mask[a:b].tolist() == samples[i].loss_mask.tolist()
            assert batch.positions[a:b].tolist() == list(range(b - a))
            assert set(batch.document_ids[a:b].tolist()) == {d}
            spans = set(batch.span_ids[a:b].tolist()) - {-1}
            assert len(spans) == len(set(samples[i].span_ids.tolist()) - {-1})
            assert not spans & seen
            seen |= spans

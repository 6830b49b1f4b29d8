import pytest
import torch

from spectrain.drafters.vocab import choose_kept_ids, coverage, forced_ids, read_kept_ids, vocabulary_maps
from spectrain.testing import byte_tokenizer

KEPT = torch.tensor([0, 2, 3, 7, 9])


def read(d2t, t2d=None, num_kept=5, num_target=10):
    return read_kept_ids(d2t, t2d, num_kept=num_kept, num_target=num_target, source="draft.safetensors")


@pytest.mark.case("O-V01")
def test_d2t_holds_offsets_and_t2d_marks_the_kept_ids():
    maps = vocabulary_maps(KEPT, 10)
    assert maps["d2t"].tolist() == [0, 1, 1, 4, 5]
    assert maps["t2d"].nonzero()[:, 0].tolist() == [0, 2, 3, 7, 9]
    assert (maps["d2t"].dtype, maps["t2d"].dtype, maps["t2d"].shape) == (torch.int64, torch.bool, (10,))


@pytest.mark.case("O-V01")
def test_written_maps_are_read_back():
    assert read(**vocabulary_maps(KEPT, 10)).tolist() == KEPT.tolist()


@pytest.mark.case("O-V01")
@pytest.mark.parametrize(
    ("d2t", "why"),
    [
        ([0, 2, 3, 7, 9], "absolute ids"),
        ([0, 1, 0, 4, 5], "an id twice"),
        ([0, 1, -1, 4, 5], "falling"),
        ([-1, 1, 1, 4, 5], "below zero"),
        ([0, 1, 1, 4, 6], "past the end"),
    ],
)
def test_maps_that_are_no_offsets_are_refused(d2t, why):
    with pytest.raises(ValueError, match=r"draft\.safetensors: d2t gives .*offsets"):
        read(torch.tensor(d2t))


@pytest.mark.case("O-V01")
@pytest.mark.parametrize("marked", [[0, 2, 3, 7], [0, 2, 3, 7, 8], [0, 1, 2, 3, 7, 9]])
def test_a_t2d_that_contradicts_d2t_is_refused(marked):
    t2d = torch.zeros(10, dtype=torch.bool)
    t2d[marked] = True
    with pytest.raises(ValueError, match="t2d does not mark"):
        read(vocabulary_maps(KEPT, 10)["d2t"], t2d)


@pytest.mark.case("O-V01")
def test_maps_may_be_missing_only_where_every_id_is_kept():
    assert vocabulary_maps(torch.arange(4), 4) == {}
    assert read(None, num_kept=4, num_target=4).tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="no d2t, but 5 draft ids"):
        read(None)


def test_a_d2t_of_another_size_is_refused():
    with pytest.raises(ValueError, match="d2t has 5 entries for 6"):
        read(vocabulary_maps(KEPT, 10)["d2t"], num_kept=6)


@pytest.mark.case("O-V02")
def test_rows_past_the_tokenizer_are_never_kept():
    counts = torch.zeros(16, dtype=torch.int64)
    counts[3], counts[12] = 5, 9
    kept = choose_kept_ids(counts, 6, num_tokens=10)
    assert kept.tolist() == [0, 1, 2, 3, 4, 5]
    assert kept.max() <= 9


def test_the_most_frequent_ids_are_kept_in_ascending_order():
    assert choose_kept_ids(torch.tensor([0, 5, 1, 9, 5, 0]), 3, num_tokens=6).tolist() == [1, 3, 4]


def test_equal_counts_and_unseen_ids_go_to_the_lowest():
    assert choose_kept_ids(torch.tensor([0, 0, 2, 2, 2, 7]), 3, num_tokens=6).tolist() == [2, 3, 5]
    assert choose_kept_ids(torch.tensor([0, 0, 0, 0, 1, 0]), 3, num_tokens=6).tolist() == [0, 1, 4]


def test_stop_tokens_are_kept_though_never_seen():
    assert choose_kept_ids(torch.tensor([9, 9, 9, 0, 0, 0]), 3, num_tokens=6, forced=[5, 4, 5]).tolist() == [
        0,
        4,
        5,
    ]


def test_counts_may_be_shorter_than_the_tokenizer():
    assert choose_kept_ids(torch.tensor([0, 1]), 2, num_tokens=6, forced=[5]).tolist() == [1, 5]


def test_added_tokens_that_training_supervises_are_forced():
    """Ids 256 to 259 are added; 257 and 259 occur, 97 occurs and is no added token."""
    counts = torch.zeros(260, dtype=torch.int64)
    counts[[97, 257, 259]] = torch.tensor([5, 1, 2])
    assert forced_ids(byte_tokenizer(), counts, [258]) == {257, 258, 259}


def test_an_added_token_past_the_counts_is_not_forced():
    assert forced_ids(byte_tokenizer(), torch.ones(258, dtype=torch.int64), []) == {256, 257}


@pytest.mark.parametrize(("num_kept", "forced"), [(7, []), (1, [1, 2]), (0, [])])
def test_impossible_sizes_are_refused_with_their_key(num_kept, forced):
    with pytest.raises(ValueError, match=f"drafter.draft_vocab={num_kept}: expected"):
        choose_kept_ids(torch.ones(6, dtype=torch.int64), num_kept, num_tokens=6, forced=forced)


@pytest.mark.case("O-V02")
def test_a_forced_id_past_the_tokenizer_is_refused():
    with pytest.raises(ValueError, match=r"forced ids \[6\]"):
        choose_kept_ids(torch.ones(16, dtype=torch.int64), 3, num_tokens=6, forced=[6])


@pytest.mark.case("O-V03")
def test_kept_mass_and_coverage_are_those_of_the_whole_vocabulary():
    kept = torch.tensor([0, 1, 2])
    inside = vocabulary_maps(kept, 4)["t2d"]
    laws = torch.tensor([[2.0, 1, 0, 3], [3, 1, 0, 2]]).softmax(-1)
    torch.testing.assert_close(laws[:, inside].sum(-1), torch.tensor([0.356086, 0.763117]), atol=1e-6, rtol=0)
    renormalised = laws[1, inside] / laws[1, inside].sum()
    torch.testing.assert_close(renormalised, torch.tensor([0.843795, 0.114195, 0.042010]), atol=1e-6, rtol=0)
    best = laws.argmax(-1)
    assert inside[best].tolist() == [False, True]
    assert coverage(kept, torch.bincount(best)) == 0.5

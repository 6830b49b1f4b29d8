"""Depths, bits and links of trees, drawn by hand and at odd sizes."""

import pytest
import torch

from spectrain.cache import ancestors
from spectrain.kernels.tree_build import reference
from spectrain.kernels.tree_build_triton import launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where the kernels run
FORMS = pytest.mark.parametrize("form", [launch, reference])
FIELDS = ("depths", "positions", "bits", "first_child", "next_sibling")


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def random_trees(counts, places):
    """Parents of random trees, and rubbish behind them."""
    parents = ints([[77] * places] * len(counts))
    for row, count in zip(parents, counts, strict=True):
        row[:count] = ints([int(torch.randint(-1, i, (1,))) if i else -1 for i in range(count)])
    return parents


@FORMS
def test_a_small_tree_is_what_was_drawn(form):
    tree = form(ints([[-1, 0, 0, 2]]), ints([4]), ints([10]))
    assert tree.depths.tolist() == [[0, 1, 1, 2]]
    assert tree.positions.tolist() == [[10, 11, 11, 12]]
    assert tree.bits.tolist() == [[[0b0001], [0b0011], [0b0101], [0b1101]]]
    assert tree.first_child.tolist() == [[0, 1, -1, 3, -1]]
    assert tree.next_sibling.tolist() == [[-1, 2, -1, -1]]


@FORMS
def test_places_without_a_node_hold_nothing(form):
    tree = form(ints([[-1, -1, 0], [0, 0, 0]]), ints([2, 0]), ints([5, 6]))
    assert tree.depths.tolist() == [[0, 0, 0], [0, 0, 0]]
    assert tree.positions.tolist() == [[5, 5, 0], [0, 0, 0]]
    assert tree.bits.tolist() == [[[1], [2], [0]], [[0], [0], [0]]]
    assert tree.first_child.tolist() == [[0, -1, -1, -1], [-1, -1, -1, -1]]
    assert tree.next_sibling.tolist() == [[1, -1, -1], [-1, -1, -1]]


@pytest.mark.parametrize("counts", [(1,), (63, 20, 1), (130, 64)])
def test_random_trees_of_odd_sizes_equal_the_reference(counts):
    parents = random_trees(counts, max(counts))
    arguments = parents, ints(counts), ints(range(len(counts)))
    ours, expected = launch(*arguments), reference(*arguments)
    for field in FIELDS:
        assert torch.equal(getattr(ours, field), getattr(expected, field)), field


def test_the_bits_are_the_ancestors():
    (parents,) = random_trees((63,), 63).tolist()
    bits = launch(ints([parents]), ints([63]), ints([0])).bits[0]
    unpacked = (bits[:, :, None] >> torch.arange(32, device=DEVICE) & 1).flatten(1)[:, :63]
    assert torch.equal(unpacked.bool().cpu(), torch.from_numpy(ancestors(parents)))


@FORMS
def test_node_31_is_the_sign_bit_and_node_32_begins_a_word(form):
    tree = form(ints([[*range(-1, 32)]]), ints([33]), ints([0]))
    assert tree.bits[0, 30:].tolist() == [[2**31 - 1, 0], [-1, 0], [-1, 1]]

"""The accepted path moves down in place in every layer; recurrent states go back to the last kept token."""

import pytest
import torch

from spectrain.kernels import commit_triton, state_commit_triton
from spectrain.kernels.commit import Table, reference
from spectrain.kernels.state_commit import reference as state_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where the kernels run
COMMIT = pytest.mark.parametrize("form", [commit_triton.launch, reference])
STATE = pytest.mark.parametrize("form", [state_commit_triton.launch, state_reference])


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def cache(requests, slots, width, dtype):
    """Each number says its request and slot."""
    numbers = torch.arange(requests * slots, device=DEVICE).view(requests, slots, 1, 1)
    return numbers.expand(requests, slots, 1, width).to(dtype).contiguous()


@COMMIT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_path_moves_to_the_end_of_the_text(form, dtype):
    """Request 1 keeps nodes 1, 3, 4 behind 3 tokens, request 0 nodes 0, 2 behind 5."""
    layers = [cache(2, 10, 3, dtype) for _ in range(4)]
    form(Table.of(layers), ints([1, 0]), ints([3, 5]), ints([[1, 3, 4], [0, 2, 9]]), ints([3, 2]))
    for layer in layers:
        assert layer[0, :, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 7, 7, 8, 9]
        assert layer[1, :, 0, 0].tolist() == [10, 11, 12, 14, 16, 17, 16, 17, 18, 19]
        assert torch.equal(layer[..., :1].expand_as(layer), layer)


@COMMIT
def test_an_empty_path_moves_nothing(form):
    layer = cache(1, 6, 1, torch.float32)
    form(Table.of([layer]), ints([0]), ints([2]), ints([[3, 1]]), ints([0]))
    assert torch.equal(layer, cache(1, 6, 1, torch.float32))


@COMMIT
def test_layers_of_several_shapes_move_alike(form):
    layers = [cache(1, 6, 1025, torch.float32), cache(1, 6, 63, torch.bfloat16)]
    tables = Table.of(layers)
    form(tables, ints([0]), ints([1]), ints([[1, 2]]), ints([2]))
    assert len(tables) == 2
    for layer in layers:
        assert layer[0, :, 0].float().amin(1).tolist() == [0, 2, 3, 3, 4, 5]
        assert layer[0, :, 0].float().amax(1).tolist() == [0, 2, 3, 3, 4, 5]


def test_a_table_needs_slots_that_lie_one_after_the_other():
    with pytest.raises(AssertionError, match="strides"):
        Table.of([torch.zeros(2, 4, 3, 3).transpose(1, 2)])


@STATE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 63, 1030])
def test_a_state_is_the_snapshot_after_the_last_accepted_token(form, dtype, width):
    """Three rows of state, of which 2 and 0 ran four tokens; 3 and 1 of their draft tokens were kept."""
    states = [torch.full((3, *shape), -1.0, dtype=dtype, device=DEVICE) for shape in ((width,), (2, 2))]
    snapshots = [cache(2, 4, width, dtype)[:, :, 0], cache(2, 4, 4, dtype).view(2, 4, 2, 2)]
    form(states, snapshots, ints([2, 0]), ints([3, 1]))
    for state in states:
        assert [row.unique().tolist() for row in state] == [[5], [-1], [3]]

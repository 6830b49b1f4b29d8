"""`state_commit` on a GPU: one kernel per layer's tensor; nothing is read on the host."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from spectrain.kernels.aot import Launch

UNITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
BLOCK = 1024


def launch(states, snapshots, requests_B, accepted_B) -> None:
    """See `state_commit`."""
    for state, taken in zip(states, snapshots, strict=True):
        assert state.is_contiguous() and taken.is_contiguous() and state.dtype == taken.dtype
        unit = UNITS[state.element_size()]
        width = state[0].numel()
        restore_state[(len(requests_B), triton.cdiv(width, BLOCK))](
            state.view(unit), taken.view(unit), requests_B, accepted_B, taken.shape[1], width, BLOCK=BLOCK
        )


def launches() -> Iterator[Launch]:
    """For `spectrain.kernels.aot`."""
    tables = {"requests": "*i32", "accepted": "*i32"}
    for size in (2, 4):
        unit = f"*i{8 * size}"
        signature = {"state": unit, "snapshots": unit, **tables, "depth": "i32", "width": "i32:16"}
        yield Launch(restore_state, f"{size} bytes", signature, {"BLOCK": BLOCK}, num_warps=4, num_stages=3)


@triton.jit
def restore_state(state, snapshots, requests, accepted, depth, width, BLOCK: tl.constexpr):
    """One program per request and BLOCK numbers of a state."""
    b = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = b * depth + tl.load(accepted + b)
    kept = tl.load(snapshots + row * width + column, mask=column < width, other=0)
    tl.store(state + tl.load(requests + b).to(tl.int64) * width + column, kept, mask=column < width)

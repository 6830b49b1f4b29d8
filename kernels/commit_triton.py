"""`commit` on a GPU: one kernel per table moves the slots of all its tensors; nothing is read on the host.

A column moves in the order of i, each by one thread, so that what is overwritten has been read.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from spectrain.kernels.aot import Launch

UNITS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
BLOCK = 1024


def launch(tables, requests_B, lengths_B, path_BP, accepted_B) -> None:
    """See `commit`."""
    for table in tables:
        _, S, *rest = table.tensors[0].shape
        width = torch.Size(rest).numel()
        move_slots[(len(table.tensors), len(requests_B), triton.cdiv(width, BLOCK))](
            table.pointers, requests_B, lengths_B, path_BP, accepted_B, S, path_BP.shape[1], width,
            UNIT=UNITS[table.tensors[0].element_size()], BLOCK=BLOCK,
        )  # fmt: skip


def launches() -> Iterator[Launch]:
    """For `spectrain.kernels.aot`."""
    pointers = {"pointers": "*i64", **dict.fromkeys(("requests", "lengths", "path", "accepted"), "*i32")}
    signature = {**pointers, "S": "i32", "P": "i32", "width": "i32:16"}
    for size in (2, 4):
        constants = {"UNIT": UNITS[size], "BLOCK": BLOCK}
        yield Launch(move_slots, f"{size} bytes", signature, constants, num_warps=4, num_stages=3)


@triton.jit
def move_slots(
    pointers, requests, lengths, path, accepted, S, P, width, UNIT: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per tensor, request and BLOCK columns of a slot."""
    b = tl.program_id(1)
    base = tl.load(pointers + tl.program_id(0)).to(tl.pointer_type(UNIT))
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(requests + b).to(tl.int64) * S + tl.load(lengths + b)
    for i in range(0, tl.load(accepted + b)):
        node = tl.load(path + b * P + i)
        moves = column < tl.where(node != i, width, 0)
        held = tl.load(base + (first + node) * width + column, mask=moves, other=0)
        tl.store(base + (first + i) * width + column, held, mask=moves)

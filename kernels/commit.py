"""Keep the accepted nodes of each request as text, in place, in the keys and values of every layer.

    slot length_b + i  <-  slot length_b + path_bi      for i = 0 .. accepted_b - 1

With length 5 and path (0, 2), slot 7 moves to 6. A path ascends, so path_bi >= i: what is written has been
read, as long as each column moves in the order of i, which one thread does. Bytes are moved, whatever their
dtype. Legend: B requests, P places of a path, R rows of the cache, S slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Table:
    """Tensors of one shape and element size, and where they lie (int64, on their device): one kernel moves
    rows of all of them. A table is made once for tensors that stay where they are."""

    tensors: tuple[torch.Tensor, ...]
    pointers: torch.Tensor

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> "list[Table]":
        """One table per shape and element size, in the order of the tensors."""
        alike: dict[tuple, list[torch.Tensor]] = {}
        for tensor in tensors:
            assert tensor.is_contiguous(), f"strides {tensor.stride()} of shape {tuple(tensor.shape)}"
            alike.setdefault((tensor.shape, tensor.element_size()), []).append(tensor)
        return [
            Table(tuple(some), torch.tensor([t.data_ptr() for t in some], device=some[0].device))
            for some in alike.values()
        ]


def commit(
    tables: Sequence[Table],
    requests_B: torch.Tensor,
    lengths_B: torch.Tensor,
    path_BP: torch.Tensor,
    accepted_B: torch.Tensor,
) -> None:
    """Move slots of tensors [R, S, ...]. All int32: requests: rows of the cache, each at most once; lengths:
    committed tokens; path: nodes from the root's child on, of which the first `accepted` count."""
    if requests_B.device.type == "cpu":
        reference(tables, requests_B, lengths_B, path_BP, accepted_B)
    else:
        from spectrain.kernels.commit_triton import launch

        launch(tables, requests_B, lengths_B, path_BP, accepted_B)


def reference(tables, requests_B, lengths_B, path_BP, accepted_B) -> None:
    """The same by one gather and scatter per tensor."""
    places = torch.arange(path_BP.shape[1], device=path_BP.device)
    moves = (places < accepted_B[:, None]) & (path_BP != places)
    for table in tables:
        first = requests_B.long() * table.tensors[0].shape[1] + lengths_B
        source, destination = ((first[:, None] + nodes)[moves] for nodes in (path_BP, places))
        for tensor in table.tensors:
            slots = tensor.flatten(0, 1)
            slots.index_copy_(0, destination, slots.index_select(0, source))

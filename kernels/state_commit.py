"""Put the state of recurrent layers back to the last accepted token of a chain.

    state[request_b]  <-  snapshots[b, accepted_b]

A chain of root and D draft tokens leaves a snapshot of the state after each: snapshots[b, 0] after the root,
snapshots[b, i] after draft token i. With 2 of 4 accepted, snapshots[b, 2] becomes the state. Bytes are moved,
whatever their dtype.

The engine does not call it. Layers of transformers give the state behind a call, not behind each of its
tokens; one call per token would give the snapshots, but read all weights each time, which costs more than
speculation gains. So `spectrain/recurrent.py` keeps or drops the copy of the state that the whole call ran
on, and replays. The op waits for layers that write a state per token.
Legend: B requests, R rows of the state, D draft tokens.
"""

from collections.abc import Sequence

import torch


def state_commit(
    states: Sequence[torch.Tensor],
    snapshots: Sequence[torch.Tensor],
    requests_B: torch.Tensor,
    accepted_B: torch.Tensor,
) -> None:
    """Write to states [R, ...] of each layer from its snapshots [B, D + 1, ...], both contiguous and of one
    dtype. int32: requests: rows of the state, each at most once; accepted: draft tokens kept, 0 to D."""
    if requests_B.device.type == "cpu":
        reference(states, snapshots, requests_B, accepted_B)
    else:
        from spectrain.kernels.state_commit_triton import launch

        launch(states, snapshots, requests_B, accepted_B)


def reference(states, snapshots, requests_B, accepted_B) -> None:
    """The same by indexing."""
    for state, taken in zip(states, snapshots, strict=True):
        batch = torch.arange(len(requests_B), device=state.device)
        state[requests_B.long()] = taken[batch, accepted_B.long()]

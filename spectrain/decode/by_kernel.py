"""What `decode/verify.py` decides, by the kernels of `spectrain/kernels/verify.py` on a GPU.

The random numbers of a round depend on keys that are known before it, so all that may be asked for go to the
device in one copy, and the verdicts come back in one. Knows no model.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch

from spectrain.cache import KERNEL_DEVICES
from spectrain.decode.plan import depths
from spectrain.decode.sampling import BONUS, COIN, RESIDUAL, Streams
from spectrain.decode.walk import Laws, not_drawn
from spectrain.kernels.verify import NOT_DRAWN, Drawn, Trees
from spectrain.laws import LOSSY_LAWS
from spectrain.proposal import Proposal, Verdict


def covers(proposals: Sequence[Proposal], device: torch.device, *, law: str, streams: Streams) -> bool:
    """Whether kernels can decide these proposals: without penalties, by `target_only`, `rejection`, or a law
    that is `target_only` where tokens were chosen."""
    if device.type not in KERNEL_DEVICES or streams.penalised or law in LOSSY_LAWS:
        return False
    return law in ("target_only", "rejection") or all(proposal.q is None for proposal in proposals)


def verify_by_kernel(
    proposals: Sequence[Proposal],
    logits_MV: torch.Tensor,
    starts: Sequence[int],
    laws: Laws,
    *,
    law: str,
    streams: Streams,
    requests: Sequence[int],
    root_positions: Sequence[int],
) -> list[Verdict]:
    """One verdict per proposal. starts: the root's row of logits_MV, node n being n + 1 rows behind it; laws:
    asked for the error where logits are not finite."""
    from spectrain.kernels.row_laws_triton import Filters
    from spectrain.kernels.verify_triton import verify

    device, sampling = logits_MV.device, streams.sampling
    reach = [max(depths(proposal.parents), default=0) for proposal in proposals]
    uniforms = torch.zeros(len(proposals), max(reach) + 1, 3, dtype=torch.float64)
    if not sampling.greedy:
        for b, (request, root) in enumerate(zip(requests, root_positions, strict=True)):
            for slot in range(reach[b] + 1):
                for i, purpose in enumerate((COIN, RESIDUAL, BONUS)):
                    uniforms[b, slot, i] = streams.uniform(request, root, slot, purpose)
    filters = Filters(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    drawn = _drawn(proposals, device) if law == "rejection" else None
    out = verify(logits_MV, _trees(proposals, starts, device), uniforms.to(device), filters, drawn)
    columns = (out.accepted, out.bonus, out.refused, out.status)
    table = torch.cat((torch.stack(columns, 1), out.path, out.alphas), 1).tolist()  # float64, exact
    verdicts = []
    for i, (accepted, bonus, refused, status, *rest) in enumerate(table):
        path = tuple(int(node) for node in rest[: int(accepted)])
        if status:
            raise _error(proposals[i], i, path[-1] if path else -1, int(status), laws)
        alphas = rest[max(reach) + 1 :][: int(accepted + refused)]
        verdicts.append(Verdict(path, int(bonus), tuple(alphas)))
    return verdicts


def _trees(proposals: Sequence[Proposal], starts: Sequence[int], device: torch.device) -> Trees:
    N = max(1, *(len(proposal.parents) for proposal in proposals))

    def padded(values: Sequence[int]) -> list[int]:
        return [*values, *[-1] * (N - len(values))]

    parents = [padded(proposal.parents) for proposal in proposals]
    tokens = [padded(proposal.tokens.tolist()) for proposal in proposals]
    lists = (list(starts), [len(proposal.parents) for proposal in proposals], parents, tokens)
    return Trees(*(torch.tensor(values, dtype=torch.int32, device=device) for values in lists))


def _drawn(proposals: Sequence[Proposal], device: torch.device) -> Drawn | None:
    """The laws of drawn tokens; None where all were chosen."""
    if all(proposal.q is None for proposal in proposals):
        return None
    rows = []
    for proposal in proposals:
        assert proposal.q is not None or not proposal.parents, "a proposal with q beside one without"
        rows.append([] if proposal.q is None else list(proposal.q))
    starts = [0, *accumulate(len(some) for some in rows[:-1])]
    q = torch.stack([row for some in rows for row in some]).to(device)
    return Drawn(q, torch.tensor(starts, dtype=torch.int32, device=device))


def _error(proposal: Proposal, index: int, node: int, status: int, laws: Laws) -> Exception:
    """Why the walk stopped at `node`."""
    if status == NOT_DRAWN:
        assert proposal.q is not None
        token = int(proposal.tokens[node + 1])
        return not_drawn(token, float(proposal.q[node + 1][token]))
    laws([index], [node])
    return AssertionError(f"proposal {index}: the kernels found logits that are not finite at node {node}")

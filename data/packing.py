"""TokenBatch: samples laid end to end in one flat row, without padding.

Knows token ids and masks, nothing of text, models or files. Documents never see each other: `document_ids`
goes through target, drafter attention, labels and slots. A span is a maximal run of supervised tokens of one
document.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sample:
    """One rendered conversation (or one turn of it).

    ids: int32 [T]; loss_mask: bool [T], True where the target itself would generate the token; id: stable
    text id. span_ids: int32 [T], -1 outside spans, else the number of the span in the sample, so that two
    adjacent spans stay two.
    """

    id: str
    ids: torch.Tensor
    loss_mask: torch.Tensor
    span_ids: torch.Tensor


@dataclass(frozen=True)
class TokenBatch:
    """Packed samples. All tensors are [T] with T the sum of the sample lengths.

    ids int64; loss_mask bool; document_ids int64 (0, 0, .., 1, 1, ..); positions int64 (restart at 0 in each
    document); span_ids int64, -1 outside spans, unique over the batch; offsets: D + 1 document boundaries;
    sample_ids: D texts.

    Two samples "ab|CD" and "x|Y" (capitals supervised) pack to
        ids           a b C D x Y
        document_ids  0 0 0 0 1 1
        positions     0 1 2 3 0 1
        span_ids     -1 -1 0 0 -1 1
        offsets       0 4 6
    """

    ids: torch.Tensor
    loss_mask: torch.Tensor
    document_ids: torch.Tensor
    positions: torch.Tensor
    span_ids: torch.Tensor
    offsets: tuple[int, ...]
    sample_ids: tuple[str, ...]

    def __len__(self) -> int:
        return self.ids.shape[0]


def pack(samples: Sequence[Sample]) -> TokenBatch:
    """Lay `samples` end to end, in the order given."""
    assert samples, "pack: no samples"
    lengths = torch.tensor([len(s.ids) for s in samples])
    offsets = (0, *torch.cumsum(lengths, 0).tolist())
    span_ids, num_spans = [], 0
    for sample in samples:
        span_ids.append(torch.where(sample.span_ids >= 0, sample.span_ids.long() + num_spans, -1))
        num_spans = max(num_spans, int(span_ids[-1].max()) + 1)
    document_ids = torch.repeat_interleave(torch.arange(len(samples)), lengths)
    return TokenBatch(
        ids=torch.cat([s.ids for s in samples]).long(),
        loss_mask=torch.cat([s.loss_mask for s in samples]),
        document_ids=document_ids,
        positions=torch.arange(offsets[-1]) - torch.tensor(offsets)[document_ids],
        span_ids=torch.cat(span_ids),
        offsets=offsets,
        sample_ids=tuple(s.id for s in samples),
    )


def plan_rows(lengths: Sequence[int], order: Iterable[int], max_tokens: int) -> list[list[int]]:
    """Cut `order` (indices into `lengths`) into consecutive rows of at most `max_tokens` tokens.

    lengths 3, 2, 4, 1 in order 0, 1, 2, 3 with at most 5 tokens give [0, 1], [2, 3]. Raises ValueError for a
    sample that does not fit a row by itself.
    """
    rows: list[list[int]] = []
    room = 0
    for i in order:
        if lengths[i] > max_tokens:
            raise ValueError(f"a sample of {lengths[i]} tokens does not fit train.micro_tokens={max_tokens}")
        if lengths[i] > room:
            rows.append([])
            room = max_tokens
        rows[-1].append(i)
        room -= lengths[i]
    return rows

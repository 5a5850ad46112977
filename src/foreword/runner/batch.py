"""From a plan to the tensors of one forward pass, made once a step, on the host."""

from dataclasses import dataclass

import torch
from torch import Tensor

from foreword.base.ids import RequestId
from foreword.runner.attention.tiles import Segment
from foreword.schedule.plan import Chunk, Draw

_PAD_TOKEN = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A ragged batch: the rows of all chunks end to end, then padding."""

    ids: Tensor
    """[1, T] token ids."""
    positions: Tensor
    """[1, T] absolute positions; padding stands at 0."""
    segments: tuple[Segment, ...]
    drawing: tuple[tuple[RequestId, Draw], ...]
    """Who samples, in the order of `last_rows`."""
    last_rows: Tensor
    """[max(1, len(drawing))] rows whose logits are wanted; row 0 when nobody samples."""
    total: int
    """T."""


def build(chunks: tuple[Chunk, ...], tokens: tuple[tuple[int, ...], ...], total: int) -> Batch:
    """Lay the chunks out and pad them to `total` rows. `tokens` are their ids with nothing pending."""
    segments: list[Segment] = []
    drawing: list[tuple[RequestId, Draw]] = []
    last_rows: list[int] = []
    ids: list[int] = []
    positions: list[int] = []
    for chunk, own in zip(chunks, tokens, strict=True):
        segments.append(Segment(row=len(ids), start=chunk.start, count=len(own), blocks=chunk.blocks))
        ids.extend(own)
        positions.extend(range(chunk.start, chunk.end))
        if chunk.draw is not None:
            drawing.append((chunk.request, chunk.draw))
            last_rows.append(len(ids) - 1)
    padding = total - len(ids)
    ids.extend([_PAD_TOKEN] * padding)
    positions.extend([0] * padding)
    return Batch(
        ids=torch.tensor([ids]),
        positions=torch.tensor([positions]),
        segments=tuple(segments),
        drawing=tuple(drawing),
        last_rows=torch.tensor(last_rows or [0]),
        total=total,
    )

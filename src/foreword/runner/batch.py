"""From a plan to the tensors of one forward pass, made once a step, on the host.

All but one thing is known there: a token that the step before has yet to draw. It goes from that step's tensor into
this one's on the device.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foreword.base.errors import InvariantBroken
from foreword.base.ids import PENDING_TOKEN, RequestId
from foreword.runner.attention.tiles import Segment
from foreword.runner.flight import Flight
from foreword.runner.transfer import send
from foreword.schedule.plan import Chunk, Draw

_PAD_TOKEN = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A ragged batch: the rows of all chunks end to end, then padding."""

    ids: Tensor
    """[1, T] token ids, something else in the place of those that are pending."""
    positions: Tensor
    """[1, T] absolute positions; padding stands at 0."""
    segments: tuple[Segment, ...]
    drawing: tuple[RequestId, ...]
    """Who samples, in the order of `last_rows`."""
    draws: tuple[Draw, ...]
    """How each of them does."""
    last_rows: Tensor
    """[max(1, len(drawing))] rows whose logits are wanted; row 0 when nobody samples."""
    total: int
    """T."""
    pending: tuple[Tensor, Tensor] | None = None
    """Rows, and the tokens that go there, [n] each, on the device; None where all are known."""

    @property
    def rows(self) -> int:
        """Without padding."""
        return sum(segment.count for segment in self.segments)

    def first(self, count: int) -> "Batch":
        """Its first rows, up to so many, of which the last one is wanted."""
        segments = tuple(
            replace(segment, count=min(segment.count, count - segment.row))
            for segment in self.segments
            if segment.row < count
        )
        rows = sum(segment.count for segment in segments)
        return replace(self, segments=segments, last_rows=torch.tensor([rows - 1]), pending=None)

    def fill_in(self, ids: Tensor) -> None:
        """Put what was pending into `ids` [T or more], which are on the device."""
        if self.pending is not None:
            ids.index_copy_(0, *self.pending)


def build(chunks: tuple[Chunk, ...], total: int, before: Flight | None) -> Batch:
    """Lay the chunks out and pad them to `total` rows. What is pending, the step `before` draws.

    Raises InvariantBroken when it does not.
    """
    segments: list[Segment] = []
    drawing: list[RequestId] = []
    draws: list[Draw] = []
    last_rows: list[int] = []
    ids: list[int] = []
    positions: list[int] = []
    pending: list[tuple[int, RequestId]] = []
    for chunk in chunks:
        segments.append(Segment(row=len(ids), start=chunk.start, count=len(chunk.tokens), blocks=chunk.blocks))
        ids.extend(chunk.tokens)
        if ids[-1] == PENDING_TOKEN:
            ids[-1] = _PAD_TOKEN
            pending.append((len(ids) - 1, chunk.request))
        positions.extend(range(chunk.start, chunk.end))
        if chunk.draw is not None:
            drawing.append(chunk.request)
            draws.append(chunk.draw)
            last_rows.append(len(ids) - 1)
    padding = total - len(ids)
    ids.extend([_PAD_TOKEN] * padding)
    positions.extend([0] * padding)
    return Batch(
        ids=torch.tensor([ids]),
        positions=torch.tensor([positions]),
        segments=tuple(segments),
        drawing=tuple(drawing),
        draws=tuple(draws),
        last_rows=torch.tensor(last_rows or [0]),
        total=total,
        pending=_find(pending, before) if pending else None,
    )


def _find(pending: list[tuple[int, RequestId]], before: Flight | None) -> tuple[Tensor, Tensor]:
    """Rows and their tokens, on the device."""
    places = {} if before is None else {request: place for place, request in enumerate(before.requests)}
    lost = [request for _, request in pending if request not in places]
    if before is None or lost:
        raise InvariantBroken(f"{', '.join(lost)}: a token is pending that the step before does not draw")
    drawn = before.drawn.tokens
    rows = send(torch.tensor([row for row, _ in pending]), drawn.device)
    return rows, drawn.index_select(0, send(torch.tensor([places[request] for _, request in pending]), drawn.device))

"""Captured forwards: steps are recorded once for each size and then launched as a whole.

A step of few rows is over on a card before Python has launched half of it. So decodes, at a ladder of batch sizes, and
short prefills, as after a hit, run as graphs: `Graphs.run` finds the least recorded size that holds a batch, puts the
batch's integers into its buffers and replays it. What no size holds, and every step where the backend cannot stand
still or a forward cannot be recorded, runs as usual.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from foreword.base.errors import amount
from foreword.runner.attention.backend import Backend, Extent, Fixed
from foreword.runner.attention.call import Step
from foreword.runner.attention.tiles import Segment
from foreword.runner.batch import Batch
from foreword.runner.transfer import put, staging

_log = logging.getLogger(__name__)

Forward = Callable[[Tensor, Tensor, Step, Tensor], Tensor]
"""Takes ids [1, T], positions [1, T], the step and the rows wanted to logits [rows, vocabulary]."""

_DECODES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_PREFILLS = (16, 32, 64, 128, 256)
_PREFILL_SEGMENTS = 8
_TRIES = 3
_FEW = 3
"""Rows of a batch that a new recording is tried on."""


class Recorded(Protocol):
    """A forward that was recorded."""

    def replay(self, rows: int, wanted: int) -> Tensor:
        """Run it over what its buffers hold now, so many rows, and rows wanted; the same tensor every time."""
        ...


class Recorder(Protocol):
    """Records what a device does."""

    @property
    def extents(self) -> tuple[Extent, ...]:
        """Sizes worth recording, those that hold less first."""
        ...

    @property
    def checked(self) -> bool:
        """Whether what it recorded is to be compared, to the bit, with a step that is not."""
        ...

    @property
    def follows(self) -> bool:
        """Whether what it recorded computes only the rows that there are, and no padding."""
        ...

    def record(self, work: Callable[[], Tensor], extent: Extent) -> Recorded:
        """Record `work`, a step of that size. Raises RuntimeError when it cannot be recorded."""
        ...


def sizes(
    decodes: Sequence[int], prefills: Sequence[int], segments: int, *, sharing: bool = False
) -> tuple[Extent, ...]:
    """Decodes of so many rows, and prefills of so many in up to `segments` parts; those that hold less first.

    With `sharing`, decodes come with and without room for what their requests share.
    """
    extents = (
        *(Extent(rows=rows, segments=rows, longest=1) for rows in decodes),
        *(Extent(rows=rows, segments=rows, longest=1, shared=True) for rows in decodes if sharing and rows > 1),
        *(Extent(rows=rows, segments=segments, longest=rows) for rows in prefills),
    )
    return tuple(sorted(extents, key=lambda extent: (extent.rows, extent.longest, extent.shared)))


def ladder() -> tuple[Extent, ...]:
    """Sizes for a card."""
    return sizes(_DECODES, _PREFILLS, _PREFILL_SEGMENTS, sharing=True)


def holding(extents: Sequence[Extent], segments: Sequence[Segment]) -> Iterator[Extent]:
    """The first few sizes that have room for a step's rows."""
    rows, longest = sum(segment.count for segment in segments), max(segment.count for segment in segments)
    fitting = (e for e in extents if e.rows >= rows and e.segments >= len(segments) and e.longest >= longest)
    for _, extent in zip(range(_TRIES), fitting, strict=False):
        yield extent


@dataclass(frozen=True, slots=True)
class _Frame:
    """One size, recorded: buffers that stay where they are."""

    extent: Extent
    numbers: Tensor
    """int64 [2 * rows + segments] on the device: ids, positions, rows whose logits are wanted."""
    fixed: Fixed
    recorded: Recorded | None

    def put(self, batch: Batch) -> None:
        """Fill in what `fixed` has not. Padding is token 0 at position 0."""
        rows, used = self.extent.rows, batch.rows
        host = staging(self.numbers)
        host.zero_()
        host[:used] = batch.ids[0, :used]
        host[rows : rows + used] = batch.positions[0, :used]
        host[2 * rows : 2 * rows + len(batch.last_rows)] = batch.last_rows
        put(host, self.numbers)
        batch.fill_in(self.numbers)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Views of ids [1, rows], positions [1, rows] and wanted rows [segments]."""
        rows = self.extent.rows
        return self.numbers[None, :rows], self.numbers[None, rows : 2 * rows], self.numbers[2 * rows :]


class Graphs:
    """Owner of the frames of one model on one device."""

    def __init__(self, forward: Forward, backend: Backend, recorder: Recorder, device: torch.device) -> None:
        """Take what computes a step, what attends, what records, and where."""
        self._forward = forward
        self._backend = backend
        self._recorder = recorder
        self._device = device
        self._extents = recorder.extents
        self._frames: dict[Extent, _Frame | None] = {}
        self.recording_s = 0.0
        """Seconds that went into recording sizes, or into finding out that they cannot be, in all steps so far."""

    def run(self, batch: Batch) -> Tensor | None:
        """Logits of the rows that sample, valid until the next run; None: compute this step as usual.

        `batch` is on the host.
        """
        for extent in holding(self._extents, batch.segments):
            if extent not in self._frames:
                self._frames[extent] = self._open(extent)
            frame = self._frames[extent]
            if frame is None or not frame.fixed.refill(batch.segments):
                continue
            frame.put(batch)
            recorded = frame.recorded or self._record(frame, batch)
            wanted = len(batch.last_rows)
            return None if recorded is None else recorded.replay(batch.rows, wanted)[:wanted]
        return None

    def _open(self, extent: Extent) -> _Frame | None:
        fixed = self._backend.fixed(extent)
        if fixed is None:
            return None
        numbers = torch.zeros(2 * extent.rows + extent.segments, dtype=torch.long, device=self._device)
        return _Frame(extent, numbers, fixed, None)

    def _record(self, frame: _Frame, batch: Batch) -> Recorded | None:
        """Record a frame, which holds a batch. None: it cannot be recorded."""
        ids, positions, wanted = frame.inputs()
        start = time.perf_counter()
        try:
            recorded = self._recorder.record(lambda: self._forward(ids, positions, frame.fixed, wanted), frame.extent)
            if self._recorder.checked:
                self._check(frame, recorded, batch)
        except RuntimeError as error:
            _log.warning(
                "steps of %s cannot be recorded and run one launch at a time: %s",
                amount(frame.extent.rows, "row"),
                error,
            )
            self._frames[frame.extent] = None
            return None
        finally:
            self.recording_s += time.perf_counter() - start
        self._frames[frame.extent] = replace(frame, recorded=recorded)
        return recorded

    def _check(self, frame: _Frame, recorded: Recorded, batch: Batch) -> None:
        """Raise RuntimeError unless a batch's first rows come out to the bit as they do in a usual step."""
        few = batch.first(_FEW)
        frame.fixed.refill(few.segments)
        frame.put(few)
        found = recorded.replay(few.rows, 1)[0].clone()
        ids, positions, wanted = frame.inputs()
        rows, places = (few.rows, 1) if self._recorder.follows else (len(ids[0]), len(wanted))
        step = self._backend.begin(few.segments, rows)
        usual = self._forward(ids[:, :rows], positions[:, :rows], step, wanted[:places])[0]
        if not torch.equal(found, usual):
            raise RuntimeError("what was recorded comes out differently when it is repeated")
        frame.fixed.refill(batch.segments)
        frame.put(batch)


class CudaRecorder:
    """Records with CUDA graphs, which share one pool of memory: they never run at the same time."""

    extents = ladder()
    checked, follows = False, False

    def __init__(self) -> None:
        self._cuda = cast(Any, torch.cuda)
        self._pool = self._cuda.graph_pool_handle()

    def record(self, work: Callable[[], Tensor], extent: Extent) -> Recorded:
        """See `Recorder`. `work` runs once for practice and once for the record."""
        del extent
        cuda = self._cuda
        aside = cuda.Stream()
        aside.wait_stream(cuda.current_stream())
        with cuda.stream(aside):
            work()
        cuda.current_stream().wait_stream(aside)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph, pool=self._pool):
            out = work()
        return _CudaGraph(graph, out)


class _CudaGraph:
    __slots__ = ("_graph", "_out")

    def __init__(self, graph: Any, out: Tensor) -> None:
        self._graph = graph
        self._out = out

    def replay(self, rows: int, wanted: int) -> Tensor:
        """See `Recorded`."""
        del rows, wanted
        self._graph.replay()
        return self._out

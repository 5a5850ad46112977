"""The way into the engine from any thread, as faces see it; `worker.Worker` is the one that serves."""

from typing import Protocol

from foreword.base.ids import RequestId
from foreword.base.params import FinishReason
from foreword.cache.prefix_cache import Flushed
from foreword.engine.state import EngineState
from foreword.engine.stream import Stream
from foreword.schedule.request import Submission


class EngineClient(Protocol):
    """Submit, cancel and ask from any thread."""

    @property
    def alive(self) -> bool:
        """Whether the engine thread runs."""
        ...

    def now(self) -> float:
        """The engine's clock, in seconds; for `Submission.arrival_s`."""
        ...

    def state(self) -> EngineState:
        """Numbers for metrics and status pages; a moment old, never blocking a step."""
        ...

    def submit(self, submission: Submission) -> Stream:
        """Queue a request.

        Raises CapacityError when the queue is full or the engine is stopping, RequestError when it can never fit.
        """
        ...

    def cancel(self, request: RequestId, finish: FinishReason = "cancelled") -> None:
        """Stop a request within a step; what it has computed stays cached. Unknown ids are ignored.

        `finish` is "stop" when its text is complete (a stop string), so that it is counted as such.
        """
        ...

    def flush(self) -> Flushed:
        """Forget everything cached; after it returns no new request hits older entries."""
        ...

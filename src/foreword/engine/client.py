"""The way into the engine from any thread: submit, cancel, read state."""

from typing import Protocol

from foreword.base.ids import RequestId
from foreword.engine.stream import Stream
from foreword.schedule.request import Submission


class EngineClient(Protocol):
    """Submit and cancel from any thread; what `engine.worker.Worker` gives out."""

    @property
    def alive(self) -> bool:
        """Whether the engine thread runs."""
        ...

    def now(self) -> float:
        """The engine's clock, in seconds; for `Submission.arrival_s`."""
        ...

    def submit(self, submission: Submission) -> Stream:
        """Queue a request.

        Raises CapacityError when the queue is full or the engine is stopping, RequestError when it can never fit.
        """
        ...

    def cancel(self, request: RequestId) -> None:
        """Stop a request within a step; what it has computed stays cached. Unknown ids are ignored."""
        ...

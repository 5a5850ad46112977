"""A step that was launched: which requests draw in it, and what they draw, when it is here."""

from dataclasses import dataclass

from foreword.base.ids import RequestId
from foreword.runner.sampler import Drawn
from foreword.schedule.plan import StepResult


@dataclass(frozen=True, slots=True)
class Flight:
    """Implements `engine.sockets.Flight`."""

    requests: tuple[RequestId, ...]
    drawn: Drawn
    """A token for each of them."""
    recording_s: float = 0.0

    def land(self) -> StepResult:
        """See `engine.sockets.Flight`."""
        return StepResult(dict(zip(self.requests, self.drawn.samples(), strict=True)))

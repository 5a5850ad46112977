"""The sockets of the loop: what must be plugged in to make the heart run somewhere.

    serve       a Hugging Face model          monotonic clock
    unit test   `testing.fakes.FakeRunner`    `testing.fakes.ManualClock`
"""

from typing import Protocol

from foreword.schedule.plan import Plan, StepResult


class Runner(Protocol):
    """Computes steps. Called by one thread, one plan at a time, in order."""

    def execute(self, plan: Plan) -> StepResult:
        """Do the plan's copies, write the KV of every chunk, sample where a chunk has a draw.

        Raises anything on failure; nothing of the step may be believed then.
        """
        ...


class Clock(Protocol):
    """Tells the time."""

    def now(self) -> float:
        """Seconds since some fixed moment; never goes back."""
        ...

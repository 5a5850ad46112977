"""The sockets of the loop: what must be plugged in to make the heart run somewhere.

serve       a Hugging Face model          monotonic clock             metrics
unit test   `testing.fakes.FakeRunner`    `testing.fakes.ManualClock` nobody
"""

import time
from collections.abc import Sequence
from typing import Protocol

from foreword.cache.orders import Compare
from foreword.schedule.plan import Outcome, Plan, StepResult


class Flight(Protocol):
    """A step that was launched."""

    @property
    def recording_s(self) -> float:
        """Seconds that launching it took beyond what others of its size will take: it was recorded for them."""
        ...

    def land(self) -> StepResult:
        """Wait for it. Raises anything on failure; nothing of the step may be believed then."""
        ...


class Runner(Protocol):
    """Computes steps, in the order in which they are launched. Called by one thread."""

    @property
    def depth(self) -> int:
        """How many steps may be under way at once: 1, or 2 where the device computes while its host goes on."""
        ...

    def launch(self, plan: Plan) -> Flight:
        """Begin to do the plan's copies, write the KV of every chunk, and sample where a chunk has a draw.

        A pending token is one that the step launched before this one draws. Raises as landing does.
        """
        ...

    def rest(self) -> bool:
        """Nothing is wanted for now: do a little, a few milliseconds at most, of what later steps would wait for.

        False: nothing of the kind is left to do.
        """
        ...

    def compare(self, pairs: Sequence[Compare]) -> tuple[float, ...]:
        """For each pair the largest difference of any element, relative to the published block's largest element.

        0 means equal to the bit; a NaN anywhere gives NaN.
        """
        ...


class Clock(Protocol):
    """Tells the time."""

    def now(self) -> float:
        """Seconds since some fixed moment; never goes back."""
        ...


class Observer(Protocol):
    """Is told what happened, on the engine's thread, before anybody else hears of it. Must be quick."""

    def observe(self, outcome: Outcome) -> None:
        """A step was committed or aborted, or a request was cancelled (an outcome of no chunks)."""
        ...

    def observe_step(self, step_s: float, bookkeeping_s: float, recording_s: float) -> None:
        """What the loop's turn took that brought one step back, and two parts of it.

        One that was not the runner's, and one that other steps will not take: see `Flight`. No moment is in two steps'
        times.
        """
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Seconds, with sub-microsecond resolution."""
        return time.perf_counter()


class Several:
    """Observers that are told one after the other."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def observe(self, outcome: Outcome) -> None:
        """Tell all of them."""
        for observer in self._observers:
            observer.observe(outcome)

    def observe_step(self, step_s: float, bookkeeping_s: float, recording_s: float) -> None:
        """Tell all of them."""
        for observer in self._observers:
            observer.observe_step(step_s, bookkeeping_s, recording_s)


class Nobody:
    """An observer that looks away."""

    def observe(self, outcome: Outcome) -> None:
        """Nothing."""

    def observe_step(self, step_s: float, bookkeeping_s: float, recording_s: float) -> None:
        """Nothing."""

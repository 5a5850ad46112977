"""What the runner asks of whoever computes attention."""

from typing import Protocol

from foreword.runner.attention.call import Step
from foreword.runner.attention.tiles import Segment
from foreword.runner.memory import KVMemory


class Backend(Protocol):
    """One way of computing attention, chosen when the model is loaded."""

    @property
    def name(self) -> str:
        """As in `--attention`."""
        ...

    @property
    def exact(self) -> bool:
        """Whether a row's bits depend on its own tokens and positions only."""
        ...

    def begin(self, segments: tuple[Segment, ...], total: int) -> Step:
        """Start a step of `total` rows: those of the segments, in order, then padding."""
        ...

    def over(self, memory: KVMemory) -> "Backend":
        """The same over another memory of the same layout."""
        ...

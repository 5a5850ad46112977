"""What the runner asks of whoever computes attention, and what such a one is made from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from foreword.runner.attention.call import LayerFacts, Step
from foreword.runner.attention.tiles import Segment
from foreword.runner.memory import KVMemory
from foreword.runner.shelf import NOWHERE, Shelf


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What a backend is chosen by and made from: the model's layers, where their KV lies, and what is asked of it."""

    facts: tuple[LayerFacts, ...]
    memory: KVMemory
    exact: bool = False
    """Whether `--exact` asks that a row's bits depend on its own tokens and positions only."""
    shelf: Shelf = NOWHERE
    """Where machine code is kept."""

    @property
    def slots(self) -> Mapping[int, int]:
        """The place of each layer in the memory's layout, by the library's index of the layer."""
        return {fact.layer: slot for slot, fact in enumerate(self.facts)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How large a step may be that is recorded once and replayed (see `runner.graphs`)."""

    rows: int
    segments: int
    longest: int
    """Rows of one segment at most."""
    shared: bool = False
    """Whether there is room for attending together to blocks that are shared."""


class Fixed(Step, Protocol):
    """A step whose tensors stay where they are."""

    def refill(self, segments: tuple[Segment, ...]) -> bool:
        """Put another step's work in. False: there is no room for it, and nothing has changed."""
        ...


class Backend(Protocol):
    """One way of computing attention, chosen when the model is loaded."""

    @property
    def name(self) -> str:
        """As in `--attention`."""
        ...

    @property
    def ingredient(self) -> str:
        """Its part of block identity: changes with whatever changes the bits of its results."""
        ...

    @property
    def exact(self) -> bool:
        """Whether a row's bits depend on its own tokens and positions only."""
        ...

    def begin(self, segments: tuple[Segment, ...], total: int) -> Step:
        """Start a step of `total` rows: those of the segments, in order, then padding."""
        ...

    def fixed(self, extent: Extent) -> Fixed | None:
        """A step for all steps up to a size, to be recorded. None: this backend's steps cannot be."""
        ...

    def over(self, memory: KVMemory) -> "Backend":
        """The same over another memory of the same layout."""
        ...

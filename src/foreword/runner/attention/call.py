"""One attention call of one layer, as values: what the library's many conventions come down to."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from foreword.runner.layout import LayerShape


@dataclass(frozen=True, slots=True)
class Sight:
    """Which earlier positions a layer's query sees. The default sees all of them, itself included."""

    window: int | None = None
    """Key j is visible to query i iff j > i - window: the window counts the query itself."""
    chunk: int | None = None
    """Key j is visible to query i iff j // chunk == i // chunk."""

    def first_key(self, first_query: int) -> int:
        """The earliest position that any query from `first_query` on may see."""
        first = 0
        if self.window is not None:
            first = max(first, first_query - self.window + 1)
        if self.chunk is not None:
            first = max(first, first_query // self.chunk * self.chunk)
        return first

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Boolean [..., queries, keys] from positions [..., queries] and [..., keys]."""
        query, key = queries[..., :, None], keys[..., None, :]
        seen = key <= query
        if self.window is not None:
            seen = seen & (key > query - self.window)
        if self.chunk is not None:
            seen = seen & (key // self.chunk == query // self.chunk)
        return seen


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer turns products of queries and keys into weights."""

    scaling: float
    softcap: float | None = None
    """Scores become cap * tanh(score / cap) before the mask."""
    sinks: Tensor | None = None
    """[heads]: a score that takes part in the softmax and brings no value."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a layer hands over. T counts the rows of the ragged batch, padding included."""

    layer: int
    query: Tensor
    """[heads, T, key_dim], rotated already."""
    key: Tensor
    """[kv_heads, T, key_dim], rotated already, not repeated for grouped queries."""
    value: Tensor
    """[kv_heads, T, value_dim]."""
    scoring: Scoring
    sight: Sight
    causal: bool = True
    strange: tuple[str, ...] = ()
    """Names of arguments that nobody here understands."""

    @property
    def shape(self) -> LayerShape:
        """What the layer stores per token."""
        return LayerShape(kv_heads=self.key.shape[0], key_dim=self.key.shape[2], value_dim=self.value.shape[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """What is the same in every call of one layer."""

    layer: int
    """The library's index of the layer."""
    heads: int
    shape: LayerShape
    sight: Sight
    scoring: Scoring


class Step(Protocol):
    """What travels through the model's forward."""

    def attend(self, call: Call) -> Tensor:
        """Store the call's keys and values, attend, and return [T, heads, value_dim]."""
        ...

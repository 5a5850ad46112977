"""Where each layer's keys and values lie inside a block: pure arithmetic over integers, no tensor.

A block is one span of elements across all layers, so that it can be copied, checksummed, spilled or sent as one run
of bytes. Inside the span each layer has a piece for K and a piece for V, and a piece is *head-major*:

    block b:  | layer 0: K | V | layer 1: K | V | ... |
    piece:    [kv_heads, block_size, head_dim], contiguous

Head-major, because attention wants [kv_heads, keys, head_dim]: a head's tokens of one block are then one run, and
reading a block table is a gather of whole runs that needs no transposing afterwards.

Head dims may differ per layer and between K and V. `unit` divides all of them, so that a token's vector is always a
whole number of units and a head's run in a block a whole number of rows of `block_size * unit` elements.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from math import gcd


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One layer's K or V inside a block."""

    offset: int
    """First element, counted from the start of the block."""
    heads: int
    """KV heads."""
    dim: int
    """Elements of one head's vector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What one layer stores per token."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def width(self) -> int:
        """Elements per token, K and V together."""
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Neighbouring pieces of one head dim, seen as one: [heads, block_size, dim]. Most models have a single band."""

    offset: int
    heads: int
    dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The map of one block."""

    block_size: int
    """Tokens in a block."""
    keys: tuple[Piece, ...]
    values: tuple[Piece, ...]
    bands: tuple[Band, ...]
    """The whole block again, in as few parts as can be."""
    span: int
    """Elements of one block, all layers."""
    unit: int
    """Greatest common divisor of all head dims."""

    @property
    def num_layers(self) -> int:
        """Layers that store KV."""
        return len(self.keys)


def lay_out(shapes: tuple[LayerShape, ...], block_size: int) -> Layout:
    """Put the layers one after the other. Raises ValueError when there is no layer to store."""
    if not shapes:
        raise ValueError("a layout needs at least one layer")
    keys: list[Piece] = []
    values: list[Piece] = []
    offset = 0
    for shape in shapes:
        keys.append(Piece(offset=offset, heads=shape.kv_heads, dim=shape.key_dim))
        offset += shape.kv_heads * shape.key_dim * block_size
        values.append(Piece(offset=offset, heads=shape.kv_heads, dim=shape.value_dim))
        offset += shape.kv_heads * shape.value_dim * block_size
    unit = reduce(gcd, (piece.dim for piece in (*keys, *values)))
    return Layout(
        block_size=block_size,
        keys=tuple(keys),
        values=tuple(values),
        bands=_bands(piece for pair in zip(keys, values, strict=True) for piece in pair),
        span=offset,
        unit=unit,
    )


def _bands(pieces: Iterable[Piece]) -> tuple[Band, ...]:
    bands: list[Band] = []
    for dim, alike in groupby(pieces, key=lambda piece: piece.dim):
        members = list(alike)
        heads = sum(piece.heads for piece in members)
        bands.append(Band(offset=members[0].offset, heads=heads, dim=dim))
    return tuple(bands)

"""The reference backend: plain products over gathered keys, in any dtype, on any device.

Tiles that are alone in their segment and small (decoding rows, short tails) are gathered and multiplied together when
they read equally many keys; the tiles of a long segment share one gather.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from foreword.runner.attention.call import Call, Sight
from foreword.runner.attention.tiles import TILE, Segment, Tile, cut, table
from foreword.runner.layout import Piece
from foreword.runner.memory import KVMemory

_SMALL = 4


@dataclass(frozen=True, slots=True)
class _Slice:
    """One product: the same number of rows and of keys for each sequence of a group."""

    rows: Tensor
    """[n * height] rows of the batch; short tiles repeat their last row."""
    height: int
    first_key: int
    """Where its keys begin in the gathered ones."""
    bias: Tensor
    """[n, 1, 1, height, keys] float32: 0 where visible, -inf elsewhere."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences that are gathered together."""

    blocks: Tensor
    """[n, count] block ids."""
    slices: tuple[_Slice, ...]


class _Work(NamedTuple):
    """All groups under one sight, and where each batch row stands in their outputs put end to end."""

    groups: tuple[_Group, ...]
    origin: Tensor


class TiledStep:
    """One step's work. `attend` is called once a layer."""

    __slots__ = (
        "_blocks",
        "_device",
        "_memory",
        "_offsets",
        "_places",
        "_runs",
        "_segments",
        "_slots",
        "_work",
        "num_rows",
        "total",
    )

    def __init__(self, memory: KVMemory, segments: tuple[Segment, ...], total: int, slots: Mapping[int, int]) -> None:
        """`total` counts the rows of the batch, padding after the segments' rows included.

        `slots` says which layer of the memory's layout belongs to the library's index of a layer.
        """
        self._memory = memory
        self._slots = slots
        self._segments = segments
        self.num_rows = sum(segment.count for segment in segments)
        self.total = total
        self._device = memory.buffer.device
        size = memory.layout.block_size
        positions = [p for s in segments for p in range(s.start, s.start + s.count)]
        tables = [s.blocks[p // size] for s in segments for p in range(s.start, s.start + s.count)]
        self._blocks = torch.tensor(tables, dtype=torch.long, device=self._device)
        self._offsets = torch.tensor([p % size for p in positions], dtype=torch.long, device=self._device)
        self._places: dict[tuple[int, int], Tensor] = {}
        self._runs: dict[tuple[int, int, int], Tensor] = {}
        self._work: dict[Sight, _Work] = {}

    def attend(self, call: Call) -> Tensor:
        """See `call.Step`."""
        self._store(call)
        work = self._work.get(call.sight)
        if work is None:
            work = self._work[call.sight] = self._cut(call.sight)
        parts = [part for group in work.groups for part in self._attend_group(call, group)]
        rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        return rows.index_select(0, work.origin)

    def _store(self, call: Call) -> None:
        layout = self._memory.layout
        for piece, states in (
            (layout.keys[self._slots[call.layer]], call.key),
            (layout.values[self._slots[call.layer]], call.value),
        ):
            shape = (piece.heads, piece.dim)
            places = self._places.get(shape)
            if places is None:
                places = self._places[shape] = self._memory.places(piece, self._blocks, self._offsets)
            self._memory.write(piece, places, states[:, : self.num_rows])

    def _attend_group(self, call: Call, group: _Group) -> list[Tensor]:
        layout = self._memory.layout
        keys = self._gather(group, layout.keys[self._slots[call.layer]])
        values = self._gather(group, layout.values[self._slots[call.layer]])
        parts: list[Tensor] = []
        for piece in group.slices:
            until = piece.first_key + piece.bias.shape[-1]
            parts.append(_product(call, piece, keys[:, piece.first_key : until], values[:, piece.first_key : until]))
        return parts

    def _gather(self, group: _Group, piece: Piece) -> Tensor:
        key = (id(group), piece.heads, piece.dim)
        runs = self._runs.get(key)
        if runs is None:
            runs = self._runs[key] = self._memory.runs(piece, group.blocks)
        return self._memory.read(piece, runs, group.blocks.shape[1])

    def _cut(self, sight: Sight) -> _Work:
        size = self._memory.layout.block_size
        alone: list[tuple[Segment, tuple[Tile, ...]]] = []
        together: defaultdict[int, list[tuple[Segment, Tile]]] = defaultdict(list)
        for segment in self._segments:
            tiles = cut(segment, sight, size)
            if len(tiles) == 1 and segment.count <= _SMALL:
                together[tiles[0].num_blocks].append((segment, tiles[0]))
            else:
                alone.append((segment, tiles))
        groups = [self._group_alone(segment, tiles, sight) for segment, tiles in alone]
        groups += [self._group_together(members, sight) for members in together.values()]
        return _Work(tuple(groups), self._origin(groups))

    def _group_alone(self, segment: Segment, tiles: tuple[Tile, ...], sight: Sight) -> _Group:
        first = tiles[0].first_block
        until = max(tile.first_block + tile.num_blocks for tile in tiles)
        blocks = table(segment, first, until - first, self._memory.null_block)
        slices = tuple(self._slice([tile], first, _height(tile.count), sight) for tile in tiles)
        return _Group(torch.tensor([blocks], device=self._device), slices)

    def _group_together(self, members: list[tuple[Segment, Tile]], sight: Sight) -> _Group:
        null = self._memory.null_block
        blocks = [table(segment, tile.first_block, tile.num_blocks, null) for segment, tile in members]
        piece = self._slice([tile for _, tile in members], None, _SMALL, sight)
        return _Group(torch.tensor(blocks, device=self._device), (piece,))

    def _slice(self, tiles: list[Tile], first: int | None, height: int, sight: Sight) -> _Slice:
        """One product over `tiles`. `first`: the block where the gathered keys begin; None where each tile's do."""
        size = self._memory.layout.block_size
        steps = torch.arange(height)
        counts = torch.tensor([[tile.count - 1] for tile in tiles])
        steps = torch.minimum(steps[None], counts)
        queries = torch.tensor([[tile.start] for tile in tiles]) + steps
        begins = torch.tensor([[tile.first_block * size] for tile in tiles])
        keys = begins + torch.arange(tiles[0].num_blocks * size)[None]
        bias = torch.zeros(len(tiles), height, keys.shape[1])
        bias.masked_fill_(~sight.visible(queries, keys), float("-inf"))
        rows = torch.tensor([[tile.row] for tile in tiles]) + steps
        return _Slice(
            rows=rows.reshape(-1).to(self._device),
            height=height,
            first_key=0 if first is None else (tiles[0].first_block - first) * size,
            bias=bias[:, None, None].to(self._device),
        )

    def _origin(self, groups: list[_Group]) -> Tensor:
        """Where each row of the batch stands; padding rows point anywhere, nobody reads them."""
        rows = torch.cat([piece.rows for group in groups for piece in group.slices])
        origin = torch.zeros(self.total, dtype=torch.long, device=self._device)
        places = torch.arange(rows.shape[0], device=self._device)
        return origin.scatter_(0, rows, places)


def _height(count: int) -> int:
    """Rows that a product of `count` rows is made to have."""
    return _SMALL if count <= _SMALL else TILE


def _product(call: Call, piece: _Slice, keys: Tensor, values: Tensor) -> Tensor:
    """Scores, softmax, weighted sum: [n * height, heads, value_dim].

    keys and values are [n * kv_heads, count, dim]. Query heads that share a KV head are stacked as more rows.
    """
    heads, _, dim = call.query.shape
    kv_heads = call.key.shape[0]
    n, height, group = piece.bias.shape[0], piece.height, heads // kv_heads
    query = call.query.index_select(1, piece.rows).view(kv_heads, group, n, height, dim)
    query = query.permute(2, 0, 1, 3, 4).reshape(n * kv_heads, group * height, dim)
    scores = torch.bmm(query, keys.transpose(1, 2)).view(n, kv_heads, group, height, -1)
    weights = _soften(call, scores, piece.bias).to(values.dtype).view(n * kv_heads, group * height, -1)
    mixed = torch.bmm(weights, values).view(n, kv_heads, group, height, -1)
    return mixed.permute(0, 3, 1, 2, 4).reshape(n * height, heads, -1)


def _soften(call: Call, scores: Tensor, bias: Tensor) -> Tensor:
    """Softmax over keys in float32. scores [n, kv_heads, group, height, keys]."""
    if call.softcap is None:
        scores = torch.add(bias, scores, alpha=call.scaling)
    else:
        scores = torch.tanh(scores.float() * (call.scaling / call.softcap)) * call.softcap + bias
    if call.sinks is None:
        return torch.softmax(scores, dim=-1)
    sinks = call.sinks.float().view(1, scores.shape[1], scores.shape[2], 1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1]

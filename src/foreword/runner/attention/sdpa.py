"""The reference backend: torch's scaled dot product attention over gathered keys, in any dtype, on any device.

Work comes in *groups*, whose keys are gathered together, and *slices*, one product each. The tiles of a long segment
share one gather and have a slice each; single tiles of few rows (decoding, short tails) that read equally many keys
are one group with one slice. Query heads that share a KV head are stacked as more rows of one product, so keys are
never repeated.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from foreword.runner.attention.backend import Extent, Fixed, Ground
from foreword.runner.attention.call import Call, Sight
from foreword.runner.attention.heights import Heights, heights_by_layer
from foreword.runner.attention.product import attend_product
from foreword.runner.attention.store import Store
from foreword.runner.attention.tiles import Segment, Tile, cut, table
from foreword.runner.copies import clear_tails
from foreword.runner.layout import LayerShape
from foreword.runner.memory import KVMemory
from foreword.runner.transfer import send

_GATHER_BYTES = 64 * 2**20
"""Keys and values of one layer that are gathered at once for sequences that share a product."""
_STACKED_MASK_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class _Run:
    """The rows of a product are just as many rows of the batch, one after the other."""

    begin: int


@dataclass(frozen=True, slots=True)
class _Single:
    """Each sequence has one row, and these are neighbours in the batch; the product repeats it to its height."""

    begin: int


@dataclass(frozen=True, slots=True)
class _Scattered:
    """The rows of a product come from here and there."""

    take: Tensor
    """[n * height] batch rows to read; a short tile repeats its last row."""
    real: Tensor
    """[rows] which rows of the product are nobody's repetition."""
    into: Tensor
    """[rows] the batch rows where those belong."""


@dataclass(frozen=True, slots=True)
class _Slice:
    """One product of n sequences, each with `height` rows and as many keys as the mask is wide."""

    mask: Tensor
    """[n, 1, height, keys] in the model's dtype: 0 where visible, -inf elsewhere; repeated already for each query head
    of a group while that is small.
    """
    height: int
    first_key: int
    """Where its keys begin in the gathered ones."""
    rows: "_Run | _Single | _Scattered"


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences whose keys are gathered together."""

    blocks: Tensor
    """[n, count] block ids."""
    slices: tuple[_Slice, ...]


def obstacle(ground: Ground) -> str | None:
    """Never: it computes any layer, in any dtype, on any device."""
    del ground


def make(ground: Ground) -> "SdpaBackend":
    """Try out how many rows its products may have, and make it."""
    buffer = ground.memory.buffer
    heights = heights_by_layer(ground.facts, buffer.dtype, on_cpu=buffer.device.type == "cpu")
    return SdpaBackend(ground.memory, ground.slots, heights)


class SdpaBackend:
    """Makes a step's attention. See `backend.Backend`."""

    name = "sdpa"
    ingredient = "sdpa, tiled 1"

    def __init__(self, memory: KVMemory, slots: Mapping[int, int], heights: Mapping[int, Heights]) -> None:
        """Take both maps by the library's index of a layer: its place in the memory's layout, and its heights."""
        self.memory = memory
        self.slots = slots
        self.heights = heights

    @property
    def exact(self) -> bool:
        """Whether a row's bits depend on its own tokens and positions only."""
        return all(heights.exact for heights in self.heights.values())

    def begin(self, segments: tuple[Segment, ...], total: int) -> "SdpaStep":
        """Start a step of `total` rows: those of the segments, in order, then padding."""
        tails = (segment.fresh_tail(self.memory.layout.block_size) for segment in segments)
        clear_tails(self.memory, (tail for tail in tails if tail is not None))
        return SdpaStep(self, segments, total)

    def fixed(self, extent: Extent) -> Fixed | None:
        """None: what a step launches depends on its rows."""
        del extent

    def over(self, memory: KVMemory) -> "SdpaBackend":
        """The same over another memory of the same layout."""
        return SdpaBackend(memory, self.slots, self.heights)


class SdpaStep:
    """One step's work; made once, used by every layer."""

    __slots__ = ("_backend", "_cuts", "_memory", "_runs", "_segments", "_store", "_total")

    def __init__(self, backend: SdpaBackend, segments: tuple[Segment, ...], total: int) -> None:
        self._backend = backend
        self._memory = backend.memory
        self._segments = segments
        self._total = total
        self._store = Store(self._memory, segments)
        self._runs: dict[tuple[int, LayerShape], Tensor] = {}
        self._cuts: dict[tuple[Sight, Heights, int], tuple[_Group, ...]] = {}

    def attend(self, call: Call) -> Tensor:
        """See `call.Step`."""
        layer = self._backend.slots[call.layer]
        shape, num_rows = call.shape, self._store.num_rows
        self._store.write(layer, shape, call)
        out = call.value.new_empty(self._total, call.query.shape[0], shape.value_dim)
        if self._total > num_rows:
            out[num_rows:] = 0
        for group in self._cut(call, self._backend.heights[call.layer]):
            keys, values = self._gather(layer, shape, group)
            for piece in group.slices:
                _attend_slice(call, piece, keys, values, out)
        return out

    def _gather(self, layer: int, shape: LayerShape, group: _Group) -> tuple[Tensor, Tensor]:
        """Keys and values, [n, kv_heads, keys, dim] each."""
        runs = self._runs.get((id(group), shape))
        if runs is None:
            runs = self._runs[id(group), shape] = self._memory.runs(layer, group.blocks)
        return self._memory.read(layer, runs, group.blocks.shape[1])

    def _cut(self, call: Call, heights: Heights) -> tuple[_Group, ...]:
        key = (call.sight, heights, call.query.shape[0] // call.key.shape[0])
        groups = self._cuts.get(key)
        if groups is None:
            groups = self._cuts[key] = self._make_groups(*key)
        return groups

    def _make_groups(self, sight: Sight, heights: Heights, stack: int) -> tuple[_Group, ...]:
        """Cut all segments for layers of one sight. `stack` query heads share a KV head."""
        null = self._memory.null_block
        groups: list[_Group] = []
        together: defaultdict[int, list[tuple[Segment, Tile]]] = defaultdict(list)
        for segment in self._segments:
            tiles = cut(segment, sight, self._memory.layout.block_size)
            if len(tiles) == 1 and tiles[0].count <= heights.grouped:
                together[tiles[0].num_blocks].append((segment, tiles[0]))
                continue
            first = tiles[0].first_block
            until = max(tile.first_block + tile.num_blocks for tile in tiles)
            slices = tuple(
                self._slice([tile], tile.first_block - first, heights.of(tile.count), (sight, stack)) for tile in tiles
            )
            groups.append(self._group([table(segment, first, until - first, null)], slices))
        for members in self._few_at_a_time(together.values()):
            tables = [table(segment, tile.first_block, tile.num_blocks, null) for segment, tile in members]
            piece = self._slice([tile for _, tile in members], 0, heights.grouped, (sight, stack))
            groups.append(self._group(tables, (piece,)))
        return tuple(groups)

    def _few_at_a_time(self, alike: Iterable[list[tuple[Segment, Tile]]]) -> Iterator[list[tuple[Segment, Tile]]]:
        """Split groups whose gathered keys and values would take too much memory."""
        layout, element = self._memory.layout, self._memory.buffer.element_size()
        pairs = zip(layout.keys, layout.values, strict=True)
        widest = max(key.heads * key.dim + value.heads * value.dim for key, value in pairs)
        for members in alike:
            each = members[0][1].num_blocks * layout.block_size * widest * element
            most = max(1, _GATHER_BYTES // each)
            for first in range(0, len(members), most):
                yield members[first : first + most]

    def _group(self, tables: list[tuple[int, ...]], slices: tuple[_Slice, ...]) -> _Group:
        return _Group(send(torch.tensor(tables), self._memory.buffer.device), slices)

    def _slice(self, tiles: list[Tile], skip: int, height: int, view: tuple[Sight, int]) -> _Slice:
        """One product over tiles that read equally many keys, `skip` blocks after the gathered ones begin."""
        buffer, size = self._memory.buffer, self._memory.layout.block_size
        sight, stack = view
        counts = torch.tensor([[tile.count] for tile in tiles])
        steps = torch.arange(height)[None]
        clipped = torch.minimum(steps, counts - 1)
        queries = torch.tensor([[tile.start] for tile in tiles]) + clipped
        keys = torch.tensor([[tile.first_block * size] for tile in tiles]) + torch.arange(tiles[0].num_blocks * size)
        mask = torch.zeros(len(tiles), height, keys.shape[1], dtype=buffer.dtype)
        mask.masked_fill_(~sight.visible(queries, keys), float("-inf"))
        if mask.nbytes * stack <= _STACKED_MASK_BYTES:
            mask = mask.repeat(1, stack, 1)
        mask = send(mask[:, None], buffer.device)
        if len(tiles) == 1 and tiles[0].count == height:
            return _Slice(mask, height, skip * size, _Run(tiles[0].row))
        if all(tile.count == 1 and tile.row == tiles[0].row + i for i, tile in enumerate(tiles)):
            return _Slice(mask, height, skip * size, _Single(tiles[0].row))
        rows = send((torch.tensor([[tile.row] for tile in tiles]) + clipped).reshape(-1), buffer.device)
        real = send((steps < counts).reshape(-1).nonzero().reshape(-1), buffer.device)
        return _Slice(mask, height, skip * size, _Scattered(rows, real, rows.index_select(0, real)))


def _attend_slice(call: Call, piece: _Slice, keys: Tensor, values: Tensor, out: Tensor) -> None:
    """Attend for one slice and put its rows into `out` [T, heads, value_dim]."""
    n, kv_heads = keys.shape[:2]
    heads, _, dim = call.query.shape
    group, height = heads // kv_heads, piece.height
    until = piece.first_key + piece.mask.shape[3]
    keys, values = keys[:, :, piece.first_key : until], values[:, :, piece.first_key : until]
    match piece.rows:
        case _Run(begin):
            query = call.query[:, begin : begin + height]
        case _Single(begin):
            query = call.query[:, begin : begin + n, None].expand(-1, -1, height, -1)
        case _Scattered(take):
            query = call.query.index_select(1, take)
    query = query.view(kv_heads, group, n, height, dim).permute(2, 0, 1, 3, 4)
    mask = piece.mask if piece.mask.shape[2] == group * height else piece.mask.repeat(1, 1, group, 1)
    mixed = attend_product(call.scoring, query, keys, values, mask)
    match piece.rows:
        case _Run(begin):
            out[begin : begin + height].view(1, height, kv_heads, group, -1).copy_(mixed.permute(0, 3, 1, 2, 4))
        case _Single(begin):
            out[begin : begin + n].view(n, kv_heads, group, -1).copy_(mixed[:, :, :, 0])
        case _Scattered(_, real, into):
            rows = mixed.permute(0, 3, 1, 2, 4).reshape(n * height, heads, -1)
            out.index_copy_(0, into, rows.index_select(0, real))

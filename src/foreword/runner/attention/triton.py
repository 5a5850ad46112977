"""The Triton backend: paged attention by kernels of our own (see `kernels`).

The step's work is integers in one array (see `work`), which goes to the device in one copy. A layer costs two
launches: store, attend. One more for rows of the other kind where decodes and prefills meet, and one
to merge where keys are attended to in parts: long contexts of few sequences, and what sequences share.
"""

import importlib.util
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from foreword.runner.attention.backend import Extent, Fixed, Ground
from foreword.runner.attention.call import Call, LayerFacts, Sight
from foreword.runner.attention.sharing import LEAST_SAVED, Group, Sharer, find_groups
from foreword.runner.attention.tiles import Segment
from foreword.runner.attention.work import STORE_ROWS, Cutting, Room, Work, offsets, plan_work
from foreword.runner.memory import KVMemory
from foreword.runner.transfer import put, send, staging

LOG2_E = 1.4426950408889634
_LARGEST_DIM = 256
_LEAST_ROWS = 16
"""Rows of a tensor core's product at least."""
_MOST_PARTS = 32
_MOST_GROUPS = 32
"""Small groups that share blocks in a step that is recorded."""
_MOST_BLOCKS = 8192
"""Of a sequence in a step that is recorded; a longer one is computed as usual."""
_PROGRAMS_PER_CORE = 2
_SHARER_ROWS = 64
"""A chunk of more rows than that reads shared keys seldom enough by itself."""


def obstacle(ground: Ground) -> str | None:
    """Why the kernels cannot run here."""
    if ground.memory.buffer.device.type != "cuda":
        return "its kernels need a CUDA card"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    widest = max(max(fact.shape.key_dim, fact.shape.value_dim) for fact in ground.facts)
    if widest > _LARGEST_DIM:
        return f"its kernels take heads of up to {_LARGEST_DIM} dimensions, and these have {widest}"
    return None


def make(ground: Ground) -> "TritonBackend":
    """Make it. With `exact` each row's keys are summed up in one order, whatever shares the batch."""
    return TritonBackend(ground, ground.memory)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a layer's work is cut for the card."""

    rows: int
    """Rows of a wide strip, heads of a group included."""
    narrow_rows: int
    """0: all strips are wide."""
    keys: int

    def cutting(self, group: int) -> Cutting:
        """Rows of the batch in a strip, where `group` query heads share a KV head."""
        return Cutting(narrow=self.narrow_rows // group, wide=self.rows // group)


def tiling(group: int, widest: int, dtype: torch.dtype, *, exact: bool) -> Tiling:
    """Strips and key tiles for heads of `widest` dimensions at most, so that a tile fits into shared memory."""
    small = _power(max(_LEAST_ROWS, group))
    large = widest > 128 or dtype == torch.float32
    if exact:
        return Tiling(rows=max(32 if dtype == torch.float32 else 64, small), narrow_rows=0, keys=32 if large else 64)
    rows = 32 if dtype == torch.float32 else 64 if large else 128
    return Tiling(rows=max(rows, small), narrow_rows=small, keys=32 if large else 64)


def num_parts(num_strips: int, kv_heads: int, num_programs: int) -> int:
    """Into how many parts the keys of each strip are cut, so that about `num_programs` programs have something to do.

    Does not depend on how many keys there are: a captured graph is launched again when they have become more.
    """
    wanted = num_programs // max(1, num_strips * kv_heads)
    return min(_MOST_PARTS, 1 << max(0, wanted.bit_length() - 1))


class TritonBackend:
    """Makes a step's attention. See `backend.Backend`."""

    name = "triton"

    def __init__(self, ground: Ground, memory: KVMemory, least_saved: int = LEAST_SAVED) -> None:
        """`least_saved` as in `sharing.find_groups`."""
        self.kernels = _load_kernels()
        self.ground = ground
        self.memory = memory
        self.exact = ground.exact
        """Whether a row's bits depend on its own tokens and positions only."""
        self.least_saved = least_saved
        buffer = memory.buffer
        self.upcast = self.kernels.interpreted() and buffer.dtype == torch.bfloat16
        self.num_programs = 1 if self.exact else _num_cores(buffer.device) * _PROGRAMS_PER_CORE
        self.slots = ground.slots
        self.tilings = {_group(fact): self._tiling(_group(fact)) for fact in ground.facts}
        sees_all = any(fact.sight.window is None and fact.sight.chunk is None for fact in ground.facts)
        self.shares = sees_all and not self.exact
        self._forms: dict[Any, Any] = {}

    @property
    def ingredient(self) -> str:
        """Its part of block identity."""
        return f"triton, {'in one part' if self.exact else 'in parts'} 1"

    def begin(self, segments: tuple[Segment, ...], total: int) -> "TritonStep":
        """Start a step of `total` rows: those of the segments, in order, then padding."""
        works = self.plan(segments)
        rooms = {group: work.room() for group, work in works.items()}
        numbers = torch.frombuffer(gather_numbers(works, rooms), dtype=torch.int32)
        return TritonStep(self, total, rooms, send(numbers, self.memory.buffer.device))

    def fixed(self, extent: Extent) -> Fixed | None:
        """A step for all steps up to a size, to be recorded. One with room for sharing only where layers can share."""
        if extent.shared and not self.shares:
            return None
        return FixedStep(self, extent)

    def over(self, memory: KVMemory) -> "TritonBackend":
        """The same over another memory of the same layout."""
        return TritonBackend(self.ground, memory, self.least_saved)

    def plan(self, segments: tuple[Segment, ...]) -> Mapping[int, Work]:
        """The step's work, by how many query heads share a KV head."""
        size = self.memory.layout.block_size
        shared = self._shared(segments, size) if self.shares else ()
        return {
            group: plan_work(segments, size, tiling.cutting(group), shared, tiling.keys)
            for group, tiling in self.tilings.items()
        }

    def form(self, call: Call, kind: str, *, parts: bool) -> Any:
        """What a kernel is compiled for, for a layer like this one and one kind of strip."""
        heads, _, key_dim = call.query.shape
        kv_heads, _, value_dim = call.value.shape
        group, sight, scoring = heads // kv_heads, call.sight, call.scoring
        capped, sinks = scoring.softcap is not None, scoring.sinks is not None and kind != "shared"
        key = (group, key_dim, value_dim, sight, capped, sinks, kind, parts)
        found = self._forms.get(key)
        if found is None:
            tiling = self.tilings[group]
            found = self._forms[key] = self.kernels.constant(
                self.kernels.Form,
                ROWS=tiling.narrow_rows if kind == "narrow" else tiling.rows,
                KEYS=tiling.keys,
                GROUP=group,
                BLOCK=self.memory.layout.block_size,
                KEY_DIM=key_dim,
                KEY_PAD=_power(max(16, key_dim)),
                VALUE_DIM=value_dim,
                VALUE_PAD=_power(max(16, value_dim)),
                WINDOW=sight.window or 0,
                CHUNK=sight.chunk or 0,
                CAPPED=capped,
                SINKS=sinks,
                LISTED=kind == "shared",
                PARTS=parts,
                EXACT=self.exact,
                UPCAST=self.upcast,
            )
        return found

    def shape(self, key_dim: int, value_dim: int) -> Any:
        """What storing is compiled for."""
        key = ("store", key_dim, value_dim)
        if key not in self._forms:
            self._forms[key] = self.kernels.constant(
                self.kernels.Shape,
                ROWS=STORE_ROWS,
                BLOCK=self.memory.layout.block_size,
                KEY_DIM=key_dim,
                KEY_PAD=_power(key_dim),
                VALUE_DIM=value_dim,
                VALUE_PAD=_power(value_dim),
            )
        return self._forms[key]

    def many(self, value_dim: int) -> Any:
        """What merging is compiled for."""
        key = ("merge", value_dim)
        if key not in self._forms:
            pad = _power(value_dim)
            self._forms[key] = self.kernels.constant(
                self.kernels.Many, PARTS=_MOST_PARTS, VALUE_DIM=value_dim, VALUE_PAD=pad
            )
        return self._forms[key]

    def launch(self, group: int, kind: str) -> Mapping[str, int]:
        """How a program of `attend` runs on a card."""
        tiling = self.tilings[group]
        return {"num_warps": 8 if kind != "narrow" and tiling.rows >= 128 else 4, "num_stages": 2}

    def _tiling(self, group: int) -> Tiling:
        alike = [fact.shape for fact in self.ground.facts if _group(fact) == group]
        widest = max(max(shape.key_dim, shape.value_dim) for shape in alike)
        return tiling(group, widest, self.memory.buffer.dtype, exact=self.exact)

    def _shared(self, segments: tuple[Segment, ...], size: int) -> tuple[Group, ...]:
        sharers = [Sharer(s.blocks, s.start // size if s.count <= _SHARER_ROWS else 0) for s in segments]
        return find_groups(sharers, size, self.least_saved)


@dataclass(frozen=True, slots=True)
class _Parts:
    """Where results over parts of the keys go, for the rows of one kind."""

    count: int
    """Parts of each row's keys."""
    partial: Tensor
    """[rows * count, heads, value_dim] in float32."""
    weight: Tensor
    """[rows * count, heads] in float32."""


class TritonStep:
    """One step's work; made once, used by every layer."""

    __slots__ = ("_backend", "_buffers", "_numbers", "_rooms", "_total")

    def __init__(self, backend: TritonBackend, total: int, rooms: Mapping[int, Room], numbers: Tensor) -> None:
        """`rooms`, by how many query heads share a KV head, say where things are in `numbers`; see `_Numbers`."""
        self._backend = backend
        self._total = total
        self._rooms = rooms
        self._numbers = _Numbers(rooms, numbers)
        self._buffers: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def attend(self, call: Call) -> Tensor:
        """See `call.Step`."""
        call = replace(call, query=_dense(call.query), key=_dense(call.key), value=_dense(call.value))
        heads, kv_heads = call.query.shape[0], call.key.shape[0]
        room = self._rooms[heads // kv_heads]
        self._store(call)
        # Nobody computes rows of padding: they stay what they were at first, zeros.
        out = self._buffer("out", (self._total, heads, call.value.shape[2]), call.value.dtype)
        shared = None
        if room.shared and call.sight == Sight():
            shared = self._parts(call, "shared", self._filled(call, room.shared_rows), room.shared_rows)
            self._launch(call, "shared", room.shared, out, shared)
        for kind, strips, rows in (("narrow", room.narrow, room.narrow_rows), ("wide", room.wide, room.wide_rows)):
            if not strips:
                continue
            own = self._parts(call, kind, strips if kind == "narrow" else self._filled(call, rows), rows)
            if own.count == 1 and shared is None:
                self._launch(call, kind, strips, out, None)
            else:
                self._launch(call, kind, strips, out, own)
                self._merge(call, kind, out, own, shared)
        return out

    def _store(self, call: Call) -> None:
        backend, layout = self._backend, self._backend.memory.layout
        kernels, place = backend.kernels, backend.slots[call.layer]
        kv_heads, _, key_dim = call.key.shape
        value_dim = call.value.shape[2]
        slots = self._numbers.of(call.query.shape[0] // kv_heads, "slots")
        data = kernels.Kept(call.key, call.value, backend.memory.buffer, slots)
        sizes = kernels.Strides(
            *call.key.stride()[:2],
            *call.value.stride()[:2],
            layout.span,
            layout.keys[place].offset,
            layout.values[place].offset,
        )
        kernels.store[(slots.shape[0] // STORE_ROWS, kv_heads)](data, sizes, backend.shape(key_dim, value_dim))

    def _launch(self, call: Call, kind: str, strips: int, out: Tensor, parts: _Parts | None) -> None:
        """Attend for one kind of strip, to `out` or in parts."""
        backend, layout = self._backend, self._backend.memory.layout
        kernels, place, scoring = backend.kernels, backend.slots[call.layer], call.scoring
        heads, kv_heads = call.query.shape[0], call.key.shape[0]
        group = heads // kv_heads
        data = kernels.Pointers(
            call.query,
            backend.memory.buffer,
            out,
            out if parts is None else parts.partial,
            out if parts is None else parts.weight,
            self._numbers.of(group, kind),
            self._numbers.of(group, "members"),
            self._numbers.tables,
            out if scoring.sinks is None else scoring.sinks,
        )
        scale = scoring.scaling if scoring.softcap is not None else scoring.scaling * LOG2_E
        sizes = kernels.Sizes(
            *call.query.stride()[:2],
            layout.span,
            layout.keys[place].offset,
            layout.values[place].offset,
            scale,
            float(scoring.softcap or 1.0),
        )
        form = backend.form(call, kind, parts=parts is not None)
        grid = (strips, kv_heads, 1 if parts is None else parts.count)
        kernels.attend[grid](data, sizes, form, **backend.launch(group, kind))

    def _merge(self, call: Call, kind: str, out: Tensor, own: _Parts, shared: _Parts | None) -> None:
        heads, kernels = call.query.shape[0], self._backend.kernels
        rows = self._numbers.of(heads // call.key.shape[0], f"{kind}_rows")
        other = own if shared is None else shared
        data = kernels.Parts(out, rows, own.partial, own.weight, other.partial, other.weight)
        form = self._backend.many(call.value.shape[2])
        kernels.merge[(own.weight.shape[0] // own.count, heads)](data, own.count, shared.count if shared else 0, form)

    def _filled(self, call: Call, rows: int) -> int:
        """Strips that so many rows fill. A recorded step has place for more, which are empty as a rule."""
        group = call.query.shape[0] // call.key.shape[0]
        return -(-rows // self._backend.tilings[group].cutting(group).wide)

    def _parts(self, call: Call, kind: str, strips: int, rows: int) -> _Parts:
        heads, value_dim = call.query.shape[0], call.value.shape[2]
        count = num_parts(strips, call.key.shape[0], self._backend.num_programs)
        partial = self._buffer(f"{kind} parts", (rows * count, heads, value_dim), torch.float32)
        return _Parts(count, partial, self._buffer(f"{kind} weights", (rows * count, heads), torch.float32))

    def _buffer(self, use: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """One for all layers: what a layer has left in it is used up before the next one attends."""
        found = self._buffers.get((use, shape))
        if found is None:
            new = torch.zeros if use == "out" else torch.empty
            found = new(shape, dtype=dtype, device=self._backend.memory.buffer.device)
            self._buffers[use, shape] = found
        return found


class FixedStep(TritonStep):
    """A step whose tensors stay where they are. See `backend.Fixed`."""

    __slots__ = ("_on_device",)

    def __init__(self, backend: TritonBackend, extent: Extent) -> None:
        rooms = {group: room_for(extent, tiling.cutting(group)) for group, tiling in backend.tilings.items()}
        tables = extent.segments * min(backend.memory.num_blocks, _MOST_BLOCKS)
        size = sum(offsets(room)["end"] for room in rooms.values()) + tables
        device = backend.memory.buffer.device
        self._on_device = torch.zeros(size, dtype=torch.int32, device=device)
        super().__init__(backend, extent.rows, rooms, self._on_device)

    def refill(self, segments: tuple[Segment, ...]) -> bool:
        """See `backend.Fixed`."""
        works = self._backend.plan(segments)
        if not all(work.fits(self._rooms[group]) for group, work in works.items()):
            return False
        numbers = gather_numbers(works, self._rooms)
        if len(numbers) > len(self._on_device):
            return False
        target = self._on_device[: len(numbers)]
        host = staging(target)
        host[:] = torch.frombuffer(numbers, dtype=torch.int32)
        put(host, target)
        return True


def room_for(extent: Extent, cutting: Cutting) -> Room:
    """Enough for any step of a size. Decodes need no wide strips where there are narrow ones."""
    rows, segments = extent.rows, extent.segments
    narrow = segments if cutting.narrow else 0
    wide = 0 if narrow and extent.longest <= cutting.narrow else -(-rows // cutting.wide) + segments
    return Room(
        rows=rows,
        narrow=narrow,
        narrow_rows=min(rows, narrow * cutting.narrow),
        wide=wide,
        wide_rows=rows if wide else 0,
        shared=max(2 * -(-rows // cutting.wide), min(rows // 4, _MOST_GROUPS)) if extent.shared else 0,
        shared_rows=rows if extent.shared else 0,
    )


class _Numbers:
    """The step's integers on the device: for each group what `Work.pack` has made, then the block tables."""

    __slots__ = ("_views", "tables")

    def __init__(self, rooms: Mapping[int, Room], numbers: Tensor) -> None:
        self._views: dict[tuple[int, str], Tensor] = {}
        begin = 0
        for group, room in rooms.items():
            names, places = zip(*offsets(room).items(), strict=True)
            for name, first, last in zip(names, places, places[1:], strict=False):
                self._views[group, name] = numbers[begin + first : begin + last]
            begin += places[-1]
        self.tables = numbers[begin:]

    def of(self, group: int, name: str) -> Tensor:
        """One kind of integer."""
        return self._views[group, name]


def gather_numbers(works: Mapping[int, Work], rooms: Mapping[int, Room]) -> "array[int]":
    """All integers of a step, as `_Numbers` reads them."""
    numbers = array("i")
    for group, work in works.items():
        numbers.extend(work.pack(rooms[group]))
    numbers.extend(next(iter(works.values())).tables)  # they do not depend on the group
    return numbers


def _dense(states: Tensor) -> Tensor:
    """With neighbouring elements of each vector side by side."""
    return states if states.stride(2) == 1 else states.contiguous()


def _group(fact: LayerFacts) -> int:
    return fact.heads // fact.shape.kv_heads


def _num_cores(device: torch.device) -> int:
    """Multiprocessors of a card; some number where there is none."""
    return (
        int(cast(Any, torch.cuda).get_device_properties(device).multi_processor_count) if device.type == "cuda" else 8
    )


def _power(number: int) -> int:
    """The least power of two that is not less."""
    return 1 << (number - 1).bit_length()


def _load_kernels() -> Any:
    """Not at import: where the backend cannot be used, Triton need not be there."""
    return importlib.import_module("foreword.runner.attention.kernels")

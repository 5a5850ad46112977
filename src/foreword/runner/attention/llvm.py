"""Our own paged attention on a CPU: one kernel, compiled by LLVM at start for the processor at hand (`runner.native`).

It reads keys and values where they lie, through the block table, so nothing is gathered, padded or masked by torch.
"""

import struct
from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from foreword.runner.attention.backend import Extent, Fixed, Ground
from foreword.runner.attention.call import Call, LayerFacts
from foreword.runner.attention.strips import Strip, cut
from foreword.runner.attention.tiles import Segment
from foreword.runner.memory import KVMemory
from foreword.runner.native import machine, store
from foreword.runner.native.form import CHUNK, Form, Job, Scratch
from foreword.runner.native.machine import new_job
from foreword.runner.native.paged import write
from foreword.runner.native.writer import LANES, LOG2_E
from foreword.runner.shelf import Shelf

_DTYPES = (torch.bfloat16, torch.float32)
_FIXED_BLOCKS = 2**15
"""Entries of all block tables of a step that is recorded; a step with more is computed as usual."""


def obstacle(ground: Ground) -> str | None:
    """Why it cannot be used here."""
    buffer, size = ground.memory.buffer, ground.memory.layout.block_size
    if buffer.device.type != "cpu":
        return "it computes on a CPU"
    if buffer.dtype not in _DTYPES:
        return f"it computes in bfloat16 and float32, not in {str(buffer.dtype).removeprefix('torch.')}"
    if size % LANES:
        return f"it reads {LANES} keys at a time, and a block has {size}"
    if not machine.is_there():
        return "llvmlite cannot be loaded"
    multiple = 2 * LANES if buffer.dtype == torch.bfloat16 else LANES
    for fact in ground.facts:
        dims = (fact.shape.key_dim, fact.shape.value_dim)
        if any(dim % multiple for dim in dims):
            return f"layer {fact.layer} has vectors of {dims[0]} and {dims[1]} numbers, not a multiple of {multiple}"
    return None


def make(ground: Ground) -> "LlvmBackend":
    """Compile kernels for each kind of layer."""
    forms = {fact.layer: _form(fact, ground.memory) for fact in ground.facts}
    return LlvmBackend(ground, ground.memory, {layer: _kernel(form, ground.shelf) for layer, form in forms.items()})


class Kernel:
    """Machine code for one kind of layer."""

    def __init__(self, form: Form, shelf: Shelf) -> None:
        self.form = form
        self.scratch_bytes = Scratch(form).size
        self.attend = machine.Compiled("attention", write(form), shelf)
        self.store = _store(form, shelf)


class LlvmBackend:
    """Makes a step's attention. See `backend.Backend`."""

    name = "llvm"
    exact = True

    def __init__(self, ground: Ground, memory: KVMemory, kernels: Mapping[int, Kernel]) -> None:
        """Take `kernels` by the library's index of a layer; `memory` stands in for the one that `ground` names."""
        self.ground = ground
        self.memory = memory
        self.slots = ground.slots
        self.kernels = kernels
        self.sights = tuple({fact.sight for fact in ground.facts})
        self.positions = tuple({kernel.form.positions for kernel in kernels.values()})
        """Most rows of a strip, over all kernels."""
        tiles = any(kernel.form.tiles for kernel in kernels.values())
        self.ingredient = f"llvm, {'tiles' if tiles else 'single'} 2"

    def begin(self, segments: tuple[Segment, ...], total: int) -> "LlvmStep":
        """Start a step of `total` rows: those of the segments, in order, then padding."""
        blocks = sum(len(segment.blocks) for segment in segments)
        padding = total - sum(segment.count for segment in segments)
        step = LlvmStep(self, total, len(segments), blocks, padding)
        step.refill(segments)
        return step

    def fixed(self, extent: Extent) -> Fixed | None:
        """A step for all steps up to a size. None where room for sharing is asked for: it takes none here."""
        return None if extent.shared else LlvmStep(self, extent.rows, extent.segments, _FIXED_BLOCKS)

    def over(self, memory: KVMemory) -> "LlvmBackend":
        """The same over another memory of the same layout."""
        return LlvmBackend(self.ground, memory, self.kernels)


class LlvmStep:
    """One step's work, used by every layer; another step's can be put in its place. See `backend.Fixed`."""

    def __init__(self, backend: LlvmBackend, rows: int, segments: int, blocks: int, padding: int = 0) -> None:
        """Make room for so many rows, segments, and blocks in all tables; the last rows are `padding` for good."""
        self._backend = backend
        self._rows = rows
        self._padding = padding
        self._threads = torch.get_num_threads()
        self._tables = torch.zeros(blocks, dtype=torch.int32)
        self._slots = torch.full((rows,), -1)
        self._strips = {most: _Strips(rows // most + segments) for most in backend.positions}
        self._first_keys = {sight: torch.zeros(rows, dtype=torch.int32) for sight in backend.sights}
        largest = max(kernel.scratch_bytes for kernel in backend.kernels.values())
        self._scratch = torch.empty(self._threads * largest, dtype=torch.uint8)
        self._job = new_job(Job)
        self._job[Job.TABLES] = self._tables.data_ptr()
        self._job[Job.SPAN] = backend.memory.block_bytes
        self._job[Job.SCRATCH] = self._scratch.data_ptr()
        self._store = new_job(store.Job)
        self._store[store.Job.ROWS] = rows
        self._store[store.Job.SLOTS] = self._slots.data_ptr()
        self._store[store.Job.SPAN] = backend.memory.block_bytes

    def refill(self, segments: tuple[Segment, ...]) -> bool:
        """See `backend.Fixed`."""
        size = self._backend.memory.layout.block_size
        slots = [slot for segment in segments for slot in segment.slots(size)]
        tables = [block for segment in segments for block in segment.blocks]
        num_blocks = self._backend.memory.num_blocks
        if tables and (min(tables) < 0 or max(tables) >= num_blocks):
            # A kernel would write wherever that is.
            raise IndexError(f"a step names blocks from {min(tables)} to {max(tables)}; there are {num_blocks}")
        if len(slots) > self._rows or len(tables) > len(self._tables):
            return False
        strips = {most: cut(segments, most, size, CHUNK) for most in self._strips}
        if any(len(found) > self._strips[most].most for most, found in strips.items()):
            return False
        _put(self._slots, slots, -1)
        self._tables[: len(tables)] = torch.tensor(tables, dtype=torch.int32)
        for most, found in strips.items():
            self._strips[most].put(found)
        positions = [segment.start + i for segment in segments for i in range(segment.count)]
        for sight, first_keys in self._first_keys.items():
            _put(first_keys, [sight.first_key(position) for position in positions], 0)
        return True

    def attend(self, call: Call) -> Tensor:
        """See `call.Step`."""
        kernel, element = self._backend.kernels[call.layer], call.value.element_size()
        query, key, value = (_near(states) for states in (call.query, call.key, call.value))
        kept = self._backend.memory.buffer.dtype
        if not query.dtype is key.dtype is value.dtype is kept:
            raise RuntimeError(f"queries, keys and values are {query.dtype}, {key.dtype} and {value.dtype}, not {kept}")
        out = value.new_empty(self._rows, query.shape[0], value.shape[2])
        if self._padding:
            out[-self._padding :].zero_()
        sinks = None if call.scoring.sinks is None else call.scoring.sinks.float() * LOG2_E
        self._describe(call, kernel.form)
        self._put_away(kernel, key, value)
        job = self._job
        job[Job.QUERY] = query.data_ptr()
        job[Job.QUERY_ROW] = query.stride(1) * element
        job[Job.QUERY_HEAD] = query.stride(0) * element
        job[Job.OUT] = out.data_ptr()
        job[Job.SINKS] = 0 if sinks is None else sinks.data_ptr()
        kernel.attend.run(job, threads=self._threads)
        return out

    def _describe(self, call: Call, form: Form) -> None:
        """Say in both jobs which layer it is, and what its rows see."""
        memory, slot, scoring, job = self._backend.memory, self._backend.slots[call.layer], call.scoring, self._job
        element, base = memory.buffer.element_size(), memory.buffer.data_ptr()
        strips = self._strips[form.positions]
        job[Job.NEXT] = job[Job.WORKERS] = self._store[store.Job.NEXT] = 0
        job[Job.NUM_STRIPS] = strips.most
        job[Job.STRIPS] = strips.strips.data_ptr()
        job[Job.PARTS] = strips.parts.data_ptr()
        job[Job.WALKS] = strips.walks.data_ptr()
        job[Job.FIRST_KEYS] = self._first_keys[call.sight].data_ptr()
        job[Job.KEYS] = self._store[store.Job.KEYS] = base + memory.layout.keys[slot].offset * element
        job[Job.VALUES] = self._store[store.Job.VALUES] = base + memory.layout.values[slot].offset * element
        # Scores are powers of two to the kernel.
        job[Job.SCALE] = _bits(scoring.scaling * LOG2_E)
        job[Job.CAP] = _bits((scoring.softcap or 0.0) * LOG2_E)

    def _put_away(self, kernel: Kernel, key: Tensor, value: Tensor) -> None:
        job, element = self._store, key.element_size()
        job[store.Job.KEY] = key.data_ptr()
        job[store.Job.KEY_ROW] = key.stride(1) * element
        job[store.Job.KEY_HEAD] = key.stride(0) * element
        job[store.Job.VALUE] = value.data_ptr()
        job[store.Job.VALUE_ROW] = value.stride(1) * element
        job[store.Job.VALUE_HEAD] = value.stride(0) * element
        kernel.store.run(job, (self._rows,), store.STRIP)


class _Strips:
    """Up to `most` strips as the kernel reads them: see `form.Job`."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.strips = torch.zeros(most, 4, dtype=torch.int32)
        # A strip of several parts has a walk for each and one more.
        self.parts = torch.zeros(most, 4, dtype=torch.int32)
        self.walks = torch.zeros(2 * most, 7, dtype=torch.int32)

    def put(self, strips: Sequence[Strip]) -> None:
        """Take these in the place of others; there are not more parts than there may be strips."""
        bounds, parts, walks = list[tuple[int, ...]](), list[tuple[int, ...]](), list[tuple[int, ...]]()
        for strip in strips:
            first_part, first_walk = len(parts), len(walks)
            parts += strip.parts
            walks += strip.walks
            bounds.append((first_part, len(parts), first_walk, len(walks)))
        _put(self.strips, bounds, 0)
        self.parts[: len(parts)] = torch.tensor(parts, dtype=torch.int32)
        self.walks[: len(walks)] = torch.tensor(walks, dtype=torch.int32)


def _put(numbers: Tensor, values: Sequence[int] | Sequence[tuple[int, ...]], nothing: int) -> None:
    """Write values into the front of a tensor, and `nothing` into what is left of it."""
    numbers[: len(values)] = torch.tensor(values, dtype=numbers.dtype)
    numbers[len(values) :] = nothing


def _near(states: Tensor) -> Tensor:
    """The same with the numbers of a vector side by side."""
    return states if states.stride(2) == 1 else states.contiguous()


def _store(form: Form, shelf: Shelf) -> machine.Compiled:
    """Layers that store alike have one kernel."""
    element = 2 if form.half else 4
    key_bytes, value_bytes = form.key_dim * element, form.value_dim * element
    return _store_code(
        store.Form(kv_heads=form.kv_heads, key_bytes=key_bytes, value_bytes=value_bytes, block_size=form.block_size),
        shelf,
    )


@cache
def _store_code(form: store.Form, shelf: Shelf) -> machine.Compiled:
    """Compiled once in a process."""
    return machine.Compiled("store", store.write(form), shelf)


@cache
def _kernel(form: Form, shelf: Shelf) -> Kernel:
    """Compiled once in a process."""
    return Kernel(form, shelf)


def _form(fact: LayerFacts, memory: KVMemory) -> Form:
    half = memory.buffer.dtype == torch.bfloat16
    return Form(
        group=fact.heads // fact.shape.kv_heads,
        kv_heads=fact.shape.kv_heads,
        key_dim=fact.shape.key_dim,
        value_dim=fact.shape.value_dim,
        block_size=memory.layout.block_size,
        half=half,
        tiles=half and machine.multiplies_tiles(),
        capped=fact.scoring.softcap is not None,
        sinks=fact.scoring.sinks is not None,
    )


def _bits(value: float) -> int:
    """A float32's bits as an integer."""
    return struct.unpack("<i", struct.pack("<f", value))[0]

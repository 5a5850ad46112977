"""Our own paged attention on a CPU: one kernel, compiled by LLVM at start for the processor at hand (`runner.native`).

It reads keys and values where they lie, through the block table, so nothing is gathered, padded or masked by torch.
"""

import ctypes
import struct
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from foreword.runner.attention.backend import Extent, Fixed, Ground
from foreword.runner.attention.call import Call, LayerFacts, Sight
from foreword.runner.attention.store import Store
from foreword.runner.attention.tiles import Segment
from foreword.runner.memory import KVMemory
from foreword.runner.native import machine
from foreword.runner.native.form import Form, Job, Scratch
from foreword.runner.native.paged import write
from foreword.runner.native.writer import LANES, LOG2_E

_DTYPES = (torch.bfloat16, torch.float32)


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
    """Compile a kernel for each kind of layer."""
    forms = {fact.layer: _form(fact, ground.memory) for fact in ground.facts}
    return LlvmBackend(ground.memory, ground.slots, {layer: _kernel(form) for layer, form in forms.items()})


class Kernel:
    """Machine code for one kind of layer."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self.scratch_bytes = Scratch(form).size
        self.code = machine.Compiled("attention", write(form))


class LlvmBackend:
    """Makes a step's attention. See `backend.Backend`."""

    name = "llvm"
    exact = True

    def __init__(self, memory: KVMemory, slots: Mapping[int, int], kernels: Mapping[int, Kernel]) -> None:
        """Take both maps by the library's index of a layer."""
        self.memory = memory
        self.slots = slots
        self.kernels = kernels
        tiles = any(kernel.form.tiles for kernel in kernels.values())
        self.ingredient = f"llvm, {'tiles' if tiles else 'single'} 2"

    def begin(self, segments: tuple[Segment, ...], total: int) -> "LlvmStep":
        """Start a step of `total` rows: those of the segments, in order, then padding."""
        return LlvmStep(self, segments, total)

    def fixed(self, extent: Extent) -> Fixed | None:
        """None: recording is for a card."""
        del extent

    def over(self, memory: KVMemory) -> "LlvmBackend":
        """The same over another memory of the same layout."""
        return LlvmBackend(memory, self.slots, self.kernels)


class LlvmStep:
    """One step's work; made once, used by every layer."""

    def __init__(self, backend: LlvmBackend, segments: tuple[Segment, ...], total: int) -> None:
        self._backend = backend
        self._segments = segments
        self._total = total
        self._store = Store(backend.memory, segments)
        self._tables = _ints([block for segment in segments for block in segment.blocks])
        self._strips: dict[int, Tensor] = {}
        self._first_keys: dict[Sight, Tensor] = {}
        self._threads = torch.get_num_threads()
        largest = max(kernel.scratch_bytes for kernel in backend.kernels.values())
        self._scratch = torch.empty(self._threads * largest, dtype=torch.uint8)
        self._job = (ctypes.c_int64 * len(Job))()
        self._job[Job.TABLES] = self._tables.data_ptr()
        self._job[Job.SPAN] = backend.memory.block_bytes
        self._job[Job.SCRATCH] = self._scratch.data_ptr()

    def attend(self, call: Call) -> Tensor:
        """See `call.Step`."""
        kernel, num_rows = self._backend.kernels[call.layer], self._store.num_rows
        self._store.write(self._backend.slots[call.layer], call.shape, call)
        out = call.value.new_empty(self._total, call.query.shape[0], call.shape.value_dim)
        if self._total > num_rows:
            out[num_rows:] = 0
        query = call.query if call.query.stride(2) == 1 else call.query.contiguous()
        sinks = None if call.scoring.sinks is None else call.scoring.sinks.float() * LOG2_E
        self._describe(call, kernel.form)
        job, element = self._job, out.element_size()
        job[Job.QUERY] = query.data_ptr()
        job[Job.QUERY_ROW] = query.stride(1) * element
        job[Job.QUERY_HEAD] = query.stride(0) * element
        job[Job.OUT] = out.data_ptr()
        job[Job.SINKS] = 0 if sinks is None else sinks.data_ptr()
        kernel.code.run(ctypes.addressof(job), self._threads)
        return out

    def _describe(self, call: Call, form: Form) -> None:
        """Say in the job which layer it is, and what its rows see."""
        memory, slot, scoring, job = self._backend.memory, self._backend.slots[call.layer], call.scoring, self._job
        element, base = memory.buffer.element_size(), memory.buffer.data_ptr()
        strips = self._cut(form.positions)
        job[Job.NEXT] = job[Job.WORKERS] = 0
        job[Job.NUM_STRIPS] = strips.shape[0]
        job[Job.STRIPS] = strips.data_ptr()
        job[Job.FIRST_KEYS] = self._first(call.sight).data_ptr()
        job[Job.KEYS] = base + memory.layout.keys[slot].offset * element
        job[Job.VALUES] = base + memory.layout.values[slot].offset * element
        # Scores are powers of two to the kernel.
        job[Job.SCALE] = _bits(scoring.scaling * LOG2_E)
        job[Job.CAP] = _bits((scoring.softcap or 0.0) * LOG2_E)

    def _cut(self, most: int) -> Tensor:
        """int32 [n, 4], those that read most keys first: see `form.Job`."""
        found = self._strips.get(most)
        if found is None:
            strips: list[tuple[int, int, int, int]] = []
            table = 0
            for segment in self._segments:
                for done in range(0, segment.count, most):
                    count = min(most, segment.count - done)
                    strips.append((segment.row + done, segment.start + done, count, table))
                table += len(segment.blocks)
            strips.sort(key=lambda strip: -strip[2] * (strip[1] + strip[2]))
            found = self._strips[most] = _ints(strips)
        return found

    def _first(self, sight: Sight) -> Tensor:
        """int32 [rows]: the earliest position that each row sees."""
        found = self._first_keys.get(sight)
        if found is None:
            segments = self._segments
            positions = (s.start + i for s in segments for i in range(s.count))
            found = self._first_keys[sight] = _ints([sight.first_key(position) for position in positions])
        return found


@cache
def _kernel(form: Form) -> Kernel:
    """Compiled once in a process."""
    return Kernel(form)


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


def _ints(values: list[int] | list[tuple[int, int, int, int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _bits(value: float) -> int:
    """A float32's bits as an integer."""
    return struct.unpack("<i", struct.pack("<f", value))[0]

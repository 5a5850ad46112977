"""Putting a step's keys and values into their blocks: what one worker does with one job."""

from dataclasses import dataclass
from enum import IntEnum

from foreword.runner.native import machine
from foreword.runner.native.worker import Worker
from foreword.runner.native.writer import I64, INTS, Value, ir

_VECTOR_BYTES = 64
STRIP = 16
"""Rows that a worker takes at once."""


class Job(IntEnum):
    """A job is an array of 64-bit integers: what each place holds. Distances are in bytes."""

    NEXT = machine.NEXT
    """The next row; workers count it up."""
    ROWS = machine.ROWS
    SLOTS = 2
    """int64 [rows]: block * block_size + place in the block; -1 for a row that is not stored."""
    SPAN = 3
    """Of one block, all layers."""
    KEY = 4
    KEY_ROW = 5
    KEY_HEAD = 6
    KEYS = 7
    """The layer's first key in block 0."""
    VALUE = 8
    VALUE_ROW = 9
    VALUE_HEAD = 10
    VALUES = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What a kernel is written for."""

    kv_heads: int
    key_bytes: int
    """Of one key, a multiple of 64, as is `value_bytes`."""
    value_bytes: int
    block_size: int


def write(form: Form) -> str:
    """The kernel's LLVM code; its way in is `work(job)`."""
    module = ir.Module("store")
    worker = Worker(module)
    w, rows = worker.w, worker.field(Job.ROWS)
    with (
        worker.taking(Job.NEXT, w.number(STRIP), rows) as first,
        w.loop(first, w.smaller(w.plus(first, STRIP), rows)) as row,
    ):
        slot = w.load(I64, worker.pointer(Job.SLOTS), w.times(row, 8))
        with w.b.if_then(w.b.icmp_signed(">=", slot, w.number(0))):
            _copy(worker, form, (row, slot), Job.KEY, form.key_bytes)
            _copy(worker, form, (row, slot), Job.VALUE, form.value_bytes)
    w.b.ret_void()
    return str(module)


def _copy(worker: Worker, form: Form, at: tuple[Value, Value], what: Job, size: int) -> None:
    """Copy the vectors of all heads of a row; the four fields from `what` on say from where and to where."""
    w, (row, slot) = worker.w, at
    source, row_bytes, head_bytes, target = (
        worker.pointer(what + i) if i in (0, 3) else worker.field(what + i) for i in range(4)
    )
    block, place = (op(slot, w.number(form.block_size)) for op in (w.b.sdiv, w.b.srem))
    block = w.b.mul(block, worker.field(Job.SPAN))
    with w.loop(w.number(0), w.number(form.kv_heads)) as head:
        ahead = w.b.add(w.b.mul(row, row_bytes), w.b.mul(head, head_bytes))
        inside = w.times(w.b.add(w.times(head, form.block_size), place), size)
        for part in range(0, size, _VECTOR_BYTES):
            vector = w.load(INTS, w.at(source, ahead), part)
            w.store(vector, w.at(target, w.b.add(block, inside)), part)

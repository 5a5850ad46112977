"""What stands between a model's products, a row at a time: norms, gates, rotations, sums.

Torch makes each of them of many small operations, with a pass over memory for each. Roundings are those of the
library's code: where it goes through bfloat16 on the way, so does this. A row's operations are its own.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, cast

from foreword.runner.native import machine
from foreword.runner.native.activation import Activation, activate
from foreword.runner.native.worker import Worker
from foreword.runner.native.writer import F32, FLOATS, HALVES, LANES, Value, ir

STEP = 2 * LANES
"""Numbers of a row are taken so many at a time, or half as many from each of its halves."""


class Job(IntEnum):
    """A job is an array of 64-bit integers: what each place holds. Distances are in bytes."""

    NEXT = machine.NEXT
    """The next row; workers count it up."""
    ROWS = machine.ROWS
    STRIP = 2
    """Rows that a worker takes at once."""
    SIZE = 3
    """Numbers in a row, a multiple of 32."""
    X = 4
    X_ROW = 5
    Y = 6
    """The second operand: weights of a norm (float32), what a gate lets through, a sum adds; cosines of a rotation."""
    Z = 7
    """The third: sines of a rotation; bits of a norm's epsilon."""
    OUT = 8
    """Rows one right after the other."""
    HEADS = 9
    """Vectors of `SIZE` that a row of a rotation has."""
    X_HEAD = 10


Kind = Literal["norm", "late norm", "silu", "gelu", "sum", "turn"]
"""
norm
    `weight * round(x / rms(x))`
late norm
    `round(x / rms(x) * weight)`, in float32 up to the end
silu, gelu
    `round(f(x)) * y`
sum
    `x + y`
turn
    rotary embedding of neighbouring halves: `round(x * cos) + round(rotate_half(x) * sin)`
"""


@dataclass(frozen=True, slots=True)
class Form:
    """What a kernel is written for."""

    kind: Kind
    half: bool
    """bfloat16; else float32."""


def write(form: Form) -> str:
    """The kernel's LLVM code; its way in is `work(job)`."""
    module = ir.Module("rowwise")
    _Worker(module, form).write()
    return str(module)


class _Worker(Worker):
    """Writes `work(job)`."""

    def __init__(self, module: Value, form: Form) -> None:
        super().__init__(module)
        self.form = form
        self.element = 2 if form.half else 4
        self.size = self.field(Job.SIZE)

    def write(self) -> None:
        """Take rows until there are none."""
        w = self.w
        write_row: Callable[[Value], None] = {
            "norm": self._norm,
            "late norm": self._norm,
            "silu": self._gate,
            "gelu": self._gate,
            "sum": self._sum,
            "turn": self._turn,
        }[self.form.kind]
        strip, rows = self.field(Job.STRIP), self.field(Job.ROWS)
        with (
            self.taking(Job.NEXT, strip, rows) as first,
            w.loop(first, w.smaller(w.b.add(first, strip), rows)) as row,
        ):
            write_row(row)
        w.b.ret_void()

    def _norm(self, row: Value) -> None:
        w, b = self.w, self.w.b
        x, out = self._row(Job.X, row, self.field(Job.X_ROW)), self._out(row, self.size)
        sums = [w.slot(), w.slot()]
        for slot in sums:
            b.store(w.floats(0.0), slot)
        with self._columns() as column:
            for i, slot in enumerate(sums):
                own = self._load(x, w.plus(column, LANES * i))
                b.store(w.fma(own, own, b.load(slot, typ=FLOATS)), slot)
        total = w.across(b.fadd(*(b.load(slot, typ=FLOATS) for slot in sums)), b.fadd)
        mean = b.fdiv(total, w.splat(b.sitofp(self.size, F32)))
        epsilon = w.splat(b.bitcast(b.trunc(self.field(Job.Z), ir.IntType(32)), F32))
        factor = b.fdiv(w.floats(1.0), w.call("llvm.sqrt.v16f32", FLOATS, b.fadd(mean, epsilon)))
        weight = self.pointer(Job.Y)
        with self._columns() as column:
            for i in range(2):
                place = w.plus(column, LANES * i)
                own = b.fmul(self._load(x, place), factor)
                if self.form.kind == "norm":
                    own = self._round(own)
                self._store(b.fmul(own, w.load(FLOATS, weight, w.times(place, 4))), out, place)

    def _gate(self, row: Value) -> None:
        w, b = self.w, self.w.b
        x, out = self._row(Job.X, row, self.field(Job.X_ROW)), self._out(row, self.size)
        y = self._row(Job.Y, row, self.field(Job.X_ROW))
        kind = cast("Activation", self.form.kind)
        with self._columns() as column:
            for i in range(2):
                place = w.plus(column, LANES * i)
                own = self._round(activate(w, kind, self._load(x, place)))
                self._store(b.fmul(own, self._load(y, place)), out, place)

    def _sum(self, row: Value) -> None:
        w = self.w
        out, *terms = (self._out(row, self.size), *(self._row(f, row, self.field(Job.X_ROW)) for f in (Job.X, Job.Y)))
        with self._columns() as column:
            for i in range(2):
                place = w.plus(column, LANES * i)
                self._store(w.b.fadd(*(self._load(term, place) for term in terms)), out, place)

    def _turn(self, row: Value) -> None:
        w, b = self.w, self.w.b
        heads = self.field(Job.HEADS)
        half = b.sdiv(self.size, w.number(2))
        cos, sin = (self._row(field, row, w.times(self.size, self.element)) for field in (Job.Y, Job.Z))
        x, out = self._row(Job.X, row, self.field(Job.X_ROW)), self._out(row, b.mul(self.size, heads))
        with w.loop(w.number(0), heads) as head, w.loop(w.number(0), half, LANES) as low:
            high = b.add(low, half)
            own = w.at(x, b.mul(head, self.field(Job.X_HEAD)))
            to = w.at(out, b.mul(head, w.times(self.size, self.element)))
            first, second = self._load(own, low), self._load(own, high)
            for place, x1, x2 in ((low, first, b.fneg(second)), (high, second, first)):
                straight = self._round(b.fmul(x1, self._load(cos, place)))
                across = self._round(b.fmul(x2, self._load(sin, place)))
                self._store(b.fadd(straight, across), to, place)

    @contextmanager
    def _columns(self) -> Generator[Value]:
        with self.w.loop(self.w.number(0), self.size, STEP) as column:
            yield column

    def _load(self, base: Value, place: Value) -> Value:
        """16 numbers as float32, from number `place` on."""
        w = self.w
        if not self.form.half:
            return w.load(FLOATS, base, w.times(place, 4))
        return w.b.bitcast(w.load_halves(base, w.times(place, 2)), FLOATS)

    def _store(self, value: Value, base: Value, place: Value) -> None:
        w = self.w
        w.store(w.b.fptrunc(value, HALVES) if self.form.half else value, base, w.times(place, self.element))

    def _round(self, value: Value) -> Value:
        """To the model's precision and back."""
        b = self.w.b
        return b.fpext(b.fptrunc(value, HALVES), FLOATS) if self.form.half else value

    def _row(self, field: Job, row: Value, distance: Value) -> Value:
        return self.w.at(self.pointer(field), self.w.b.mul(row, distance))

    def _out(self, row: Value, count: Value) -> Value:
        return self._row(Job.OUT, row, self.w.times(count, self.element))

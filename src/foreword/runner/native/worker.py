"""What every kernel begins with: a function `work(job)`, which several workers run at once on the same job."""

from collections.abc import Generator
from contextlib import contextmanager
from enum import IntEnum

from foreword.runner.native.writer import I8, I64, POINTER, Value, Writer, ir


class Worker:
    """Writes `work(job)`. A job is an array of 64-bit integers, whose places its kernel's `Job` names."""

    def __init__(self, module: Value) -> None:
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER]), "work")
        self.w = Writer(function)
        self.job = function.args[0]

    def field(self, place: IntEnum | int) -> Value:
        """An integer of the job."""
        return self.w.load(I64, self.job, 8 * place)

    def pointer(self, place: IntEnum | int) -> Value:
        """An address of the job."""
        return self.w.load(POINTER, self.job, 8 * place)

    def count_up(self, place: IntEnum, by: Value) -> Value:
        """Add to a place that all workers share; what was there before."""
        return self.w.b.atomic_rmw("add", self.w.at(self.job, 8 * place), by, "monotonic")

    @contextmanager
    def taking(self, place: IntEnum, step: Value, stop: Value) -> Generator[Value]:
        """Take what no other worker has, `step` numbers at a time, until `stop` is reached; gives the first of them."""
        w = self.w
        ask, take, leave = (w.function.append_basic_block(name) for name in ("ask", "take", "leave"))
        w.b.branch(ask)
        w.b.position_at_end(ask)
        first = self.count_up(place, step)
        w.b.cbranch(w.b.icmp_signed("<", first, stop), take, leave)
        w.b.position_at_end(take)
        yield first
        w.b.branch(ask)
        w.b.position_at_end(leave)

    @contextmanager
    def tiles(self, shapes: Value, before: Value) -> Generator[None]:
        """Shape the tile registers (Intel AMX) for a while; whoever else uses them here finds them as they were.

        `shapes` is the address of what LDTILECFG reads, `before` that of 64 bytes for what it was.
        """
        w = self.w
        w.call("llvm.x86.sttilecfg", ir.VoidType(), before)
        w.call("llvm.x86.ldtilecfg", ir.VoidType(), shapes)
        yield
        w.call("llvm.x86.ldtilecfg", ir.VoidType(), before)

    def scratch(self, size: int) -> Value:
        """The address of some bytes of a worker's own, at a multiple of 64."""
        place = self.w.b.alloca(ir.ArrayType(I8, size))
        place.align = 64
        return self.w.b.bitcast(place, POINTER)

"""Writing vector code: what LLVM's builder lacks, so that a kernel reads as loops over vectors of 16 lanes.

All arithmetic is as it is written: nothing is reassociated or contracted, so that what a kernel computes does not
depend on the processor, the version of LLVM, or how many rows were computed side by side. Processors with shorter
vectors take several for each of ours.
"""

import importlib
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

ir = cast(Any, importlib.import_module("llvmlite.ir"))

LANES = 16
I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
POINTER = ir.PointerType()
FLOATS, INTS, SHORTS = (ir.VectorType(kind, LANES) for kind in (F32, I32, I16))


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no name for."""

    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


HALVES = ir.VectorType(_BFloat(), LANES)


class Function:
    """A function whose address was found at run time, for the builder to call."""

    def __init__(self, address: "Value", result: "Value", arguments: "Sequence[Value]") -> None:
        self.type = address.type
        self.function_type = ir.FunctionType(result, arguments)
        self._address = address

    def get_reference(self) -> str:
        """How the builder names it."""
        return self._address.get_reference()


LOG2_E = 1 / math.log(2)
EXP2 = (1.0, 0.6931471824645996, 0.24022646248340607, 0.0555032864, 0.00961848907, 0.00133999309, 0.000153458124)
"""Coefficients of a polynomial for 2^r, |r| <= 1/2, of least relative error: 2e-9 of its own, 8e-8 in float32."""
EXP2_SHORT = (0.9999992847442627, 0.6931217908859253, 0.240247443318367, 0.05591785907745361, 0.009570101276040077)
"""The same, shorter: 3e-6, where what comes out is rounded to bfloat16."""

Value = Any
"""A value of the code that is being written."""


class Writer:
    """Writes one function. Addresses are pointers; distances are in bytes."""

    def __init__(self, function: Value) -> None:
        self.function = function
        self.b = ir.IRBuilder(function.append_basic_block("entry"))

    def number(self, value: int) -> Value:
        """A 64-bit constant."""
        return ir.Constant(I64, value)

    def at(self, base: Value, distance: Value) -> Value:
        """The address `distance` bytes after `base`."""
        distance = self.number(distance) if isinstance(distance, int) else distance
        return self.b.gep(base, [distance], source_etype=I8)

    def load(self, kind: Value, base: Value, distance: Value = 0) -> Value:
        """A value out of memory; vectors need not be aligned."""
        value = self.b.load(self.at(base, distance), typ=kind)
        value.align = 4 if kind in (FLOATS, INTS, F32, I32) else 8 if kind in (I64, POINTER) else 2
        return value

    def store(self, value: Value, base: Value, distance: Value = 0) -> None:
        """Put a value into memory; vectors need not be aligned."""
        self.b.store(value, self.at(base, distance), align=2 if value.type in (HALVES, SHORTS) else 4)

    def times(self, value: Value, factor: int) -> Value:
        """An integer times a constant."""
        return self.b.mul(value, ir.Constant(value.type, factor))

    def plus(self, value: Value, term: int) -> Value:
        """An integer plus a constant."""
        return self.b.add(value, ir.Constant(value.type, term))

    def splat(self, value: Value) -> Value:
        """The same number in each lane."""
        vector = ir.VectorType(value.type, LANES)
        one = self.b.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(I32, 0))
        return self.b.shuffle_vector(one, ir.Constant(vector, ir.Undefined), ir.Constant(INTS, [0] * LANES))

    def floats(self, value: float) -> Value:
        """A constant in each lane."""
        return ir.Constant(FLOATS, [value] * LANES)

    def ints(self, values: Sequence[int]) -> Value:
        """One constant a lane."""
        return ir.Constant(INTS, list(values))

    def slot(self) -> Value:
        """A place for a vector of floats that changes; LLVM keeps it in registers where it can."""
        with self.b.goto_entry_block():
            return self.b.alloca(FLOATS)

    def call(self, name: str, kind: Value, *arguments: Value) -> Value:
        """One of LLVM's own functions."""
        module = self.function.module
        known = module.globals.get(name)
        if known is None:
            kinds = [POINTER if isinstance(value.type, ir.PointerType) else value.type for value in arguments]
            known = ir.Function(module, ir.FunctionType(kind, kinds), name)
        return self.b.call(known, arguments)

    def constant(self, value: bytes) -> Value:
        """The address of some bytes that never change."""
        kind = ir.ArrayType(I8, len(value))
        place = ir.GlobalVariable(self.function.module, kind, f"constant{len(self.function.module.globals)}")
        place.initializer, place.global_constant, place.linkage = ir.Constant(kind, bytearray(value)), True, "internal"
        return self.b.bitcast(place, POINTER)

    def fetch(self, base: Value, distance: Value = 0) -> None:
        """Have what lies there on its way into the core's own cache; it changes nothing else."""
        self.call("llvm.prefetch.p0", ir.VoidType(), self.at(base, distance), *(ir.Constant(I32, n) for n in (0, 2, 1)))

    def load_tile(self, number: int, base: Value, row: Value, *, passing: bool = False) -> None:
        """Fill a tile register (Intel AMX) with rows that lie `row` bytes apart.

        What is `passing` shouldn't take the place of what stays in the innermost cache.
        """
        name = "llvm.x86.tileloaddt164" if passing else "llvm.x86.tileloadd64"
        self.call(name, ir.VoidType(), ir.Constant(I8, number), base, row)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """Multiply and add, rounded once: a * b + c."""
        return self.call("llvm.fma.v16f32", FLOATS, a, b, c)

    def smaller(self, a: Value, b: Value) -> Value:
        """The smaller of two integers."""
        return self.b.select(self.b.icmp_signed("<", a, b), a, b)

    def upwards(self, value: Value, divisor: Value) -> Value:
        """An integer divided by another, rounded up; both are positive."""
        return self.b.sdiv(self.plus(self.b.add(value, divisor), -1), divisor)

    def load_halves(self, base: Value, distance: Value = 0) -> Value:
        """16 numbers of bfloat16 out of memory, as the words of float32 that they are the upper halves of."""
        return self.b.shl(self.b.zext(self.load(SHORTS, base, distance), INTS), self.ints([16] * LANES))

    def larger(self, a: Value, b: Value) -> Value:
        """The larger in each lane; neither may be NaN."""
        return self.b.select(self.b.fcmp_ordered(">", a, b), a, b)

    def across(self, x: Value, combine: Callable[[Value, Value], Value]) -> Value:
        """All lanes combined, in each lane: each with its opposite, halving four times."""
        for size in (8, 4, 2, 1):
            x = combine(x, self.b.shuffle_vector(x, x, self.ints([lane ^ size for lane in range(LANES)])))
        return x

    @contextmanager
    def loop(self, start: Value, stop: Value, step: int = 1) -> Generator[Value]:
        """For each number from `start` up to `stop`, which may be reached already."""
        b = self.b
        before = b.block
        head, body, after = (self.function.append_basic_block(name) for name in ("head", "body", "after"))
        b.branch(head)
        b.position_at_end(head)
        index = b.phi(I64)
        index.add_incoming(start, before)
        b.cbranch(b.icmp_signed("<", index, stop), body, after)
        b.position_at_end(body)
        yield index
        index.add_incoming(self.plus(index, step), b.block)
        b.branch(head)
        b.position_at_end(after)

    def exp2(self, x: Value, terms: Sequence[float]) -> Value:
        """Two to the power of each lane; x is at most 127, and below -126 counts as -126.

        x = n + r with |r| <= 1/2, and 2^r by a polynomial: see EXP2 and EXP2_SHORT.
        """
        b = self.b
        x = self.larger(x, self.floats(-126.0))
        n = self.call("llvm.rint.v16f32", FLOATS, x)
        r = b.fsub(x, n)
        p = self.floats(terms[-1])
        for term in reversed(terms[:-1]):
            p = self.fma(p, r, self.floats(term))
        raised = b.shl(b.fptosi(n, INTS), self.ints([23] * LANES))
        return b.bitcast(b.add(b.bitcast(p, INTS), raised), FLOATS)

    def transpose(self, rows: Sequence[Value]) -> list[Value]:
        """16 vectors of 16 lanes, lane i of vector j to lane j of vector i: squares are swapped, halving each time."""
        rows = list(rows)
        for size in (8, 4, 2, 1):
            low = self.ints([lane if not lane & size else lane - size + LANES for lane in range(LANES)])
            high = self.ints([lane + size if not lane & size else lane + LANES for lane in range(LANES)])
            for i in (i for i in range(LANES) if not i & size):
                a, b = rows[i], rows[i + size]
                rows[i], rows[i + size] = self.b.shuffle_vector(a, b, low), self.b.shuffle_vector(a, b, high)
        return rows

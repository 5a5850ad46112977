"""Products with weights in tile registers (Intel AMX): what one worker does with one job.

`x @ weight.T` for rows of bfloat16: an item of work is a strip of rows and a panel, some blocks of 32 columns each, and
workers take items until none is left. A weight is laid out once for all, so that what a block reads lies in the order
of reading. Of a strip, 32 rows at a time meet all blocks of the panel: they stay in the innermost cache, weights pass
by it out of the next one, and what came of the block before is rounded and written meanwhile.

Every element of the result is one sum over the inputs in their order, 32 at a time, kept in a tile register from the
first to the last and rounded once; only the number of inputs takes part in how it is computed. So a row's bits do not
depend on how many rows there are, by construction.
"""

from enum import IntEnum

from foreword.runner.native import machine
from foreword.runner.native.activation import Activation, activate
from foreword.runner.native.form import TILE_BYTES, TILE_ROWS, tile_shapes
from foreword.runner.native.worker import Worker
from foreword.runner.native.writer import FLOATS, HALVES, I8, I32, I64, LANES, POINTER, Value, ir

COLUMNS = 32
"""Of a block's weights: two tiles side by side."""
STEP = 32
"""Inputs that a tile holds."""
STRIP = 256
"""Rows of an item, at most."""
_STEP_BYTES = 2 * STEP * COLUMNS
_PANEL_BYTES = 2**19
"""Of a panel's weights: they should stay in a core's own cache while a strip's rows pass by."""
_FEW, _SOME = 32, 128
"""Rows up to which weights are taken one block at a time, or a few: reading them is what takes the time then."""
_ROWS = 2 * TILE_ROWS
"""Multiplied together."""
_LEFT, _RIGHT = 4, 6
"""Tile registers: the first four are sums."""


class Job(IntEnum):
    """A job is an array of 64-bit integers: what each place holds. Distances are in bytes."""

    NEXT = machine.NEXT
    """The next item; workers count it up. Strips of one panel come one after the other."""
    ROWS = machine.ROWS
    ROOM = 2
    """Rows that there is room for in each part of the result."""
    WORKERS = 3
    """How many there are, at most."""
    BLOCKS = 4
    STEPS = 5
    """Inputs, 32 at a time."""
    X = 6
    X_ROW = 7
    WEIGHT = 8
    """bfloat16 [blocks, steps, 2, 16, 16, 2]: of a block and a step two tiles, of pairs of inputs by column."""
    BIAS = 9
    """float32 [columns]."""
    PARTS = 10
    """int32 [blocks, 2]: where the part of the result that a block is in begins; numbers from row to row there."""
    OUT = 11
    """Parts one after the other, each [room, numbers from row to row]."""


def write(gate: Activation | None = None) -> str:
    """The kernel's LLVM code; its way in is `work(job)`.

    With a gate, the two tiles of a block are 16 columns of the gate and the same 16 of what it lets through, and what
    comes out are the 16 products `round(f(round(gate))) * round(other)`.
    """
    module = ir.Module("product")
    _Worker(module, gate).write()
    return str(module)


class _Worker(Worker):
    """Writes `work(job)`."""

    def __init__(self, module: Value, gate: Activation | None) -> None:
        super().__init__(module)
        self.gate: Activation | None = gate
        self.width = COLUMNS if gate is None else COLUMNS // 2
        """Columns of the result that a block makes."""
        self.sums = self.scratch(_ROWS * COLUMNS * 4)
        self.before = self.scratch(TILE_BYTES)
        self.rows, self.steps, self.x_row = (self.field(place) for place in (Job.ROWS, Job.STEPS, Job.X_ROW))
        self.strips = self.w.upwards(self.rows, self.w.number(STRIP))
        self.panel = self._panel()
        # Of the sums that are to be rounded yet: how many rows, how far apart they are to lie, where, and their biases.
        self.due, self.due_apart = (self.w.b.alloca(I64) for _ in range(2))
        self.due_out, self.due_bias = (self.w.b.alloca(POINTER) for _ in range(2))

    def write(self) -> None:
        """Take items until there are none."""
        w = self.w
        held = w.smaller(self.rows, w.number(TILE_ROWS))
        shapes = w.constant(b"".join(tile_shapes(rows) for rows in range(1, TILE_ROWS + 1)))
        shape = w.at(shapes, w.times(w.plus(held, -1), TILE_BYTES))
        items = w.b.mul(w.upwards(self.field(Job.BLOCKS), self.panel), self.strips)
        with self.tiles(shape, self.before), self.taking(Job.NEXT, w.number(1), items) as item:
            self._item(item)
        w.b.ret_void()

    def _panel(self) -> Value:
        """Blocks of weights that a worker takes at once: as many for each worker, as far as that is possible."""
        w, blocks, workers = self.w, self.field(Job.BLOCKS), self.field(Job.WORKERS)
        many = w.b.sdiv(w.number(_PANEL_BYTES // _STEP_BYTES), self.steps)
        most = w.b.select(w.b.icmp_signed(">", many, w.number(1)), many, w.number(1))
        for rows, few in ((_SOME, 4), (_FEW, 1)):
            most = w.b.select(w.b.icmp_signed("<=", self.rows, w.number(rows)), w.number(few), most)
        rounds = w.upwards(blocks, w.b.mul(workers, most))
        return w.upwards(blocks, w.b.mul(workers, rounds))

    def _item(self, item: Value) -> None:
        w = self.w
        block = w.b.mul(w.b.sdiv(item, self.strips), self.panel)
        self.blocks = block, w.smaller(w.b.add(block, self.panel), self.field(Job.BLOCKS))
        first = w.times(w.b.srem(item, self.strips), STRIP)
        end = w.smaller(w.plus(first, STRIP), self.rows)
        rest = w.b.add(first, w.times(w.b.sdiv(w.b.sub(end, first), w.number(_ROWS)), _ROWS))
        full = w.number(TILE_ROWS)
        w.b.store(w.number(0), self.due)
        with w.loop(first, rest, _ROWS) as row:
            self._rows(row, w.number(_ROWS), tiles=2)
        with w.b.if_then(w.b.icmp_signed(">", w.b.sub(end, rest), full)):
            self._rows(rest, full, tiles=1)
        with w.b.if_then(w.b.icmp_signed(">", end, rest)):
            # The last tile is a full one where there are so many rows: some are computed twice, to the same bits.
            count = w.smaller(end, full)
            self._rows(w.b.sub(end, count), count, tiles=1)
        self._round(w.number(0), w.b.load(self.due))

    def _rows(self, row: Value, count: Value, *, tiles: int) -> None:
        """Multiply `count` rows from `row` on, which take so many tiles, by all blocks of the panel."""
        w = self.w
        x = w.at(self.pointer(Job.X), w.b.mul(row, self.x_row))
        with w.loop(*self.blocks) as block:
            self._multiply(x, block, tiles)
            part = w.at(self.pointer(Job.PARTS), w.times(block, 8))
            begin, apart = (w.b.sext(w.load(I32, part, 4 * place), I64) for place in range(2))
            column = w.b.sub(w.times(block, self.width), begin)
            ahead = w.b.add(w.b.add(w.b.mul(begin, self.field(Job.ROOM)), w.b.mul(row, apart)), column)
            w.b.store(count, self.due)
            w.b.store(w.times(apart, 2), self.due_apart)
            w.b.store(w.at(self.pointer(Job.OUT), w.times(ahead, 2)), self.due_out)
            w.b.store(w.at(self.pointer(Job.BIAS), w.times(block, COLUMNS * 4)), self.due_bias)

    def _multiply(self, x: Value, block: Value, tiles: int) -> None:
        """Sum up some rows' products with a block, and meanwhile round what is due: a core does both at once."""
        w = self.w
        weight = w.at(self.pointer(Job.WEIGHT), w.b.mul(block, w.times(self.steps, _STEP_BYTES)))
        pairs = w.smaller(w.b.sdiv(w.b.load(self.due), w.number(2)), self.steps)
        for number in range(2 * tiles):
            w.call("llvm.x86.tilezero", ir.VoidType(), ir.Constant(I8, number))
        with w.loop(w.number(0), self.steps) as step:
            for side in range(2):
                place = w.plus(w.times(step, _STEP_BYTES), side * TILE_ROWS * TILE_BYTES)
                w.load_tile(_RIGHT + side, w.at(weight, place), w.number(TILE_BYTES), passing=True)
            for tile in range(tiles):
                lower = w.at(x, w.b.add(w.times(step, TILE_BYTES), w.times(self.x_row, tile * TILE_ROWS)))
                w.load_tile(_LEFT + tile, lower, self.x_row)
                for side in range(2):
                    numbers = (2 * tile + side, _LEFT + tile, _RIGHT + side)
                    w.call("llvm.x86.tdpbf16ps", ir.VoidType(), *(ir.Constant(I8, number) for number in numbers))
            with w.b.if_then(w.b.icmp_signed("<", step, pairs)):
                for other in range(2):
                    self._round_row(w.plus(w.times(step, 2), other))
        self._round(w.times(pairs, 2), w.b.load(self.due))
        for tile in range(tiles):
            for side in range(2):
                place = w.at(self.sums, tile * TILE_ROWS * COLUMNS * 4 + side * TILE_BYTES)
                number = ir.Constant(I8, 2 * tile + side)
                w.call("llvm.x86.tilestored64", ir.VoidType(), number, place, w.number(COLUMNS * 4))

    def _round(self, first: Value, end: Value) -> None:
        with self.w.loop(first, end) as index:
            self._round_row(index)

    def _round_row(self, index: Value) -> None:
        """Round a row of the sums that are due, into the result."""
        w, bias = self.w, self.w.b.load(self.due_bias)
        out = w.at(w.b.load(self.due_out), w.b.mul(index, w.b.load(self.due_apart)))
        halves: list[Value] = []
        for side in range(2):
            total = w.load(FLOATS, self.sums, w.plus(w.times(index, COLUMNS * 4), 64 * side))
            halves.append(w.b.fptrunc(w.b.fadd(total, w.load(FLOATS, bias, 64 * side)), HALVES))
        if self.gate is not None:
            halves = [self._let_through(self.gate, *halves)]
        for side, half in enumerate(halves):
            w.store(half, out, 2 * LANES * side)

    def _let_through(self, gate: Activation, value: Value, other: Value) -> Value:
        w, b = self.w, self.w.b
        opened = b.fptrunc(activate(w, gate, b.fpext(value, FLOATS)), HALVES)
        return b.fptrunc(b.fmul(b.fpext(opened, FLOATS), b.fpext(other, FLOATS)), HALVES)

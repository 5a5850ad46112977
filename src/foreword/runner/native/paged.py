"""The paged attention kernel for CPUs: what one worker does with one job.

A *strip* is some rows that are computed together (`attention.strips`): neighbours of one sequence, or rows of several
that begin with the same blocks. An item of work is a strip and a KV head, and workers take items until none is left.
Keys are read through the block table in chunks of CHUNK at absolute multiples of CHUNK, laid out for the processor once
for all rows that walk by, and each row goes through its chunks in order with a running maximum (the online softmax of
Milakov and Gimelshein, arXiv:1805.02867). A row's arithmetic is its own, operation for
operation: what it adds up depends neither on the rows beside it nor on where its strip begins, and a chunk that it
does not see leaves its sums as they were. So its bits depend on its own tokens and positions only, by construction.

Keys that a row does not see are masked, and values that no row of the strip sees are read as zeros: blocks may hold
anything past what has been written, and zero times NaN is NaN.
"""

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from foreword.runner.native.form import CHUNK, NOTHING, TILED_ROWS, VECTORS, Form, Job, Scratch, tile_shapes
from foreword.runner.native.rows import Kind, write_rows
from foreword.runner.native.worker import Worker
from foreword.runner.native.writer import (
    EXP2,
    F32,
    FLOATS,
    HALVES,
    I32,
    I64,
    INTS,
    LANES,
    SHORTS,
    Value,
    Writer,
    ir,
)


def write(form: Form) -> str:
    """The kernel's LLVM code; its way in is `work(job)`."""
    module = ir.Module("paged")
    scratch = Scratch(form)
    _Worker(module, form, scratch, write_rows(module, form, scratch)).write()
    return str(module)


def _load_words(w: Writer, form: Form, base: Value, index: int) -> Value:
    """The 16 words from word `index` on of a vector in memory."""
    if form.half and not form.tiles:
        return w.load_halves(base, 2 * index)
    return w.load(INTS, base, 4 * index)


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of the batch in one query head."""

    number: Value
    """Of row and head together, in the strip."""
    row: Value
    """In the batch."""
    position: Value
    head: Value


class _Worker(Worker):
    """Writes `work(job)`."""

    def __init__(self, module: Value, form: Form, scratch: Scratch, groups: dict[Kind, Value]) -> None:
        super().__init__(module)
        self.form = form
        self.places = scratch
        self.groups = groups
        number = self.count_up(Job.WORKERS, self.w.number(1))
        self.memory = self.w.at(self.pointer(Job.SCRATCH), self.w.times(number, scratch.size))

    def write(self) -> None:
        """Take items until there are none."""
        w, heads = self.w, self.w.number(self.form.kv_heads)
        before = w.at(self.memory, self.places.before)
        shaped = self.tiles(w.constant(tile_shapes()), before) if self.form.tiles else nullcontext()
        items = w.b.mul(self.field(Job.NUM_STRIPS), heads)
        with shaped, self.taking(Job.NEXT, w.number(1), items) as item:
            self.head = w.b.srem(item, heads)
            parts, walks = self._bounds(w.b.sdiv(item, heads))
            with self._each_row(parts) as row:
                self._begin_row(row)
            with w.loop(*walks) as walk:
                self._walk(walk)
            with self._each_row(parts) as row:
                self._finish_row(row)
        w.b.ret_void()

    def _bounds(self, strip: Value) -> tuple[tuple[Value, Value], tuple[Value, Value]]:
        """A strip's parts and walks, from the first to the one after the last."""
        part, parts_end, walk, walks_end = self._numbers(Job.STRIPS, strip, 4)
        return (part, parts_end), (walk, walks_end)

    def _numbers(self, table: Job, index: Value, count: int) -> list[Value]:
        """A row of one of the tables of int32."""
        w = self.w
        row = w.at(self.pointer(table), w.times(index, 4 * count))
        return [w.b.sext(w.load(I32, row, 4 * place), I64) for place in range(count)]

    def _walk(self, walk: Value) -> None:
        """Take some rows of the strip through keys that lie in one block table."""
        w, form = self.w, self.form
        place, count, begin, self.end, self.table, row, last = self._numbers(Job.WALKS, walk, 7)
        self.first_key, self.last_first_key = (
            w.b.sext(w.load(I32, self.pointer(Job.FIRST_KEYS), w.times(one, 4)), I64) for one in (row, last)
        )
        chunk = w.number(CHUNK)
        seen = w.b.mul(w.b.sdiv(self.first_key, chunk), chunk)
        first, rows = (w.times(number, form.group) for number in (place, count))
        with w.loop(w.b.select(w.b.icmp_signed(">", seen, begin), seen, begin), self.end, CHUNK) as base:
            with w.loop(w.number(0), w.number(VECTORS)) as vector:
                key = w.b.add(base, w.times(vector, LANES))
                self._fetch(w.plus(key, CHUNK))
                self._lay_out(vector, key)
            if form.tiles:
                with w.loop(w.number(0), rows, TILED_ROWS) as done:
                    most = w.smaller(w.b.sub(rows, done), w.number(TILED_ROWS))
                    self._rows(w.b.add(first, done), most, base, TILED_ROWS)
            else:
                self._side_by_side(first, rows, base)

    @contextmanager
    def _each_row(self, parts: tuple[Value, Value]) -> Generator[_Row]:
        """Loop over the rows of a strip's parts and the query heads of the group."""
        w, form = self.w, self.form
        with w.loop(*parts) as part:
            first, start, count, place = self._numbers(Job.PARTS, part, 4)
            with w.loop(w.number(0), count) as index, w.loop(w.number(0), w.number(form.group)) as member:
                yield _Row(
                    number=w.b.add(w.times(w.b.add(place, index), form.group), member),
                    row=w.b.add(first, index),
                    position=w.b.trunc(w.b.add(start, index), I32),
                    head=w.b.add(w.times(self.head, form.group), member),
                )

    def _begin_row(self, at: _Row) -> None:
        w, form, scratch, row = self.w, self.form, self.places, at.number
        ahead = w.b.add(w.b.mul(at.row, self.field(Job.QUERY_ROW)), w.b.mul(at.head, self.field(Job.QUERY_HEAD)))
        query = w.at(self.pointer(Job.QUERY), ahead)
        for index in range(0, form.depth, LANES):
            words = _load_words(w, form, query, index)
            w.store(words, self.memory, w.plus(w.times(row, form.depth * 4), scratch.query + 4 * index))
        first = w.load(I32, self.pointer(Job.FIRST_KEYS), w.times(at.row, 4))
        w.store(at.position, self.memory, w.plus(w.times(row, 4), scratch.position))
        w.store(first, self.memory, w.plus(w.times(row, 4), scratch.first_key))
        w.store(ir.Constant(F32, NOTHING), self.memory, w.plus(w.times(row, 4), scratch.highest))
        w.store(w.floats(0.0), self.memory, w.plus(w.times(row, LANES * 4), scratch.total))
        for column in range(0, form.value_dim, LANES):
            place = w.plus(w.times(row, form.value_dim * 4), scratch.mixed + 4 * column)
            w.store(w.floats(0.0), self.memory, place)

    def _side_by_side(self, first: Value, rows: Value, base: Value) -> None:
        """Take `rows` rows from the first on through a chunk, as many at a time as can be."""
        w, done, end = self.w, first, self.w.b.add(first, rows)
        for count in sorted({kind.count for kind in self.groups}, reverse=True):
            stop = w.b.add(done, w.times(w.b.sdiv(w.b.sub(end, done), w.number(count)), count))
            with w.loop(done, stop, count) as row:
                self._rows(row, w.number(count), base, count)
            done = stop

    def _rows(self, row: Value, count: Value, base: Value, most: int) -> None:
        """Take `count` rows through a chunk, by the functions for up to `most`, unless it comes after all of them.

        Rows of several parts lie in no order where keys are shared. All of them come after those keys; but where their
        sight begins, only the walk's own bounds say of all.
        """
        w, scratch = self.w, self.places
        end = w.plus(base, CHUNK)

        def position(index: Value) -> Value:
            return w.b.sext(w.load(I32, self.memory, w.plus(w.times(index, 4), scratch.position)), I64)

        last = w.plus(w.b.add(row, count), -1)
        with w.b.if_then(w.b.icmp_signed(">=", position(last), base)):
            whole = w.b.and_(
                w.b.icmp_signed(">=", w.plus(position(row), 1), end),
                w.b.icmp_signed("<=", self.last_first_key, base),
            )
            scale, cap = (w.b.bitcast(w.b.trunc(self.field(field), I32), F32) for field in (Job.SCALE, Job.CAP))
            arguments = [self.memory, row, base, scale, cap, count]
            with w.b.if_else(whole) as (then, otherwise):
                with then:
                    w.b.call(self.groups[Kind(most, whole=True)], arguments)
                with otherwise:
                    w.b.call(self.groups[Kind(most, whole=False)], arguments)

    def _lay_out(self, vector: Value, key: Value) -> None:
        """Lay out 16 keys and values, from position `key` on: of each key word a vector, and values in pairs."""
        w, form = self.w, self.form
        with w.b.if_else(w.b.icmp_signed("<", key, self.end)) as (there, beyond):
            with there:
                keys, values = self._places(key)
                self._lay_out_keys(vector, keys)
                self._lay_out_values(vector, key, values)
            with beyond, w.loop(w.number(0), w.number(form.terms // VECTORS)) as term:
                for column in range(0, form.value_dim, LANES):
                    w.store(w.ints([0] * LANES), self.memory, self._value_place(vector, term, column))

    def _fetch(self, key: Value) -> None:
        """Ask memory for 16 keys and values, from position `key` on: blocks lie apart, so nobody guesses the next."""
        w, form = self.w, self.form
        with w.b.if_then(w.b.icmp_signed("<", key, self.end)):
            for place, dim in zip(self._places(key), (form.key_dim, form.value_dim), strict=True):
                for line in range(0, LANES * dim * form.element, 64):
                    w.fetch(place, line)

    def _places(self, key: Value) -> tuple[Value, Value]:
        """Where 16 keys and values lie, from position `key` on."""
        w, form = self.w, self.form
        entry = w.b.add(self.table, w.b.sdiv(key, w.number(form.block_size)))
        block = w.b.sext(w.load(I32, self.pointer(Job.TABLES), w.times(entry, 4)), I64)
        block = w.b.mul(block, self.field(Job.SPAN))
        inside = w.b.srem(key, w.number(form.block_size))
        token = w.b.add(w.times(self.head, form.block_size), inside)
        distances = (w.times(token, dim * form.element) for dim in (form.key_dim, form.value_dim))
        keys, values = (w.b.add(block, distance) for distance in distances)
        return w.at(self.pointer(Job.KEYS), keys), w.at(self.pointer(Job.VALUES), values)

    def _lay_out_keys(self, vector: Value, keys: Value) -> None:
        w, form = self.w, self.form
        for index in range(0, form.depth, LANES):
            rows = [_load_words(w, form, w.at(keys, i * form.key_dim * form.element), index) for i in range(LANES)]
            for i, column in enumerate(w.transpose(rows)):
                place = w.plus(w.times(vector, 4 * LANES), self.places.keys + (index + i) * CHUNK * 4)
                w.store(column, self.memory, place)

    def _lay_out_values(self, vector: Value, key: Value, values: Value) -> None:
        w, form = self.w, self.form
        each = 2 if form.tiles else 1
        with w.loop(w.number(0), w.number(LANES // each)) as term:
            seen: list[Value] = []
            sources: list[Value] = []
            for i in range(each):
                index = w.plus(w.times(term, each), i)
                position = w.b.add(key, index)
                before_end = w.b.icmp_signed("<", position, self.end)
                seen.append(w.b.and_(before_end, w.b.icmp_signed(">=", position, self.first_key)))
                sources.append(w.at(values, w.times(index, form.value_dim * form.element)))
            for column in range(0, form.value_dim, LANES):
                if form.tiles:
                    low, high = (w.b.zext(w.load(SHORTS, source, 2 * column), INTS) for source in sources)
                    high = w.b.shl(high, w.ints([16] * LANES))
                    nothing = w.ints([0] * LANES)
                    word = w.b.or_(w.b.select(seen[0], low, nothing), w.b.select(seen[1], high, nothing))
                else:
                    word = w.b.select(seen[0], _load_words(w, form, sources[0], column), w.ints([0] * LANES))
                w.store(word, self.memory, self._value_place(vector, term, column))

    def _value_place(self, vector: Value, term: Value, column: int) -> Value:
        w, form = self.w, self.form
        number = w.b.add(w.times(vector, form.terms // VECTORS), term)
        return w.plus(w.times(number, form.value_dim * 4), self.places.values + 4 * column)

    def _finish_row(self, at: _Row) -> None:
        """Divide a row's sums by its total, in which a sink takes part."""
        w, form, scratch, row = self.w, self.form, self.places, at.number
        b = w.b
        number = b.add(w.times(at.row, form.group * form.kv_heads), at.head)
        address = w.at(self.pointer(Job.OUT), w.times(number, form.value_dim * form.element))
        totals = w.load(FLOATS, self.memory, w.plus(w.times(row, LANES * 4), scratch.total))
        total = b.extract_element(totals, ir.Constant(I32, 0))
        for lane in range(1, LANES):
            total = b.fadd(total, b.extract_element(totals, ir.Constant(I32, lane)))
        total, factor = w.splat(total), w.floats(1.0)
        if form.sinks:
            sink = w.splat(w.load(F32, self.pointer(Job.SINKS), w.times(at.head, 4)))
            before = w.splat(w.load(F32, self.memory, w.plus(w.times(row, 4), scratch.highest)))
            highest = w.larger(before, sink)
            factor = w.exp2(b.fsub(before, highest), EXP2)
            total = w.fma(total, factor, w.exp2(b.fsub(sink, highest), EXP2))
        for column in range(0, form.value_dim, LANES):
            mixed = w.load(FLOATS, self.memory, w.plus(w.times(row, form.value_dim * 4), scratch.mixed + 4 * column))
            mixed = b.fdiv(b.fmul(mixed, factor), total)
            w.store(b.fptrunc(mixed, HALVES) if form.half else mixed, address, form.element * column)

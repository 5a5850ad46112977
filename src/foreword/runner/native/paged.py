"""The paged attention kernel for CPUs: what one worker does with one job.

A *strip* is some neighbouring rows of one sequence; an item of work is a strip and a KV head, and workers take items
until none is left. Keys are read through the block table in chunks of CHUNK at absolute multiples of CHUNK, laid out
for the processor once for all rows of the strip, and each row goes through its chunks in order with a running maximum
(the online softmax of Milakov and Gimelshein, arXiv:1805.02867). A row's arithmetic is its own, operation for
operation: what it adds up depends neither on the rows beside it nor on where its strip begins, and a chunk that it
does not see leaves its sums as they were. So its bits depend on its own tokens and positions only, by construction.

Keys that a row does not see are masked, and values that no row of the strip sees are read as zeros: blocks may hold
anything past what has been written, and zero times NaN is NaN.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

from foreword.runner.native.writer import (
    F32,
    FLOATS,
    HALVES,
    I32,
    I64,
    INTS,
    LANES,
    PAIRS,
    POINTER,
    SHORTS,
    Value,
    Writer,
    ir,
)

CHUNK = 64
"""Keys that a row looks at together."""
_VECTORS = CHUNK // LANES
_SIDE_BY_SIDE = (6, 3, 2, 1)
"""Rows computed side by side, to use what was loaded more than once: as many as there are registers for."""
_NOTHING = -3e38
"""A score below all others, and finite: minus infinity less itself would be NaN."""
MOST_ROWS = 192
"""Rows times query heads of a strip, unless one row has more: what a worker keeps of them should stay in its cache."""


class Job(IntEnum):
    """A job is an array of 64-bit integers: what each place holds. Distances are in bytes."""

    NEXT = 0
    """The next item; workers count it up."""
    WORKERS = 1
    """Workers that have come so far."""
    NUM_STRIPS = 2
    STRIPS = 3
    """int32 [n, 4]: first row of the batch, its position, number of rows, where its block table begins."""
    TABLES = 4
    """int32: block tables, one after the other."""
    FIRST_KEYS = 5
    """int32 [rows]: the earliest position that each row of the batch sees."""
    QUERY = 6
    QUERY_ROW = 7
    QUERY_HEAD = 8
    OUT = 9
    """[rows, heads, value_dim]."""
    KEYS = 10
    """The layer's first key in block 0."""
    VALUES = 11
    SPAN = 12
    """Of one block, all layers."""
    SCRATCH = 13
    SCALE = 14
    """Bits of a float32, as are the next."""
    CAP = 15
    SINKS = 16
    """float32 [heads]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What a kernel is written for."""

    group: int
    """Query heads that share a KV head."""
    kv_heads: int
    key_dim: int
    """A multiple of 32 for bfloat16 and of 16 for float32, as is `value_dim`."""
    value_dim: int
    block_size: int
    """A multiple of 16."""
    half: bool
    """bfloat16; else float32."""
    pairs: bool
    """Multiply bfloat16 two at a time; else in float32."""
    capped: bool
    sinks: bool

    @property
    def positions(self) -> int:
        """Most rows of the batch in a strip."""
        return max(1, MOST_ROWS // self.group)

    @property
    def element(self) -> int:
        """Bytes of a number in memory."""
        return 2 if self.half else 4

    @property
    def depth(self) -> int:
        """Steps of a score: 32-bit words of a key, each one number or a pair."""
        return self.key_dim // 2 if self.pairs else self.key_dim

    @property
    def terms(self) -> int:
        """Steps of a weighted sum over a chunk."""
        return CHUNK // 2 if self.pairs else CHUNK


class Scratch:
    """Where a worker keeps what: distances in bytes from its own scratch memory."""

    def __init__(self, form: Form) -> None:
        rows = form.positions * form.group
        self.size = 0
        self.query = self._take(rows * form.depth * 4)
        self.keys = self._take(form.depth * CHUNK * 4)
        self.values = self._take(form.terms * form.value_dim * 4)
        self.weights = self._take(max(_SIDE_BY_SIDE) * form.terms * 4)
        self.position = self._take(rows * 4)
        self.first_key = self._take(rows * 4)
        self.highest = self._take(rows * 4)
        self.total = self._take(rows * LANES * 4)
        self.mixed = self._take(rows * form.value_dim * 4)

    def _take(self, count: int) -> int:
        begin = self.size
        self.size += -(-count // 64) * 64
        return begin


def write(form: Form) -> str:
    """The kernel's LLVM code; its way in is `work(job)`."""
    module = ir.Module("paged")
    scratch = Scratch(form)
    groups = {count: _write_rows(module, form, scratch, count) for count in _SIDE_BY_SIDE}
    _Worker(module, form, scratch, groups).write()
    return str(module)


def _multiply_add(w: Writer, form: Form, sums: Value, left: Value, right: Value) -> Value:
    """`sums` plus the products of 32-bit words, each one number or a pair."""
    if form.pairs:
        a, b = (w.b.bitcast(word, PAIRS) for word in (left, right))
        return w.call("llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, sums, a, b)
    return w.fma(w.b.bitcast(left, FLOATS), w.b.bitcast(right, FLOATS), sums)


def _load_words(w: Writer, form: Form, base: Value, index: int) -> Value:
    """The 16 words from word `index` on of a vector in memory."""
    if form.half and not form.pairs:
        shorts = w.load(SHORTS, base, 2 * index)
        return w.b.shl(w.b.zext(shorts, INTS), w.ints([16] * LANES))
    return w.load(INTS, base, 4 * index)


def _write_rows(module: Value, form: Form, scratch: Scratch, count: int) -> Value:
    """A function that takes `count` neighbouring rows of a strip through one chunk."""
    kinds = [POINTER, I64, I64, F32, F32]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), f"rows{count}")
    function.linkage = "internal"
    w = Writer(function)
    memory, row, base, scale, cap = function.args
    rescale = [
        _weigh(w, form, scratch, (memory, w.plus(row, i), i), scores)
        for i, scores in enumerate(_score(w, form, scratch, (memory, row, base, scale, cap), count))
    ]
    _mix(w, form, scratch, (memory, row), rescale)
    w.b.ret_void()
    return function


def _score(w: Writer, form: Form, scratch: Scratch, given: tuple[Value, ...], count: int) -> list[list[Value]]:
    """Scores of each row with a chunk's keys, four vectors a row; _NOTHING where a key is not seen."""
    memory, row, base, scale, cap = given
    sums = [[w.slot() for _ in range(_VECTORS)] for _ in range(count)]
    for slot in (slot for slots in sums for slot in slots):
        w.b.store(w.floats(0.0), slot)
    query = w.at(memory, w.plus(w.times(row, form.depth * 4), scratch.query))
    keys = w.at(memory, scratch.keys)
    with w.loop(w.number(0), w.number(form.depth)) as step:
        words = [w.load(INTS, keys, w.plus(w.times(step, CHUNK * 4), 64 * i)) for i in range(_VECTORS)]
        for i in range(count):
            own = w.splat(w.load(I32, query, w.plus(w.times(step, 4), i * form.depth * 4)))
            for slot, word in zip(sums[i], words, strict=True):
                w.b.store(_multiply_add(w, form, w.b.load(slot, typ=FLOATS), own, word), slot)
    scores: list[list[Value]] = []
    for i in range(count):
        place = w.times(w.plus(row, i), 4)
        last, first = (
            w.splat(w.load(I32, memory, w.plus(place, part))) for part in (scratch.position, scratch.first_key)
        )
        scores.append([])
        for vector, slot in enumerate(sums[i]):
            key = w.b.add(w.splat(w.b.trunc(base, I32)), w.ints(range(LANES * vector, LANES * vector + LANES)))
            seen = w.b.and_(w.b.icmp_signed("<=", key, last), w.b.icmp_signed(">=", key, first))
            score = w.b.fmul(w.b.load(slot, typ=FLOATS), w.splat(scale))
            if form.capped:
                score = _cap(w, score, w.splat(cap))
            scores[-1].append(w.b.select(seen, score, w.floats(_NOTHING)))
    return scores


def _cap(w: Writer, score: Value, cap: Value) -> Value:
    """Cap * tanh(score / cap), with tanh(x) = 1 - 2 / (e^(2x) + 1); beyond 20 it is 1 in float32."""
    x = w.b.fdiv(score, cap)
    x = w.b.select(w.b.fcmp_ordered("<", x, w.floats(20.0)), x, w.floats(20.0))
    x = w.larger(x, w.floats(-20.0))
    above = w.b.fadd(w.exp(w.b.fadd(x, x)), w.floats(1.0))
    return w.b.fmul(cap, w.b.fsub(w.floats(1.0), w.b.fdiv(w.floats(2.0), above)))


def _weigh(w: Writer, form: Form, scratch: Scratch, at: tuple[Value, Value, int], scores: list[Value]) -> Value:
    """Make weights of a row's scores, for `_mix`, and keep its maximum and total; returns what rescales its sums."""
    memory, row, index = at
    b = w.b
    highest = w.larger(w.larger(scores[0], scores[1]), w.larger(scores[2], scores[3]))
    for size in (8, 4, 2, 1):
        swapped = b.shuffle_vector(highest, highest, w.ints([lane ^ size for lane in range(LANES)]))
        highest = w.larger(highest, swapped)
    place = w.plus(w.times(row, 4), scratch.highest)
    before = w.splat(w.load(F32, memory, place))
    highest = w.larger(before, highest)
    w.store(b.extract_element(highest, ir.Constant(I32, 0)), memory, place)
    rescale = w.exp(b.fsub(before, highest))
    weights = [
        b.select(b.fcmp_ordered(">", score, w.floats(_NOTHING)), w.exp(b.fsub(score, highest)), w.floats(0.0))
        for score in scores
    ]
    total = b.fadd(b.fadd(weights[0], weights[1]), b.fadd(weights[2], weights[3]))
    place = w.plus(w.times(row, LANES * 4), scratch.total)
    w.store(w.fma(w.load(FLOATS, memory, place), rescale, total), memory, place)
    for vector, weight in enumerate(weights):
        step = LANES * (2 if form.pairs else 4)
        rounded = b.fptrunc(weight, HALVES) if form.pairs else weight
        w.store(rounded, memory, scratch.weights + index * form.terms * 4 + vector * step)
    return rescale


def _mix(w: Writer, form: Form, scratch: Scratch, at: tuple[Value, Value], rescale: list[Value]) -> None:
    """Add a chunk's values, weighted, to the sums of each row; as many columns at a time as there are registers for."""
    memory, row = at
    values, weights = w.at(memory, scratch.values), w.at(memory, scratch.weights)
    for first in range(0, form.value_dim, CHUNK):
        columns = range(first, min(first + CHUNK, form.value_dim), LANES)
        sums = [[w.slot() for _ in columns] for _ in rescale]
        places = [
            [w.plus(w.times(w.plus(row, i), form.value_dim * 4), scratch.mixed + 4 * column) for column in columns]
            for i in range(len(rescale))
        ]
        for i, factor in enumerate(rescale):
            for slot, place in zip(sums[i], places[i], strict=True):
                w.b.store(w.b.fmul(w.load(FLOATS, memory, place), factor), slot)
        with w.loop(w.number(0), w.number(form.terms)) as step:
            words = [w.load(INTS, values, w.plus(w.times(step, form.value_dim * 4), 4 * c)) for c in columns]
            for i in range(len(rescale)):
                weight = w.splat(w.load(I32, weights, w.plus(w.times(step, 4), i * form.terms * 4)))
                for slot, word in zip(sums[i], words, strict=True):
                    w.b.store(_multiply_add(w, form, w.b.load(slot, typ=FLOATS), weight, word), slot)
        for i in range(len(rescale)):
            for slot, place in zip(sums[i], places[i], strict=True):
                w.store(w.b.load(slot, typ=FLOATS), memory, place)


class _Worker:
    """Writes `work(job)`."""

    def __init__(self, module: Value, form: Form, scratch: Scratch, groups: dict[int, Value]) -> None:
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER]), "work")
        self.form = form
        self.scratch = scratch
        self.groups = groups
        self.w = Writer(function)
        self.job = function.args[0]
        number = self._count_up(Job.WORKERS)
        self.memory = self.w.at(self._pointer(Job.SCRATCH), self.w.times(number, scratch.size))

    def write(self) -> None:
        """Take items until there are none."""
        w = self.w
        ask, take, leave = (w.function.append_basic_block(name) for name in ("ask", "take", "leave"))
        w.b.branch(ask)
        w.b.position_at_end(ask)
        item = self._count_up(Job.NEXT)
        heads = w.number(self.form.kv_heads)
        w.b.cbranch(w.b.icmp_signed("<", item, w.b.mul(self._field(Job.NUM_STRIPS), heads)), take, leave)
        w.b.position_at_end(take)
        strip = w.at(self._pointer(Job.STRIPS), w.times(w.b.sdiv(item, heads), 16))
        self.head = w.b.srem(item, heads)
        self.row, self.start, self.count, self.table = (
            w.b.sext(w.load(I32, strip, 4 * place), I64) for place in range(4)
        )
        self.end = w.b.add(self.start, self.count)
        self.first_key = w.b.sext(w.load(I32, self._pointer(Job.FIRST_KEYS), w.times(self.row, 4)), I64)
        self._strip()
        w.b.branch(ask)
        w.b.position_at_end(leave)
        w.b.ret_void()

    def _strip(self) -> None:
        w, form = self.w, self.form
        rows = w.times(self.count, form.group)
        with self._each_row() as (row, position, query, _):
            self._begin_row(row, position, query)
        chunk = w.number(CHUNK)
        with w.loop(w.b.mul(w.b.sdiv(self.first_key, chunk), chunk), self.end, CHUNK) as base:
            with w.loop(w.number(0), w.number(_VECTORS)) as vector:
                self._lay_out(vector, w.b.add(base, w.times(vector, LANES)))
            done = w.number(0)
            for count, function in self.groups.items():
                stop = w.b.add(done, w.times(w.b.sdiv(w.b.sub(rows, done), w.number(count)), count))
                with w.loop(done, stop, count) as row:
                    self._rows(function, row, count, base)
                done = stop
        with self._each_row() as (row, _, _, out):
            self._finish_row(row, out)

    @contextmanager
    def _each_row(self) -> Generator[tuple[Value, Value, Value, tuple[Value, Value]]]:
        """Loop over the strip's rows and the query heads of the group.

        Gives the number in the strip of row and head together, the row's place in the strip, the address of the query,
        and the address of the result with the number of the head.
        """
        w, form = self.w, self.form
        with w.loop(w.number(0), self.count) as place, w.loop(w.number(0), w.number(form.group)) as member:
            head = w.b.add(w.times(self.head, form.group), member)
            row = w.b.add(self.row, place)
            ahead = w.b.add(w.b.mul(row, self._field(Job.QUERY_ROW)), w.b.mul(head, self._field(Job.QUERY_HEAD)))
            number = w.b.add(w.times(row, form.group * form.kv_heads), head)
            out = w.at(self._pointer(Job.OUT), w.times(number, form.value_dim * form.element))
            yield w.b.add(w.times(place, form.group), member), place, w.at(self._pointer(Job.QUERY), ahead), (out, head)

    def _begin_row(self, row: Value, place: Value, query: Value) -> None:
        w, form, scratch = self.w, self.form, self.scratch
        for index in range(0, form.depth, LANES):
            words = _load_words(w, form, query, index)
            w.store(words, self.memory, w.plus(w.times(row, form.depth * 4), scratch.query + 4 * index))
        position = w.b.trunc(w.b.add(self.start, place), I32)
        first = w.load(I32, self._pointer(Job.FIRST_KEYS), w.times(w.b.add(self.row, place), 4))
        w.store(position, self.memory, w.plus(w.times(row, 4), scratch.position))
        w.store(first, self.memory, w.plus(w.times(row, 4), scratch.first_key))
        w.store(ir.Constant(F32, _NOTHING), self.memory, w.plus(w.times(row, 4), scratch.highest))
        w.store(w.floats(0.0), self.memory, w.plus(w.times(row, LANES * 4), scratch.total))
        for column in range(0, form.value_dim, LANES):
            place = w.plus(w.times(row, form.value_dim * 4), scratch.mixed + 4 * column)
            w.store(w.floats(0.0), self.memory, place)

    def _rows(self, function: Value, row: Value, count: int, base: Value) -> None:
        """Take some rows through a chunk, unless none of them sees any of it."""
        w, scratch = self.w, self.scratch
        last = w.load(I32, self.memory, w.plus(w.times(row, 4), scratch.position + 4 * (count - 1)))
        first = w.load(I32, self.memory, w.plus(w.times(row, 4), scratch.first_key))
        sees = w.b.and_(
            w.b.icmp_signed(">=", w.b.sext(last, I64), base),
            w.b.icmp_signed("<", w.b.sext(first, I64), w.plus(base, CHUNK)),
        )
        with w.b.if_then(sees):
            scale, cap = (w.b.bitcast(w.b.trunc(self._field(field), I32), F32) for field in (Job.SCALE, Job.CAP))
            w.b.call(function, [self.memory, row, base, scale, cap])

    def _lay_out(self, vector: Value, key: Value) -> None:
        """Lay out 16 keys and values, from position `key` on: of each key word a vector, and values in pairs."""
        w, form = self.w, self.form
        with w.b.if_else(w.b.icmp_signed("<", key, self.end)) as (there, beyond):
            with there:
                entry = w.b.add(self.table, w.b.sdiv(key, w.number(form.block_size)))
                block = w.b.sext(w.load(I32, self._pointer(Job.TABLES), w.times(entry, 4)), I64)
                block = w.b.mul(block, self._field(Job.SPAN))
                inside = w.b.srem(key, w.number(form.block_size))
                token = w.b.add(w.times(self.head, form.block_size), inside)
                self._lay_out_keys(vector, self._vectors(Job.KEYS, block, token, form.key_dim))
                self._lay_out_values(vector, key, self._vectors(Job.VALUES, block, token, form.value_dim))
            with beyond, w.loop(w.number(0), w.number(form.terms // _VECTORS)) as term:
                for column in range(0, form.value_dim, LANES):
                    w.store(w.ints([0] * LANES), self.memory, self._value_place(vector, term, column))

    def _vectors(self, field: Job, block: Value, token: Value, dim: int) -> Value:
        distance = self.w.times(token, dim * self.form.element)
        return self.w.at(self._pointer(field), self.w.b.add(block, distance))

    def _lay_out_keys(self, vector: Value, keys: Value) -> None:
        w, form = self.w, self.form
        for index in range(0, form.depth, LANES):
            rows = [_load_words(w, form, w.at(keys, i * form.key_dim * form.element), index) for i in range(LANES)]
            for i, column in enumerate(w.transpose(rows)):
                place = w.plus(w.times(vector, 4 * LANES), self.scratch.keys + (index + i) * CHUNK * 4)
                w.store(column, self.memory, place)

    def _lay_out_values(self, vector: Value, key: Value, values: Value) -> None:
        w, form = self.w, self.form
        each = 2 if form.pairs else 1
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
                if form.pairs:
                    low, high = (w.b.zext(w.load(SHORTS, source, 2 * column), INTS) for source in sources)
                    high = w.b.shl(high, w.ints([16] * LANES))
                    nothing = w.ints([0] * LANES)
                    word = w.b.or_(w.b.select(seen[0], low, nothing), w.b.select(seen[1], high, nothing))
                else:
                    word = w.b.select(seen[0], _load_words(w, form, sources[0], column), w.ints([0] * LANES))
                w.store(word, self.memory, self._value_place(vector, term, column))

    def _value_place(self, vector: Value, term: Value, column: int) -> Value:
        w, form = self.w, self.form
        number = w.b.add(w.times(vector, form.terms // _VECTORS), term)
        return w.plus(w.times(number, form.value_dim * 4), self.scratch.values + 4 * column)

    def _finish_row(self, row: Value, out: tuple[Value, Value]) -> None:
        """Divide a row's sums by its total, in which a sink takes part."""
        w, form, scratch = self.w, self.form, self.scratch
        b = w.b
        address, head = out
        totals = w.load(FLOATS, self.memory, w.plus(w.times(row, LANES * 4), scratch.total))
        total = b.extract_element(totals, ir.Constant(I32, 0))
        for lane in range(1, LANES):
            total = b.fadd(total, b.extract_element(totals, ir.Constant(I32, lane)))
        total, factor = w.splat(total), w.floats(1.0)
        if form.sinks:
            sink = w.splat(w.load(F32, self._pointer(Job.SINKS), w.times(head, 4)))
            before = w.splat(w.load(F32, self.memory, w.plus(w.times(row, 4), scratch.highest)))
            highest = w.larger(before, sink)
            factor = w.exp(b.fsub(before, highest))
            total = w.fma(total, factor, w.exp(b.fsub(sink, highest)))
        for column in range(0, form.value_dim, LANES):
            mixed = w.load(FLOATS, self.memory, w.plus(w.times(row, form.value_dim * 4), scratch.mixed + 4 * column))
            mixed = b.fdiv(b.fmul(mixed, factor), total)
            w.store(b.fptrunc(mixed, HALVES) if form.half else mixed, address, form.element * column)

    def _count_up(self, field: Job) -> Value:
        return self.w.b.atomic_rmw("add", self.w.at(self.job, 8 * field), self.w.number(1), "monotonic")

    def _field(self, field: Job) -> Value:
        return self.w.load(I64, self.job, 8 * field)

    def _pointer(self, field: Job) -> Value:
        return self.w.load(POINTER, self.job, 8 * field)

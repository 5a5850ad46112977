"""How some rows of a strip go through one chunk of keys: scores, weights, weighted sums.

There are two ways with products: rows side by side, whose sums are kept in vector registers, in float32; and tile
registers (Intel AMX), in bfloat16. In both a row's operations are its own.
"""

from dataclasses import dataclass

from foreword.runner.native.form import CHUNK, NOTHING, RISE, TILE_BYTES, TILE_ROWS, TILED_ROWS, VECTORS, Form, Scratch
from foreword.runner.native.writer import (
    EXP2,
    EXP2_SHORT,
    F32,
    FLOATS,
    HALVES,
    I8,
    I32,
    I64,
    LANES,
    LOG2_E,
    POINTER,
    Value,
    Writer,
    ir,
)

_SIDE_BY_SIDE = (6, 3, 2, 1)
"""Rows computed side by side, to use what was loaded more than once: as many as there are registers for."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a function that takes rows through a chunk is written for."""

    count: int
    """Most rows."""
    whole: bool
    """Each row sees all of the chunk; else what it does not see is masked."""


def write_rows(module: Value, form: Form, scratch: Scratch) -> dict[Kind, Value]:
    """Functions that take rows through a chunk; those that take most first."""
    counts = (TILED_ROWS,) if form.tiles else _SIDE_BY_SIDE
    write = _write_tile if form.tiles else _write_rows
    kinds = (Kind(count, whole) for count in counts for whole in (True, False))
    return {kind: write(module, form, scratch, kind) for kind in kinds}


def _row_function(module: Value, name: str) -> tuple[Writer, tuple[Value, ...]]:
    """Begin a function that takes neighbouring rows of a strip through one chunk.

    It is given a worker's memory, the first row, the chunk's first key, scale and cap of scores, and the number of
    rows.
    """
    kinds = [POINTER, I64, I64, F32, F32, I64]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), name)
    function.linkage = "internal"
    return Writer(function), tuple(function.args)


def _write_rows(module: Value, form: Form, scratch: Scratch, kind: Kind) -> Value:
    """The function for some rows whose sums are kept in vector registers."""
    w, (memory, row, base, scale, cap, _) = _row_function(module, f"rows{kind.count}{'whole' * kind.whole}")
    products = _multiply_keys(w, form, scratch, (memory, row), kind.count)
    for i, own in enumerate(products):
        at = memory, w.plus(row, i), w.number(i)
        _weigh(w, form, scratch, at, _score(w, form, own, scale, cap), base=None if kind.whole else base)
    _mix(w, form, scratch, (memory, row), kind.count)
    w.b.ret_void()
    return w.function


def _write_tile(module: Value, form: Form, scratch: Scratch, kind: Kind) -> Value:
    """The function for up to four tiles of rows, multiplied in tile registers.

    A row of a tile is multiplied by itself, so it does not matter what those past the last one hold; but they must be
    left as they are.
    """
    w, (memory, row, base, scale, cap, count) = _row_function(module, f"tiles{'whole' * kind.whole}")
    scores, keys = w.at(memory, scratch.scores), (w.at(memory, scratch.keys), CHUNK * 4)
    with w.loop(w.number(0), count, TILE_ROWS) as first:
        query = w.at(memory, w.plus(w.times(w.b.add(row, first), form.depth * 4), scratch.query))
        own = w.at(scores, w.times(first, CHUNK * 4)), w.number(CHUNK * 4)
        _multiply_tiles(w, (query, form.depth * 4), keys, _Sums(own), form.depth)
    with w.loop(w.number(0), count) as index:
        at = memory, w.b.add(row, index), index
        found = [w.load(FLOATS, scores, w.plus(w.times(index, CHUNK * 4), 64 * i)) for i in range(VECTORS)]
        _weigh(w, form, scratch, at, _score(w, form, found, scale, cap), base=None if kind.whole else base)
    with w.loop(w.number(0), count, TILE_ROWS) as first:
        weights = w.at(memory, w.plus(w.times(first, form.terms * 4), scratch.weights))
        left = w.b.sub(count, first)
        for column in range(0, form.value_dim, CHUNK):
            wide = form.value_dim * 4
            values = w.at(memory, scratch.values + 4 * column)
            mixed = w.at(memory, w.plus(w.times(w.b.add(row, first), wide), scratch.mixed + 4 * column))
            most = min(VECTORS, (form.value_dim - column) // LANES)
            # What comes after the last row is another sequence's: then sums go where scores are no longer needed.
            is_full = w.b.icmp_signed(">=", left, w.number(TILE_ROWS))
            target = w.b.select(is_full, mixed, scores), w.b.select(is_full, w.number(wide), w.number(CHUNK * 4))
            sums = _Sums(target, (mixed, w.number(wide)), most)
            _multiply_tiles(w, (weights, form.terms * 4), (values, wide), sums, form.terms)
            with w.b.if_then(w.b.not_(is_full)), w.loop(w.number(0), left) as index:
                for vector in range(most):
                    found = w.load(FLOATS, scores, w.plus(w.times(index, CHUNK * 4), TILE_BYTES * vector))
                    w.store(found, mixed, w.plus(w.times(index, wide), TILE_BYTES * vector))
    w.b.ret_void()
    return w.function


_Rows = tuple[Value, int]
"""An address, and the bytes from one row to the next."""


@dataclass(frozen=True, slots=True)
class _Sums:
    """Where 16 rows of sums go, and where those are that they are added to: addresses, and bytes to the next row."""

    target: tuple[Value, Value]
    before: tuple[Value, Value] | None = None
    tiles: int = VECTORS
    """Of 16 columns each."""


def _multiply_tiles(w: Writer, left: _Rows, right: _Rows, sums: _Sums, depth: int) -> None:
    """16 rows of words times `depth` rows of up to 64 words."""
    tiles = range(sums.tiles)
    for tile in tiles:
        if sums.before is None:
            w.call("llvm.x86.tilezero", ir.VoidType(), ir.Constant(I8, tile))
        else:
            w.load_tile(tile, w.at(sums.before[0], TILE_BYTES * tile), sums.before[1])
    a, b = VECTORS, VECTORS + 1
    for step in range(depth // LANES):
        w.load_tile(a, w.at(left[0], TILE_BYTES * step), w.number(left[1]))
        for tile in tiles:
            w.load_tile(b, w.at(right[0], step * LANES * right[1] + TILE_BYTES * tile), w.number(right[1]))
            w.call("llvm.x86.tdpbf16ps", ir.VoidType(), *(ir.Constant(I8, number) for number in (tile, a, b)))
    for tile in tiles:
        place = w.at(sums.target[0], TILE_BYTES * tile)
        w.call("llvm.x86.tilestored64", ir.VoidType(), ir.Constant(I8, tile), place, sums.target[1])


def _multiply_keys(w: Writer, form: Form, scratch: Scratch, at: tuple[Value, Value], count: int) -> list[list[Value]]:
    """Products of `count` rows and a chunk's keys, four vectors a row."""
    memory, row = at
    sums = [[w.slot() for _ in range(VECTORS)] for _ in range(count)]
    for slot in (slot for slots in sums for slot in slots):
        w.b.store(w.floats(0.0), slot)
    query = w.at(memory, w.plus(w.times(row, form.depth * 4), scratch.query))
    keys = w.at(memory, scratch.keys)
    with w.loop(w.number(0), w.number(form.depth)) as step:
        words = [w.load(FLOATS, keys, w.plus(w.times(step, CHUNK * 4), 64 * i)) for i in range(VECTORS)]
        for i in range(count):
            own = w.splat(w.load(F32, query, w.plus(w.times(step, 4), i * form.depth * 4)))
            for slot, word in zip(sums[i], words, strict=True):
                w.b.store(w.fma(own, word, w.b.load(slot, typ=FLOATS)), slot)
    return [[w.b.load(slot, typ=FLOATS) for slot in slots] for slots in sums]


def _score(w: Writer, form: Form, products: list[Value], scale: Value, cap: Value) -> list[Value]:
    """Scores out of products with keys, as powers of two: what is given as `scale` and `cap` counts in them."""
    scores = [w.b.fmul(product, w.splat(scale)) for product in products]
    return [_cap(w, score, w.splat(cap)) for score in scores] if form.capped else scores


def _cap(w: Writer, score: Value, cap: Value) -> Value:
    """Cap * tanh(score / cap), with tanh(x) = 1 - 2 / (e^(2x) + 1); beyond 20 it is 1 in float32."""
    x = w.b.fdiv(score, cap)
    x = w.b.select(w.b.fcmp_ordered("<", x, w.floats(20.0)), x, w.floats(20.0))
    x = w.larger(x, w.floats(-20.0))
    above = w.b.fadd(w.exp2(w.b.fmul(x, w.floats(2 * LOG2_E)), EXP2), w.floats(1.0))
    return w.b.fmul(cap, w.b.fsub(w.floats(1.0), w.b.fdiv(w.floats(2.0), above)))


def _seen(w: Writer, scratch: Scratch, at: tuple[Value, Value], base: Value) -> list[Value]:
    """Which keys of a chunk a row sees."""
    memory, row = at
    place = w.times(row, 4)
    last, first = (w.splat(w.load(I32, memory, w.plus(place, part))) for part in (scratch.position, scratch.first_key))
    begin = w.splat(w.b.trunc(base, I32))
    keys = (w.b.add(begin, w.ints(range(LANES * i, LANES * i + LANES))) for i in range(VECTORS))
    return [w.b.and_(w.b.icmp_signed("<=", key, last), w.b.icmp_signed(">=", key, first)) for key in keys]


def _weigh(
    w: Writer,
    form: Form,
    scratch: Scratch,
    at: tuple[Value, Value, Value],
    scores: list[Value],
    *,
    base: Value | None,
) -> None:
    """Make weights of a row's scores, and keep its maximum and total.

    `at` is a worker's memory, the row, and its place among the weights; `base` is the chunk's first key where some may
    not be seen.
    """
    memory, row, index = at
    b = w.b
    seen = None if base is None else _seen(w, scratch, (memory, row), base)
    if seen is not None:
        scores = [b.select(own, score, w.floats(NOTHING)) for own, score in zip(seen, scores, strict=True)]
    highest = w.larger(w.larger(scores[0], scores[1]), w.larger(scores[2], scores[3]))
    highest = w.across(highest, w.larger)
    found = b.extract_element(highest, ir.Constant(I32, 0))
    place = w.plus(w.times(row, 4), scratch.highest)
    before = w.load(F32, memory, place)
    with b.if_then(b.fcmp_ordered(">", found, b.fadd(before, ir.Constant(F32, RISE))), likely=False):
        _rescale(w, form, scratch, (memory, row), w.exp2(w.splat(b.fsub(before, found)), EXP2))
        w.store(found, memory, place)
    highest = w.splat(w.load(F32, memory, place))
    terms = EXP2_SHORT if form.tiles else EXP2
    weights = [w.exp2(b.fsub(score, highest), terms) for score in scores]
    if seen is not None:
        weights = [b.select(own, weight, w.floats(0.0)) for own, weight in zip(seen, weights, strict=True)]
    total = b.fadd(b.fadd(weights[0], weights[1]), b.fadd(weights[2], weights[3]))
    place = w.plus(w.times(row, LANES * 4), scratch.total)
    w.store(b.fadd(w.load(FLOATS, memory, place), total), memory, place)
    for vector, weight in enumerate(weights):
        step = LANES * (2 if form.tiles else 4)
        rounded = b.fptrunc(weight, HALVES) if form.tiles else weight
        w.store(rounded, memory, w.plus(w.times(index, form.terms * 4), scratch.weights + vector * step))


def _rescale(w: Writer, form: Form, scratch: Scratch, at: tuple[Value, Value], factor: Value) -> None:
    """Multiply what a row has summed up so far."""
    memory, row = at
    total = w.plus(w.times(row, LANES * 4), scratch.total)
    mixed = (w.plus(w.times(row, form.value_dim * 4), scratch.mixed + 4 * c) for c in range(0, form.value_dim, LANES))
    for place in (total, *mixed):
        w.store(w.b.fmul(w.load(FLOATS, memory, place), factor), memory, place)


def _mix(w: Writer, form: Form, scratch: Scratch, at: tuple[Value, Value], count: int) -> None:
    """Add a chunk's values, weighted, to the sums of each row; as many columns at a time as there are registers for."""
    memory, row = at
    values, weights = w.at(memory, scratch.values), w.at(memory, scratch.weights)
    for first in range(0, form.value_dim, CHUNK):
        columns = range(first, min(first + CHUNK, form.value_dim), LANES)
        sums = [[w.slot() for _ in columns] for _ in range(count)]
        places = [
            [w.plus(w.times(w.plus(row, i), form.value_dim * 4), scratch.mixed + 4 * column) for column in columns]
            for i in range(count)
        ]
        for i in range(count):
            for slot, place in zip(sums[i], places[i], strict=True):
                w.b.store(w.load(FLOATS, memory, place), slot)
        with w.loop(w.number(0), w.number(form.terms)) as step:
            words = [w.load(FLOATS, values, w.plus(w.times(step, form.value_dim * 4), 4 * c)) for c in columns]
            for i in range(count):
                weight = w.splat(w.load(F32, weights, w.plus(w.times(step, 4), i * form.terms * 4)))
                for slot, word in zip(sums[i], words, strict=True):
                    w.b.store(w.fma(weight, word, w.b.load(slot, typ=FLOATS)), slot)
        for i in range(count):
            for slot, place in zip(sums[i], places[i], strict=True):
                w.store(w.b.load(slot, typ=FLOATS), memory, place)

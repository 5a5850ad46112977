# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false
# The bodies below are not run as Python: Triton reads them, and its own types are not Python's.
"""The paged attention kernels, in Triton: store keys and values, attend, merge parts.

One kernel attends for every kind of strip (see `work`). A program takes one strip, one KV head and one part of the
strip's keys; its rows are the strip's queries times the query heads that share the KV head. Keys are read through the
block table in tiles at absolute multiples of KEYS, and sums run over tiles in order, so what a row adds up does not
depend on where its strip begins or ends: a tile that a row does not see leaves its sums untouched to the bit.

Whatever is masked is not read. Blocks may hold anything past what has been written, and zero times NaN is NaN.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


def interpreted() -> bool:
    """Whether Triton runs kernels as Python, without a card (TRITON_INTERPRET=1 when it was imported)."""
    return bool(triton.knobs.runtime.interpret)


def constant(form: Any, **values: object) -> Any:
    """What a kernel is compiled for: each value a constant."""
    return form(**{name: tl.constexpr(value) for name, value in values.items()})


class Pointers(NamedTuple):
    """What `attend` reads and writes."""

    query: Any
    memory: Any
    out: Any
    partial: Any
    """float32 [rows of this kind, parts, heads, value_dim]: results over a part of the keys."""
    weight: Any
    """float32 [rows of this kind, parts, heads]: their log2-sum-exp2."""
    strips: Any
    members: Any
    tables: Any
    sinks: Any


class Sizes(NamedTuple):
    """Distances in elements, and how scores are scaled."""

    query_head: Any
    query_row: Any
    span: Any
    """Of one block, all layers."""
    key_base: Any
    """Where the layer's keys begin in a block."""
    value_base: Any
    scale: Any
    """Of scores; with a cap the natural one, else times log2(e)."""
    cap: Any


class Form(NamedTuple):
    """What a kernel is compiled for; all members are `tl.constexpr`."""

    ROWS: Any
    KEYS: Any
    GROUP: Any
    """Query heads that share a KV head."""
    BLOCK: Any
    """Tokens in a block."""
    KEY_DIM: Any
    KEY_PAD: Any
    VALUE_DIM: Any
    VALUE_PAD: Any
    WINDOW: Any
    """0: none."""
    CHUNK: Any
    """0: none."""
    CAPPED: Any
    SINKS: Any
    LISTED: Any
    """The strip's rows are listed in `members` and see all its keys."""
    PARTS: Any
    """Results go to `partial`, not to `out`."""
    EXACT: Any
    """Every tile is treated alike."""
    UPCAST: Any
    """Multiply in float32; for the interpreter, which multiplies bfloat16 wrongly."""


@triton.jit
def _load(memory, places, dim: tl.constexpr, pad: tl.constexpr, inside):
    """Vectors [places, pad] of `dim` elements each; zeros where not inside."""
    lanes = tl.arange(0, pad)
    return tl.load(memory + places[:, None] + lanes[None, :], mask=inside[:, None] & (lanes < dim)[None, :], other=0.0)


@triton.jit
def _visible(position, keys, end, form):
    """Which keys each row sees [rows, keys]."""
    seen = (keys[None, :] <= position[:, None]) & (keys < end)[None, :]
    if form.WINDOW > 0:
        seen = seen & (keys[None, :] > position[:, None] - form.WINDOW)
    if form.CHUNK > 0:
        seen = seen & (keys[None, :] // form.CHUNK == position[:, None] // form.CHUNK)
    return seen


@triton.jit
def _scores(query, key, sizes, form):
    """Scores [rows, keys] in units of log2."""
    raw = tl.dot(query, tl.trans(key), input_precision="ieee")
    if form.CAPPED:
        # tanh(x) = 1 - 2 / (e^2x + 1), in powers of two; both ends come out right.
        capped = 1.0 - 2.0 / (tl.exp2(raw * (sizes.scale * (2.0 * 1.4426950408889634) / sizes.cap)) + 1.0)
        return capped * (sizes.cap * 1.4426950408889634)
    return raw * sizes.scale


@triton.jit
def _add_tile(sums, about, tile, form, masked: tl.constexpr):
    """Add one tile of keys to the sums of each row: (weighted values, largest score, sum of weights)."""
    acc, top, total = sums
    query, position, head, table, end, data, sizes = about
    keys = tile * form.KEYS + tl.arange(0, form.KEYS)
    inside = keys < end
    block = tl.load(data.tables + table + keys // form.BLOCK, mask=inside, other=0).to(tl.int64) * sizes.span
    slot = head * form.BLOCK + keys % form.BLOCK
    key = _load(data.memory, block + sizes.key_base + slot * form.KEY_DIM, form.KEY_DIM, form.KEY_PAD, inside)
    value = _load(data.memory, block + sizes.value_base + slot * form.VALUE_DIM, form.VALUE_DIM, form.VALUE_PAD, inside)
    if form.UPCAST:
        key = key.to(tl.float32)
        value = value.to(tl.float32)
    scores = _scores(query, key, sizes, form)
    if masked:
        scores = tl.where(_visible(position, keys, end, form), scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    level = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - level[:, None])
    fade = tl.exp2(top - level)
    acc = acc * fade[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return acc, higher, total * fade + tl.sum(weights, 1)


@triton.jit
def _put(data, sums, spots, form):
    """Write the rows' results: to `out`, or as one of several parts."""
    acc, top, total = sums
    rows, numbers, heads, inside = spots
    lanes = tl.arange(0, form.VALUE_PAD)
    mask = inside[:, None] & (lanes < form.VALUE_DIM)[None, :]
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    num_heads = tl.num_programs(1) * form.GROUP
    if form.PARTS:
        place = (numbers * tl.num_programs(2) + tl.program_id(2)) * num_heads + heads
        tl.store(data.partial + place.to(tl.int64)[:, None] * form.VALUE_DIM + lanes[None, :], result, mask=mask)
        # No key was seen: weigh nothing.
        weight = tl.where(total == 0.0, float("-inf"), top + tl.log2(tl.where(total == 0.0, 1.0, total)))
        tl.store(data.weight + place, weight, mask=inside)
    else:
        place = (rows * num_heads + heads).to(tl.int64) * form.VALUE_DIM
        tl.store(data.out + place[:, None] + lanes[None, :], result.to(data.out.dtype.element_ty), mask=mask)


@triton.jit
def _key_tiles(start, end, skip, part, form):
    """First and last tile of this part of a strip's keys, and the first one that some row does not see whole."""
    lowest = skip
    if (form.WINDOW > 0) | (form.CHUNK > 0):
        # What others attend to is attended to once more: a layer that sees a part of it only cannot use that.
        lowest = start * 0
    if form.WINDOW > 0:
        lowest = tl.maximum(lowest, start - form.WINDOW + 1)
    if form.CHUNK > 0:
        lowest = tl.maximum(lowest, start // form.CHUNK * form.CHUNK)
    first = lowest // form.KEYS
    last = tl.cdiv(end, form.KEYS)
    each = tl.cdiv(tl.maximum(last - first, 0), tl.num_programs(2))
    first = first + part * each
    last = tl.minimum(first + each, last)
    whole = first
    if (form.WINDOW == 0) & (form.CHUNK == 0) & (not form.EXACT):
        # Keys before `start + 1` are seen by all rows; a listed strip sees all keys before its end.
        whole = tl.maximum(first, tl.minimum(tl.minimum(start + 1, end) // form.KEYS, last))
    return first, whole, last


@triton.jit
def attend(data, sizes, form):
    """One strip (axis 0), one KV head (axis 1), one part of the keys (axis 2)."""
    strip = data.strips + tl.program_id(0) * 7
    row = tl.load(strip)
    count = tl.load(strip + 1)
    start = tl.load(strip + 2)
    end = tl.load(strip + 3)
    skip = tl.load(strip + 4)
    table = tl.load(strip + 5)
    first_number = tl.load(strip + 6)
    head, part = tl.program_id(1), tl.program_id(2)
    lanes = tl.arange(0, form.ROWS)
    index = lanes // form.GROUP
    inside = index < count
    heads = head * form.GROUP + lanes % form.GROUP
    rows = row + index
    if form.LISTED:
        rows = tl.load(data.members + rows, mask=inside, other=0)
        position = start + index * 0
    else:
        position = start + index
    places = heads.to(tl.int64) * sizes.query_head + rows.to(tl.int64) * sizes.query_row
    query = _load(data.query, places, form.KEY_DIM, form.KEY_PAD, inside)
    if form.UPCAST:
        query = query.to(tl.float32)
    acc = tl.zeros([form.ROWS, form.VALUE_PAD], tl.float32)
    top = tl.full([form.ROWS], float("-inf"), tl.float32)
    total = tl.zeros([form.ROWS], tl.float32)
    if form.SINKS:
        # A sink is a key without a value; the first part brings it.
        sink = tl.load(data.sinks + heads, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634
        top = tl.where(part == 0, sink, top)
        total = tl.where(part == 0, 1.0, total)
    first, whole, last = _key_tiles(start, end, skip, part, form)
    about = (query, position, head, table, end, data, sizes)
    for tile in range(first, whole):
        acc, top, total = _add_tile((acc, top, total), about, tile, form, False)
    for tile in range(whole, last):
        acc, top, total = _add_tile((acc, top, total), about, tile, form, True)
    _put(data, (acc, top, total), (rows, first_number + index, heads, inside), form)


class Kept(NamedTuple):
    """What `store` reads and writes."""

    key: Any
    value: Any
    memory: Any
    slots: Any
    """Where each row goes, in tokens; -1: nowhere. As many as the programs take rows."""


class Strides(NamedTuple):
    """Distances in elements."""

    key_head: Any
    key_row: Any
    value_head: Any
    value_row: Any
    span: Any
    key_base: Any
    """Where the layer's keys begin in a block."""
    value_base: Any


class Shape(NamedTuple):
    """What `store` is compiled for; all members are `tl.constexpr`."""

    ROWS: Any
    BLOCK: Any
    KEY_DIM: Any
    KEY_PAD: Any
    VALUE_DIM: Any
    VALUE_PAD: Any


@triton.jit
def store(data, sizes, shape):
    """Write some rows' keys and values (axis 0) of one KV head (axis 1) into their blocks."""
    rows = tl.program_id(0) * shape.ROWS + tl.arange(0, shape.ROWS)
    head = tl.program_id(1)
    slots = tl.load(data.slots + rows)
    inside = slots >= 0
    base = (slots // shape.BLOCK).to(tl.int64) * sizes.span
    slot = head * shape.BLOCK + slots % shape.BLOCK
    lanes = tl.arange(0, shape.KEY_PAD)
    mask = inside[:, None] & (lanes < shape.KEY_DIM)[None, :]
    source = rows.to(tl.int64) * sizes.key_row + head * sizes.key_head
    target = base + sizes.key_base + slot * shape.KEY_DIM
    vector = tl.load(data.key + source[:, None] + lanes[None, :], mask=mask)
    tl.store(data.memory + target[:, None] + lanes[None, :], vector, mask=mask)
    lanes = tl.arange(0, shape.VALUE_PAD)
    mask = inside[:, None] & (lanes < shape.VALUE_DIM)[None, :]
    source = rows.to(tl.int64) * sizes.value_row + head * sizes.value_head
    target = base + sizes.value_base + slot * shape.VALUE_DIM
    vector = tl.load(data.value + source[:, None] + lanes[None, :], mask=mask)
    tl.store(data.memory + target[:, None] + lanes[None, :], vector, mask=mask)


class Parts(NamedTuple):
    """What `merge` reads and writes."""

    out: Any
    rows: Any
    """For each row of a kind: its row in the batch or -1, and its number among the shared rows or -1."""
    partial: Any
    weight: Any
    shared_partial: Any
    shared_weight: Any


class Many(NamedTuple):
    """What `merge` is compiled for; all members are `tl.constexpr`."""

    PARTS: Any
    """Most parts of either kind."""
    VALUE_DIM: Any
    VALUE_PAD: Any


@triton.jit
def _gather(partial, weight, number, count, form):
    """The parts of one row and head: weights [PARTS] and results [PARTS, VALUE_PAD]; absent ones weigh nothing."""
    parts = tl.arange(0, form.PARTS)
    lanes = tl.arange(0, form.VALUE_PAD)
    inside = parts < tl.where(number >= 0, count, 0)
    place = (number * count + parts) * tl.num_programs(1) + tl.program_id(1)
    spot = place.to(tl.int64)[:, None] * form.VALUE_DIM + lanes[None, :]
    mask = inside[:, None] & (lanes < form.VALUE_DIM)[None, :]
    return tl.load(weight + place, mask=inside, other=float("-inf")), tl.load(partial + spot, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["own", "shared"])
def merge(data, own, shared, form):
    """Join the parts of one row (axis 0) and one query head (axis 1) by their log-sum-exp.

    `own` parts of a row's own keys there are, and `shared` ones of those that it shares.
    """
    number = tl.program_id(0)
    row = tl.load(data.rows + 2 * number)
    weight, result = _gather(data.partial, data.weight, tl.where(row >= 0, number, -1), own, form)
    further = tl.load(data.rows + 2 * number + 1)
    shared_weight, shared_result = _gather(data.shared_partial, data.shared_weight, further, shared, form)
    top = tl.maximum(tl.max(weight, 0), tl.max(shared_weight, 0))
    level = tl.where(top == float("-inf"), 0.0, top)
    weight, shared_weight = tl.exp2(weight - level), tl.exp2(shared_weight - level)
    total = tl.sum(weight, 0) + tl.sum(shared_weight, 0)
    acc = tl.sum(result * weight[:, None], 0) + tl.sum(shared_result * shared_weight[:, None], 0)
    lanes = tl.arange(0, form.VALUE_PAD)
    place = (row * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * form.VALUE_DIM + lanes
    value = (acc / tl.where(total == 0.0, 1.0, total)).to(data.out.dtype.element_ty)
    tl.store(data.out + place, value, mask=lanes < tl.where(row >= 0, form.VALUE_DIM, 0))

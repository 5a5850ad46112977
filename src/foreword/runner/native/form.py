"""What a paged attention kernel is written for, what it is given, and where a worker keeps what."""

from dataclasses import dataclass
from enum import IntEnum

from foreword.runner.native import machine
from foreword.runner.native.writer import LANES

CHUNK = 64
"""Keys that a row looks at together."""
VECTORS = CHUNK // LANES
TILE_ROWS, TILE_BYTES = 16, 64
"""Of a tile register (Intel AMX): as many rows, and bytes of each."""
TILED_ROWS = 4 * TILE_ROWS
"""Rows that go through a chunk together: while those of one tile are weighed, others are multiplied."""
NOTHING = -3e38
"""A score below all others, and finite: minus infinity less itself would be NaN."""
RISE = 8.0
"""A row's sums are rescaled when its highest score rises by more than that, as a power of two; until then weights are
above 1, by at most that much."""
MOST_ROWS = 192
"""Rows times query heads of a strip, unless one row has more: what a worker keeps of them should stay in its cache."""


class Job(IntEnum):
    """A job is an array of 64-bit integers: what each place holds. Distances are in bytes."""

    NEXT = machine.NEXT
    """The next item; workers count it up."""
    NUM_STRIPS = machine.ROWS
    """It takes strips of rows."""
    WORKERS = 2
    """Workers that have come so far."""
    STRIPS = 3
    """int32 [n, 4]: see `attention.strips`, as for the next two."""
    PARTS = 4
    """int32 [n, 4]."""
    WALKS = 5
    """int32 [n, 7]."""
    TABLES = 6
    """int32: block tables, one after the other."""
    FIRST_KEYS = 7
    """int32 [rows]: the earliest position that each row of the batch sees."""
    QUERY = 8
    QUERY_ROW = 9
    QUERY_HEAD = 10
    OUT = 11
    """[rows, heads, value_dim]."""
    KEYS = 12
    """The layer's first key in block 0."""
    VALUES = 13
    SPAN = 14
    """Of one block, all layers."""
    SCRATCH = 15
    SCALE = 16
    """Bits of a float32, as are the next. Scores are powers of two: what is said in powers of e is brought to those."""
    CAP = 17
    SINKS = 18
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
    tiles: bool
    """Multiply bfloat16 in tile registers, where a 32-bit word is a pair of numbers; else all is float32."""
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
        return self.key_dim // 2 if self.tiles else self.key_dim

    @property
    def terms(self) -> int:
        """Steps of a weighted sum over a chunk."""
        return CHUNK // 2 if self.tiles else CHUNK


class Scratch:
    """Where a worker keeps what: distances in bytes from its own scratch memory."""

    def __init__(self, form: Form) -> None:
        rows = form.positions * form.group + TILE_ROWS - 1  # a tile that begins at the last row reads on
        self.size = 0
        self.query = self._take(rows * form.depth * 4)
        self.keys = self._take(form.depth * CHUNK * 4)
        self.values = self._take(form.terms * form.value_dim * 4)
        self.scores = self._take(TILED_ROWS * CHUNK * 4)
        self.weights = self._take(TILED_ROWS * form.terms * 4)
        self.before = self._take(TILE_BYTES)
        self.position = self._take(rows * 4)
        self.first_key = self._take(rows * 4)
        self.highest = self._take(rows * 4)
        self.total = self._take(rows * LANES * 4)
        self.mixed = self._take(rows * form.value_dim * 4)

    def _take(self, count: int) -> int:
        begin = self.size
        self.size += -(-count // 64) * 64
        return begin


def tile_shapes(rows: int = TILE_ROWS) -> bytes:
    """What LDTILECFG reads: palette 1, all eight tiles 64 bytes wide and of 16 rows, but the first six of `rows`."""
    widths = b"".join(TILE_BYTES.to_bytes(2, "little") for _ in range(8))
    return bytes([1]) + bytes(15) + widths.ljust(32, b"\0") + bytes([rows] * 6 + [TILE_ROWS] * 2).ljust(16, b"\0")

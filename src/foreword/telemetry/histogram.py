"""A histogram cheap enough for the engine thread: one bisection and two additions an observation."""

from bisect import bisect_left
from collections.abc import Iterable

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Bucket borders for what a caller waits for: a token, a step, an answer."""

SHORT_SECONDS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.1, 1.0)
"""Bucket borders for bookkeeping, which must stay far below a step."""


class Histogram:
    """Counts by bucket and a sum. Not thread-safe: its owner holds a lock."""

    __slots__ = ("_borders", "_counts", "total")

    def __init__(self, borders: Iterable[float]) -> None:
        self._borders = tuple(borders)
        self._counts = [0] * (len(self._borders) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count one value; a bucket holds what is at most its border."""
        self._counts[bisect_left(self._borders, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """(border, values at or below it) from the lowest to "+Inf", as Prometheus wants them."""
        rows: list[tuple[str, float]] = []
        below = 0
        for border, count in zip((*map(str, self._borders), "+Inf"), self._counts, strict=True):
            below += count
            rows.append((border, float(below)))
        return rows

"""Auditor: recomputes a share of what was reused, when there is nothing else to do, and compares block by block.

note     a request that reused something has ended; every so often its prompt is remembered
plan     compute the next few of its published blocks again, behind the published ones before them
commit   those pairs, ours and the published one, are compared
judge    a pair that differs takes its prefix out of the cache
rest     somebody has work: give all back and go on later

The first block is computed from nothing, and each later one from blocks that are found right by then: together that is
the whole prompt recomputed cold. It takes few blocks at a time, free ones where there are any, so that a full pool is
audited too and loses one block for it. Nothing that an audit computes is ever published.
"""

from collections import deque
from dataclasses import dataclass

from foreword.base.ids import RequestId
from foreword.base.params import EVERYTHING, Reach
from foreword.cache.identity import Chain
from foreword.cache.lease import Lease
from foreword.cache.orders import Compare
from foreword.cache.prefix_cache import PrefixCache
from foreword.schedule.plan import Chunk, Plan

AUDIT = RequestId("audit")
_REMEMBERED = 16


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one piece of an audit found, in blocks."""

    num_compared: int
    num_mismatched: int
    worst: float
    """The largest relative error of any block."""


class Auditor:
    """Owns the prompts to recompute and at most two leases. Used by the engine's thread between steps only."""

    __slots__ = ("_cache", "_done", "_due", "_max_tokens", "_prompts", "_published", "_scratch", "_share", "_tolerance")

    def __init__(self, cache: PrefixCache, *, share: float, tolerance: float, max_tokens: int) -> None:
        """`share` of hits is audited, 0..1; a relative error above `tolerance` is a mismatch (0: every bit counts)."""
        self._cache = cache
        self._share = share
        self._tolerance = tolerance
        self._max_tokens = max_tokens
        self._prompts: deque[tuple[int, Chain]] = deque(maxlen=_REMEMBERED)
        # With the cache's generation at the time: what was flushed or reloaded since is none of ours.
        self._due = 0.0
        self._done = 0
        """Leading blocks of the prompt at hand that were compared."""
        self._published: Lease | None = None
        """Holds what is to be compared, so that nothing evicts it meanwhile."""
        self._scratch: Lease | None = None
        """The blocks before the piece at hand, and the piece computed again."""

    @property
    def busy(self) -> bool:
        """Whether a prompt waits to be recomputed."""
        return bool(self._prompts)

    def note(self, chain: Chain) -> None:
        """A request that reused part of `chain` is over, and the chain grows no more."""
        self._due += self._share
        if self._due >= 1:
            self._due -= 1
            self._prompts.append((self._cache.generation, chain))

    def plan(self) -> Plan | None:
        """The next piece to compute; None if there is none, or no room for it."""
        while self._prompts and self._prompts[0][0] != self._cache.generation:
            self.give_up()
        if not self._prompts:
            return None
        cache, chain, size, done = self._cache, self._prompts[0][1], self._cache.block_size, self._done
        if self._published is None:
            self._published = cache.acquire(chain, EVERYTHING)
        left = self._published.matched_tokens // size - done
        num = min(left, max(1, min(self._max_tokens // size, cache.state().free)))
        if num < 1:
            self.give_up()
            return None
        start, end = done * size, (done + num) * size
        self._scratch = cache.acquire(chain, Reach(read_tokens=start))
        if cache.reserve(self._scratch, start, end) is None:
            self.give_up()
            return None
        return Plan(-1, (Chunk(AUDIT, start, tuple(chain.tokens[start:end]), self._scratch.blocks, None),))

    def commit(self, plan: Plan) -> tuple[Compare, ...]:
        """Believe a piece; the pairs to compare."""
        ours, published, size = self._scratch, self._published, self._cache.block_size
        if ours is None or published is None:
            return ()
        piece = range(plan.chunks[0].start // size, plan.chunks[0].end // size)
        return tuple(Compare(ours.blocks[i], published.blocks[i]) for i in piece)

    def judge(self, pairs: tuple[Compare, ...], errors: tuple[float, ...]) -> Verdict:
        """Take out of the cache what differs, with all that continues it; else go on behind these pairs."""
        chain, first = self._prompts[0][1], self._done
        # Not "error > tolerance": a NaN must count as wrong.
        wrong = [first + i for i, error in enumerate(errors) if not error <= self._tolerance]
        self._done += len(pairs)
        if self._scratch is not None:
            self._cache.release(self._scratch)
            self._scratch = None
        if wrong:
            self.give_up()
            self._cache.quarantine(chain.hashes[wrong[0]])
        elif self._published is None or self._done >= self._published.matched_tokens // self._cache.block_size:
            self.give_up()
        return Verdict(len(pairs), len(wrong), max(errors, default=0.0))

    def rest(self) -> None:
        """Hold nothing; the prompt at hand goes on when there is time."""
        for lease in (self._scratch, self._published):
            if lease is not None:
                self._cache.release(lease)
        self._scratch = self._published = None

    def give_up(self) -> None:
        """Drop the prompt at hand."""
        self.rest()
        self._prompts.popleft()
        self._done = 0

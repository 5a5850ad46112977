"""Auditor: recomputes a share of what was reused, when there is nothing else to do, and compares block by block.

note     a request that reused something has ended; every so often its prompt is remembered
plan     compute the next piece of a remembered prompt, cold, into blocks of its own
commit   where a block is published already, the cache holds it beside ours: those pairs are compared
judge    a pair that differs takes its prefix out of the cache
rest     somebody has work: give all back and begin again later
"""

from collections import deque
from dataclasses import dataclass

from foreword.base.ids import BlockHash, RequestId
from foreword.base.params import Keep, Reach
from foreword.cache.identity import Chain
from foreword.cache.lease import Lease
from foreword.cache.orders import Compare
from foreword.cache.prefix_cache import PrefixCache
from foreword.schedule.budget import grant
from foreword.schedule.plan import Chunk, Plan

AUDIT = RequestId("audit")
_REMEMBERED = 16
_FOR_NOTHING = Keep(ttl_s=0, priority=0)
"""An audit makes nothing dearer, and what it computes of what has left meanwhile goes again."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an audit of one prompt found, in blocks."""

    num_compared: int
    num_mismatched: int
    worst: float
    """The largest relative error of any block."""


class Auditor:
    """Owns the prompts to recompute and at most one lease. Used by the engine's thread between steps only."""

    __slots__ = ("_cache", "_computed", "_due", "_lease", "_max_tokens", "_prompts", "_share", "_tolerance")

    def __init__(self, cache: PrefixCache, *, share: float, tolerance: float, max_tokens: int) -> None:
        """`share` of hits is audited, 0..1; a relative error above `tolerance` is a mismatch (0: every bit counts)."""
        self._cache = cache
        self._share = share
        self._tolerance = tolerance
        self._max_tokens = max_tokens
        self._prompts: deque[tuple[int, Chain]] = deque(maxlen=_REMEMBERED)
        # With the cache's generation at the time: what was flushed or reloaded since is none of ours.
        self._due = 0.0
        self._lease: Lease | None = None
        self._computed = 0

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
        chain, size = self._prompts[0][1], self._cache.block_size
        whole = len(chain) // size * size
        if self._lease is None:
            self._lease = self._cache.acquire(chain, Reach(read=False), _FOR_NOTHING)
            self._computed = 0
        tokens = grant(self._computed, whole - self._computed, self._max_tokens, size)
        end = self._computed + tokens
        if not tokens or self._cache.reserve(self._lease, self._computed, end) is None:
            self.give_up()
            return None
        ids = tuple(chain.tokens[self._computed : end])
        return Plan(-1, (Chunk(AUDIT, self._computed, ids, self._lease.blocks, None),))

    def commit(self, plan: Plan) -> tuple[Compare, ...]:
        """Believe a piece; the pairs to compare once the whole prompt is there, none before."""
        chain, lease = self._prompts[0][1], self._lease
        if lease is None:
            return ()
        self._computed = plan.chunks[0].end
        if self._computed < len(chain) // self._cache.block_size * self._cache.block_size:
            return ()
        self._cache.publish(lease, chain, self._computed)
        return tuple(Compare(lease.blocks[i], block) for i, block in sorted(lease.shadows.items()))

    def judge(self, pairs: tuple[Compare, ...], errors: tuple[float, ...]) -> Verdict:
        """Take out of the cache what differs, with all that continues it, and forget the prompt."""
        chain, lease = self._prompts[0][1], self._lease
        wrong = list[BlockHash]()
        if lease is not None:
            at = {block: i for i, block in lease.shadows.items()}
            # Not "error > tolerance": a NaN must count as wrong.
            wrong = [
                chain.hashes[at[pair.published]]
                for pair, error in zip(pairs, errors, strict=True)
                if not error <= self._tolerance
            ]
        self.give_up()
        if wrong:
            self._cache.quarantine(wrong[0])
        return Verdict(len(pairs), len(wrong), max(errors, default=0.0))

    def rest(self) -> None:
        """Hold nothing; the prompt at hand is begun again when there is time."""
        if self._lease is not None:
            self._cache.release(self._lease)
            self._lease = None

    def give_up(self) -> None:
        """Drop the prompt at hand."""
        self.rest()
        self._prompts.popleft()

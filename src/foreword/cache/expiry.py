"""Expiry: which block's time is up next. A block that was used meanwhile is found out when its moment comes."""

from heapq import heapify, heappop, heappush

from foreword.base.ids import BlockId

NEVER = float("inf")
_SLACK = 1024


class Expiry:
    """Blocks and their moments, soonest first; equal moments in the order in which they were set."""

    __slots__ = ("_heap", "_moments", "_seq", "next")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, BlockId]] = []
        self._moments: dict[BlockId, tuple[float, int]] = {}
        # The one entry of the heap that counts for a block: its earliest. Later ones are left-overs.
        self._seq = 0
        self.next = NEVER
        """No block's moment comes before this one."""

    def watch(self, block: BlockId, moment: float) -> None:
        """See to it that `pop` names the block at this moment or before."""
        known = self._moments.get(block)
        if known is not None and known[0] <= moment:
            return
        self._seq += 1
        self._moments[block] = (moment, self._seq)
        heappush(self._heap, (moment, self._seq, block))
        if len(self._heap) > 2 * len(self._moments) + _SLACK:
            self._heap = [(*entry, known) for known, entry in self._moments.items()]
            heapify(self._heap)
        self.next = self._heap[0][0]

    def pop(self, now: float) -> BlockId | None:
        """A block whose moment has come, once; the caller decides whether it is still true."""
        while self.next <= now:
            moment, seq, block = heappop(self._heap)
            self.next = self._heap[0][0] if self._heap else NEVER
            if self._moments.get(block) == (moment, seq):
                del self._moments[block]
                return block
        return None

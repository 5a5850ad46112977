"""Lease: what one request holds of the pool, from its match to its release."""

from foreword.base.ids import BlockId
from foreword.base.params import AS_USUAL, Keep, Reach


class Lease:
    """One request's block table and everything else it holds. Made by `PrefixCache.acquire`, changed by it alone.

    Every block of the match is held, not only the deepest: an unheld block is then always free to go. If the match ends
    inside a block, that block is in the table as well; it is shared, so the first write into it makes a private copy.
    """

    __slots__ = (
        "blocks",
        "generation",
        "keep",
        "matched_tokens",
        "published",
        "reach",
        "shadows",
        "sources",
        "tenant",
        "unstored",
    )

    def __init__(
        self, tenant: str, blocks: tuple[BlockId, ...], matched_tokens: int, reach: Reach, generation: int
    ) -> None:
        self.tenant = tenant
        """Name of the tenant that the blocks are for; decides whose cached blocks may be evicted."""
        self.blocks = blocks
        """The block table: block i holds the tokens from i * block_size on. Plans carry it, so it is replaced when it
        grows and never changed.
        """
        self.matched_tokens = matched_tokens
        """Tokens that the match covers; computing starts here."""
        self.reach = reach
        self.keep: Keep = AS_USUAL
        """How what is published through this lease is kept."""
        self.generation = generation
        """Of the cache up to which nothing that was forgotten concerned this lease; once something did, it publishes no
        more."""
        self.published = 0
        """Leading blocks of the table that are dealt with: published, or shadowed by the block that is."""
        self.unstored = 0
        """Leading blocks of which it is dealt with that they are not to be stored."""
        self.shadows: dict[int, BlockId] = {}
        """Table index -> the published block of the same content, held beside our own private one."""
        self.sources: list[BlockId] = []
        """Blocks that a copy not yet committed reads."""

    def held(self) -> list[BlockId]:
        """Everything the lease holds, in the order to release it: copies' sources, then the tail first."""
        order = list(self.sources)
        for i in range(len(self.blocks) - 1, -1, -1):
            order.append(self.blocks[i])
            if i in self.shadows:
                order.append(self.shadows[i])
        return order

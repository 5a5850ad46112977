"""Names for the integers, bytes and strings that cross rooms."""

from typing import NewType

BlockId = NewType("BlockId", int)
"""Index of a block in the device pool, 0 <= id < number of blocks."""

BlockHash = NewType("BlockHash", bytes)
"""32 bytes (SHA-256) naming a block's tokens and everything before them. See `cache.identity`."""

RequestId = NewType("RequestId", str)
"""One request's name, unique in a process's life."""

PENDING_TOKEN = -1
"""Stands in a chunk for a token that a step still running is about to sample."""

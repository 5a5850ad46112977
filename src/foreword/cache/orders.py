"""What the heart asks the shell to do with blocks' bytes, as frozen values."""

from dataclasses import dataclass

from foreword.base.ids import BlockId


@dataclass(frozen=True, slots=True)
class Compare:
    """Compare the whole of two blocks that should hold the same keys and values."""

    own: BlockId
    """Computed just now."""
    published: BlockId
    """What everybody reuses."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the first `num_tokens` tokens of block `source` into block `target`, in every layer.

    All copies of a plan read before any of its chunks writes.
    """

    source: BlockId
    target: BlockId
    num_tokens: int

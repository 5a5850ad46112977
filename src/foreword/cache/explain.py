"""Why a lookup stopped where it did: exactly one reason out of a closed set, the first that applies in its order."""

from array import array
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Literal

from foreword.base.ids import BlockHash
from foreword.base.params import Reach
from foreword.cache.departed import Cause, Departed, Left
from foreword.cache.identity import Chain, Content
from foreword.cache.index import PrefixIndex

Reason = Literal[
    "cache_disabled",
    "model_not_cacheable",
    "read_disabled",
    "prefix_length",
    "complete",
    "too_short",
    "pending",
    "flushed",
    "expired",
    "evicted",
    "not_stored",
    "other_namespace",
    "diverged",
    "never_seen",
]

_PLAIN = Content((), b"")
_SHOWN_BLOCKS = 2
"""Blocks of the nearest cached continuation that an explanation shows."""


_REASONS: Mapping[Cause, Reason] = {
    "pressure": "evicted",
    "quota": "evicted",
    "expired": "expired",
    "flushed": "flushed",
    "audit": "flushed",
}


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a match ended. Holds nothing of another tenant: all it compares has the same parent and extras."""

    reason: Reason
    at_token: int
    """The first token that had to be computed."""
    left: Left | None = None
    """With `flushed`, `expired` and `evicted`: by what and when."""
    continues: tuple[int, ...] = ()
    """With `diverged`: how the nearest cached continuation goes on from `at_token`, a few tokens."""


def explain(
    chain: Chain, reach: Reach, at_token: int, *, index: PrefixIndex, departed: Departed, claims: Container[BlockHash]
) -> Explanation:
    """Why a match of `at_token` tokens ends there, in a cache that is on.

    `claims`: blocks that are being computed. O(log children).
    """
    limit = reach.readable(len(chain) - 1)
    if not reach.read:
        return Explanation("read_disabled", at_token)
    if at_token == limit:
        return Explanation("complete" if at_token == len(chain) - 1 else "prefix_length", at_token)
    if len(chain) <= chain.block_size:
        return Explanation("too_short", at_token)
    block, inside = divmod(at_token, chain.block_size)
    name = chain.hashes[block] if block < len(chain.hashes) else None
    if name is not None and name in claims:
        return Explanation("pending", at_token)
    gone = _gone(chain, at_token, name, departed)
    if gone is not None:
        return gone
    if departed.had_elsewhere(chain, block, inside):
        return Explanation("other_namespace", at_token)
    near = index.nearest(chain.parent(block), chain.content(block))
    if near is None:
        return Explanation("never_seen", at_token)
    return Explanation("diverged", at_token, continues=_continuation(index, near[0], inside))


def _gone(chain: Chain, at_token: int, name: BlockHash | None, departed: Departed) -> Explanation | None:
    """What happened to the block that is missing (`name`, unless the prompt ends inside it), or to one like it."""
    block, inside = divmod(at_token, chain.block_size)
    left = None if name is None else departed.how(name)
    if left is None and (name is None or not departed.is_unstored(name)):
        left = departed.how_one_like(chain, block, inside)
        if left is None and not departed.is_one_like_unstored(chain, block, inside):
            return None
    return Explanation("not_stored" if left is None else _REASONS[left.cause], at_token, left)


def _continuation(index: PrefixIndex, name: BlockHash, start: int) -> tuple[int, ...]:
    """Tokens of a cached block from `start` on, and of some block that continues it."""
    tokens, step = array("I"), name
    for _ in range(_SHOWN_BLOCKS):
        (block,) = index.blocks([step])
        tokens.frombytes(index.content(block).raw)
        # Without extras only: below a public block stand the private ones of all tenants.
        below = index.nearest(step, _PLAIN)
        if below is None:
            break
        step = below[0]
    return tuple(tokens[start:])

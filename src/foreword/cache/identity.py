"""The one place where block identity is made: model state -> root, tokens -> chain of block hashes.

Canonical bytes, format 1. All integers are little-endian and of fixed width; `str` is UTF-8.

    text(s)  = u32 length of s in bytes | s
    root     = SHA-256( text("foreword kv 1") | u32 block size
                        | u32 number of ingredients | for each, sorted by name: text(name) | text(value) )
    block i  = SHA-256( h(i-1), 32 bytes (the root for i = 0)
                        | u32 number of tokens | the tokens, u32 each
                        | u32 number of extras | for each: text(extra) )

A hash therefore names a block's tokens, everything before them, and everything else that shapes its keys and
values. No pickle and no per-process seed takes part: two processes, machines or Python versions agree, and
`tests/cache/test_identity.py` holds golden vectors. *Ingredients* are the model's state (weights digest,
architecture, dtype, ...; `runner.fingerprint` collects them). *Extras* belong to one block: the tenant's salt in the
first private block, digests of inputs that are not token ids. An absent extras field is the four bytes of u32 0.
"""

import sys
from array import array
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import NamedTuple, TypeAlias, cast

from foreword.base.ids import BlockHash

Tokens: TypeAlias = "array[int]"
"""Token ids as 32-bit unsigned integers, `array("I")`."""

Extras = Mapping[int, tuple[bytes, ...]]
"""Block index -> what shapes that block's KV besides its tokens."""

_FORMAT = b"foreword kv 1"
_NO_EXTRAS = bytes(4)


def root(ingredients: Mapping[str, str], block_size: int) -> BlockHash:
    """The hash that all chains of one model state and block size start from."""
    parts = [_text(_FORMAT), _u32(block_size), _u32(len(ingredients))]
    for name in sorted(ingredients):
        parts += (_text(name.encode()), _text(ingredients[name].encode()))
    return BlockHash(sha256(b"".join(parts)).digest())


class Content(NamedTuple):
    """A block beyond its parent: two blocks with equal parent and content are the same block. Sorts by extras first."""

    extras: tuple[bytes, ...]
    raw: bytes
    """The tokens as 32-bit integers in this machine's order; compared and cut, never hashed or stored."""

    def common_tokens(self, other: "Content") -> int:
        """Leading tokens that both have, 0 if their extras differ: those tokens' KV is the same."""
        if self.extras != other.extras:
            return 0
        length = min(len(self.raw), len(other.raw))
        if self.raw[:length] == other.raw[:length]:
            return length // 4
        return next(i for i in range(0, length, 4) if self.raw[i : i + 4] != other.raw[i : i + 4]) // 4


class Chain:
    """One request's tokens and the hashes of its full blocks; only ever appended to.

    Built where the request comes in, then carried: no tree, tier or router hashes anything again.
    """

    __slots__ = ("_extras", "block_size", "hashes", "root", "tokens")

    def __init__(self, root: BlockHash, block_size: int, tokens: Iterable[int], extras: Extras | None = None) -> None:
        """Take the token ids (each 0 <= id < 2**32; OverflowError otherwise) and hash every full block."""
        self.root = root
        self.block_size = block_size
        self.tokens: Tokens = array("I", tokens)
        self.hashes: list[BlockHash] = []
        self._extras: Extras = extras or {}
        self._hash_full_blocks()

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, token: int) -> None:
        """Add one token; hashes the block that it completes, if it completes one."""
        self.tokens.append(token)
        if len(self.tokens) % self.block_size == 0:
            self._hash_full_blocks()

    def parent(self, block: int) -> BlockHash:
        """The hash that block number `block` continues: the block before it, or the root."""
        return self.hashes[block - 1] if block else self.root

    def content(self, block: int) -> Content:
        """What block number `block` adds to its parent; the last block may be a part of one."""
        start = block * self.block_size
        return Content(self._extras.get(block, ()), self.tokens[start : start + self.block_size].tobytes())

    def _hash_full_blocks(self) -> None:
        size, done = self.block_size, len(self.hashes)
        todo = len(self.tokens) // size - done
        if not todo:
            return
        words = self.tokens[done * size : (done + todo) * size]
        if sys.byteorder == "big":
            words.byteswap()
        raw, step, count = words.tobytes(), 4 * size, _u32(size)
        extras, fresh = self._extras, list[bytes]()
        before: bytes = self.parent(done)
        for i in range(todo):
            tail = _extras_field(extras[done + i]) if extras and done + i in extras else _NO_EXTRAS
            before = sha256(before + count + raw[i * step : i * step + step] + tail).digest()
            fresh.append(before)
        self.hashes += cast(list[BlockHash], fresh)


def _extras_field(extras: tuple[bytes, ...]) -> bytes:
    return _u32(len(extras)) + b"".join(_text(extra) for extra in extras)


def _u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def _text(raw: bytes) -> bytes:
    return _u32(len(raw)) + raw

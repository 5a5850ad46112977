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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from struct import iter_unpack
from typing import NamedTuple, TypeAlias, cast

from foreword.base.ids import BlockHash

Tokens: TypeAlias = "array[int]"
"""Token ids as 32-bit unsigned integers, `array("I")`."""

Extras = Mapping[int, tuple[bytes, ...]]
"""Block index -> what shapes that block's KV besides its tokens."""

_FORMAT = b"foreword kv 1"
_NO_EXTRAS = bytes(4)
_RUN_BLOCKS, _RUN_BYTES = 64, 4_096
_MOST_RUNS = 2_048
"""Runs of at most so many blocks and bytes of ids whose hashes are remembered: of two million tokens, some 18 MB."""


def root(ingredients: Mapping[str, str], block_size: int) -> BlockHash:
    """The hash that all chains of one model state and block size start from."""
    parts = [_text(_FORMAT), _u32(block_size), _u32(len(ingredients))]
    for name in sorted(ingredients):
        parts += (_text(name.encode()), _text(ingredients[name].encode()))
    return BlockHash(sha256(b"".join(parts)).digest())


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose blocks these are. Two tenants share nothing, since their salts part their chains."""

    name: str = ""
    salt: bytes = b""
    """Enters as an extra of the first private block; empty on a server that serves one tenant only."""

    @classmethod
    def named(cls, name: str) -> "Tenant":
        """The tenant of this name with the salt that is its own, on every machine and after every restart."""
        return cls(name, sha256(_text(b"foreword tenant 1") + _text(name.encode())).digest())


ALONE = Tenant()
"""The only tenant of a server without keys."""

PUBLIC = "public"
"""Owner of the blocks that an operator shares among all tenants."""


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


@dataclass(frozen=True, slots=True)
class Space:
    """Where chains of one model state start, and what all tenants share of it."""

    root: BlockHash
    block_size: int
    public: frozenset[BlockHash] = frozenset()
    """Hashes of public blocks, computed without any tenant's salt; closed towards the root."""


class Chain:
    """One request's tokens and the hashes of its full blocks; only ever appended to.

    Built where the request comes in, then carried: no tree, tier or router hashes anything again.
    """

    __slots__ = ("_extras", "_public", "block_size", "first_private", "hashes", "root", "tenant", "tokens")

    def __init__(
        self,
        space: Space,
        tokens: Iterable[int],
        *,
        tenant: Tenant = ALONE,
        extras: Extras | None = None,
    ) -> None:
        """Take the token ids (each 0 <= id < 2**32; OverflowError otherwise) and hash every full block."""
        self.root = space.root
        self.block_size = space.block_size
        self.tenant = tenant
        self.tokens: Tokens = array("I", tokens)
        self.hashes: list[BlockHash] = []
        self.first_private = 0
        """Leading blocks that are public; the tenant's salt enters right after them."""
        self._public = space.public
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
        return Content(self.extras(block), self.tokens[start : start + self.block_size].tobytes())

    def extras(self, block: int) -> tuple[bytes, ...]:
        """What shapes block number `block` besides its tokens; the salt last."""
        own = self._extras.get(block, ())
        return (*own, self.tenant.salt) if block == self.first_private and self.tenant.salt else own

    def owner(self, block: int) -> str:
        """Who answers for the memory of block number `block`: its tenant, or PUBLIC."""
        return self.tenant.name if block >= self.first_private else PUBLIC

    def _hash_full_blocks(self) -> None:
        size, done = self.block_size, len(self.hashes)
        todo = len(self.tokens) // size - done
        if not todo:
            return
        extend = cast(Callable[[Sequence[bytes]], None], self.hashes.extend)
        words = self.tokens[done * size : (done + todo) * size]
        if sys.byteorder == "big":
            words.byteswap()
        raw, step, count = words.tobytes(), 4 * size, _u32(size)
        before: bytes = self.parent(done)
        last_extra = max(self._extras, default=-1)
        i = done
        while i < done + todo and i <= max(self.first_private, last_extra):
            body = count + raw[(i - done) * step : (i - done + 1) * step]
            if i == self.first_private and self._is_public(before + body, i):
                self.first_private += 1
            tail = _field(self.extras(i)) if i in self._extras or i == self.first_private else _NO_EXTRAS
            before = sha256(before + body + tail).digest()
            extend([before])
            i += 1
        # From here on no block has extras: nearly all of a long prompt, so nothing is decided any more.
        whole = min(_RUN_BLOCKS, max(1, _RUN_BYTES // step)) * step
        for start in range((i - done) * step, len(raw), whole):
            run = raw[start : start + whole]
            names = (_known if len(run) == whole else _hash_run)(before, run, step)
            extend(names)
            before = names[-1]

    def _is_public(self, beginning: bytes, block: int) -> bool:
        """Whether a block that continues the public head is public itself: without a salt its hash is a known one."""
        return bool(self._public) and sha256(beginning + _field(self._extras.get(block, ()))).digest() in self._public


def _hash_run(before: bytes, raw: bytes, step: int) -> tuple[bytes, ...]:
    """Hashes of blocks without extras, of `step` bytes of ids each, that continue `before`."""
    join, count = b"".join, _u32(step // 4)
    blocks = iter_unpack(f"{step}s", raw)
    return tuple([before := sha256(join((before, count, ids, _NO_EXTRAS))).digest() for (ids,) in blocks])


_known = lru_cache(_MOST_RUNS)(_hash_run)
"""The same; what it is asked again it remembers. A long prompt comes many times, and hashing it takes milliseconds."""


def _field(extras: tuple[bytes, ...]) -> bytes:
    return _u32(len(extras)) + b"".join(_text(extra) for extra in extras)


def _u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def _text(raw: bytes) -> bytes:
    return _u32(len(raw)) + raw

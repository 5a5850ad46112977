"""The device's KV memory: one buffer [num_blocks + 1, span] and the ways in and out of it.

Knows blocks and slots, not requests, prefixes or tenants. The last block is the *null block*: zeros that nobody ever
writes. Key slots past a request's own blocks are read from it, because a masked key still meets a zero weight in a
product, and 0 * NaN is NaN: what a freed block holds must never get that far.
"""

import ctypes
import mmap
import sys
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from foreword.base.config import CacheConfig, parse_kv_cache
from foreword.base.errors import ConfigError
from foreword.runner.layout import Layout, Piece

_AUTO_CPU_BYTES = 4 * 2**30
_AUTO_CPU_SHARE = 0.25
_AUTO_CUDA_SHARE = 0.85

_AHEAD_BYTES, _AHEAD_SHARE = 128 * 2**20, 1 / 32
"""How much of what comes next is got ahead: at most so much, and no more of the whole."""
_PORTION_BYTES = 2 * 2**20
"""Of one system call: about a millisecond."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14: as if each page were written to."""


class KVMemory:
    """Owner of the buffer. `num_blocks` counts usable blocks; the null block comes on top."""

    __slots__ = ("_ready", "_rows", "_units", "_used", "buffer", "layout", "null_block", "num_blocks")

    def __init__(self, layout: Layout, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        """Reserve the memory. The system gives a CPU its pages when they are first written, or by `prepare`."""
        self.layout = layout
        self.num_blocks = num_blocks
        self.null_block = num_blocks
        self.buffer = _zeros(num_blocks + 1, layout.span, dtype, device)
        self._used = 0
        """Bytes from the front, up to the last block that a step was to write."""
        self._ready = 0 if device.type == "cpu" and sys.platform == "linux" else self.buffer.nbytes
        """Bytes from the front that have their pages, or get them by themselves."""
        self._units = self.buffer.view(-1, layout.unit)
        self._rows = self.buffer.view(-1, layout.unit * layout.block_size)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return self.layout.span * self.buffer.element_size()

    def reach(self, block: int) -> None:
        """Blocks up to this one are in use: those behind it will be next, as the pool hands them out in order."""
        self._used = max(self._used, (block + 1) * self.block_bytes)

    def prepare(self) -> bool:
        """Get the pages of some of the next blocks, which changes nothing in them; False: none is to be got now.

        Otherwise a request that finds nothing waits for them: some 3 % of its time.
        """
        whole = self.buffer.nbytes
        end = min(self._used + min(_AHEAD_BYTES, int(whole * _AHEAD_SHARE)), whole)
        first = max(self._ready, self._used // _PORTION_BYTES * _PORTION_BYTES)
        if first >= end:
            return False
        size = min(_PORTION_BYTES, whole - first)
        # Not mmap.madvise, which lets no other thread of Python run: a caller may be about to read its answer.
        address = ctypes.c_void_p(self.buffer.data_ptr() + first)
        failed = ctypes.CDLL(None).madvise(address, ctypes.c_size_t(size), _POPULATE_WRITE)
        # An older system does not know it, or there is no page left: they come when they are written.
        self._ready = whole if failed else first + size
        return not failed

    def keys(self, layer: int) -> Tensor:
        """K of one layer, a view [num_blocks + 1, block_size, kv_heads, key_dim]."""
        return self._view(self.layout.keys[layer])

    def values(self, layer: int) -> Tensor:
        """V of one layer, a view [num_blocks + 1, block_size, kv_heads, value_dim]."""
        return self._view(self.layout.values[layer])

    def places(self, layer: int, blocks: Tensor, offsets: Tensor) -> Tensor:
        """Where tokens go in a layer, for `write`: one row number for each unit of K, then of V.

        `blocks` and `offsets` are [tokens]: the block of each and its place inside the block. Fits all layers of the
        same shape.
        """
        size, unit = self.layout.block_size, self.layout.unit
        device, span = self.buffer.device, self.layout.span // unit
        rows: list[Tensor] = []
        for piece in (self.layout.keys[layer], self.layout.values[layer]):
            parts = piece.dim // unit
            token = blocks * span + offsets * parts + (piece.offset - self.layout.keys[layer].offset) // unit
            head = torch.arange(piece.heads, device=device) * (size * parts)
            part = torch.arange(parts, device=device)
            rows.append((head[:, None, None] + token[None, :, None] + part[None, None, :]).reshape(-1))
        return torch.cat(rows)

    def write(self, layer: int, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store `keys` and `values` [heads, tokens, dim] of a layer at `places`."""
        unit = self.layout.unit
        if keys.shape == values.shape:
            vectors = torch.cat((keys, values)).view(-1, unit)
        else:
            vectors = torch.cat((keys.reshape(-1, unit), values.reshape(-1, unit)))
        self._units.index_copy_(0, places + self.layout.keys[layer].offset // unit, vectors)

    def runs(self, layer: int, blocks: Tensor) -> Tensor:
        """Which rows hold a layer's part of `blocks` [n, count], for `read`: those of K, then those of V.

        Fits all layers of the same shape.
        """
        size, unit = self.layout.block_size, self.layout.unit
        device = self.buffer.device
        rows: list[Tensor] = []
        for piece in (self.layout.keys[layer], self.layout.values[layer]):
            parts = piece.dim // unit
            skipped = (piece.offset - self.layout.keys[layer].offset) // (unit * size)
            block = blocks * (self.layout.span // (unit * size)) + skipped
            head = torch.arange(piece.heads, device=device) * parts
            part = torch.arange(parts, device=device)
            rows.append((block[:, None, :, None] + head[None, :, None, None] + part).reshape(-1))
        return torch.cat(rows)

    def read(self, layer: int, runs: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Gather a layer's K and V of `count` blocks for each of n tables: [n, heads, count * block_size, dim] each."""
        keys, values = self.layout.keys[layer], self.layout.values[layer]
        size, unit = self.layout.block_size, self.layout.unit
        rows = torch.index_select(self._rows, 0, runs + keys.offset // (unit * size))
        num_keys = rows.shape[0] * keys.dim // (keys.dim + values.dim)
        return (
            rows[:num_keys].view(-1, keys.heads, count * size, keys.dim),
            rows[num_keys:].view(-1, values.heads, count * size, values.dim),
        )

    def _view(self, piece: Piece) -> Tensor:
        size = self.layout.block_size
        whole = self.buffer[:, piece.offset : piece.offset + piece.heads * size * piece.dim]
        return whole.view(-1, piece.heads, size, piece.dim).transpose(1, 2)


def count_blocks(config: CacheConfig, block_bytes: int, device: torch.device) -> int:
    """How many blocks `--kv-cache` buys. Raises ConfigError when that is not even one."""
    if config.kv_cache != "auto":
        unit, number = parse_kv_cache(config.kv_cache)
        if unit == "blocks":
            return number
    size = budget_bytes(config, device)
    if size < block_bytes:
        raise ConfigError(f"kv_cache is {size} bytes; one block of this model needs {block_bytes}")
    return size // block_bytes


def budget_bytes(config: CacheConfig, device: torch.device) -> int:
    """Bytes that `--kv-cache` stands for; it must not be a number of blocks."""
    return _auto_bytes(device) if config.kv_cache == "auto" else parse_kv_cache(config.kv_cache)[1]


def _zeros(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(rows, columns, dtype=dtype, device=device)
    # torch.zeros would write to every page; anonymous pages are zero by themselves and cost nothing until used.
    size = rows * columns * dtype.itemsize
    try:
        pages = mmap.mmap(-1, size)
    except OSError as error:
        raise ConfigError(f"{size / 2**30:.1f} GiB for KV cannot be had ({error.strerror}); lower --kv-cache") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A request that finds nothing writes to blocks that nobody has used yet: a fault for each 4 KiB of them is
        # up to 3 % of its time. Where the system knows no large pages, it says so, and nothing is lost.
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(rows, columns)


def _auto_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _AUTO_CUDA_SHARE)
    return min(_AUTO_CPU_BYTES, int(_available_ram() * _AUTO_CPU_SHARE))


def _available_ram() -> int:
    """Bytes that can be had without swapping; where the system does not say, what would give 4 GiB."""
    try:
        with Path("/proc/meminfo").open(encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return int(_AUTO_CPU_BYTES / _AUTO_CPU_SHARE)

"""Orders on whole blocks: copy the first tokens of one into another, in every layer; compare two."""

from collections.abc import Sequence

import torch
from torch import Tensor

from foreword.cache.orders import Compare, Copy
from foreword.runner.layout import Piece
from foreword.runner.memory import KVMemory


def apply_copies(memory: KVMemory, copies: tuple[Copy, ...]) -> None:
    """Carry out all copies of a plan. Every source is read before any target is written.

    Only the ordered tokens are touched: the rest of a target keeps what it held.
    """
    if not copies:
        return
    device = memory.buffer.device
    sources = torch.tensor([copy.source for copy in copies], device=device)
    taken = memory.buffer.index_select(0, sources)
    for row, copy in enumerate(copies):
        for piece in (*memory.layout.keys, *memory.layout.values):
            into = _head_major(memory, memory.buffer[copy.target], piece)
            into[:, : copy.num_tokens] = _head_major(memory, taken[row], piece)[:, : copy.num_tokens]


def _head_major(memory: KVMemory, block: Tensor, piece: Piece) -> Tensor:
    """A block's piece as [heads, block_size, dim], a view."""
    size = memory.layout.block_size
    return block[piece.offset : piece.offset + piece.heads * size * piece.dim].view(piece.heads, size, piece.dim)


def compare_blocks(memory: KVMemory, pairs: Sequence[Compare]) -> tuple[float, ...]:
    """For each pair the largest |own - published| of any element, over the largest |published|; NaN if there is one.

    A block of zeros compared with anything else gives inf.
    """
    errors: list[float] = []
    for pair in pairs:
        own, published = memory.buffer[pair.own], memory.buffer[pair.published]
        if torch.equal(own.view(torch.uint8), published.view(torch.uint8)):
            errors.append(0.0)
            continue
        difference = (own.float() - published.float()).abs().max()
        errors.append(float(difference / published.float().abs().max()))
    return tuple(errors)

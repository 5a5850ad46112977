"""What is done to whole blocks outside a forward: copying, clearing what a former owner left behind, comparing."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from foreword.cache.orders import Compare, Copy
from foreword.runner.memory import KVMemory
from foreword.runner.transfer import send


def apply_copies(memory: KVMemory, copies: tuple[Copy, ...]) -> None:
    """Carry out all copies of a plan. Every source is read before any target is written.

    What a target held past the copied tokens is cleared.
    """
    if not copies:
        return
    sources = send(torch.tensor([copy.source for copy in copies]), memory.buffer.device)
    taken = memory.buffer.index_select(0, sources)
    for row, copy in enumerate(copies):
        for source, target in zip(_bands(memory, taken[row]), _bands(memory, memory.buffer[copy.target]), strict=True):
            target[:, : copy.num_tokens] = source[:, : copy.num_tokens]
            target[:, copy.num_tokens :] = 0


def clear_tails(memory: KVMemory, tails: Iterable[tuple[int, int]]) -> None:
    """Clear each block from a slot on: [(block, first slot)].

    A row reads the whole block in which it stands. Slots that nobody has written yet are masked, but a mask multiplies
    by zero, and zero times the NaN that a former owner may have left is NaN.
    """
    for block, first in tails:
        for band in _bands(memory, memory.buffer[block]):
            band[:, first:] = 0


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


def _bands(memory: KVMemory, block: Tensor) -> Iterator[Tensor]:
    """A block [span] as views [heads, block_size, dim]."""
    size = memory.layout.block_size
    for band in memory.layout.bands:
        yield block[band.offset : band.offset + band.heads * size * band.dim].view(band.heads, size, band.dim)

"""Memory for what is needed for a moment in a step that is done again and again.

What a recorded step writes has to lie where it lay. Kept apart for every operation that would be megabytes a row, none
of them in a cache when they are written; given back as soon as nobody looks at it, the same few serve all operations of
all recorded steps, since these never run at the same time.
"""

import ctypes
import weakref

import torch
from torch import Tensor

_LEAST_BYTES = 64


class Lender:
    """Owner of that memory. What is lent comes back by itself, with the last tensor that looks at it."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}
        """By size in bytes, a power of two."""
        self._all: dict[int, Tensor] = {}
        """By address."""

    @property
    def num_bytes(self) -> int:
        """Of all memory, lent or not."""
        return sum(memory.nbytes for memory in self._all.values())

    def lends(self, address: int) -> bool:
        """Whether the memory that begins there is its own."""
        return address in self._all

    def like(self, tensor: Tensor) -> Tensor:
        """Lent memory for a tensor of that shape, precision and strides; it holds anything."""
        if not tensor.numel():
            return tensor
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        size = max(_LEAST_BYTES, 1 << ((last + 1) * tensor.element_size() - 1).bit_length())
        free = self._free.setdefault(size, [])
        memory = free.pop() if free else torch.empty(size, dtype=torch.uint8)
        self._all[memory.data_ptr()] = memory
        loan = (ctypes.c_uint8 * size).from_address(memory.data_ptr())
        weakref.finalize(loan, free.append, memory)
        return torch.frombuffer(loan, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def lasting(self, tensor: Tensor) -> Tensor:
        """The same numbers, looked at without holding what was lent; a tensor of other memory as it is."""
        if tensor.layout is not torch.strided:
            return tensor
        memory = self._all.get(tensor.untyped_storage().data_ptr())
        if memory is None:
            return tensor
        return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

"""FlashAttention 2, the package `flash-attn`: `flash_attn_varlen_func` with a block table.

Its pages are multiples of 256 tokens, so it asks for `--block-size 256`. It takes pages with strides, as ours have them
(a block holds all layers), as long as the numbers of a vector lie side by side. Knows windows and soft caps.
"""

import importlib
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from foreword.runner.attention.backend import Extent, Fixed, Ground
from foreword.runner.attention.borrowed import Rows, absence, misfit, table, window_left
from foreword.runner.attention.call import Call
from foreword.runner.attention.tiles import Segment
from foreword.runner.memory import KVMemory
from foreword.runner.transfer import send

_MODULE = "flash_attn.flash_attn_interface"
_PAGE = 256
_DIMS = range(8, 257, 8)
"""Others it would pad, and copy all pages for it."""


def obstacle(ground: Ground) -> str | None:
    """Why it cannot be used here."""
    size, why = ground.memory.layout.block_size, absence(ground.memory.buffer.device, _MODULE, "flash-attn")
    if why is not None:
        return why
    if size % _PAGE:
        return f"its pages are multiples of {_PAGE} tokens and blocks have {size}; use --block-size {_PAGE}"
    return misfit(ground, _DIMS, softcaps=True)


def make(ground: Ground) -> "FlashAttnBackend":
    """Make it."""
    return FlashAttnBackend(ground, ground.memory)


class FlashAttnBackend:
    """Makes a step's attention. See `backend.Backend`."""

    name = "flash-attn"
    ingredient = "flash-attn 1"
    exact = False

    def __init__(self, ground: Ground, memory: KVMemory) -> None:
        self.ground = ground
        self.memory = memory
        self.slots = ground.slots
        self.function: Callable[..., Tensor] = importlib.import_module(_MODULE).flash_attn_varlen_func

    def begin(self, segments: tuple[Segment, ...], total: int) -> "FlashAttnStep":
        """Start a step of `total` rows: those of the segments, in order, then padding."""
        return FlashAttnStep(self, segments, total)

    def fixed(self, extent: Extent) -> Fixed | None:
        """None: what a step launches depends on its rows."""
        del extent

    def over(self, memory: KVMemory) -> "FlashAttnBackend":
        """The same over another memory of the same layout."""
        return FlashAttnBackend(self.ground, memory)


class FlashAttnStep:
    """One step's work; made once, used by every layer."""

    def __init__(self, backend: FlashAttnBackend, segments: tuple[Segment, ...], total: int) -> None:
        self._backend = backend
        self._rows = rows = Rows(backend.memory, segments, total)
        device = backend.memory.buffer.device
        self._arguments: dict[str, Any] = {
            "cu_seqlens_q": send(torch.tensor(rows.firsts, dtype=torch.int32), device),
            "cu_seqlens_k": send(torch.tensor([0, *accumulate(rows.ends)], dtype=torch.int32), device),
            "max_seqlen_q": max(rows.counts),
            "max_seqlen_k": max(rows.ends),
            "causal": True,
            "block_table": table(backend.memory, segments),
        }

    def attend(self, call: Call) -> Tensor:
        """See `call.Step`."""
        backend, place = self._backend, self._backend.slots[call.layer]
        left = window_left(call)
        mixed = backend.function(
            self._rows.begin(place, call),
            backend.memory.keys(place),
            backend.memory.values(place),
            **self._arguments,
            softmax_scale=call.scoring.scaling,
            window_size=(left, -1 if left < 0 else 0),
            softcap=call.scoring.softcap or 0.0,
        )
        return self._rows.end(mixed)

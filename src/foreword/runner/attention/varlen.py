"""PyTorch's own paged attention, `torch.nn.attention.varlen.varlen_attn` with a block table, where a release has it.

The function hands paged calls to a FlashAttention that is installed beside PyTorch and made for the card: version 3 on
Hopper, version 4 on Blackwell. `obstacle` asks for all of that. Knows windows, but no soft caps, sinks or chunks.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from foreword.runner.attention.backend import Extent, Fixed, Ground
from foreword.runner.attention.borrowed import Rows, capability, is_there, misfit, table, window_left
from foreword.runner.attention.call import Call
from foreword.runner.attention.tiles import Segment
from foreword.runner.memory import KVMemory
from foreword.runner.transfer import send

_MODULE = "torch.nn.attention.varlen"
_DIMS = range(8, 257, 8)


@dataclass(frozen=True, slots=True)
class Kernels:
    """What computes paged calls on one kind of card."""

    name: str
    """As `torch.nn.attention.activate_flash_attention_impl` calls it."""
    package: str
    """Module that must be there."""


KERNELS: Mapping[int, Kernels] = {9: Kernels("FA3", "flash_attn_interface"), 10: Kernels("FA4", "flash_attn.cute")}
"""By the major number of a card's compute capability."""


def obstacle(ground: Ground) -> str | None:
    """Why it cannot be used here."""
    device = ground.memory.buffer.device
    if device.type != "cuda":
        return "it needs a CUDA card"
    if not _takes_block_tables():
        return f"torch {torch.__version__} has no varlen_attn with a block table"
    kernels = KERNELS.get(capability(device))
    if kernels is None:
        return "torch computes paged calls on Hopper and Blackwell cards only"
    if not is_there(kernels.package):
        return f"the package that brings {kernels.package} ({kernels.name}) is not installed"
    return misfit(ground, _DIMS, softcaps=False)


def make(ground: Ground) -> "VarlenBackend":
    """Make it, and let torch use the FlashAttention that knows block tables."""
    kernels = KERNELS[capability(ground.memory.buffer.device)]
    cast(Any, importlib.import_module("torch.nn.attention")).activate_flash_attention_impl(kernels.name)
    return VarlenBackend(ground, ground.memory, f"varlen, {kernels.name} 1")


class VarlenBackend:
    """Makes a step's attention. See `backend.Backend`."""

    name = "varlen"
    exact = False

    def __init__(self, ground: Ground, memory: KVMemory, ingredient: str) -> None:
        self.ground = ground
        self.memory = memory
        self.ingredient = ingredient
        self.slots = ground.slots
        self.function: Callable[..., Tensor] = importlib.import_module(_MODULE).varlen_attn

    def begin(self, segments: tuple[Segment, ...], total: int) -> "VarlenStep":
        """Start a step of `total` rows: those of the segments, in order, then padding."""
        return VarlenStep(self, segments, total)

    def fixed(self, extent: Extent) -> Fixed | None:
        """None: what a step launches depends on its rows."""
        del extent

    def over(self, memory: KVMemory) -> "VarlenBackend":
        """The same over another memory of the same layout."""
        return VarlenBackend(self.ground, memory, self.ingredient)


class VarlenStep:
    """One step's work; made once, used by every layer."""

    def __init__(self, backend: VarlenBackend, segments: tuple[Segment, ...], total: int) -> None:
        self._backend = backend
        self._rows = rows = Rows(backend.memory, segments, total)
        device = backend.memory.buffer.device
        self._arguments: dict[str, Any] = {
            "cu_seq_q": send(torch.tensor(rows.firsts, dtype=torch.int32), device),
            "cu_seq_k": None,
            "max_q": max(rows.counts),
            "max_k": max(rows.ends),
            "seqused_k": send(torch.tensor(rows.ends, dtype=torch.int32), device),
            "block_table": table(backend.memory, segments),
        }

    def attend(self, call: Call) -> Tensor:
        """See `call.Step`."""
        backend, place = self._backend, self._backend.slots[call.layer]
        mixed = backend.function(
            self._rows.begin(place, call),
            backend.memory.keys(place),
            backend.memory.values(place),
            **self._arguments,
            scale=call.scoring.scaling,
            window_size=(window_left(call), 0),
            enable_gqa=call.query.shape[0] != call.key.shape[0],
        )
        return self._rows.end(mixed)


def _takes_block_tables() -> bool:
    """Whether this release of torch has the function, and the argument."""
    if not is_there(_MODULE):
        return False
    function = getattr(importlib.import_module(_MODULE), "varlen_attn", None)
    return callable(function) and "block_table" in inspect.signature(function).parameters

"""PyTorch's own paged attention, `torch.nn.attention.varlen.varlen_attn` with a block table, where a release has it.

The function hands paged calls to a FlashAttention that is installed beside PyTorch and made for the card: version 3 on
Hopper, version 4 on Blackwell. `obstacle` asks for all of that. Knows windows, but no soft caps, sinks or chunks.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from foreword.runner.attention.backend import Extent, Fixed, Ground
from foreword.runner.attention.call import Call, LayerFacts
from foreword.runner.attention.store import Store
from foreword.runner.attention.tiles import Segment
from foreword.runner.memory import KVMemory
from foreword.runner.transfer import send

_MODULE = "torch.nn.attention.varlen"
_LARGEST_DIM = 256


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
    buffer = ground.memory.buffer
    if buffer.device.type != "cuda":
        return "it needs a CUDA card"
    if not _takes_block_tables():
        return f"torch {torch.__version__} has no varlen_attn with a block table"
    kernels = KERNELS.get(_capability(buffer.device))
    if kernels is None:
        return "torch computes paged calls on Hopper and Blackwell cards only"
    if not _is_there(kernels.package):
        return f"the package that brings {kernels.package} ({kernels.name}) is not installed"
    if buffer.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in half precision, not in {str(buffer.dtype).removeprefix('torch.')}"
    if ground.exact:
        return "it is not proven that its rows' bits depend on their own tokens only"
    return next((f"layer {fact.layer} {why}" for fact in ground.facts if (why := _stranger(fact))), None)


def make(ground: Ground) -> "VarlenBackend":
    """Make it, and let torch use the FlashAttention that knows block tables."""
    kernels = KERNELS[_capability(ground.memory.buffer.device)]
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
        self._total = total
        memory = backend.memory
        device = memory.buffer.device
        self._store = Store(memory, segments)
        widest = max(len(segment.blocks) for segment in segments)
        tables = [(*s.blocks, *(memory.null_block,) * (widest - len(s.blocks))) for s in segments]
        ends = [segment.start + segment.count for segment in segments]
        firsts = [segment.row for segment in segments] + [self._store.num_rows]
        counts = [segment.count for segment in segments]
        self._arguments: dict[str, Any] = {
            "cu_seq_q": send(torch.tensor(firsts, dtype=torch.int32), device),
            "cu_seq_k": None,
            "max_q": max(counts),
            "max_k": max(ends),
            "seqused_k": send(torch.tensor(ends, dtype=torch.int32), device),
            "block_table": send(torch.tensor(tables, dtype=torch.int32), device),
        }

    def attend(self, call: Call) -> Tensor:
        """See `call.Step`."""
        backend = self._backend
        place, num_rows = backend.slots[call.layer], self._store.num_rows
        self._store.write(place, call.shape, call)
        window = call.sight.window
        mixed = backend.function(
            call.query[:, :num_rows].transpose(0, 1),
            backend.memory.keys(place),
            backend.memory.values(place),
            **self._arguments,
            scale=call.scoring.scaling,
            # Ours counts the query itself, theirs the keys before it.
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=call.query.shape[0] != call.key.shape[0],
        )
        if num_rows == self._total:
            return mixed
        return torch.cat((mixed, mixed.new_zeros(self._total - num_rows, *mixed.shape[1:])))


def _stranger(fact: LayerFacts) -> str | None:
    """What a layer wants that the function does not know."""
    shape, scoring = fact.shape, fact.scoring
    if scoring.softcap is not None or scoring.sinks is not None:
        return "has a soft cap or sinks"
    if fact.sight.chunk is not None:
        return "sees chunks"
    if shape.key_dim != shape.value_dim or shape.key_dim > _LARGEST_DIM or shape.key_dim % 8:
        return f"has keys of {shape.key_dim} and values of {shape.value_dim} dimensions"
    return None


def _takes_block_tables() -> bool:
    """Whether this release of torch has the function, and the argument."""
    if not _is_there(_MODULE):
        return False
    function = getattr(importlib.import_module(_MODULE), "varlen_attn", None)
    return callable(function) and "block_table" in inspect.signature(function).parameters


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]

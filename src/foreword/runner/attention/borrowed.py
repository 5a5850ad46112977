"""Paged kernels of other libraries: what all of them ask of a model, and how a step is told to them."""

import importlib.util
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from foreword.runner.attention.backend import Ground
from foreword.runner.attention.call import Call, LayerFacts
from foreword.runner.attention.store import Store
from foreword.runner.attention.tiles import Segment
from foreword.runner.memory import KVMemory
from foreword.runner.transfer import send

HALF = (torch.bfloat16, torch.float16)


def is_there(module: str) -> bool:
    """Whether a module can be imported, as far as one sees without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # of what it is a part of
        return False


def capability(device: torch.device) -> int:
    """The major number of a card's compute capability: 8 is Ampere and Ada, 9 Hopper, 10 Blackwell."""
    return torch.cuda.get_device_capability(device)[0]


def absence(device: torch.device, module: str, package: str) -> str | None:
    """Why a package's kernels cannot be had here; None where they can. They ask for an Ampere card or a later one."""
    if device.type != "cuda":
        return "it needs a CUDA card"
    if not is_there(module):
        return f"the package {package} is not installed"
    if capability(device) < 8:
        return "it needs a card of compute capability 8.0 or later"
    return None


def misfit(ground: Ground, dims: Collection[int], *, softcaps: bool) -> str | None:
    """Why a model's layers are not for kernels that take heads of these dimensions; None where they are.

    No such kernel knows sinks or chunks, computes in float32, or promises bits.
    """
    dtype = ground.memory.buffer.dtype
    if dtype not in HALF:
        return f"it computes in half precision, not in {str(dtype).removeprefix('torch.')}"
    if ground.exact:
        return "it is not proven that its rows' bits depend on their own tokens only"
    whys = ((fact.layer, _stranger(fact, dims, softcaps=softcaps)) for fact in ground.facts)
    return next((f"layer {layer} {why}" for layer, why in whys if why), None)


def _stranger(fact: LayerFacts, dims: Collection[int], *, softcaps: bool) -> str | None:
    shape, scoring = fact.shape, fact.scoring
    if scoring.sinks is not None or (scoring.softcap is not None and not softcaps):
        return "has sinks" if softcaps else "has a soft cap or sinks"
    if fact.sight.chunk is not None:
        return "sees chunks"
    if shape.key_dim != shape.value_dim or shape.key_dim not in dims:
        return f"has keys of {shape.key_dim} and values of {shape.value_dim} dimensions"
    return None


class Rows:
    """One step's rows: those of the sequences end to end, then padding, which these kernels never see."""

    def __init__(self, memory: KVMemory, segments: Sequence[Segment], total: int) -> None:
        self._store = Store(memory, segments)
        self._total = total
        self.firsts = [*(segment.row for segment in segments), self._store.num_rows]
        """The first row of each sequence, and the end of the last one."""
        self.counts = [segment.count for segment in segments]
        self.ends = [segment.start + segment.count for segment in segments]
        """How many keys each sequence has, those of this step included."""

    def begin(self, place: int, call: Call) -> Tensor:
        """Store a call's keys and values in the memory's layer of that number; its queries [rows, heads, dim]."""
        self._store.write(place, call.shape, call)
        query = call.query[:, : self._store.num_rows].transpose(0, 1)
        return query if query.stride(2) == 1 else query.contiguous()

    def end(self, mixed: Tensor) -> Tensor:
        """With zeros for padding: [total, heads, dim]."""
        missing = self._total - mixed.shape[0]
        return torch.cat((mixed, mixed.new_zeros(missing, *mixed.shape[1:]))) if missing else mixed


def table(memory: KVMemory, segments: Sequence[Segment]) -> Tensor:
    """Block tables [sequences, blocks] in int32 on the device, filled up with the null block."""
    widest = max(len(segment.blocks) for segment in segments)
    rows = [(*s.blocks, *(memory.null_block,) * (widest - len(s.blocks))) for s in segments]
    return send(torch.tensor(rows, dtype=torch.int32), memory.buffer.device)


def window_left(call: Call) -> int:
    """How many keys before its own a query sees; -1: all. Ours counts the query itself, theirs does not."""
    window = call.sight.window
    return -1 if window is None else window - 1

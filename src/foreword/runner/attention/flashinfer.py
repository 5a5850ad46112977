"""FlashInfer, the package `flashinfer-python`: its `BatchPrefillWithPagedKVCacheWrapper`, which also takes decodes.

A wrapper is told the step once for all layers that are alike (`plan`) and then run by each of them. It takes pages with
strides, as ours have them (a block holds all layers). `plan` writes into pinned memory of the wrapper's own, from which
a copy may still be under way when the next step is planned; so steps take turns with two wrappers of each kind.
Kernels are compiled with nvcc when they are first needed, unless the package `flashinfer-jit-cache` has them. Knows
windows and soft caps.
"""

import importlib
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from foreword.runner.attention.backend import Extent, Fixed, Ground
from foreword.runner.attention.borrowed import Rows, absence, misfit, window_left
from foreword.runner.attention.call import Call
from foreword.runner.attention.tiles import Segment
from foreword.runner.memory import KVMemory
from foreword.runner.transfer import pin, send

_MODULE = "flashinfer"
_DIMS = (64, 128, 256)
_WORKSPACE_BYTES = 128 * 2**20
_TURNS = 2
"""As many steps as can be under way at once."""


def obstacle(ground: Ground) -> str | None:
    """Why it cannot be used here."""
    why = absence(ground.memory.buffer.device, _MODULE, "flashinfer-python")
    return misfit(ground, _DIMS, softcaps=True) if why is None else why


def make(ground: Ground) -> "FlashInferBackend":
    """Make it."""
    return FlashInferBackend(ground, ground.memory)


class FlashInferBackend:
    """Makes a step's attention. See `backend.Backend`."""

    name = "flashinfer"
    ingredient = "flashinfer 1"
    exact = False

    def __init__(self, ground: Ground, memory: KVMemory) -> None:
        self.ground = ground
        self.memory = memory
        self.slots = ground.slots
        self._make: Any = importlib.import_module(_MODULE).BatchPrefillWithPagedKVCacheWrapper
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=memory.buffer.device)
        self._wrappers: dict[tuple[Any, int], Any] = {}
        self._turn = 0

    def begin(self, segments: tuple[Segment, ...], total: int) -> "FlashInferStep":
        """Start a step of `total` rows: those of the segments, in order, then padding."""
        self._turn = (self._turn + 1) % _TURNS
        return FlashInferStep(self, segments, total)

    def wrapper(self, kind: Any) -> Any:
        """The one for layers of a kind in this step."""
        key = (kind, self._turn)
        if key not in self._wrappers:
            # "fa2" runs on every card that we ask for and takes strides; others are chosen by shapes, and some do not.
            self._wrappers[key] = self._make(self._workspace, "NHD", backend="fa2")
        return self._wrappers[key]

    def fixed(self, extent: Extent) -> Fixed | None:
        """None: what a step launches depends on its rows."""
        del extent

    def over(self, memory: KVMemory) -> "FlashInferBackend":
        """The same over another memory of the same layout."""
        return FlashInferBackend(self.ground, memory)


class FlashInferStep:
    """One step's work; made once, used by every layer."""

    def __init__(self, backend: FlashInferBackend, segments: tuple[Segment, ...], total: int) -> None:
        self._backend = backend
        self._rows = rows = Rows(backend.memory, segments, total)
        device, size = backend.memory.buffer.device, backend.memory.layout.block_size
        pages = [-(-end // size) for end in rows.ends]
        blocks = chain.from_iterable(s.blocks[:count] for s, count in zip(segments, pages, strict=True))
        # It reads all but the blocks on the host and sends them to the card by itself.
        self._where = (
            pin(torch.tensor(rows.firsts, dtype=torch.int32), device),
            pin(torch.tensor([0, *accumulate(pages)], dtype=torch.int32), device),
            send(torch.tensor([*blocks], dtype=torch.int32), device),
            pin(torch.tensor([(end - 1) % size + 1 for end in rows.ends], dtype=torch.int32), device),
        )
        self._planned: dict[Any, Any] = {}

    def attend(self, call: Call) -> Tensor:
        """See `call.Step`."""
        memory, place = self._backend.memory, self._backend.slots[call.layer]
        query = self._rows.begin(place, call)
        mixed = self._plan(call).run(query, (memory.keys(place), memory.values(place)))
        return self._rows.end(mixed)

    def _plan(self, call: Call) -> Any:
        """The wrapper for a layer like this one, told of the step."""
        heads, kv_heads, dim = call.query.shape[0], call.key.shape[0], call.query.shape[2]
        scaling, softcap, left = call.scoring.scaling, call.scoring.softcap, window_left(call)
        kind = (heads, kv_heads, dim, scaling, softcap, left)
        if kind not in self._planned:
            wrapper = self._backend.wrapper(kind)
            wrapper.plan(
                *self._where,
                heads,
                kv_heads,
                dim,
                self._backend.memory.layout.block_size,
                causal=True,
                sm_scale=scaling,
                window_left=left,
                logits_soft_cap=softcap,
                q_data_type=call.query.dtype,
                kv_data_type=call.key.dtype,
            )
            self._planned[kind] = wrapper
        return self._planned[kind]

"""Where a step's keys and values go, for backends that leave storing to torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from foreword.runner.attention.call import Call
from foreword.runner.attention.tiles import Segment
from foreword.runner.layout import LayerShape
from foreword.runner.memory import KVMemory
from foreword.runner.transfer import send


class Store:
    """The rows of one step; made once, used by every layer."""

    __slots__ = ("_memory", "_places", "_slots", "num_rows")

    def __init__(self, memory: KVMemory, segments: Sequence[Segment]) -> None:
        size = memory.layout.block_size
        slots = [slot for segment in segments for slot in segment.slots(size)]
        self.num_rows = len(slots)
        """Rows of the segments, which are the first of a batch."""
        self._memory = memory
        self._slots = send(torch.tensor(slots, dtype=torch.long), memory.buffer.device)
        self._places: dict[LayerShape, Tensor] = {}

    def write(self, layer: int, shape: LayerShape, call: Call) -> None:
        """Put a call's keys and values into the memory's layer of that number, which has this shape."""
        memory, size = self._memory, self._memory.layout.block_size
        places = self._places.get(shape)
        if places is None:
            places = self._places[shape] = memory.places(layer, self._slots // size, self._slots % size)
        memory.write(layer, places, call.key[:, : self.num_rows], call.value[:, : self.num_rows])

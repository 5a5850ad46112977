"""Ragged batches over a memory full of rubbish, and what attention over them should be, for tests of backends."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foreword.runner.attention.backend import Ground
from foreword.runner.attention.call import Call, LayerFacts, Scoring, Sight
from foreword.runner.attention.tiles import Segment
from foreword.runner.layout import LayerShape, lay_out
from foreword.runner.memory import KVMemory

EVERYTHING = Sight()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Layer:
    """One attention layer."""

    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    sight: Sight = EVERYTHING
    softcap: float | None = None
    sinks: bool = False

    def facts(self, index: int) -> LayerFacts:
        generator = torch.Generator().manual_seed(index)
        sinks = torch.randn(self.heads, generator=generator).to(DEVICE) if self.sinks else None
        return LayerFacts(
            layer=index,
            heads=self.heads,
            shape=LayerShape(kv_heads=self.kv_heads, key_dim=self.key_dim, value_dim=self.value_dim),
            sight=self.sight,
            scoring=Scoring(self.key_dim**-0.5, self.softcap, sinks),
        )


class Scene:
    """Sequences with a past, in blocks strewn over a memory that is NaN wherever nobody has written."""

    def __init__(self, layers: Sequence[Layer], dtype: torch.dtype = torch.float32, *, size: int = 16) -> None:
        facts = tuple(layer.facts(index) for index, layer in enumerate(layers))
        self.memory = KVMemory(lay_out(tuple(fact.shape for fact in facts), size), 96, dtype, DEVICE)
        self.memory.buffer[:-1] = float("nan")
        self.ground = Ground(facts=facts, memory=self.memory)
        self.size = size
        self._free = list(range(96))
        random.Random(0).shuffle(self._free)
        self._generator = torch.Generator().manual_seed(0)

    def exactly(self) -> Ground:
        """The ground with --exact."""
        return replace(self.ground, exact=True)

    def segments(self, *chunks: tuple[int, int], shared: int = 0) -> tuple[Segment, ...]:
        """A segment for each (start, count), its past written; their first `shared` tokens are the same blocks."""
        head = self._blocks(shared // self.size)
        self._write(head, shared)
        segments: list[Segment] = []
        row = 0
        for start, count in chunks:
            own = head[: start // self.size]
            blocks = own + self._blocks(-(-(start + count) // self.size) - len(own))
            self._write(blocks, start, len(own) * self.size)
            segments.append(Segment(row, start, count, tuple(blocks)))
            row += count
        return tuple(segments)

    def calls(self, rows: int) -> list[Call]:
        """A call of each layer over random states of `rows` rows."""
        calls: list[Call] = []
        for fact in self.ground.facts:
            shape = fact.shape
            query = self._random(rows, fact.heads, shape.key_dim)
            key = self._random(rows, shape.kv_heads, shape.key_dim)
            value = self._random(rows, shape.kv_heads, shape.value_dim)
            query, key, value = (state.transpose(0, 1) for state in (query, key, value))
            calls.append(Call(fact.layer, query, key, value, fact.scoring, fact.sight))
        return calls

    def expected(self, call: Call, segments: Sequence[Segment]) -> Tensor:
        """[rows, heads, value_dim] in float32, out of what is stored now."""
        slot = self.ground.slots[call.layer]
        group = call.query.shape[0] // call.key.shape[0]
        out = torch.zeros(call.query.shape[1], call.query.shape[0], call.value.shape[2], device=DEVICE)
        for segment in segments:
            end = segment.start + segment.count
            blocks = list(segment.blocks)
            keys, values = (
                states[blocks].flatten(0, 1)[:end].float().repeat_interleave(group, dim=1)
                for states in (self.memory.keys(slot), self.memory.values(slot))
            )
            rows = slice(segment.row, segment.row + segment.count)
            scores = torch.einsum("hqd,khd->hqk", call.query[:, rows].float(), keys) * call.scoring.scaling
            if call.scoring.softcap is not None:
                scores = call.scoring.softcap * torch.tanh(scores / call.scoring.softcap)
            seen = call.sight.visible(torch.arange(segment.start, end), torch.arange(end)).to(DEVICE)
            scores = scores.masked_fill(~seen, float("-inf"))
            if call.scoring.sinks is not None:
                sinks = call.scoring.sinks.float()[:, None, None].expand(-1, segment.count, 1)
                scores = torch.cat((scores, sinks), dim=-1)
            weights = scores.softmax(-1)[..., :end]
            out[rows] = torch.einsum("hqk,khd->qhd", weights, values)
        return out

    def _blocks(self, count: int) -> list[int]:
        return [self._free.pop() for _ in range(count)]

    def _write(self, blocks: Sequence[int], until: int, first: int = 0) -> None:
        """Random keys and values at positions from `first` up to `until`."""
        positions = torch.arange(first, until)
        at = (torch.tensor(blocks, dtype=torch.long)[positions // self.size].to(DEVICE), positions % self.size)
        for slot in range(len(self.ground.facts)):
            for states in (self.memory.keys(slot), self.memory.values(slot)):
                states[at[0], at[1].to(DEVICE)] = self._random(len(positions), *states.shape[2:])

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(DEVICE, self.memory.buffer.dtype)

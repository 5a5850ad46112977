"""Who multiplies by a model's weights on a CPU, and which of them at once.

Where the processor has tile registers, our own kernel does (`native.product`): it is exact by construction. Elsewhere
torch does, in portions of proven sizes (`linear`). Linear layers that are given the same rows, one right after the
other, are one product: of a decode step most time goes into waking threads and starting to read a weight.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, groupby
from typing import cast

import torch
from torch import Tensor, nn

from foreword.base.errors import InvariantBroken
from foreword.runner import library
from foreword.runner.linear import PACKED_BYTES, PortionedLinear, StandIn, choose_menus, pad_rows
from foreword.runner.native import machine, product
from foreword.runner.native.activation import Activation
from foreword.runner.native.product import COLUMNS, STEP, Job
from foreword.runner.rowwise import Gate
from foreword.runner.shelf import NOWHERE, Shelf

_LINE = 32
"""Numbers in a line of the cache: 64 bytes."""


@dataclass(frozen=True, slots=True)
class Products:
    """How a model's products are made."""

    exact: bool
    """No row's bits depend on how many rows there are."""
    room: Callable[[int], int]
    """Rows that a step of so many is padded to."""
    ingredient: str
    """Of block identity."""

    @property
    def pads(self) -> bool:
        """Whether some products take certain numbers of rows only."""
        return self.room is not int


PLAIN = Products(exact=False, room=int, ingredient="torch")
"""Torch's linear layers as they are."""


@dataclass(frozen=True, slots=True)
class Heard:
    """Which linear layers were called, with what, in order."""

    calls: list[tuple[nn.Linear, Tensor]] = field(default_factory=list[tuple[nn.Linear, Tensor]])
    """What they were given is kept, so that no two of them are the same object by chance."""

    def families(self) -> Iterator[tuple[nn.Linear, ...]]:
        """Layers that were given the same rows one after the other; each layer that was called just once is in one."""
        often = Counter(id(linear) for linear, _ in self.calls)
        for _, calls in groupby(self.calls, key=lambda call: id(call[1])):
            own = tuple(linear for linear, _ in calls if often[id(linear)] == 1)
            if own:
                yield own


@contextmanager
def listen(model: nn.Module) -> Generator[Heard]:
    """Note every call of a linear layer."""
    heard = Heard()

    def note(linear: nn.Module, given: tuple[Tensor, ...]) -> None:
        heard.calls.append((cast("nn.Linear", linear), given[0]))

    hooks = [linear.register_forward_pre_hook(note) for _, _, linear in _linears(model)]
    try:
        yield heard
    finally:
        for hook in hooks:
            hook.remove()


def take_over(model: nn.Module, families: Iterable[Sequence[nn.Linear]], shelf: Shelf = NOWHERE) -> Products:
    """Put a layer of ours in the place of each `nn.Linear` of a model on a CPU; then nothing of it lies in a file.

    Machine code is kept on the shelf. Weights of layers that our own kernel computes are no longer there as they were:
    whatever reads them comes first. Not exact where a model keeps weights elsewhere (a mixture's experts, for one),
    whose rows may then still depend on how many there are.
    """
    linears = list(_linears(model))
    ours: dict[int, nn.Module] = {}
    if machine.is_there() and machine.multiplies_tiles():
        for gate in (module for module in model.modules() if isinstance(module, Gate)):
            ours.update(_join(gate, shelf))
        alone = [[linear] for _, _, linear in linears]
        for family in (*families, *alone):
            able = [linear for linear in family if id(linear) not in ours and _fits(linear)]
            if able:
                laid = _lay(able, None, shelf)
                ours.update((id(linear), TiledLinear(linear, laid, i)) for i, linear in enumerate(able))
    library.copy_out(model)  # before others look at where weights are
    rest = [linear for _, _, linear in linears if id(linear) not in ours]
    small = sum(linear.weight.nbytes for linear in rest) <= PACKED_BYTES
    for linear, menu in choose_menus(rest, packs=small):
        ours[id(linear)] = PortionedLinear(linear, menu)
    for parent, name, linear in linears:
        setattr(parent, name, ours[id(linear)])
    made = {type(layer) for layer in ours.values()}
    return Products(
        exact=all(_is_covered(module) for module in model.modules()),
        room=pad_rows if PortionedLinear in made else int,
        ingredient="tiles 1" if TiledLinear in made else "torch",
    )


def _join(gate: Gate, shelf: Shelf) -> dict[int, nn.Module]:
    """Have a gate and what it lets through made by one kernel, if it takes both; what stands in for their layers."""
    both = (gate.gate_proj, gate.up_proj)
    able = [linear for linear in both if isinstance(linear, nn.Linear) and _fits(linear)]
    if len(able) < len(both):
        return {}
    laid = _lay(able, gate.kind, shelf)
    gate.together = lambda x: laid.result(x, 0)
    return {id(linear): JoinedLinear(linear) for linear in able}


def _lay(linears: Sequence[nn.Linear], gate: Activation | None, shelf: Shelf) -> "Laid":
    """Lay the weights of some layers out, and give back the memory of each that nobody else has.

    Parameters keep their names, shapes and precisions; reading numbers out of them is an error.
    """
    laid = Laid(linears, gate, shelf)
    for linear in linears:
        linear.weight = nn.Parameter(torch.empty_like(linear.weight, device="meta"), requires_grad=False)
    return laid


class JoinedLinear(StandIn):
    """Its product is made by the module that holds it."""

    def forward(self, x: Tensor) -> Tensor:
        """Nobody calls it."""
        raise InvariantBroken(f"a layer was called whose product is made elsewhere, for {tuple(x.shape)}")


class Laid:
    """Weights of one or more linear layers, laid out for the kernel as one."""

    def __init__(self, linears: Sequence[nn.Linear], gate: Activation | None = None, shelf: Shelf = NOWHERE) -> None:
        """With a gate: of two layers, a gate's and that of what it lets through; there is one result then."""
        inputs, wide = linears[0].in_features, [linear.out_features for linear in linears]
        self._inputs = inputs
        blocks, steps = sum(wide) // COLUMNS, inputs // STEP
        self.columns = wide if gate is None else wide[:1]
        self._apart = wide if gate is None else [_apart(wide[0])]
        """Numbers from row to row of a result. Of a gate's, nothing but the next product is made."""
        self._weight = linears[0].weight.new_empty(blocks, steps, 2, STEP // 2, COLUMNS // 2, 2)
        self._bias = torch.empty(blocks, 2, COLUMNS // 2)
        # Pairs of numbers stay together, and are copied as one.
        tiles = _pairs(self._weight).permute(0, 2, 4, 1, 3, 5)
        starts = list(accumulate((columns // COLUMNS for columns in wide), initial=0))
        for i, linear in enumerate(linears):
            # Side by side in each block, or in blocks one after the other.
            place = (slice(None), i) if gate is not None else slice(starts[i], starts[i + 1])
            tiles[place] = _pairs(linear.weight.detach()).view(tiles[place].shape)
            bias = cast("nn.Parameter | None", linear.bias)
            self._bias[place] = 0 if bias is None else bias.detach().view(self._bias[place].shape)
        begins = accumulate(self.columns, initial=0)
        self._parts = torch.tensor(
            [
                (begin, apart)
                for begin, apart, columns in zip(begins, self._apart, self.columns, strict=False)
                for _ in range(blocks * columns // sum(self.columns))
            ],
            dtype=torch.int32,
        )
        self._given: Tensor | None = None
        self._results: list[Tensor | None] = []
        self._run = _kernel(gate, shelf).run
        self._job = machine.new_job(Job)
        self._job[Job.BLOCKS] = blocks
        self._job[Job.STEPS] = steps
        self._job[Job.WEIGHT] = self._weight.data_ptr()
        self._job[Job.BIAS] = self._bias.data_ptr()
        self._job[Job.PARTS] = self._parts.data_ptr()

    def result(self, x: Tensor, index: int) -> Tensor:
        """`x @ weight.T + bias` of the layer `index`: x [..., in] -> [..., out].

        The first layer that asks about some rows has all of them computed; the others find their results.
        """
        found = self._results[index] if x is self._given else None
        if found is None:
            self._given, self._results = x, self._multiply(x)
            found = cast("Tensor", self._results[index])
        self._results[index] = None
        if all(left is None for left in self._results):
            self._given = None
        return found

    def _multiply(self, x: Tensor) -> list[Tensor | None]:
        if x.dtype is not torch.bfloat16 or x.shape[-1] != self._inputs:
            raise RuntimeError(f"{self._inputs} bfloat16 weights cannot be multiplied by {x.dtype} {tuple(x.shape)}")
        shape, job = x.shape[:-1], self._job
        if x.stride(-1) != 1 or shape[:-1].numel() != 1:
            x = x.contiguous()
        rows = shape.numel()
        out = x.new_empty(rows * sum(self._apart))
        job[Job.NEXT] = 0
        job[Job.ROWS] = job[Job.ROOM] = rows
        job[Job.WORKERS] = torch.get_num_threads()
        job[Job.X] = x.data_ptr()
        job[Job.X_ROW] = 2 * x.stride(-2)
        job[Job.OUT] = out.data_ptr()
        self._run(job, shape)
        begins = accumulate((rows * apart for apart in self._apart), initial=0)
        wide = zip(self.columns, self._apart, begins, strict=False)
        return [out.as_strided((*shape, columns), _strides(shape, apart), begin) for columns, apart, begin in wide]


def _strides(shape: torch.Size, apart: int) -> tuple[int, ...]:
    """Of vectors in this shape, each `apart` numbers after the one before."""
    strides = [1]
    for size in reversed(shape):
        strides.insert(0, apart)
        apart *= size
    return tuple(strides)


class TiledLinear(StandIn):
    """Its product is made by our kernel."""

    def __init__(self, linear: nn.Linear, laid: Laid, index: int) -> None:
        """`index` is its place in what was laid out."""
        super().__init__(linear)
        self._laid = laid
        self._index = index

    def forward(self, x: Tensor) -> Tensor:
        """Take x [..., in_features] to [..., out_features]."""
        return self._laid.result(x, self._index)

    def extra_repr(self) -> str:
        """Shown when the model is printed."""
        return f"{super().extra_repr()}, with={len(self._laid.columns) - 1}"


def _pairs(numbers: Tensor) -> Tensor:
    """Two numbers of half precision, side by side, as one: [..., n] -> [..., n / 2]."""
    return numbers.view(torch.int32)


def _apart(columns: int) -> int:
    """How far apart rows of so many numbers should lie: an odd number of lines of the innermost cache.

    Tiles are read down the rows; at a distance of many lines, all of them would have to share a few places there.
    """
    return (-(-columns // _LINE) | 1) * _LINE


@cache
def _kernel(gate: Activation | None, shelf: Shelf) -> machine.Compiled:
    """Compiled once in a process."""
    return machine.Compiled("product" if gate is None else f"product, {gate}", product.write(gate), shelf)


def _fits(linear: nn.Linear) -> bool:
    """Whether the kernel takes weights of that shape."""
    half = linear.weight.dtype is torch.bfloat16
    return half and linear.in_features % STEP == 0 and linear.out_features % COLUMNS == 0


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            # A subclass may compute something else in its forward.
            if type(child) is nn.Linear:
                yield parent, name, child


def _is_covered(module: nn.Module) -> bool:
    if isinstance(module, (StandIn, nn.Embedding)):
        return True
    return all(parameter.dim() < 2 for parameter in module.parameters(recurse=False))

"""Recorded forwards on a CPU: what a step of a size does is noted once, and then done again without the model.

In a small step Python's way through the model takes longer than the work itself. While a step is recorded, every
operation of torch is seen on its way (`TorchDispatchMode`), and every launch of a kernel of ours, which is noted
instead of run: views and memory stay as they are, the rest goes on the tape. Launches that follow each other are one
program (`native.program`). Memory for what is made on the way is lent, the same for all tapes. What would make a step
depend on numbers it computes (a mixture that looks which experts it needs) cannot be recorded and is refused.

Where all products are kernels of ours, what is replayed computes only the rows that a step has, so a few sizes do.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum, auto
from functools import cache, partial
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from foreword.runner.attention.backend import Extent
from foreword.runner.graphs import sizes
from foreword.runner.lender import Lender
from foreword.runner.native import machine, program
from foreword.runner.rowwise import Sum
from foreword.runner.shelf import NOWHERE, Shelf
from foreword.runner.tape import Launch, Note, Tape

_DECODES, _PREFILLS = (1, 2, 4, 8, 12, 16, 24, 32), (16, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""Rows. A row of padding costs as much as any other, and Python's part of a larger step is small beside it."""
_SEGMENTS = 16
_TELLING = ((37, 41), (131, 137), (367, 263), (1031, 263))
"""Rows, and rows wanted, where padding costs next to nothing: numbers that nothing else of a model is a multiple of,
so that whatever is as long has a row for each."""
_NEVER = -1
_MEMORY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
_LOOKS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class TapeRecorder:
    """Implements `graphs.Recorder`."""

    checked = True

    def __init__(self, shelf: Shelf = NOWHERE, *, follows: bool = False) -> None:
        """`follows`: no row's bits depend on others, and all products are made by kernels of ours."""
        self.follows = follows
        """See `graphs.Recorder`."""
        telling = tuple(Extent(rows=rows, segments=wanted, longest=rows) for rows, wanted in _TELLING)
        self.extents = telling if follows else sizes(_DECODES, _PREFILLS, _SEGMENTS)
        """See `graphs.Recorder`."""
        self._lender = Lender()
        self._sum = Sum(shelf)
        self.code = _program(shelf)
        """What runs programs."""

    @property
    def num_bytes(self) -> int:
        """Of the memory that all its tapes write to on their way."""
        return self._lender.num_bytes

    def record(self, work: Callable[[], Tensor], extent: Extent) -> Tape:
        """See `graphs.Recorder`."""
        counts = (extent.rows, extent.segments) if self.follows else (_NEVER, _NEVER)
        with _Listener(self._lender, self._sum, counts) as listener:
            out = work()
        return Tape(self.code, listener.notes, out, listener.kept)


class _Listener(machine.Witness):
    """Notes operations of torch and launches of kernels."""

    def __init__(self, lender: Lender, add: Sum, counts: tuple[int, int]) -> None:
        """`counts` are the numbers of rows, and of rows wanted, by which what follows a step's is known."""
        cast(Any, super()).__init__()
        self.notes: list[Note] = []
        self.kept: list[object] = []
        """Memory that was there before, which has to stay where it is."""
        self._lender = lender
        self._add = add
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is torch.ops.aten.add.Tensor and not kwargs and self._add.takes(*args):
            return self._note_sum(*args)
        named: dict[str, Any] = kwargs or {}
        found, does = func(*args, **named), _does(func)
        if does is _Does.LOOK and not (func is torch.ops.aten.index.Tensor and _takes_numbers(args[1])):
            raise RuntimeError(f"{func} looks at numbers")
        given = self._given((*args, *named.values()))
        if does is not _Does.WRITE and all(_place(tensor) in given for tensor in _tensors((found,))):
            return found  # it looks at the same memory in another way
        lasting = self._lender.lasting
        args, named = _mapped(lasting, args), dict(zip(named, _mapped(lasting, named.values()), strict=True))
        if does is _Does.WRITE:
            self.notes.append(partial(func, *args, **named))
            return found
        (found,) = _mapped(lambda made: made if _place(made) in given else self._lend(made, does), (found,))
        if does is not _Does.TAKE:
            targets = [lasting(tensor) for tensor in _tensors((found,))]
            self.notes.append(partial(_again, func, args, named, targets))
        return found

    def _given(self, values: Iterable[object]) -> set[int]:
        """Where the tensors among them lie; what is not lent is kept."""
        given = {_place(tensor): tensor for tensor in _tensors(values)}
        self.kept += [tensor for place, tensor in given.items() if not self._lender.lends(place)]
        return set(given)

    def _note_sum(self, x: Tensor, y: Tensor) -> Tensor:
        """Torch wakes its threads for each sum of a residual stream; a kernel of ours is part of a program."""
        self._given((x, y))
        out = self._lender.like(x)
        with self:
            self._add(x, y, out)
        return out

    def _lend(self, made: Tensor, does: "_Does") -> Tensor:
        """What stands in for a tensor that was made; oneDNN's own stay what they are."""
        if made.layout is not torch.strided:
            return made
        lent = self._lender.like(made)
        return lent if does is _Does.TAKE else lent.copy_(made)

    def launched(self, code: machine.Compiled, job: machine.Job, rows: Sequence[int], brief: int, threads: int) -> None:
        """See `machine.Witness`."""
        each, wanted = (share(rows, own) for own in self._counts)
        besides = 0 if each or wanted else job[machine.ROWS]
        self.notes.append(Launch(code, tuple(job), (each, wanted, besides), brief, threads))


def share(rows: Sequence[int], own: int) -> int:
    """How many of the rows there are for each of `own`, if those of one come right after those of another; else 0."""
    ahead = next((i for i, size in enumerate(rows) if size != 1), len(rows))
    return prod(rows[ahead + 1 :]) if ahead < len(rows) and rows[ahead] == own else 0


class _Does(Enum):
    """What an operation of torch does, as far as a tape goes."""

    LOOK = auto()
    """What comes out is as large as the numbers say."""
    WRITE = auto()
    """It changes what it is given."""
    TAKE = auto()
    """It takes memory, and writes nothing."""
    MAKE = auto()
    """It writes to memory that it takes, or nothing."""


@cache
def _does(func: Any) -> _Does:
    if any(tag in func.tags for tag in _LOOKS):
        return _Does.LOOK
    if func._schema.is_mutable:  # noqa: SLF001
        return _Does.WRITE
    return _Does.TAKE if func.overloadpacket.__name__ in _MEMORY else _Does.MAKE


def _takes_numbers(indices: Sequence[Tensor | None]) -> bool:
    """Taking rows by their numbers is tagged as if it took them by a mask."""
    return all(index is None or index.dtype is not torch.bool for index in indices)


def _again(func: Any, args: Any, named: Any, targets: list[Tensor]) -> None:
    """Compute it once more, to where it went before."""
    for old, new in zip(targets, _tensors((func(*args, **named),)), strict=True):
        old.copy_(new)


def _place(tensor: Tensor) -> int:
    """Which memory a tensor looks at; oneDNN's own tensors, which nobody else looks into, have none to name."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    """The tensors among them and in their lists. PyTorch's pytree looks into more than that, and takes longer."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(cast("Iterable[object]", value))


def _mapped(change: Callable[[Tensor], Tensor], values: Iterable[object]) -> list[Any]:
    """The same with other tensors."""
    mapped: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            mapped.append(change(value))
        elif isinstance(value, (list, tuple)):
            inner = _mapped(change, cast("Iterable[object]", value))
            mapped.append(tuple(inner) if isinstance(value, tuple) else inner)
        else:
            mapped.append(value)
    return mapped


@cache
def _program(shelf: Shelf) -> machine.Compiled:
    """Compiled once in a process."""
    return machine.Compiled("program", program.write(x86=machine.is_x86()), shelf)

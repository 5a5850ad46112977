"""Recorded forwards on a CPU: what a step of a size launches is noted once, and then launched again without the model.

Of a decode step that way takes longer than the work itself. While a step is recorded, every operation of torch is seen
on its way (`TorchDispatchMode`), and every launch of a kernel of ours: views and memory stay as they are, the rest goes
on the tape. Memory for what is made on the way is lent, the same for all tapes. What would make a step depend on
numbers it computes (a mixture that looks which experts it needs) cannot be recorded and is refused.
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum, auto
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor

from foreword.runner.graphs import sizes
from foreword.runner.lender import Lender
from foreword.runner.native import machine

_DECODES, _PREFILLS = (1, 2, 4, 8, 12, 16, 24, 32), (16, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""Rows. A row of padding costs as much as any other, and Python's part of a larger step is small beside it."""
_SEGMENTS = 16
_MEMORY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
_LOOKS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Tape:
    """A step that was recorded. Implements `graphs.Recorded`."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], object]] = []
        self.kept: list[object] = []
        """Jobs, and memory that was there before, both of which have to stay where they are."""
        self.out = torch.empty(0)

    def replay(self) -> Tensor:
        """See `graphs.Recorded`."""
        for step in self.steps:
            step()
        return self.out


class TapeRecorder:
    """Implements `graphs.Recorder`."""

    extents = sizes(_DECODES, _PREFILLS, _SEGMENTS)

    def __init__(self) -> None:
        self._lender = Lender()

    @property
    def num_bytes(self) -> int:
        """Of the memory that all its tapes write to on their way."""
        return self._lender.num_bytes

    def record(self, work: Callable[[], Tensor]) -> Tape:
        """See `graphs.Recorder`."""
        tape = Tape()
        with _Listener(tape, self._lender):
            tape.out = work()
        first = tape.out.clone()
        if not torch.equal(tape.replay(), first):
            raise RuntimeError("what was recorded comes out differently when it is repeated")
        return tape


class _Listener(machine.Witness):
    """Notes operations of torch and launches of kernels."""

    def __init__(self, tape: Tape, lender: Lender) -> None:
        cast(Any, super()).__init__()
        self._tape = tape
        self._lender = lender

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        named: dict[str, Any] = kwargs or {}
        found, does = func(*args, **named), _does(func)
        if does is _Does.LOOK and not (func is torch.ops.aten.index.Tensor and _takes_numbers(args[1])):
            raise RuntimeError(f"{func} looks at numbers")
        given = {_place(tensor): tensor for tensor in (*_tensors(args), *_tensors(named.values()))}
        self._tape.kept += [tensor for place, tensor in given.items() if not self._lender.lends(place)]
        if does is not _Does.WRITE and all(_place(tensor) in given for tensor in _tensors((found,))):
            return found  # it looks at the same memory in another way
        lasting = self._lender.lasting
        args, named = _mapped(lasting, args), dict(zip(named, _mapped(lasting, named.values()), strict=True))
        if does is _Does.WRITE:
            self._tape.steps.append(partial(func, *args, **named))
            return found
        (found,) = _mapped(lambda made: made if _place(made) in given else self._lend(made, does), (found,))
        if does is not _Does.TAKE:
            targets = [lasting(tensor) for tensor in _tensors((found,))]
            self._tape.steps.append(partial(_again, func, args, named, targets))
        return found

    def _lend(self, made: Tensor, does: "_Does") -> Tensor:
        """What stands in for a tensor that was made; oneDNN's own stay what they are."""
        if made.layout is not torch.strided:
            return made
        lent = self._lender.like(made)
        return lent if does is _Does.TAKE else lent.copy_(made)

    def launched(self, code: machine.Compiled, job: machine.Job, threads: int) -> None:
        """See `machine.Witness`."""
        before, mine = (type(job).from_buffer_copy(job) for _ in range(2))
        self._tape.kept += [before, mine]
        restore = partial(ctypes.memmove, ctypes.addressof(mine), ctypes.addressof(before), ctypes.sizeof(before))
        self._tape.steps += [restore, partial(code.run, mine, threads)]


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

"""Recorded forwards on a CPU: what a step of a size launches is noted once, and then launched again without the model.

Of a decode step that way takes longer than the work itself. While a step is recorded, every operation of torch is seen
on its way (`TorchDispatchMode`), and every launch of a kernel of ours: views and memory stay as they are, the rest goes
on the tape. What would make a step depend on numbers it computes (a mixture that looks which experts it needs) cannot
be recorded and is refused.
"""

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from foreword.runner.graphs import sizes
from foreword.runner.native import machine

_DECODES, _PREFILLS = (1, 2, 4, 8, 12, 16, 24, 32), (16, 32, 48, 64)
"""Rows. A row of padding costs as much as any other, and Python's part of a larger step is small."""
_SEGMENTS = 8
_MEMORY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
_LOOKS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Tape:
    """A step that was recorded. Implements `graphs.Recorded`."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], object]] = []
        self.kept: list[object] = []
        """Memory that the steps read and write, which has to stay where it is."""
        self.out = torch.empty(0)

    def replay(self) -> Tensor:
        """See `graphs.Recorded`."""
        for step in self.steps:
            step()
        return self.out


class TapeRecorder:
    """Implements `graphs.Recorder`."""

    extents = sizes(_DECODES, _PREFILLS, _SEGMENTS)

    def record(self, work: Callable[[], Tensor]) -> tuple[Tape, Tensor]:
        """See `graphs.Recorder`."""
        tape = Tape()
        with _Listener(tape):
            tape.out = work()
        first = tape.out.clone()
        if not torch.equal(tape.replay(), first):
            raise RuntimeError("what was recorded comes out differently when it is repeated")
        return tape, first


class _Listener(machine.Witness):
    """Notes operations of torch and launches of kernels."""

    def __init__(self, tape: Tape) -> None:
        cast(Any, super()).__init__()
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        named: dict[str, Any] = kwargs or {}
        given = _tensors((args, named))
        # Taking rows by their numbers is tagged as if it took them by a mask.
        by_number = func is torch.ops.aten.index.Tensor and all(tensor.dtype is not torch.bool for tensor in given[1:])
        if not by_number and any(tag in func.tags for tag in _LOOKS):
            raise RuntimeError(f"{func} looks at numbers")
        found = func(*args, **named)
        made = _tensors(found)
        self._tape.kept += [*given, *made]
        if func._schema.is_mutable:  # noqa: SLF001
            self._tape.steps.append(partial(func, *args, **named))
        elif func.overloadpacket.__name__ not in _MEMORY:
            places = {_place(tensor) for tensor in given}
            if any(_place(tensor) not in places for tensor in made):
                self._tape.steps.append(partial(_again, func, args, named, made))
        return found

    def launched(self, code: machine.Compiled, job: machine.Job, threads: int) -> None:
        """See `machine.Witness`."""
        before, mine = (type(job).from_buffer_copy(job) for _ in range(2))
        self._tape.kept += [before, mine]
        restore = partial(ctypes.memmove, ctypes.addressof(mine), ctypes.addressof(before), ctypes.sizeof(before))
        self._tape.steps += [restore, partial(code.run, mine, threads)]


def _again(func: Any, args: Any, named: Any, made: list[Tensor]) -> None:
    """Compute it once more, to where it went before."""
    for old, new in zip(made, _tensors(func(*args, **named)), strict=True):
        old.copy_(new)


def _place(tensor: Tensor) -> int:
    """Which memory a tensor looks at; oneDNN's own tensors, which nobody else looks into, have none to name."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]

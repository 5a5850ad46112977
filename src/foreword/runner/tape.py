"""A step that was noted on its way, to be done again without the model: operations of torch, and programs.

Launches that follow each other are one program (`native.program`). How many rows each of them computes follows from
how many the step has, if that was found out when they were noted (`recorder`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import cast

import torch
from torch import Tensor

from foreword.runner.native import machine, program

_SHORT = 4
"""Fewer launches than that may all be over at once."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch that was noted."""

    code: machine.Compiled
    job: tuple[int, ...]
    rows: tuple[int, int, int]
    """How many: for each row of the step, for each one that is wanted, and besides."""
    brief: int
    threads: int
    """As many as there is room for. This and `brief` are as in `machine.Compiled.run`."""


Note = Launch | Callable[[], object]


class Tape:
    """A step that was recorded. Implements `graphs.Recorded`."""

    def __init__(self, code: machine.Compiled, notes: Sequence[Note], out: Tensor, kept: Sequence[object]) -> None:
        """Take what runs programs, what was noted, where the result lies, and what has to stay where it is."""
        self._code = code
        self._out = out
        launches = [note for note in notes if isinstance(note, Launch)]
        self._threads = min((launch.threads for launch in launches), default=1) if machine.futex_number() else 1
        self._kept = (*kept, *{launch.code for launch in launches})
        begins = torch.tensor([0, *(len(launch.job) for launch in launches)]).cumsum(0)[:-1]
        self._jobs = torch.tensor([number for launch in launches for number in launch.job], dtype=torch.long)
        """Of all launches, one after the other, as they are before a step."""
        self._live = torch.zeros_like(self._jobs)
        self._rows = torch.tensor([launch.rows for launch in launches], dtype=torch.long).view(-1, 3)
        self._brief = torch.tensor([launch.brief for launch in launches], dtype=torch.long)
        self._places = begins + machine.ROWS
        self._launches = torch.zeros(len(launches) + 1, len(program.Launch), dtype=torch.long)
        self._launches[:-1, program.Launch.CODE] = torch.tensor([launch.code.address for launch in launches])
        self._launches[:-1, program.Launch.JOB] = self._live.data_ptr() + 8 * begins
        self._fitted: tuple[int, int] | None = None
        self._steps = list(self._join(notes))

    def replay(self, rows: int, wanted: int) -> Tensor:
        """See `graphs.Recorded`."""
        if self._fitted != (rows, wanted):
            self._fit(rows, wanted)
        self._live.copy_(self._jobs)
        for step in self._steps:
            step()
        return self._out

    def _fit(self, rows: int, wanted: int) -> None:
        counts = (self._rows * torch.tensor([rows, wanted, 1])).sum(1)
        self._jobs[self._places] = counts
        self._launches[:-1, program.Launch.BRIEF] = counts <= self._brief
        self._fitted = (rows, wanted)

    def _join(self, notes: Sequence[Note]) -> Iterator[Callable[[], object]]:
        """Launches that follow each other become one step."""
        first = 0
        for launched, group in groupby(notes, key=lambda note: isinstance(note, Launch)):
            if launched:
                count = len(list(group))
                launches = self._launches[first : first + count]
                # Not of this object: a tape that is dropped is gone at once, and so is what it kept.
                yield partial(_play, self._code, self._threads, launches, self._job(first, count))
                first += count
            else:
                yield from cast("Iterable[Callable[[], object]]", group)

    def _job(self, first: int, count: int) -> machine.Job:
        job = machine.new_job(program.Job)
        job[program.Job.COUNT] = count
        job[program.Job.LAUNCHES] = self._launches[first].data_ptr()
        job[program.Job.TEAM] = machine.team_size_address()
        job[program.Job.SYSTEM] = machine.system_address()
        job[program.Job.FUTEX] = machine.futex_number() or 0
        return job


def _play(code: machine.Compiled, threads: int, launches: Tensor, job: machine.Job) -> None:
    """Run a program with its job."""
    job[program.Job.WORKERS] = job[program.Job.MET] = 0
    # No team is woken for what is over at once.
    brief = len(launches) if len(launches) < _SHORT and bool(launches[:, program.Launch.BRIEF].all()) else 0
    code.run(job, brief=brief, threads=threads)

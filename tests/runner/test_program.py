"""Programs: every launch once, in its order, by as many workers as there are; small ones by the first alone."""

import ctypes
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate
from operator import mul

import pytest
import torch

from foreword.runner.native import machine, program
from foreword.runner.recorder import TapeRecorder
from foreword.runner.tape import Launch, Tape

# A worker waits, the first to come for as long as its job's fifth number says, the others for as long as the sixth one
# does; then it adds what one address holds to what another one does. The job's third number says how many have come.
ADDS = """
define void @work(ptr %job) {
entry:
  %slot = alloca i64
  %count = getelementptr i64, ptr %job, i64 2
  %old = atomicrmw add ptr %count, i64 1 seq_cst
  %first = icmp eq i64 %old, 0
  %place = select i1 %first, i64 5, i64 6
  %wait = getelementptr i64, ptr %job, i64 %place
  %long = load i64, ptr %wait
  br label %wait_on
wait_on:
  %i = phi i64 [0, %entry], [%next, %wait_on]
  %next = add i64 %i, 1
  store volatile i64 %next, ptr %slot
  %more = icmp slt i64 %next, %long
  br i1 %more, label %wait_on, label %go
go:
  %from = getelementptr i64, ptr %job, i64 3
  %source = load ptr, ptr %from
  %found = load i64, ptr %source
  %to = getelementptr i64, ptr %job, i64 4
  %target = load ptr, ptr %to
  %before = atomicrmw add ptr %target, i64 %found seq_cst
  ret void
}
"""


@pytest.fixture(params=[1, 2, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def launch(numbers: torch.Tensor, index: int, *, brief: int = 0, waits: tuple[int, int] = (0, 0)) -> Launch:
    """Each worker adds the number `index` to the next one; of so many rows as a step has, up to `brief` are brief."""
    job = (0, 5, 0, numbers[index].data_ptr(), numbers[index + 1].data_ptr(), *waits)
    return Launch(adds(), job, (1, 0, 0), brief, torch.get_num_threads())


@cache
def adds() -> machine.Compiled:
    return machine.Compiled("adds", ADDS)


def play(launches: Sequence[Launch]) -> Tape:
    return Tape(TapeRecorder().code, launches, torch.empty(0), launches)


def chain(count: int, long: int) -> tuple[Tape, torch.Tensor]:
    """Launches each of which takes the number that the one before has left; two of three are brief up to eight rows.

    What comes next is quick to look, and what is looked for comes late: who does not wait for others sees less.
    """
    numbers = torch.zeros(count + 1, dtype=torch.long)
    each = (
        launch(numbers, i, brief=8 if i % 3 else 0, waits=(2 * long, long) if i % 3 else (0, long))
        for i in range(count)
    )
    return play(list(each)), numbers


def meetings(tape: Tape, threads: int) -> int:
    """How often all workers have met; nobody counts as asleep any more."""
    (program_job,) = (step.args[-1] for step in tape._steps if isinstance(step, partial))
    assert program_job[program.Job.ASLEEP] == 0
    return program_job[program.Job.MET] // threads


@pytest.mark.parametrize("long", [0, 100_000], ids=["at once", "after a sleep"])
def test_each_launch_finds_what_the_one_before_left(threads: int, long: int) -> None:
    """Workers may come in any order; none runs ahead of another's launch, whether that looks or sleeps."""
    tape, numbers = chain(count=24, long=long)
    for rows in (5, 9, 5):
        numbers.zero_()
        numbers[0] = 1
        tape.replay(rows, 1)
        workers = [1 if i % 3 and rows <= 8 else threads for i in range(24)]
        assert numbers.tolist() == list(accumulate(workers, mul, initial=1))
        runs = tape._live.view(24, 7)
        assert runs[:, machine.ROWS].tolist() == [rows] * 24
        assert runs[:, 2].tolist() == workers
        assert meetings(tape, threads) == (16 if rows <= 8 else 24), "not between two that are brief"


def test_who_waits_long_goes_to_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Counter[int]()
    really = ctypes.CDLL(None).syscall

    @ctypes.CFUNCTYPE(ctypes.c_long, *[ctypes.c_long] * 5)
    def system(number: int, place: int, what: int, value: int, timeout: int) -> int:
        calls[what] += 1
        return really(*(ctypes.c_long(given) for given in (number, place, what, value, timeout)))

    monkeypatch.setattr(machine, "system_address", lambda: ctypes.cast(system, ctypes.c_void_p).value)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            tape, _ = chain(count=12, long=1_000_000)
            tape.replay(9, 1)
            assert meetings(tape, threads) == 12
            assert (min(calls[what] for what in (program._WAIT, program._WAKE)) > 0) == (threads > 1)
    finally:
        torch.set_num_threads(before)


def test_rows_and_rows_wanted_are_followed_each_for_itself() -> None:
    numbers = torch.zeros(4, dtype=torch.long)
    ways = ((1, 0, 0), (0, 2, 0), (0, 0, 7))
    tape = play([replace(launch(numbers, i), rows=rows) for i, rows in enumerate(ways)])
    for rows, wanted in ((5, 2), (5, 3), (4, 3), (4, 3)):
        tape.replay(rows, wanted)
        assert tape._live.view(3, 7)[:, machine.ROWS].tolist() == [rows, 2 * wanted, 7]


def test_few_launches_that_are_all_over_at_once_wake_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[int] = []
    really = machine.Compiled.run

    def noted(self: machine.Compiled, job: machine.Job, *, brief: int, threads: int) -> None:
        woken.append(brief)
        really(self, job, brief=brief, threads=threads)

    monkeypatch.setattr(machine.Compiled, "run", noted)
    numbers = torch.zeros(5, dtype=torch.long)
    for brief, rows in (([8], 8), ([8], 9), ([8, 8, 8], 8), ([8, 0, 8], 8), ([8] * 4, 8)):
        numbers.zero_()
        numbers[0] = 1
        play([launch(numbers, i, brief=most) for i, most in enumerate(brief)]).replay(rows, 1)
        assert numbers[1 : len(brief) + 1].all()
    assert woken == [1, 0, 3, 0, 0]


def test_as_many_workers_as_when_it_was_recorded() -> None:
    """Each has memory of its own, for as many as there were."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        tape, _ = chain(count=3, long=0)
        torch.set_num_threads(4)
        tape.replay(9, 1)
    finally:
        torch.set_num_threads(before)
    assert tape._live.view(3, 7)[:, 2].tolist() == [2] * 3


def test_where_nobody_can_be_woken_one_worker_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "futex_number", lambda: None)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        tape, numbers = chain(count=7, long=0)
        numbers[0] = 1
        tape.replay(9, 1)
    finally:
        torch.set_num_threads(before)
    assert numbers.tolist() == [1] * 8
    assert tape._live.view(7, 7)[:, 2].tolist() == [1] * 7

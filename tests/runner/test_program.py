"""Programs: every launch once, in its order, by as many workers as there are; small ones by the first alone."""

from collections.abc import Iterator

import pytest
import torch

from foreword.runner.native import machine, program
from foreword.runner.recorder import TapeRecorder
from foreword.runner.tape import Launch, Tape

# A worker adds one to its job's third number, then writes the sum of the two behind it into the last one. Some wait.
ADDS = """
define void @work(ptr %job) {{
entry:
  br label %wait
wait:
  %i = phi i64 [0, %entry], [%next, %wait]
  %next = add i64 %i, 1
  %slot = getelementptr i64, ptr %job, i64 6
  store volatile i64 %next, ptr %slot
  %more = icmp slt i64 %next, {wait}
  br i1 %more, label %wait, label %go
go:
  %count = getelementptr i64, ptr %job, i64 2
  %old = atomicrmw add ptr %count, i64 1 seq_cst
  %from = getelementptr i64, ptr %job, i64 3
  %source = load ptr, ptr %from
  %found = load i64, ptr %source
  %sum = add i64 %found, 1
  %to = getelementptr i64, ptr %job, i64 4
  %target = load ptr, ptr %to
  store i64 %sum, ptr %target
  ret void
}}
"""


@pytest.fixture(params=[1, 2, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def chain(count: int, waits: int, brief: int) -> tuple[Tape, torch.Tensor]:
    """Launches each of which takes the number that the one before has left, and leaves one more."""
    code = machine.Compiled("adds", ADDS.format(wait=waits))
    numbers = torch.zeros(count + 1, dtype=torch.long)
    launches = [
        Launch(
            code,
            (0, 5, 0, numbers[i].data_ptr(), numbers[i + 1].data_ptr(), 0, 0),
            (1, 0, 0),
            brief if i % 3 == 1 else 0,
        )
        for i in range(count)
    ]
    return Tape(TapeRecorder().code, launches, numbers, [numbers]), numbers


@pytest.mark.parametrize("waits", [1, 100_000], ids=["at once", "after a sleep"])
def test_each_launch_finds_what_the_one_before_left(threads: int, waits: int) -> None:
    """Workers may come in any order; none runs ahead of another's launch, whether that looks or sleeps."""
    tape, numbers = chain(count=40, waits=waits, brief=8)
    for rows in (5, 9, 5):  # up to eight are brief
        numbers.zero_()
        tape.replay(rows, 1)
        assert numbers.tolist() == list(range(41))
        runs = tape._live.view(40, 7)
        assert runs[:, machine.ROWS].tolist() == [rows] * 40
        alone = [i % 3 == 1 and rows <= 8 for i in range(40)]
        assert runs[:, 2].tolist() == [1 if brief else threads for brief in alone]


def test_launches_that_are_all_over_at_once_wake_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[int] = []
    really = machine.Compiled.run

    def noted(self: machine.Compiled, job: machine.Job, *, brief: int, threads: int) -> None:
        woken.append(brief)
        really(self, job, brief=brief, threads=threads)

    monkeypatch.setattr(machine.Compiled, "run", noted)
    code = machine.Compiled("adds", ADDS.format(wait=1))
    numbers = torch.zeros(2, dtype=torch.long)
    launch = Launch(code, (0, 5, 0, numbers[0].data_ptr(), numbers[1].data_ptr(), 0, 0), (1, 0, 0), 8)
    tape = Tape(TapeRecorder().code, [launch], numbers, [numbers])
    for rows in (8, 9):
        numbers.zero_()
        tape.replay(rows, 1)
        assert numbers.tolist() == [0, 1]
    assert woken == [1, 0]


def test_where_nobody_can_be_woken_one_worker_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "futex_number", lambda: None)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        tape, numbers = chain(count=7, waits=1, brief=0)
        tape.replay(5, 1)
    finally:
        torch.set_num_threads(before)
    assert numbers.tolist() == list(range(8))
    assert tape._live.view(7, 7)[:, 2].tolist() == [1] * 7
    assert len(program.Launch) == 3

"""Launches one after the other without coming back in between: what one worker does with one program.

A worker goes through all launches in their order, waits for the others after each, and leaves small ones to the first.
Waking a team of threads takes longer than many a launch, and so does getting hold of Python again after it.
"""

from collections.abc import Generator
from contextlib import contextmanager
from enum import IntEnum

from foreword.runner.native import machine
from foreword.runner.native.worker import Worker
from foreword.runner.native.writer import I32, I64, POINTER, Function, Value, ir

_PATIENCE = 2**8
"""Looks at whether the others have come, before a worker goes to sleep."""
_WAIT, _WAKE, _ALL = 128, 129, 2**31 - 1
"""FUTEX_WAIT and FUTEX_WAKE, within a process."""


class Job(IntEnum):
    """A job is an array of 64-bit integers: what each place holds."""

    WORKERS = 0
    """Workers that have come so far."""
    COUNT = machine.ROWS
    """It takes launches."""
    MET = 2
    """How often a worker has come to a place where all meet."""
    LAUNCHES = 3
    """int64 [count + 1, 3]: see `Launch`."""
    TEAM = 4
    """The address of a function that says how many workers there are; 0: one."""
    ASLEEP = 5
    """Workers that sleep until others have come, or are about to."""
    SYSTEM = 6
    """The address of C's `syscall`."""
    FUTEX = 7
    """The number of the call to the system that sleeps until somebody wakes it, and wakes."""


class Launch(IntEnum):
    """A launch is three integers: what each place holds."""

    CODE = 0
    JOB = 1
    BRIEF = 2
    """1: the first worker does it by itself."""


def write(*, x86: bool) -> str:
    """The kernel's LLVM code; its way in is `work(job)`."""
    module = ir.Module("program")
    _Worker(module, x86).write()
    return str(module)


class _Worker(Worker):
    """Writes `work(job)`."""

    def __init__(self, module: Value, x86: bool) -> None:
        super().__init__(module)
        self.x86 = x86
        self.met = self.w.b.alloca(I64)
        """How often all have met, times the workers."""
        self.workers, self.looks = (self.w.b.alloca(I64) for _ in range(2))

    def write(self) -> None:
        """Go through all launches."""
        w = self.w
        number = self.count_up(Job.WORKERS, w.number(1))
        first = w.b.icmp_signed("==", number, w.number(0))
        w.b.store(w.number(0), self.met)
        self._count_workers()
        with w.loop(w.number(0), self.field(Job.COUNT)) as index:
            launch = w.at(self.pointer(Job.LAUNCHES), w.times(index, 8 * len(Launch)))
            brief, next_brief = (
                w.b.icmp_signed("!=", w.load(I64, launch, 8 * (Launch.BRIEF + ahead)), w.number(0))
                for ahead in (0, len(Launch))
            )
            with w.b.if_then(w.b.or_(w.b.not_(brief), first)):
                work = Function(w.load(POINTER, launch, 8 * Launch.CODE), ir.VoidType(), [POINTER])
                w.b.call(work, [w.load(POINTER, launch, 8 * Launch.JOB)])
            with w.b.if_then(w.b.not_(w.b.and_(brief, next_brief))):
                self._meet()
        w.b.ret_void()

    def _count_workers(self) -> None:
        w = self.w
        w.b.store(w.number(1), self.workers)
        with w.b.if_then(w.b.icmp_signed("!=", self.field(Job.TEAM), w.number(0))):
            team = Function(self.pointer(Job.TEAM), I32, [])
            w.b.store(w.b.sext(w.b.call(team, []), I64), self.workers)

    def _meet(self) -> None:
        """Wait until all have come: look for a while, then sleep. Whoever comes last wakes those who do."""
        w = self.w
        wanted = w.b.add(w.b.load(self.met), w.b.load(self.workers))
        w.b.store(wanted, self.met)
        met, asleep = (w.at(self.job, 8 * place) for place in (Job.MET, Job.ASLEEP))
        come = w.plus(w.b.atomic_rmw("add", met, w.number(1), "seq_cst"), 1)
        with w.b.if_else(w.b.icmp_signed(">=", come, wanted)) as (last, others):
            with last, w.b.if_then(w.b.icmp_signed("!=", w.b.load_atomic(asleep, "seq_cst", 8, typ=I64), w.number(0))):
                self._system(_WAKE, w.number(_ALL))
            with others:
                self._look(met, wanted)
                seen = w.b.load_atomic(met, "seq_cst", 8, typ=I64)
                with w.b.if_then(w.b.icmp_signed("<", seen, wanted)):
                    w.b.atomic_rmw("add", asleep, w.number(1), "seq_cst")
                    with self._until_met(met, wanted) as seen:
                        self._system(_WAIT, seen)
                    w.b.atomic_rmw("sub", asleep, w.number(1), "seq_cst")

    def _look(self, met: Value, wanted: Value) -> None:
        w = self.w
        w.b.store(w.number(0), self.looks)
        with self._until_met(met, wanted, self.looks):
            if self.x86:
                w.call("llvm.x86.sse2.pause", ir.VoidType())
            w.b.store(w.plus(w.b.load(self.looks), 1), self.looks)

    @contextmanager
    def _until_met(self, met: Value, wanted: Value, looks: Value | None = None) -> Generator[Value]:
        """Do something again and again until all have come, or patience is at an end; gives how many had come."""
        w = self.w
        look, wait, after = (w.function.append_basic_block(name) for name in ("look", "wait", "after"))
        w.b.branch(look)
        w.b.position_at_end(look)
        seen = w.b.load_atomic(met, "seq_cst", 8, typ=I64)
        goes_on = w.b.icmp_signed("<", seen, wanted)
        if looks is not None:
            goes_on = w.b.and_(goes_on, w.b.icmp_signed("<", w.b.load(looks), w.number(_PATIENCE)))
        w.b.cbranch(goes_on, wait, after)
        w.b.position_at_end(wait)
        yield seen
        w.b.branch(look)
        w.b.position_at_end(after)

    def _system(self, what: int, value: Value) -> None:
        """`futex(&met, what, value, no timeout)`; it looks at the lower half of the word, which comes first."""
        w = self.w
        call = Function(self.pointer(Job.SYSTEM), I64, [I64, POINTER, I64, I64, I64])
        met = w.at(self.job, 8 * Job.MET)
        w.b.call(call, [self.field(Job.FUTEX), met, w.number(what), value, w.number(0)])

"""Engine: the loop. Plan, launch, land, commit; abort on any exception; audit when nothing else is to do.

Where the runner says so, the next step is planned and launched while one is computed: a card never waits for a plan.
"""

import json
import logging
from collections import deque
from dataclasses import asdict

from foreword.engine.sockets import Clock, Flight, Observer, Runner
from foreword.schedule.audit import Auditor
from foreword.schedule.plan import Outcome, Plan, StepResult, StepStats
from foreword.schedule.scheduler import Scheduler

_log = logging.getLogger(__name__)


class Engine:
    """Drives a scheduler with a runner. Single-threaded; `worker.Worker` is the thread around it."""

    __slots__ = ("_flights", "auditor", "clock", "observer", "runner", "scheduler")

    def __init__(
        self, scheduler: Scheduler, runner: Runner, clock: Clock, observer: Observer, auditor: Auditor | None = None
    ) -> None:
        self.auditor = auditor
        self.scheduler = scheduler
        self.runner = runner
        self.clock = clock
        self.observer = observer
        self._flights: deque[tuple[Plan, Flight]] = deque()

    @property
    def busy(self) -> bool:
        """Whether a step would find anything to do."""
        return self.scheduler.busy or (self.auditor is not None and self.auditor.busy)

    def step(self) -> Outcome | None:
        """Launch what the runner takes, and bring the oldest step back. None: there is nothing to compute."""
        start = self.clock.now()
        if self.auditor is not None and self.scheduler.busy:
            self.auditor.rest()  # before planning: whoever wants something may need its blocks
        bookkeeping_s = recording_s = 0.0
        while self._has_room:
            before = self.clock.now()
            plan = self.scheduler.plan(before)
            bookkeeping_s += self.clock.now() - before
            if plan is None:
                break
            flight = self._launch(plan)
            recording_s += flight.recording_s
            self._flights.append((plan, flight))
        if not self._flights:
            return self._audit()
        plan, flight = self._flights.popleft()
        try:
            result = flight.land()
        except Exception as error:  # noqa: BLE001  whatever the model raises, only the steps under way are lost
            return self._abort(plan, error)
        landed = self.clock.now()
        outcome = self.scheduler.commit(plan, result, landed)
        self.observer.observe(outcome)
        if not self.scheduler.busy:
            self._check()
        end = self.clock.now()
        self.observer.observe_step(end - start, bookkeeping_s + end - landed, recording_s)
        return outcome

    @property
    def _has_room(self) -> bool:
        """Whether a step may be launched: not behind one that could not be."""
        flights = self._flights
        return len(flights) < self.runner.depth and not (flights and isinstance(flights[-1][1], _Grounded))

    def _launch(self, plan: Plan) -> Flight:
        """Launch a step; what goes wrong with it is heard of when its turn to land comes."""
        try:
            return self.runner.launch(plan)
        except Exception as error:  # noqa: BLE001  as above
            return _Grounded(error)

    def dump(self, what: str) -> None:
        """Write all books into the log, as one line of JSON without a token of anybody's."""
        _log.critical("the books at a fault: %s", json.dumps(asdict(self.scheduler.books(what))))

    def _check(self) -> None:
        """The last request is over: nobody may hold anything now. If the books are wrong, go on without the cache."""
        fault = self.scheduler.cache.idle_fault()
        if fault is None:
            return
        whom = "everybody" if fault.tenants is None else f"tenant {', '.join(sorted(fault.tenants))}"
        self.dump(fault.what)
        self.scheduler.cache.stop(fault)
        _log.critical("prompts of %s are computed whole until the server is restarted: %s", whom, fault.what)

    def _audit(self) -> Outcome | None:
        """Nobody wants anything: recompute a piece of what was reused."""
        auditor = self.auditor
        plan = None if auditor is None or self.scheduler.busy else auditor.plan()
        if auditor is None or plan is None:
            return None
        try:
            self.runner.launch(plan).land()
            pairs = auditor.commit(plan)
            verdict = auditor.judge(pairs, self.runner.compare(pairs)) if pairs else None
        except Exception as error:  # noqa: BLE001  an audit that fails costs nobody anything
            _log.warning("an audit failed", exc_info=error)
            auditor.give_up()
            return None
        if verdict is None:
            return Outcome(-1, ())
        if verdict.num_mismatched:
            _log.error("an audit found wrong blocks; their prefix is out of the cache: %s", verdict)
        stats = StepStats(blocks_audited=verdict.num_compared, blocks_mismatched=verdict.num_mismatched)
        outcome = Outcome(-1, (), stats)
        self.observer.observe(outcome)
        return outcome

    def _abort(self, plan: Plan, error: Exception) -> Outcome:
        _log.warning("step %d with %d requests failed and is undone", plan.step, len(plan.chunks), exc_info=error)
        self._flights.clear()  # what was launched behind it read what it did not write
        message = f"the forward pass failed: {type(error).__name__}: {error}"
        outcome = self.scheduler.abort(plan, message, self.clock.now())
        self.observer.observe(outcome)
        return outcome


class _Grounded:
    """A step that could not be launched."""

    recording_s = 0.0

    def __init__(self, error: Exception) -> None:
        self._error = error

    def land(self) -> StepResult:
        """Say why."""
        raise self._error

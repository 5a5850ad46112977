"""Engine: the loop of one step. Plan, execute, commit; abort on any exception."""

import logging

from foreword.engine.sockets import Clock, Observer, Runner
from foreword.schedule.plan import Outcome, Plan
from foreword.schedule.scheduler import Scheduler

_log = logging.getLogger(__name__)


class Engine:
    """Drives a scheduler with a runner. Single-threaded; `worker.Worker` is the thread around it."""

    __slots__ = ("clock", "observer", "runner", "scheduler")

    def __init__(self, scheduler: Scheduler, runner: Runner, clock: Clock, observer: Observer) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.clock = clock
        self.observer = observer

    def step(self) -> Outcome | None:
        """Do one step. None: there is nothing to compute."""
        start = self.clock.now()
        plan = self.scheduler.plan(start)
        if plan is None:
            return None
        before = self.clock.now()
        try:
            result = self.runner.execute(plan)
        except Exception as error:  # noqa: BLE001  whatever the model raises, only this step is lost
            return self._abort(plan, error)
        after = self.clock.now()
        outcome = self.scheduler.commit(plan, result, after)
        self.observer.observe(outcome)
        end = self.clock.now()
        self.observer.observe_step(end - start, (end - after) + (before - start))
        return outcome

    def _abort(self, plan: Plan, error: Exception) -> Outcome:
        _log.warning("step %d with %d requests failed and is undone", plan.step, len(plan.chunks), exc_info=error)
        message = f"the forward pass failed: {type(error).__name__}: {error}"
        outcome = self.scheduler.abort(plan, message, self.clock.now())
        self.observer.observe(outcome)
        return outcome

"""Worker: the engine's thread, its bounded inbox and the streams out of it.

any thread:     submit, cancel, flush ──▶ inbox ──▶ ┌ engine thread ────────────────┐
consumer:       Stream ◀── events ◀──────────────── │ take inbox, step, hand out    │
                                                    └───────────────────────────────┘
"""

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import TypeVar

from foreword.base.errors import CapacityError, InvariantBroken, Unavailable
from foreword.base.ids import RequestId
from foreword.base.params import FinishReason
from foreword.cache.prefix_cache import Flushed
from foreword.engine.engine import Engine
from foreword.engine.state import EngineState
from foreword.engine.stream import Stream
from foreword.schedule.admission import Limits
from foreword.schedule.plan import Outcome, TokenEvent
from foreword.schedule.request import Submission

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_Command = Callable[[], None]


class Worker:
    """Runs an engine in a thread of its own. All methods but `start` may be called from any thread."""

    def __init__(self, engine: Engine, limits: Limits, *, max_live: int) -> None:
        """`max_live` bounds the requests that are queued or running; it bounds the inbox as well."""
        self._engine = engine
        self._limits = limits
        self._max_live = max_live
        self._inbox: SimpleQueue[_Command] = SimpleQueue()
        self._streams: dict[RequestId, Stream] = {}
        self._lock = Lock()
        self._stopping = False
        self._death: BaseException | None = None
        self._ended = Event()
        self._thread = Thread(target=self._run, name="foreword-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the engine thread runs and takes requests to their end."""
        return self._thread.is_alive() and self._death is None

    def now(self) -> float:
        """The engine's clock, in seconds."""
        return self._engine.clock.now()

    def state(self) -> EngineState:
        """Numbers for metrics and status pages; a moment old, never blocking a step."""
        scheduler = self._engine.scheduler
        running = scheduler.num_running
        return EngineState(
            self.alive, max(0, len(self._streams) - running), running, scheduler.cache.state(), scheduler.cache.enabled
        )

    def submit(self, submission: Submission) -> Stream:
        """Queue a request.

        Raises RequestError when it can never fit, CapacityError when the queue is full or the engine is stopping.
        """
        self._limits.check(len(submission.chain), submission.sampling.max_tokens)
        stream = Stream(submission.id)
        with self._lock:
            if self._stopping or not self.alive:
                raise Unavailable("the server is stopping; try another one", retry_after_s=10.0)
            if len(self._streams) >= self._max_live:
                raise CapacityError(
                    f"{len(self._streams)} requests are queued or running, the limit is {self._max_live}; try later"
                )
            self._streams[submission.id] = stream
            self._inbox.put(lambda: self._engine.scheduler.add(submission))
        return stream

    def cancel(self, request: RequestId, finish: FinishReason = "cancelled") -> None:
        """Stop a request within a step; what it has computed stays cached. Unknown ids are ignored."""
        self._inbox.put(lambda: self._cancel(request, finish))

    def flush(self) -> Flushed:
        """Forget everything cached; once it returns no new request hits older entries. Waits for the running step."""
        return self._call(self._engine.scheduler.flush)

    def check(self) -> None:
        """Compare all books between two steps; raises InvariantBroken."""
        self._call(self._engine.scheduler.check)

    def stop(self, *, drain: bool, timeout_s: float | None = None) -> bool:
        """Take no more requests and end the thread: after the live ones are done (`drain`), or by cancelling them.

        False if it is still at work after `timeout_s` seconds.
        """
        with self._lock:
            self._stopping = True
        if not drain:
            for name in tuple(self._streams):
                self.cancel(name)
        self._inbox.put(lambda: None)
        return self._ended.wait(timeout_s)

    # ---------------------------------------------------------------- on the engine thread

    def _run(self) -> None:
        try:
            while self._take_inbox():
                outcome = self._engine.step()
                if outcome is not None:
                    self._hand_out(outcome.events)
                elif self._engine.scheduler.busy:
                    raise InvariantBroken("requests are left and no step can be planned")
        except BaseException as death:  # noqa: BLE001  nobody above us would hear it
            self._death = death
            _log.critical("the engine thread died", exc_info=death)
        finally:
            self._bury()
            self._ended.set()

    def _take_inbox(self) -> bool:
        """Run all commands that came in, waiting for one if there is nothing else to do. False: time to end."""
        engine, inbox = self._engine, self._inbox
        while True:
            stopping = self._stopping  # read first: once it is set nothing more comes in
            while not inbox.empty():
                inbox.get()()
            if engine.busy:
                return True
            if stopping:
                return False
            inbox.get()()

    def _cancel(self, request: RequestId, finish: FinishReason) -> None:
        event = self._engine.scheduler.cancel(request, self.now(), finish)
        if event is not None:
            outcome = Outcome(-1, (event,))
            self._engine.observer.observe(outcome)
            self._hand_out(outcome.events)

    def _hand_out(self, events: Iterable[TokenEvent]) -> None:
        for event in events:
            stream = self._streams.get(event.request)
            if stream is None:
                continue
            if event.finish is not None:
                with self._lock:
                    del self._streams[event.request]
            stream.put(event)

    def _call(self, work: Callable[[], _T]) -> _T:
        """Run `work` on the engine thread between two steps and return what it returns, or raise what it raises."""
        done: Future[_T] = Future()

        def command() -> None:
            try:
                done.set_result(work())
            except Exception as error:  # noqa: BLE001  it goes to the caller
                done.set_exception(error)

        with self._lock:
            if not self.alive:
                raise Unavailable("the engine has stopped")
            self._inbox.put(command)
        return done.result()

    def _bury(self) -> None:
        """Nobody waits for a dead engine: what is live ends, with the reason."""
        with self._lock:
            self._stopping = True
            left, self._streams = self._streams, {}
        why = "the server stopped" if self._death is None else f"the engine died: {self._death}"
        for stream in left.values():
            stream.put(TokenEvent(stream.request, finish="cancelled", error=why))
        while not self._inbox.empty():
            self._inbox.get()()

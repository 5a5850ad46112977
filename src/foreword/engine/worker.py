"""Worker: the engine's thread, its bounded inbox and the streams out of it.

any thread:     submit, cancel, call  ──▶ inbox ──▶ ┌ engine thread ────────────────┐
consumer:       Stream ◀── events ◀──────────────── │ take inbox, step, hand out    │
                                                    └───────────────────────────────┘
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Condition, Event, Lock, Thread, current_thread
from typing import TypeVar

from foreword.base.errors import CapacityError, InvariantBroken, TenantLimit, Unavailable, amount
from foreword.base.ids import BlockHash, BlockId, RequestId
from foreword.base.params import FinishReason, Reach
from foreword.cache.explain import Explanation
from foreword.cache.identity import PUBLIC, Chain
from foreword.cache.prefix_cache import Flushed, PrefixCache
from foreword.engine.engine import Engine
from foreword.engine.state import EngineState, LiveRequest, TenantState, live_request
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
        self._asked: dict[RequestId, Submission] = {}
        self._num_live: Counter[str] = Counter()
        self._lock = Condition(Lock())
        """Guards what follows and the streams; told when the last stream has gone."""
        self._root: BlockHash | None = None
        """Where chains have to start; None until the first reload."""
        self._loading = False
        self._stopping = False
        self._buried = False
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

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self.alive and not self._stopping and not self._loading

    def now(self) -> float:
        """The engine's clock, in seconds."""
        return self._engine.clock.now()

    def state(self) -> EngineState:
        """Numbers for metrics and status pages; a moment old, never blocking a step."""
        scheduler = self._engine.scheduler
        running = scheduler.num_running
        return EngineState(
            alive=self.alive,
            waiting=max(0, len(self._streams) - running),
            running=running,
            pool=scheduler.cache.state(),
            caching=scheduler.cache.enabled,
            pinned=scheduler.cache.pinned(),
            departures=scheduler.cache.departures,
            tenants=self._tenants(),
        )

    def live(self, tenant: str | None = None, limit: int = 100) -> tuple[tuple[LiveRequest, ...], int]:
        """The oldest requests that are not over, a tenant's or (None) all, at most `limit`, and how many there are.

        A moment old, never blocking a step.
        """
        with self._lock:
            asked = list(self._asked.values())
        own = [one for one in asked if tenant is None or one.chain.tenant.name == tenant]
        requests, now = self._engine.scheduler.requests(), self.now()
        return tuple(live_request(one, requests.get(one.id), now) for one in own[:limit]), len(own)

    def _tenants(self) -> dict[str, TenantState]:
        with self._lock:
            live = dict(self._num_live)
        scheduler = self._engine.scheduler
        holders, owned = scheduler.holders(), scheduler.cache.owned()
        return {
            name: TenantState(
                waiting=max(0, live.get(name, 0) - len(holders.get(name, ()))),
                running=len(holders.get(name, ())),
                cached=owned.get(name, 0),
                held=len(set[BlockId]().union(*holders.get(name, ()))),
                caching=scheduler.cache.reuses(name),
            )
            for name in {*live, *holders, *owned, *scheduler.cache.stopped} - {PUBLIC}
        }

    def submit(self, submission: Submission) -> Stream:
        """Queue a request.

        Raises RequestError when it can never fit, CapacityError when the queue is full or its tenant has too many
        requests in it, Unavailable when the engine is stopping, reloading or dead.
        """
        tenant = submission.chain.tenant.name
        self._limits.of(tenant).check(len(submission.chain), submission.sampling.max_tokens)
        stream = Stream(submission.id, tenant)
        with self._lock:
            self._check_open(submission)
            self._streams[submission.id] = stream
            self._asked[submission.id] = submission
            self._num_live[tenant] += 1
            self._inbox.put(lambda: self._engine.scheduler.add(submission))
        return stream

    def _check_open(self, submission: Submission) -> None:
        if self._stopping or not self.alive:
            raise Unavailable("the server is stopping; try another one", retry_after_s=10.0)
        if self._loading or self._root not in (None, submission.chain.root):
            raise Unavailable("the model is being reloaded; try again", retry_after_s=5.0)
        tenant, most = submission.chain.tenant.name, submission.max_live
        own, all_live = self._num_live[tenant], len(self._streams)
        if most is not None and own >= most:
            raise TenantLimit(
                f"tenant {tenant} has {amount(own, 'request')} queued or running, its limit is {most}; try later"
            )
        if all_live >= self._max_live:
            raise CapacityError(
                f"there are {amount(all_live, 'request')} queued or running, the limit is {self._max_live}; try later"
            )

    def cancel(self, request: RequestId, finish: FinishReason = "cancelled") -> None:
        """Stop a request within a step; what it has computed stays cached. Unknown ids are ignored."""
        self._inbox.put(lambda: self._cancel(request, finish))

    def lookup(self, chain: Chain, reach: Reach) -> Explanation:
        """What a request would find now, and why no more; changes nothing. Waits for the running step."""
        return self._call(lambda: self._engine.scheduler.lookup(chain, reach, self.now()))

    def on_cache(self, work: Callable[[PrefixCache], _T]) -> _T:
        """Let the cache do something now, between two steps; waits for the running one. Must be quick."""
        cache = self._engine.scheduler.cache

        def done_now() -> _T:
            cache.advance(self.now())
            return work(cache)

        return self._call(done_now)

    def flush(self) -> Flushed:
        """Forget everything cached; once it returns no new request hits older entries. Waits for the running step."""
        return self.on_cache(PrefixCache.flush)

    def share(self, public: frozenset[BlockHash]) -> int:
        """Let these blocks be public; forget those that no longer are, and what continues them: how many."""
        return self.on_cache(lambda cache: cache.share(public))

    def reload(self, load: Callable[[], BlockHash]) -> BlockHash:
        """Let the live requests end, run `load` on the engine's thread, forget everything cached, and go on.

        Meanwhile requests are refused with Unavailable; afterwards only chains are taken that start at the root which
        `load` returned. When `load` raises, nothing has changed and the error is raised here.
        """
        with self._lock:
            if not self.ready:
                raise Unavailable("the engine is stopping or being reloaded already")
            self._loading = True
        try:
            with self._lock:
                self._lock.wait_for(lambda: not self._streams)
            return self._call(lambda: self._turn_to(load))
        finally:
            with self._lock:
                self._loading = False

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
                self._step()
        except BaseException as death:  # noqa: BLE001  nobody above us would hear it
            self._death = death
            _log.critical("the engine thread died", exc_info=death)
            self._engine.dump(f"{type(death).__name__}: {death}")
        finally:
            self._bury()
            self._ended.set()

    def _step(self) -> None:
        outcome = self._engine.step()
        if outcome is not None:
            self._hand_out(outcome.events)
        elif self._engine.scheduler.busy:
            raise InvariantBroken("requests are left and no step can be planned")

    def _take_inbox(self) -> bool:
        """Run all commands that came in; let the runner rest or wait for one when there is none. False: time to end."""
        engine, inbox = self._engine, self._inbox
        while True:
            stopping = self._stopping  # read first: once it is set nothing more comes in
            while not inbox.empty():
                inbox.get()()
            if engine.busy:
                return True
            if stopping:
                return False
            if not engine.runner.rest():
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
                self._forget(stream)
            stream.put(event)

    def _forget(self, stream: Stream) -> None:
        with self._lock:
            del self._streams[stream.request]
            del self._asked[stream.request]
            self._num_live[stream.tenant] -= 1
            if not self._num_live[stream.tenant]:
                del self._num_live[stream.tenant]
            if not self._streams:
                self._lock.notify_all()

    def _turn_to(self, load: Callable[[], BlockHash]) -> BlockHash:
        """Change the model while nothing runs: nothing of before is true of it afterwards."""
        while self._engine.scheduler.busy:  # a step that was launched for requests that ended meanwhile
            self._step()
        root = load()
        self.on_cache(PrefixCache.flush)
        with self._lock:
            self._root = root
        return root

    def _call(self, work: Callable[[], _T]) -> _T:
        """Run `work` on the engine thread between two steps and return what it returns, or raise what it raises."""
        if current_thread() is self._thread:
            return work()
        done: Future[_T] = Future()

        def command() -> None:
            try:
                done.set_result(work())
            except Exception as error:  # noqa: BLE001  it goes to the caller
                done.set_exception(error)

        with self._lock:
            if self._buried or not self.alive:
                raise Unavailable("the engine has stopped")
            self._inbox.put(command)
        return done.result()

    def _bury(self) -> None:
        """Nobody waits for a dead engine: what is live ends, with the reason."""
        with self._lock:
            self._stopping = self._buried = True
            left, self._streams, self._asked = self._streams, {}, {}
            self._num_live.clear()
            self._lock.notify_all()
        why = "the server stopped" if self._death is None else f"the engine died: {self._death}"
        for stream in left.values():
            stream.put(TokenEvent(stream.request, finish="cancelled", error=why))
        while not self._inbox.empty():
            self._inbox.get()()

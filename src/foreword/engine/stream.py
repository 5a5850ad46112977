"""One request's collector: the engine thread puts events in, one consumer takes them out.

Bounded by construction: it holds at most one event per token the request may generate, plus its end.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from threading import Event, Lock

from foreword.base.ids import RequestId
from foreword.schedule.plan import TokenEvent


class Stream:
    """Events of one request, in order; ends after the event that carries `finish`. One consumer, one way."""

    __slots__ = ("_events", "_lock", "_wake", "request", "tenant")

    def __init__(self, request: RequestId, tenant: str = "") -> None:
        self.request = request
        self.tenant = tenant
        self._events: deque[TokenEvent] = deque()
        self._lock = Lock()
        self._wake: Callable[[], object] | None = None

    def put(self, event: TokenEvent) -> None:
        """Add an event and wake the consumer. Called by the engine thread only."""
        with self._lock:
            self._events.append(event)
            wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    def take(self, wake: Callable[[], object]) -> list[TokenEvent]:
        """All events so far; if there are none, `wake` is called once (on the engine thread) when there is one."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
            if not events:
                self._wake = wake
            return events

    def __iter__(self) -> Iterator[TokenEvent]:
        """Events, blocking the calling thread until the end."""
        while True:
            ready = Event()
            events = self.take(ready.set)
            if not events:
                ready.wait()
            for event in events:
                yield event
                if event.finish is not None:
                    return

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        """Events, awaiting on the running loop until the end."""
        loop = asyncio.get_running_loop()
        while True:
            ready = asyncio.Event()
            events = self.take(lambda ready=ready: _set_on(loop, ready))
            if not events:
                await ready.wait()
            for event in events:
                yield event
                if event.finish is not None:
                    return


def _set_on(loop: asyncio.AbstractEventLoop, ready: asyncio.Event) -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody waits any more, and the engine serves others
        loop.call_soon_threadsafe(ready.set)

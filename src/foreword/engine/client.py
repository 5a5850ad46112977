"""The way into the engine from any thread, as faces see it; `worker.Worker` is the one that serves."""

from collections.abc import Callable
from typing import Protocol, TypeVar

from foreword.base.ids import BlockHash, RequestId
from foreword.base.params import FinishReason, Reach
from foreword.cache.explain import Explanation
from foreword.cache.identity import Chain
from foreword.cache.prefix_cache import Flushed, PrefixCache
from foreword.engine.state import EngineState
from foreword.engine.stream import Stream
from foreword.schedule.request import Submission

ResultT = TypeVar("ResultT")


class EngineClient(Protocol):
    """Submit, cancel and ask from any thread."""

    @property
    def alive(self) -> bool:
        """Whether the engine thread runs."""
        ...

    def now(self) -> float:
        """The engine's clock, in seconds; for `Submission.arrival_s`."""
        ...

    def state(self) -> EngineState:
        """Numbers for metrics and status pages; a moment old, never blocking a step."""
        ...

    def submit(self, submission: Submission) -> Stream:
        """Queue a request.

        Raises RequestError when it can never fit, CapacityError when the queue is full or its tenant has too many
        requests in it, Unavailable when the engine is stopping, reloading or dead.
        """
        ...

    def cancel(self, request: RequestId, finish: FinishReason = "cancelled") -> None:
        """Stop a request within a step; what it has computed stays cached. Unknown ids are ignored.

        `finish` is "stop" when its text is complete (a stop string), so that it is counted as such.
        """
        ...

    def lookup(self, chain: Chain, reach: Reach) -> Explanation:
        """What a request would find now, and why no more; changes nothing."""
        ...

    def on_cache(self, work: Callable[[PrefixCache], ResultT]) -> ResultT:
        """Let the cache do something now, between two steps; waits for the running one. Must be quick."""
        ...

    def flush(self) -> Flushed:
        """Forget everything cached; after it returns no new request hits older entries."""
        ...

    def share(self, public: frozenset[BlockHash]) -> int:
        """Let these blocks be public; forget those that no longer are, and what continues them: how many."""
        ...

    def reload(self, load: Callable[[], BlockHash]) -> BlockHash:
        """Let the live requests end, run `load` on the engine's thread, forget everything cached, and go on.

        Meanwhile requests are refused with Unavailable; afterwards only chains are taken that start at the root which
        `load` returned. When `load` raises, nothing has changed and the error is raised here.
        """
        ...

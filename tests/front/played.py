"""An engine that answers every request with the tokens that a test gave it."""

from collections.abc import Callable, Sequence
from threading import Lock, Thread
from time import monotonic, sleep

from foreword.base.errors import CapacityError
from foreword.base.ids import BlockHash, RequestId
from foreword.base.params import FinishReason, Reach
from foreword.cache.explain import Explanation
from foreword.cache.identity import Chain
from foreword.cache.prefix_cache import Flushed, PrefixCache
from foreword.engine.client import ResultT
from foreword.engine.state import EngineState
from foreword.engine.stream import Stream
from foreword.schedule.plan import Sample, TokenEvent, Usage
from foreword.schedule.request import Submission


class PlayedEngine:
    """Plays `tokens` to each request: at once, or from a thread of its own with `delay_s` between them."""

    def __init__(self) -> None:
        self.tokens: Sequence[int] = ()
        self.samples: Sequence[Sample] | None = None
        self.finish: FinishReason = "length"
        self.error: str | None = None
        self.ends = True
        """Whether the last token comes with an end; else the request stays open until it is cancelled."""
        self.delay_s: float | None = None
        self.room = 1000
        self.submissions: list[Submission] = []
        self.cancelled: list[RequestId] = []
        self.finishes: list[FinishReason] = []
        """What each cancel was to be counted as."""
        self.most_open = 0
        self.cache = PrefixCache(16, 4)
        self.shared: list[frozenset[BlockHash]] = []
        self._open: dict[RequestId, Stream] = {}
        self._lock = Lock()

    @property
    def alive(self) -> bool:
        return True

    def now(self) -> float:
        return monotonic()

    def submit(self, submission: Submission) -> Stream:
        stream = Stream(submission.id)
        with self._lock:
            if len(self._open) >= self.room:
                raise CapacityError("full")
            self.submissions.append(submission)
            self._open[submission.id] = stream
            self.most_open = max(self.most_open, len(self._open))
        if self.delay_s is None:
            self._play(submission, stream)
        else:
            Thread(target=self._play, args=(submission, stream), daemon=True).start()
        return stream

    def cancel(self, request: RequestId, finish: FinishReason = "cancelled") -> None:
        self.cancelled.append(request)
        self.finishes.append(finish)
        with self._lock:
            stream = self._open.pop(request, None)
        if stream is not None:
            stream.put(TokenEvent(request, finish=finish, usage=usage(1, 99)))

    def state(self) -> EngineState:
        raise NotImplementedError

    def flush(self) -> Flushed:
        return Flushed(0, 0)

    def lookup(self, chain: Chain, reach: Reach) -> Explanation:
        raise NotImplementedError

    def on_cache(self, work: Callable[[PrefixCache], ResultT]) -> ResultT:
        return work(self.cache)

    def share(self, public: frozenset[BlockHash]) -> int:
        self.shared.append(public)
        return 0

    def reload(self, load: Callable[[], BlockHash]) -> BlockHash:
        return load()

    def _play(self, submission: Submission, stream: Stream) -> None:
        samples = self.samples or [Sample(token) for token in self.tokens]
        prompt = len(submission.chain)
        for i, sample in enumerate(samples):
            sleep(self.delay_s or 0)
            last = self.ends and i == len(samples) - 1
            with self._lock:
                if submission.id not in self._open:
                    return
                if last:
                    del self._open[submission.id]
            stream.put(
                TokenEvent(
                    submission.id,
                    sample,
                    finish=self.finish if last else None,
                    error=self.error if last else None,
                    usage=usage(prompt, i + 1) if i == 0 or last else None,
                )
            )


def usage(prompt: int, completion: int) -> Usage:
    return Usage(
        prompt_tokens=prompt,
        cached_tokens=0,
        computed_tokens=prompt,
        recomputed_tokens=0,
        completion_tokens=completion,
        explanation=Explanation("never_seen", 0),
        queue_s=0.0,
        tokenize_s=0.0,
        lookup_s=0.0,
        prefill_s=0.0,
        first_token_s=0.0,
    )

"""Spans of requests for OpenTelemetry: the same account of time as in the answers' reports, and nothing of the prompts.

    request ├─ tokenize ─┼─ lookup ─┼─ queue ─┼─ prefill ─┼─ decode ─┤
                                                          ^ first_token, an event

The engine's thread only notes what happened and when; spans are made on a thread of their own. Knows the API of
OpenTelemetry, not where spans go: who makes the tracer says that.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread

from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context

from foreword.base.ids import RequestId
from foreword.base.params import FinishReason
from foreword.schedule.plan import Outcome, TokenEvent, Usage

_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class _Ended:
    """A request that is over."""

    usage: Usage
    finish: FinishReason
    first_token_ns: int | None
    """When its first token came; None if it got none."""
    end_ns: int


class Tracing:
    """An observer that makes a span of every request, with its parts below it."""

    def __init__(self, tracer: Tracer, clock_ns: Callable[[], int] = time.time_ns) -> None:
        """`clock_ns` gives nanoseconds since the epoch."""
        self._tracer = tracer
        self._clock_ns = clock_ns
        self._first_tokens: dict[RequestId, int] = {}
        self._ended: SimpleQueue[_Ended | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="foreword-tracing", daemon=True)
        self._thread.start()

    def observe(self, outcome: Outcome) -> None:
        """Note what happened. Called by the engine thread."""
        now = self._clock_ns()
        for event in outcome.events:
            if event.usage is not None:
                self._note(event, event.usage, now)

    def observe_step(self, step_s: float, bookkeeping_s: float, recording_s: float = 0.0) -> None:
        """Nothing: steps belong to many requests."""

    def close(self) -> None:
        """Make the spans of all that has ended, and end."""
        self._ended.put(None)
        self._thread.join()

    def _note(self, event: TokenEvent, usage: Usage, now: int) -> None:
        if event.sample is not None:
            self._first_tokens.setdefault(event.request, now)
        if event.finish is not None:
            self._ended.put(_Ended(usage, event.finish, self._first_tokens.pop(event.request, None), now))

    def _run(self) -> None:
        for ended in iter(self._ended.get, None):
            self._span(ended)

    def _span(self, ended: _Ended) -> None:
        usage = ended.usage
        until = ended.end_ns if ended.first_token_ns is None else ended.first_token_ns
        start = until - int(usage.first_token_s * _NS)
        span = self._tracer.start_span("request", kind=SpanKind.SERVER, start_time=start, attributes=_attributes(ended))
        if ended.first_token_ns is not None:
            span.add_event("first_token", timestamp=ended.first_token_ns)
        if ended.finish == "error":
            span.set_status(Status(StatusCode.ERROR))
        below = set_span_in_context(span)
        for name, begin, end in _parts(ended, start):
            self._tracer.start_span(name, context=below, start_time=begin).end(end)
        span.end(ended.end_ns)


def _parts(ended: _Ended, start: int) -> Iterator[tuple[str, int, int]]:
    """What the time went into, in order; up to the first token they add up to the time to it."""
    usage = ended.usage
    lengths = {
        "tokenize": usage.tokenize_s,
        "lookup": usage.lookup_s,
        "queue": usage.queue_s,
        "prefill": usage.prefill_s,
    }
    for name, seconds in lengths.items():
        end = start + int(seconds * _NS)
        yield name, start, end
        start = end
    if ended.first_token_ns is not None:
        yield "decode", ended.first_token_ns, ended.end_ns


def _attributes(ended: _Ended) -> dict[str, str | int]:
    usage = ended.usage
    return {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "foreword.cached_tokens": usage.cached_tokens,
        "foreword.computed_tokens": usage.computed_tokens,
        "foreword.recomputed_tokens": usage.recomputed_tokens,
        "foreword.reason": usage.reason,
        "foreword.at_token": usage.explanation.at_token,
        "foreword.finish": ended.finish,
        "foreword.tenant": usage.tenant,
        "foreword.key": usage.key,
    }

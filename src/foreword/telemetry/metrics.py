"""The server's metrics: `foreword_<noun>_<unit>[_total]`.

The engine thread calls `observe` with every outcome, before anybody sees its events, so that the sum of
`cached_tokens` over the answers equals the counter's delta at any moment in between. A scrape calls `render` from
another thread. One lock makes each of them see whole steps. Counting is plain integers: prometheus-client only
writes the page.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from foreword.base.ids import RequestId
from foreword.base.params import FinishReason
from foreword.cache.explain import Reason
from foreword.engine.state import EngineState
from foreword.schedule.plan import Outcome, TokenEvent, Usage
from foreword.telemetry.histogram import SECONDS, SHORT_SECONDS, Histogram

HitClass = Literal["miss", "partial", "full"]
"""How much of a prompt the cache gave: nothing, a part, or all that a lookup may give."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Media type of what `Metrics.render` returns."""


def hit_class(usage: Usage) -> HitClass:
    """The class that latencies are split by."""
    if usage.cached_tokens == 0:
        return "miss"
    return "full" if usage.reason == "complete" else "partial"


@dataclass(slots=True)
class _Track:
    """One request between its first token and its end."""

    hit: HitClass
    last_token_s: float


class Metrics:
    """Counts what the engine did. One per engine, made before it and given to it as its observer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start at zero. `clock` gives seconds and is used for the time between tokens only."""
        self._clock = clock
        self._lock = Lock()
        self._totals = dict.fromkeys(_COUNTERS, 0)
        self._finished: dict[FinishReason, int] = dict.fromkeys(get_args(FinishReason), 0)
        self._lookups: dict[Reason, int] = dict.fromkeys(get_args(Reason), 0)
        self._refused: dict[int, int] = {}
        self._ttft: dict[HitClass, Histogram] = {hit: Histogram(SECONDS) for hit in get_args(HitClass)}
        self._itl: dict[HitClass, Histogram] = {hit: Histogram(SECONDS) for hit in get_args(HitClass)}
        self._step = Histogram(SECONDS)
        self._bookkeeping = Histogram(SHORT_SECONDS)
        self._tracks: dict[RequestId, _Track] = {}

    def observe(self, outcome: Outcome) -> None:
        """Add one outcome. Called by the engine thread, before the outcome's events are handed out."""
        stats, totals, now = outcome.stats, self._totals, self._clock()
        with self._lock:
            totals["steps"] += stats.num_chunks > 0  # a cancel is an outcome without a step
            totals["prompt_tokens_cached"] += stats.prompt_tokens_cached
            totals["prompt_tokens_computed"] += stats.prompt_tokens_computed
            totals["tokens_recomputed"] += stats.tokens_recomputed
            totals["tokens_generated"] += stats.tokens_generated
            totals["preemptions"] += stats.num_preemptions
            totals["step_failures"] += stats.num_failures
            totals["blocks_audited"] += stats.blocks_audited
            totals["blocks_mismatched"] += stats.blocks_mismatched
            for event in outcome.events:
                self._count_event(event, now)

    def observe_step(self, step_s: float, bookkeeping_s: float) -> None:
        """Add one step's whole time and the part of it that was not the forward pass."""
        with self._lock:
            self._step.add(step_s)
            self._bookkeeping.add(bookkeeping_s)

    def count_refusal(self, status: int) -> None:
        """Count a request that was answered with an HTTP error instead of reaching its end in the engine."""
        with self._lock:
            self._refused[status] = self._refused.get(status, 0) + 1

    def render(self, state: EngineState) -> bytes:
        """The page for Prometheus, with the gauges read from `state`."""
        with self._lock:
            families = [*self._counters(), *self._histograms(), *_gauges(state)]
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Page(families))
        return generate_latest(registry)

    def _count_event(self, event: TokenEvent, now: float) -> None:
        track = self._tracks.get(event.request)
        if track is None and event.usage is not None and event.sample is not None:
            track = self._tracks[event.request] = _Track(hit_class(event.usage), now)
            self._lookups[event.usage.reason] += 1
            self._ttft[track.hit].add(event.usage.first_token_s)
        elif track is not None and event.sample is not None:
            self._itl[track.hit].add(now - track.last_token_s)
            track.last_token_s = now
        if event.finish is not None:
            self._finished[event.finish] += 1
            self._tracks.pop(event.request, None)

    def _counters(self) -> Iterator[Metric]:
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"foreword_{name}", text, value=self._totals[name])
        finished = CounterMetricFamily("foreword_requests_finished", "Requests that ended, by why.", labels=["finish"])
        for finish, count in self._finished.items():
            finished.add_metric([finish], count)
        text = "Requests that got a first token, by why their match stopped."
        lookups = CounterMetricFamily("foreword_lookups", text, labels=["reason"])
        for reason, count in self._lookups.items():
            lookups.add_metric([reason], count)
        refused = CounterMetricFamily(
            "foreword_requests_refused", "Requests refused, by HTTP status.", labels=["status"]
        )
        for status, count in self._refused.items():
            refused.add_metric([str(status)], count)
        yield from (finished, lookups, refused)

    def _histograms(self) -> Iterator[Metric]:
        for name, text, by_hit in (
            ("foreword_ttft_seconds", "Time from arrival to the first token, by hit class.", self._ttft),
            ("foreword_itl_seconds", "Time between two tokens of one request, by hit class.", self._itl),
        ):
            family = HistogramMetricFamily(name, text, labels=["hit"])
            for hit, histogram in by_hit.items():
                family.add_metric([hit], histogram.buckets(), histogram.total)
            yield family
        for name, text, histogram in (
            ("foreword_step_seconds", "Time of one whole step.", self._step),
            ("foreword_bookkeeping_seconds", "Time of one step outside the forward pass.", self._bookkeeping),
        ):
            yield HistogramMetricFamily(name, text, buckets=histogram.buckets(), sum_value=histogram.total)


_COUNTERS: Mapping[str, str] = {
    "prompt_tokens_cached": "Prompt tokens taken from the cache.",
    "prompt_tokens_computed": "Prompt tokens computed.",
    "tokens_recomputed": "Tokens computed again after a preemption or a failed step.",
    "tokens_generated": "Tokens sampled.",
    "preemptions": "Times a running request gave its blocks back to make room.",
    "step_failures": "Steps that were aborted.",
    "blocks_audited": "Blocks that were computed again in idle time and compared.",
    "blocks_mismatched": "Audited blocks that differed; their prefixes are out of the cache.",
    "steps": "Steps committed or aborted.",
}


def _gauges(state: EngineState) -> Iterator[Metric]:
    yield GaugeMetricFamily("foreword_requests_waiting", "Requests in the queue.", value=state.waiting)
    yield GaugeMetricFamily("foreword_requests_running", "Requests that hold blocks.", value=state.running)
    blocks = GaugeMetricFamily("foreword_blocks", "Blocks of the device pool, by state.", labels=["state"])
    blocks.add_metric(["free"], state.pool.free)
    blocks.add_metric(["cached"], state.pool.cached)
    blocks.add_metric(["held"], state.pool.held)
    yield blocks


class _Page(Collector):
    """Hands ready families to prometheus-client."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        """All families of one scrape."""
        return self._families

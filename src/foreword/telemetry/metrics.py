"""The server's metrics: `foreword_<noun>_<unit>[_total]`.

The engine thread calls `observe` with every outcome, before anybody sees its events, so that the sum of
`cached_tokens` over the answers equals the counter's delta at any moment in between. A scrape calls `render` from
another thread. One lock makes each of them see whole steps.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from foreword.base.ids import RequestId
from foreword.base.params import FinishReason
from foreword.cache.departed import Cause
from foreword.cache.explain import Reason
from foreword.engine.state import EngineState
from foreword.schedule.plan import Outcome, PromptTokens, StepStats, TokenEvent, Usage
from foreword.telemetry.pace import Pace

HitClass = Literal["miss", "partial", "full"]
"""How much of a prompt the cache gave: no whole block, a part, or all that a lookup may give."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Media type of what `Metrics.render` returns."""

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Bucket borders for what a caller waits for: a token, a step, an answer."""

SHORT_SECONDS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.1, 1.0)
"""Bucket borders for bookkeeping, which must stay far below a step."""

MAX_KEYS = 100
"""Labels of callers that get a series of their own."""

_OF_STEPS: Mapping[str, tuple[str, str]] = {
    "prompt_tokens_cached": ("prompt_tokens_cached", "Prompt tokens taken from the cache."),
    "prompt_tokens_computed": ("prompt_tokens_computed", "Prompt tokens computed."),
    "tokens_recomputed": ("tokens_recomputed", "Tokens computed again after a preemption or a failed step."),
    "tokens_generated": ("tokens_generated", "Tokens sampled."),
    "num_preemptions": ("preemptions", "Times a running request gave its blocks back to make room."),
    "num_failures": ("step_failures", "Steps that were aborted."),
    "blocks_audited": ("blocks_audited", "Blocks that were computed again in idle time and compared."),
    "blocks_mismatched": ("blocks_mismatched", "Audited blocks that differed; their prefixes are out of the cache."),
}
"""Fields of `StepStats` that counters add up: name and text of each counter."""


def hit_class(usage: Usage) -> HitClass:
    """The class that latencies are split by.

    A few tokens of a first block, such as all chats of one template share, save nobody any time.
    """
    if usage.reason == "complete" and usage.cached_tokens:
        return "full"
    return "partial" if usage.cached_tokens > usage.tail_tokens else "miss"


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What was counted since the start, for status pages."""

    prompt_tokens: PromptTokens
    saved_s: float
    reasons: Mapping[Reason, tuple[int, int]]
    """By why their match stopped: requests, and prompt tokens that they computed."""
    ttft: Mapping[HitClass, tuple[int, float]]
    """By hit class: first tokens, and the seconds to all of them together."""


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
        self._registry = CollectorRegistry(auto_describe=False)
        self._totals = {field: self._counter(name, text) for field, (name, text) in _OF_STEPS.items()}
        self._steps = self._counter("steps", "Steps committed or aborted.")
        self._finished = self._counter("requests_finished", "Requests that ended, by why.", "finish")
        self._lookups = self._counter(
            "lookups", "Requests that got a first token, by why their match stopped.", "reason"
        )
        self._recalled = self._counter(
            "prompt_tokens_recalled", "Prompt tokens with the ids that an earlier answer was given in."
        )
        self._refused = self._counter("requests_refused", "Requests refused, by HTTP status.", "status")
        self._missed = self._counter(
            "prompt_tokens_missed", "Prompt tokens computed, by why their request's match stopped.", "reason"
        )
        self._saved = self._counter(
            "saved_seconds", "Estimate of what the cached prompt tokens would have cost, as in the answers' `saved`."
        )
        self._keys = _Keys(self._registry)
        self._ttft = self._by_hit("ttft_seconds", "Time from arrival to the first token, by hit class.")
        self._itl = self._by_hit("itl_seconds", "Time between two tokens of one request, by hit class.")
        self._step = self._histogram("step_seconds", "Time of the loop's turn that brought one step back.", SECONDS)
        self._bookkeeping = self._histogram("bookkeeping_seconds", "The part of it outside the runner.", SHORT_SECONDS)
        self._gauges = _Gauges(self._registry)
        self._tenants = _Tenants(self._registry)
        for finish in get_args(FinishReason):
            self._finished.labels(finish)
        for reason in get_args(Reason):
            self._lookups.labels(reason)
            self._missed.labels(reason)
        self._tracks: dict[RequestId, _Track] = {}
        self._stats = StepStats()
        self.pace = Pace()
        """What a token of a step costs."""

    def observe(self, outcome: Outcome) -> None:
        """Add one outcome. Called by the engine thread, before the outcome's events are handed out."""
        stats, now = outcome.stats, self._clock()
        with self._lock:
            self._steps.inc(stats.num_chunks > 0)  # a cancel is an outcome without a step
            for field, counter in self._totals.items():
                if amount := getattr(stats, field):
                    counter.inc(amount)
            self._tenants.step(stats)
            for event in outcome.events:
                self._count_event(event, now)
        self._stats = stats

    def observe_step(self, step_s: float, bookkeeping_s: float, recording_s: float = 0.0) -> None:
        """Add the whole time of the step that was observed last, and two parts of it: see `engine.sockets.Observer`."""
        with self._lock:
            self._step.observe(step_s)
            self._bookkeeping.observe(bookkeeping_s)
        self.pace.add(self._stats.num_tokens, max(0.0, step_s - recording_s))

    def count_refusal(self, status: int) -> None:
        """Count a request that was answered with an HTTP error instead of reaching its end in the engine."""
        with self._lock:
            self._refused.labels(status).inc()

    def render(
        self, state: EngineState, *, ready: bool = True, volatile_spans: int = 0, volatile_tokens: int = 0
    ) -> bytes:
        """The page for Prometheus, with the gauges read from `state`, and what the engine does not know."""
        with self._lock:
            self._gauges.read(state)
            self._gauges.ready.set(ready)
            self._gauges.volatile_spans.set(volatile_spans)
            self._gauges.volatile_tokens.set(volatile_tokens)
            return generate_latest(_Page(self._registry))

    def totals(self) -> Totals:
        """The counters of this moment."""
        with self._lock:
            lookups, missed = _values(self._lookups), _values(self._missed)
            cached, computed = self._totals["prompt_tokens_cached"], self._totals["prompt_tokens_computed"]
            return Totals(
                prompt_tokens=PromptTokens(int(_values(cached)[()]), int(_values(computed)[()])),
                saved_s=_values(self._saved)[()],
                reasons={name: (int(lookups[name,]), int(missed[name,])) for name in get_args(Reason)},
                ttft={hit: _first_tokens(family) for hit, family in self._ttft.items()},
            )

    def prompt_tokens_of(self, tenant: str) -> PromptTokens:
        """What this tenant's prompts took from the cache and computed."""
        with self._lock:
            return self._tenants.prompt_tokens(tenant)

    def _count_event(self, event: TokenEvent, now: float) -> None:
        track = self._tracks.get(event.request)
        if track is None and event.usage is not None and event.sample is not None:
            track = self._tracks[event.request] = _Track(hit_class(event.usage), now)
            self._count_prompt(event.usage)
            self._ttft[track.hit].observe(event.usage.first_token_s)
        elif track is None and event.usage is not None and event.finish == "length":
            self._count_prompt(event.usage)  # a prompt that was only warmed
        elif track is not None and event.sample is not None:
            self._itl[track.hit].observe(now - track.last_token_s)
            track.last_token_s = now
        if event.finish is not None:
            self._finished.labels(event.finish).inc()
            self._tracks.pop(event.request, None)
            if event.usage is not None:
                self._tenants.ended(event.usage)

    def _count_prompt(self, usage: Usage) -> None:
        """A prompt is done."""
        self._lookups.labels(usage.reason).inc()
        self._recalled.inc(usage.recalled_tokens)
        self._missed.labels(usage.reason).inc(usage.computed_tokens)
        self._saved.inc(usage.cached_tokens * self.pace.token_s)
        self._keys.count(usage)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"foreword_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, borders: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"foreword_{name}", text, labels, registry=self._registry, buckets=borders)

    def _by_hit(self, name: str, text: str) -> dict[HitClass, Histogram]:
        family = self._histogram(name, text, SECONDS, "hit")
        return {hit: family.labels(hit) for hit in get_args(HitClass)}


def _values(counter: Counter) -> dict[tuple[str, ...], float]:
    """A counter's values by their labels."""
    (family,) = counter.collect()
    return {tuple(row.labels.values()): row.value for row in family.samples if row.name.endswith("_total")}


def _first_tokens(family: Histogram) -> tuple[int, float]:
    """A histogram's number and sum."""
    (collected,) = family.collect()
    rows = {row.name.rsplit("_", 1)[1]: row.value for row in collected.samples}
    return int(rows["count"]), rows["sum"]


class _Tenants:
    """What tenants of a server with keys asked for; on a server without them there is nothing to see."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "foreword_tenant_requests", "Requests that ended, by tenant.", ["tenant"], registry=registry
        )
        self._cached = Counter(
            "foreword_tenant_prompt_tokens_cached",
            "Prompt tokens taken from the cache, by tenant.",
            ["tenant"],
            registry=registry,
        )
        self._computed = Counter(
            "foreword_tenant_prompt_tokens_computed",
            "Prompt tokens computed, by tenant.",
            ["tenant"],
            registry=registry,
        )

    def step(self, stats: StepStats) -> None:
        """A step came back; what it did for a request that was cancelled meanwhile counts like any other."""
        for tenant, tokens in stats.tenants.items():
            if tenant:
                self._cached.labels(tenant).inc(tokens.cached)
                self._computed.labels(tenant).inc(tokens.computed)

    def prompt_tokens(self, tenant: str) -> PromptTokens:
        """The two sums of one tenant."""
        cached, computed = (_values(counter).get((tenant,), 0) for counter in (self._cached, self._computed))
        return PromptTokens(int(cached), int(computed))

    def ended(self, usage: Usage) -> None:
        """A request is over, with or without an answer."""
        if usage.tenant:
            self._requests.labels(usage.tenant).inc()


class _Keys:
    """Prompt tokens by the labels that callers gave; the first hundred of each tenant have a name of their own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._known: dict[str, set[str]] = {}
        self._tokens = Counter(
            "foreword_key_prompt_tokens",
            "Prompt tokens of requests with a `key`, by tenant and key (a hundred, then `other`), cached or computed.",
            ["tenant", "key", "source"],
            registry=registry,
        )

    def count(self, usage: Usage) -> None:
        """A prompt is done."""
        if not usage.key:
            return
        known = self._known.setdefault(usage.tenant, set())
        if len(known) < MAX_KEYS:
            known.add(usage.key)
        key = usage.key if usage.key in known else "other"
        self._tokens.labels(usage.tenant, key, "cached").inc(usage.cached_tokens)
        self._tokens.labels(usage.tenant, key, "computed").inc(usage.computed_tokens)


class _Departures(Collector):
    """What left the cache: the heart counts it, and a scrape reads it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.counts: Mapping[Cause, int] = {}
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The one family."""
        family = CounterMetricFamily("foreword_blocks_left", "Blocks that left the cache, by cause.", labels=["cause"])
        for cause in get_args(Cause):
            family.add_metric([cause], self.counts.get(cause, 0))
        yield family


class _Gauges:
    """What is read when somebody asks."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.ready = Gauge("foreword_ready", "1 while requests are taken, as `/ready` says, else 0.", registry=registry)
        self.volatile_spans = Gauge(
            "foreword_volatile_spans", "Spans of prompts that keep ending matches, as in advice.", registry=registry
        )
        self.volatile_tokens = Gauge(
            "foreword_volatile_tokens",
            "Prompt tokens of the last hour that were computed again because of such spans.",
            registry=registry,
        )
        self._waiting = Gauge("foreword_requests_waiting", "Requests in the queue.", registry=registry)
        self._running = Gauge("foreword_requests_running", "Requests that hold blocks.", registry=registry)
        self._blocks = Gauge("foreword_blocks", "Blocks of the device pool, by state.", ["state"], registry=registry)
        self._pinned = Gauge("foreword_blocks_pinned", "Blocks of pinned prefixes, cached or not.", registry=registry)
        self._caching = Gauge("foreword_caching", "1 while prefixes are reused, else 0.", registry=registry)
        self._stopped = Gauge(
            "foreword_tenants_stopped", "Tenants whose reuse a fault in the books has stopped.", registry=registry
        )
        self._departures = _Departures(registry)
        self._tenant_blocks = Gauge(
            "foreword_tenant_blocks",
            "Blocks by tenant: cached ones, and those that its requests hold.",
            ["tenant", "state"],
            registry=registry,
        )

    def read(self, state: EngineState) -> None:
        """Show this moment."""
        self._waiting.set(state.waiting)
        self._running.set(state.running)
        for name in ("free", "cached", "held"):
            self._blocks.labels(name).set(getattr(state.pool, name))
        self._pinned.set(sum(state.pinned.values()))
        self._caching.set(state.caching)
        self._stopped.set(sum(not its.caching for its in state.tenants.values()))
        self._departures.counts = state.departures
        self._tenant_blocks.clear()
        for tenant, its in state.tenants.items():
            if tenant:
                self._tenant_blocks.labels(tenant, "cached").set(its.cached)
                self._tenant_blocks.labels(tenant, "held").set(its.held)


class _Page(Collector):
    """All families of one scrape, without the times at which their counters were made: nobody restarts one by one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """The families, in the order in which they were made."""
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family

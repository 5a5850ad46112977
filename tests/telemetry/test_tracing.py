"""Spans of real requests: their parts add up, their numbers are the answers', and they hold nothing of the prompts."""

import json
import sys

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from foreword.assemble import assemble
from foreword.base.config import CacheConfig, Config, ModelConfig
from foreword.base.errors import ConfigError
from foreword.cli.tracing import tracing
from foreword.engine.sockets import Several
from foreword.front.ask import Ask
from foreword.schedule.plan import Usage
from foreword.telemetry import Metrics
from foreword.telemetry.tracing import Tracing

CANARY = "zanzibar"
HEAD = f"The tower of {CANARY} was built in 1874 and stands forty-one metres above the sea. Its keeper was Ingrid. " * 3
PARTS = ["tokenize", "lookup", "queue", "prefill"]


def length(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_each_request_is_a_span_with_the_account_of_its_answer() -> None:
    exporter, provider, metrics = InMemorySpanExporter(), TracerProvider(), Metrics()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans_of = Tracing(provider.get_tracer("foreword"))
    config = Config(model=ModelConfig(device="cpu"), cache=CacheConfig(kv_cache="100"))
    assembly = assemble(config, observer=Several(metrics, spans_of))
    usages = list[Usage]()
    try:
        for n in range(3):
            ask = Ask(prompt=f"{HEAD} {n}?", key="nightly", ignore_eos=True, max_tokens=4, warm=n == 2)
            answer = assembly.front.submit(ask)
            *_, last = answer
            assert last.usage is not None
            usages.append(last.usage)
    finally:
        assembly.close()
    spans_of.close()
    exported = exporter.get_finished_spans()
    roots = [span for span in exported if span.parent is None]
    assert [span.name for span in roots] == ["request"] * 3
    for span, usage in zip(roots, usages, strict=True):
        below = [one for one in exported if one.parent is not None and one.parent == span.get_span_context()]
        told = dict(span.attributes or {})
        assert told["foreword.cached_tokens"] == usage.cached_tokens
        assert told["foreword.computed_tokens"] == usage.computed_tokens
        assert told["gen_ai.usage.output_tokens"] == usage.completion_tokens
        assert (told["foreword.reason"], told["foreword.key"]) == (usage.reason, "nightly")
        decoded = usage.completion_tokens > 0
        assert [one.name for one in below] == [*PARTS, *(["decode"] if decoded else [])]
        assert [event.name for event in span.events] == (["first_token"] if decoded else [])
        assert sum(length(one) for one in below if one.name in PARTS) == pytest.approx(usage.first_token_s, abs=1e-6)
        assert [one.start_time for one in below] == sorted(one.start_time or 0 for one in below)
        assert below[0].start_time == span.start_time
        assert sum(length(one) for one in below) == pytest.approx(length(span), abs=1e-6)
    assert [usage.cached_tokens > 32 for usage in usages] == [False, True, True]
    assert metrics.totals().prompt_tokens.cached == sum(usage.cached_tokens for usage in usages)
    text = json.dumps([json.loads(span.to_json()) for span in exported])
    assert "nightly" in text
    assert CANARY not in text


def test_spans_are_sent_only_where_an_endpoint_is_set_and_the_extra_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracing({"OTEL_SERVICE_NAME": "x", "OTEL_EXPORTER_OTLP_ENDPOINT": ""}) is None
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    assert isinstance(tracing(endpoint), Tracing)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'foreword\[otel\]', or unset it"):
        tracing(endpoint)

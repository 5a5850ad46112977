"""Whether spans are sent, and where: OpenTelemetry's own environment says it."""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from foreword.base.errors import ConfigError

if TYPE_CHECKING:
    from foreword.telemetry.tracing import Tracing

_log = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def tracing(environment: Mapping[str, str]) -> "Tracing | None":
    """Who sends spans, if an endpoint is set; None if none is. Raises ConfigError when the extra is not installed."""
    endpoint = next((name for name in _ENDPOINTS if environment.get(name)), None)
    if endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError(
            f"{endpoint} is set, and OpenTelemetry is not installed: pip install 'foreword[otel]', or unset it"
        ) from None
    from foreword.telemetry.tracing import Tracing

    named = "OTEL_SERVICE_NAME" in environment or "service.name=" in environment.get("OTEL_RESOURCE_ATTRIBUTES", "")
    provider = TracerProvider(resource=Resource.create({} if named else {"service.name": "foreword"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    _log.info("spans are sent to %s", environment[endpoint])
    return Tracing(provider.get_tracer("foreword"))

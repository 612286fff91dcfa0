"""The OpenTelemetry SDK around `spans.py`: where spans go, and how that ends.

Model     finished spans go to a queue, and a thread sends them in batches by OTLP over HTTP. A full queue or a
          collector that does not answer loses spans, never time of the loop
Valid     with the extra `otlp`, which brings the exporter; its environment variables (`OTEL_EXPORTER_OTLP_HEADERS` and
          the like) hold
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib import import_module
from random import Random

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

import router
from router.errors import ConfigError
from router.laps import TimedLaps
from router.telemetry.config import NOT_INSTALLED, TracingConfig
from router.telemetry.spans import Tracing


class Provider:
    """Owner of the SDK's threads. processor : takes finished spans"""

    def __init__(self, config: TracingConfig, processor: SpanProcessor) -> None:
        self._share = config.share
        self._sdk = TracerProvider(
            sampler=ALWAYS_ON,  # who is not sampled gets no span at all
            resource=Resource.create({"service.name": config.service_name, "service.version": router.__version__}),
            shutdown_on_exit=False,
        )
        self._sdk.add_span_processor(processor)

    def tracing(self, laps: TimedLaps | None = None, *, scheme: str = "http", seed: int | None = None) -> Tracing:
        """What makes the spans. scheme : of the traffic port; seed : of which are sampled, None: others each time"""
        tracer = self._sdk.get_tracer("tfirst", router.__version__)
        return Tracing(tracer, share=self._share, rng=Random(seed), laps=laps, scheme=scheme)

    async def stop(self) -> None:
        """Send what is left, within the limits of the exporter."""
        await asyncio.to_thread(self._sdk.shutdown)


def by_otlp(config: TracingConfig) -> Provider | None:
    """The provider a configuration asks for; None where it asks for none.

    Raises
    ------
    ConfigError : the extra is not installed
    """
    if config.endpoint is None:
        return None
    return Provider(config, BatchSpanProcessor(exporter_class()(endpoint=config.endpoint, timeout=config.timeout_s)))


def exporter_class() -> Callable[..., SpanExporter]:
    """The exporter, if it is installed."""
    try:
        module = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ModuleNotFoundError as exc:
        raise ConfigError(NOT_INSTALLED) from exc
    exporter: Callable[..., SpanExporter] = module.OTLPSpanExporter
    return exporter

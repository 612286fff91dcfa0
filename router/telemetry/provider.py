"""The OpenTelemetry SDK around `spans.py`: where spans go, and how that ends.

Model     finished spans go to a queue, and a thread sends them in batches by OTLP over HTTP. A full queue or a
          collector that does not answer loses spans, never time of the loop
Valid     with the extra `otlp`, which brings the exporter; its environment variables (`OTEL_EXPORTER_OTLP_HEADERS` and
          the like) hold
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from random import Random
from threading import Thread

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

import router
from router.errors import ConfigError
from router.laps import TimedLaps
from router.telemetry.config import NOT_INSTALLED, TracingConfig
from router.telemetry.spans import Tracing

log = logging.getLogger(__name__)


class Provider:
    """Owner of the SDK's threads. processor : takes finished spans"""

    def __init__(self, config: TracingConfig, processor: SpanProcessor) -> None:
        self._share = config.share
        self._timeout_s = config.timeout_s
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
        """Send what is left, for `timeout_s` at most: a collector that does not take it must not keep the router."""
        loop, sent = asyncio.get_running_loop(), asyncio.Event()

        def send() -> None:
            self._sdk.shutdown()
            with suppress(RuntimeError):  # the loop has been closed meanwhile
                loop.call_soon_threadsafe(sent.set)

        Thread(target=send, name="last spans", daemon=True).start()  # not the loop's own, which waits for its threads
        try:
            async with asyncio.timeout(self._timeout_s):
                await sent.wait()
        except TimeoutError:
            log.warning("the collector did not take the last spans within %g s: they are lost", self._timeout_s)


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

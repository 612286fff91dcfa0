"""Families of metrics whose numbers live in other objects, made when somebody scrapes. Their names come from those who
register them, but for those of event sources, which are always together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import nan

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.signals.states import SourceReport


class Elsewhere(Collector):
    """A metric whose numbers live in another object."""

    def __init__(
        self,
        kind: type[CounterMetricFamily | GaugeMetricFamily],
        name: str,
        text: str,
        label: str,
        read: Callable[[], Mapping[str, float]],
    ) -> None:
        self._kind, self._name, self._text, self._label, self._read = kind, name, text, label, read

    def collect(self) -> Iterator[Metric]:
        family = self._kind(self._name, self._text, labels=[self._label])
        for value, total in self._read().items():
            family.add_metric([value], total)
        yield family


class Sources(Collector):
    """Event sources as their owner reports them. An age nobody knows is NaN, as everywhere."""

    def __init__(self, read: Callable[[], list[SourceReport]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        labels = ["source", "carrier"]
        age = GaugeMetricFamily(
            "tfirst_event_source_age_seconds", "Since the last batch of cache events; NaN: never", labels=labels
        )
        connected = GaugeMetricFamily(
            "tfirst_event_source_connected", "1 while its publisher is connected", labels=labels
        )
        counted = CounterMetricFamily(
            "tfirst_event_source_incidents", "What happened on each event source", labels=["source", "kind"]
        )
        for report in self._read():
            at = [report.name, report.carrier.value]
            age.add_metric(at, nan if report.age_s is None else report.age_s)
            connected.add_metric(at, float(report.connected))
            for kind, total in report.counts.items():
                counted.add_metric([report.name, kind], total)
        yield from (age, connected, counted)

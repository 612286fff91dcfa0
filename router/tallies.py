"""Counters and histograms as plain numbers, turned into metric families when somebody scrapes.

Model     counting is an addition to a number in a dictionary or a list; names, labels and cumulative buckets are made
          for each scrape, which is a thousand times rarer than a request
Valid     one thread counts and scrapes: the event loop's
Blind to  when a series began (`_created`)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString


class Tally(Collector):
    """A counter, by the values of its labels.

    totals : by those values, in the order of `labels`; whoever counts adds to them
    """

    def __init__(self, name: str, text: str, labels: Sequence[str] = (), *, registry: CollectorRegistry) -> None:
        self._name, self._text, self._labels = name, text, labels
        self.totals: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}
        registry.register(self)

    def add(self, values: tuple[str, ...], amount: float = 1.0) -> None:
        """Count `amount` (>= 0) under these values."""
        totals = self.totals
        totals[values] = totals.get(values, 0.0) + amount

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, total in self.totals.items():
            family.add_metric(values, total)
        yield family


class Spread(Collector):
    """A histogram. bounds : upper ends of its buckets, ascending; one without end follows"""

    def __init__(self, name: str, text: str, bounds: Sequence[float], *, registry: CollectorRegistry) -> None:
        self._name, self._text, self._bounds = name, text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        """Count a finite value in the first bucket whose bound it does not exceed."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text)
        ends = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(ends, map(float, accumulate(self._counts)), strict=True))
        family.add_metric([], buckets, self._sum)
        yield family

"""Counters and histograms as plain numbers, turned into metric families when somebody scrapes.

Model     counting is an addition to a number in a dictionary or a list; names, labels and cumulative buckets are made
          for each scrape, which is a thousand times rarer than a request
Valid     one thread counts and scrapes: the event loop's
Blind to  when a series began (`_created`)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString


class Tally(Collector):
    """A counter, by the values of its labels.

    totals : by those values, in the order of `labels`; whoever counts adds to them
    known : values that are shown from the start, at zero, so that the first of a kind is seen as a rise
    beside : what somebody else counts of the same, read when somebody scrapes; None: nobody does
    """

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str] = (),
        *,
        known: Iterable[tuple[str, ...]] = (),
        registry: CollectorRegistry,
    ) -> None:
        self._name, self._text, self._labels = name, text, labels
        self.totals: dict[tuple[str, ...], float] = dict.fromkeys(known, 0.0) if labels else {(): 0.0}
        self.beside: Callable[[], Mapping[tuple[str, ...], float]] | None = None
        registry.register(self)

    def add(self, values: tuple[str, ...], amount: float = 1.0) -> None:
        """Count `amount` (>= 0) under these values."""
        totals = self.totals
        totals[values] = totals.get(values, 0.0) + amount

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        beside = {} if self.beside is None else self.beside()
        for values in {**self.totals, **beside}:
            family.add_metric(values, self.totals.get(values, 0.0) + beside.get(values, 0.0))
        yield family

    def keep_only(self, names: Iterable[str]) -> None:
        """Forget every series whose first label is none of `names`."""
        kept = set(names)
        for values in [values for values in self.totals if values[0] not in kept]:
            del self.totals[values]


class Spread(Collector):
    """A histogram. bounds : upper ends of its buckets, ascending; one without end follows

    observe : counts a finite value in the first bucket whose bound it does not exceed
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float], *, registry: CollectorRegistry) -> None:
        self._name, self._text, self._bounds = name, text, bounds
        self._counts = Counts(bounds)
        self.observe = self._counts.observe
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text)
        family.add_metric([], self._counts.buckets(), self._counts.sum)
        yield family


class Spreads(Collector):
    """A histogram for each value of one label, of a closed set. known : values shown from the start"""

    def __init__(
        self,
        name: str,
        text: str,
        label: str,
        bounds: Sequence[float],
        *,
        known: Iterable[str] = (),
        registry: CollectorRegistry,
    ) -> None:
        self._name, self._text, self._label, self._bounds = name, text, label, bounds
        self._counts = {value: Counts(bounds) for value in known}
        registry.register(self)

    def observe(self, of: str, value: float) -> None:
        """Count a finite value in the histogram of the label's value `of`."""
        counts = self._counts.get(of)
        if counts is None:
            counts = self._counts[of] = Counts(self._bounds)
        counts.observe(value)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=[self._label])
        for value, counts in self._counts.items():
            family.add_metric([value], counts.buckets(), counts.sum)
        yield family


class Counts:
    """How many values fell into each bucket, and their sum."""

    __slots__ = ("_bounds", "_in", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._in = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a finite value in the first bucket whose bound it does not exceed."""
        self._in[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Upper end of each bucket and how many values are not above it."""
        ends = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(ends, map(float, accumulate(self._in)), strict=True))

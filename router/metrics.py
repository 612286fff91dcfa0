"""The only home of metric names. Base units, `_total` for counters, labels from closed sets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from math import nan

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from estimators.queueing import waiting_s
from estimators.view import FleetView, is_nobody
from router.actions import Outcome
from router.discovery.following import ListReport
from router.health import Health
from router.health import State as HealthState
from router.receipts import Receipt
from router.signals.load_board import LoadBoard, Origin
from router.signals.states import SourceReport
from router.tallies import Spread, Tally

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)
DECISION_BUCKETS = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 2e-2)
ERROR_BUCKETS = (-5, -2, -1, -0.5, -0.2, -0.1, -0.05, -0.02, 0, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class Metrics:
    """All metrics of one router, in a registry of their own so that tests and several routers do not meet."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Tally("tfirst_requests", "Requests by how they ended", ["outcome"], registry=registry)
        self.first_token = Spread(
            "tfirst_first_token_seconds", "Arrival to first token, streams", LATENCY_BUCKETS, registry=registry
        )
        self.end_to_end = Spread(
            "tfirst_end_to_end_seconds", "Arrival to end of a complete answer", LATENCY_BUCKETS, registry=registry
        )
        self.estimate_error = Spread(
            "tfirst_first_token_error_seconds", "Observed minus expected first token", ERROR_BUCKETS, registry=registry
        )
        self.decision = Spread(
            "tfirst_decision_seconds", "From a parsed request to its actions", DECISION_BUCKETS, registry=registry
        )
        self.refusals = Tally(
            "tfirst_refusals", "Requests the router placed nowhere, by why", ["cause"], registry=registry
        )
        self.arm_requests = Tally(
            "tfirst_arm_requests",
            "Requests by arm of the experiment, by how they ended",
            ["arm", "outcome"],
            registry=registry,
        )
        self.arm_first_token = Histogram(
            "tfirst_arm_first_token_seconds",
            "Arrival to first token by arm of the experiment, streams",
            ["arm"],
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.client_requests = Tally(
            "tfirst_client_requests", "Requests by the name of the key they came with", ["client"], registry=registry
        )
        self.choices = Tally("tfirst_choices", "Decisions by path and reason", ["path", "reason"], registry=registry)
        self.prompt_tokens = Tally(
            "tfirst_prompt_tokens", "Prompt tokens by where they were expected from", ["source"], registry=registry
        )
        for source in ("local", "remote", "recompute"):
            self.prompt_tokens.add((source,), 0.0)
        self.reported_cached_tokens = Tally(
            "tfirst_reported_cached_tokens", "Prompt tokens engines said they reused", registry=registry
        )
        self.booked = Gauge("tfirst_booked_requests", "Requests in flight", ["replica"], registry=registry)
        self.backlog = Gauge(
            "tfirst_booked_prefill_seconds", "Prefill work booked and not seen done", ["replica"], registry=registry
        )
        self.health = Gauge(
            "tfirst_replica_health", "1 for the state each replica is in", ["replica", "state"], registry=registry
        )
        self.share = Gauge(
            "tfirst_replica_share",
            "Of its turns, how many a replica gets: below 1 it starts slowly",
            ["replica"],
            registry=registry,
        )
        self.queued = Gauge(
            "tfirst_queued_requests",
            "Requests that wait in the router, by configured tenant; all others together have none",
            ["tenant"],
            registry=registry,
        )
        self.retry_budget = Gauge("tfirst_retry_budget", "Second attempts that could be made now", registry=registry)
        self.up = Gauge("tfirst_replica_up", "1 when the replica answers its probes", ["replica"], registry=registry)
        self.signal_age = Gauge(
            "tfirst_signal_age_seconds", "Age of the last load report; NaN: never seen", ["replica"], registry=registry
        )
        self.directory_blocks = Gauge(
            "tfirst_directory_blocks", "Blocks the directory knows", ["tier"], registry=registry
        )
        self.event_sources = Gauge(
            "tfirst_event_source_state",
            "1 for the state each event source is in",
            ["source", "state"],
            registry=registry,
        )
        self.keys_rejected = Gauge(
            "tfirst_client_keys_rejected",
            "1 while the keys file cannot be used and older keys count",
            registry=registry,
        )
        self.receipts_dropped = Gauge("tfirst_receipts_dropped", "Receipts lost since start", registry=registry)
        self._named: set[str] = set()  # replicas and sources that have series

    def count(self, receipt: Receipt) -> None:
        """Take a finished receipt into account."""
        self.requests.add((receipt.outcome or "",))
        if receipt.outcome == Outcome.REFUSED.value and receipt.cause is not None:
            self.refusals.add((receipt.cause,))
        if receipt.arm is not None and not receipt.override:
            self._count_arm(receipt.arm, receipt)
        if receipt.client is not None:
            self.client_requests.add((receipt.client,))
        choice = receipt.choice
        if choice is not None and receipt.reason is not None:
            self.choices.add((choice.path, receipt.reason))
            computed = receipt.prompt_tokens - choice.local_tokens - choice.fetched_tokens
            for source, tokens in (
                ("local", choice.local_tokens),
                ("remote", choice.fetched_tokens),
                ("recompute", computed),
            ):
                if tokens > 0:
                    self.prompt_tokens.add((source,), tokens)
        elif receipt.reason is not None:  # placed without estimates
            self.choices.add(("unknown", receipt.reason))
        if receipt.first_token_s is not None:
            self.first_token.observe(receipt.first_token_s)
            if choice is not None and receipt.placed_s is not None:
                self.estimate_error.observe(receipt.first_token_s - receipt.placed_s - choice.first_token_s)
        if receipt.outcome == "ok" and receipt.ended_s is not None:
            self.end_to_end.observe(receipt.ended_s)
        if receipt.cached_tokens is not None:
            self.reported_cached_tokens.add((), receipt.cached_tokens)

    def _count_arm(self, arm: str, receipt: Receipt) -> None:
        """One more request of an arm, whose names are a closed set: those of the configuration."""
        self.arm_requests.add((arm, receipt.outcome or ""))
        if receipt.first_token_s is not None:
            self.arm_first_token.labels(arm).observe(receipt.first_token_s)

    def show_fleet(self, view: FleetView, up: Callable[[int], bool], step_tokens: int, now_s: float) -> None:
        """Copy the fleet view into gauges; called when somebody scrapes."""
        waiting = waiting_s(view, step_tokens)
        for row, name in enumerate(view.names):
            if is_nobody(name):
                continue
            self.booked.labels(name).set(int(view.booked[row]))
            head_s = max(0.0, float(view.head_ends_s[row]) - now_s)
            self.backlog.labels(name).set(head_s + float(waiting[row]))
            self.up.labels(name).set(up(row))
            self.signal_age.labels(name).set(now_s - float(view.sampled_at_s[row]))

    def forget_the_gone(self, names: Iterable[str]) -> None:
        """Drop the series of replicas and sources that are none of `names`; called when somebody scrapes."""
        gone, self._named = self._named - set(names), set(names)
        for name in gone:
            for gauge in (self.booked, self.backlog, self.up, self.signal_age, self.health, self.share):
                gauge.remove_by_labels({"replica": name})
            self.event_sources.remove_by_labels({"source": name})

    def show_elsewhere(self, name: str, text: str, label: str, read: Callable[[], Mapping[str, float]]) -> None:
        """Show numbers of now that somebody else has, by the values of one label, read when somebody scrapes."""
        self.registry.register(_Elsewhere(GaugeMetricFamily, name, text, label, read))

    def follow_lists(self, read: Callable[[], list[ListReport]]) -> None:
        """Show which lists of replicas cannot be used, read when somebody scrapes."""
        self.show_elsewhere(
            "tfirst_replica_list_rejected",
            "1 while a list of replicas cannot be used and its last good one counts",
            "source",
            lambda: {report.source: float(report.failure is not None) for report in read()},
        )

    def show_health(self, name: str, health: Health, now_s: float) -> None:
        """Copy how one replica is doing into gauges; called when somebody scrapes."""
        now = health.state()
        for state in HealthState:
            self.health.labels(name, state.value).set(state is now)
        self.share.labels(name).set(health.share(now_s))

    def show_queue(self, queued: Mapping[str, int], tenants: Collection[str]) -> None:
        """The same for who waits. tenants : those with a label, whatever names clients make up"""
        for tenant in tenants:
            self.queued.labels(tenant).set(queued.get(tenant, 0))
        self.queued.labels("").set(sum(waiting for name, waiting in queued.items() if name not in tenants))

    def count_elsewhere(self, name: str, text: str, label: str, read: Callable[[], Mapping[str, float]]) -> None:
        """Show totals that somebody else counts, by the values of one label, read when somebody scrapes."""
        self.registry.register(_Elsewhere(CounterMetricFamily, name, text, label, read))

    def follow_sources(self, read: Callable[[], list[SourceReport]]) -> None:
        """Show age, connection and counters of every event source, read when somebody scrapes."""
        self.registry.register(_Sources(read))

    def follow_load(self, board: LoadBoard) -> None:
        """Show how many load reports came from where, and what was wrong with them."""
        for name, text, counts in (
            ("tfirst_load_reports", "Load reports by where they came from", board.counts),
            ("tfirst_load_anomalies", "Values in load reports that could not be used", board.anomalies),
            ("tfirst_load_incomplete", "Load reports that left the queue or the batch unknown", board.incomplete),
        ):
            self.count_elsewhere(name, text, "origin", partial(_by_value, counts))

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)


def _by_value(counts: Mapping[Origin, int]) -> dict[str, float]:
    return {origin.value: total for origin, total in counts.items()}


class _Elsewhere(Collector):
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


class _Sources(Collector):
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

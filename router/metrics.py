"""The only home of metric names. Base units, `_total` for counters, labels from closed sets.

Model     what a request did is counted once, when it has ended, from its receipt; what is true now is read from its
          owner when somebody scrapes. `docs/metrics.md` lists every name, and a test holds that list true
Valid     labels are configured names and closed enums. What a client can make up becomes none of them
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Protocol

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

import router
from estimators.paths import PATHS, Path
from estimators.queueing import waiting_s
from estimators.view import FleetView, is_nobody
from router.actions import Outcome, Why
from router.discovery.following import ListReport
from router.health import Health
from router.health import State as HealthState
from router.http.shared import Counts
from router.laps import Phase
from router.metric_families import Elsewhere, Sources
from router.receipts import Candidate, Receipt
from router.signals.load_board import LoadBoard, Origin
from router.signals.states import SourceReport
from router.tallies import Spread, Spreads, Tally

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)
TOKEN_BUCKETS = (0.002, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
DECISION_BUCKETS = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 2e-2)
PHASE_BUCKETS = (5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 5e-3)
ERROR_BUCKETS = (-5, -2, -1, -0.5, -0.2, -0.1, -0.05, -0.02, 0, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2, 4, 10)
USD_BUCKETS = (1e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 1)
RESULTS = GOOD, LATE, LOST = ("good", "late", "lost")  # a complete answer, one beyond a deadline, and no answer
REGRET_EVERY = 16  # placed requests for one whose regret is worked out, which costs more than all counting
_WHY = frozenset(why.value for why in Why)
FORECASTS = ("p90", "p99")  # of a first token; a label named "quantile" would make this a summary


class Regretting(Protocol):
    """What a decision noted, as far as it tells of regret."""

    def regret_s(self, waited_s: float) -> float | None:
        """First token, `waited_s` from the choice, less what was expected of the best other; None: there was none."""
        ...


class Metrics:
    """All metrics of one router, in a registry of their own so that tests and several routers do not meet."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.received = Tally(
            "tfirst_received_requests", "Requests, each once, whatever became of it", registry=registry
        )
        self.requests = Tally(
            "tfirst_requests",
            "Requests by how they ended",
            ["outcome"],
            known=[(outcome.value,) for outcome in Outcome],
            registry=registry,
        )
        self.attempts = Tally("tfirst_attempts", "Times a request was sent to a replica", registry=registry)
        self.failed_attempts = Tally(
            "tfirst_failed_attempts", "Those that came to nothing, by replica", ["replica"], registry=registry
        )
        self.good = Tally(
            "tfirst_good_requests", "Complete answers within their deadlines, if they had any", registry=registry
        )
        self.first_token = Spread(
            "tfirst_first_token_seconds", "Arrival to first token, streams", LATENCY_BUCKETS, registry=registry
        )
        self.inter_token = Spread(
            "tfirst_inter_token_seconds",
            "Mean time between the output tokens of a stream",
            TOKEN_BUCKETS,
            registry=registry,
        )
        self.end_to_end = Spread(
            "tfirst_end_to_end_seconds", "Arrival to end of a complete answer", LATENCY_BUCKETS, registry=registry
        )
        self.queue = Spread(
            "tfirst_queue_seconds",
            "Arrival to the last choice: time in the router's queue and on failed attempts",
            LATENCY_BUCKETS,
            registry=registry,
        )
        self.output_tokens = Tally("tfirst_output_tokens", "Output tokens of complete answers", registry=registry)
        self.estimate_error = Spread(
            "tfirst_first_token_error_seconds", "Predicted minus observed first token", ERROR_BUCKETS, registry=registry
        )
        self.estimate_ratio = Spread(
            "tfirst_first_token_ratio", "Observed over predicted first token", RATIO_BUCKETS, registry=registry
        )
        self.forecasts = Tally(
            "tfirst_forecasts",
            "First tokens by whether they came within the forecast",
            ["forecast", "result"],
            known=[(forecast, result) for forecast in FORECASTS for result in ("covered", "missed")],
            registry=registry,
        )
        self.usd = Spreads(
            "tfirst_request_usd",
            "Cost of requests, by what came of them, where prices are known",
            "result",
            USD_BUCKETS,
            known=RESULTS,
            registry=registry,
        )
        self.regret = Spread(
            "tfirst_regret_seconds",
            f"First token less what was expected of the best other candidate, of one request in {REGRET_EVERY}",
            ERROR_BUCKETS,
            registry=registry,
        )
        self.decision = Spread(
            "tfirst_decision_seconds", "From a parsed request to its actions", DECISION_BUCKETS, registry=registry
        )
        self.phases = Spreads(
            "tfirst_decision_phase_seconds",
            "Parts of decisions",
            "phase",
            PHASE_BUCKETS,
            known=[phase.value for phase in Phase],
            registry=registry,
        )
        self.refusals = Tally(
            "tfirst_refusals",
            "Requests the router placed nowhere, by why",
            ["cause"],
            known=[(why.value,) for why in Why],
            registry=registry,
        )
        self.resumes = Tally(
            "tfirst_resumes",
            "Broken streams that went on elsewhere, and those that did not, by why",
            ["outcome"],
            registry=registry,
        )
        self.arm_requests = Tally(
            "tfirst_arm_requests",
            "Requests by arm of the experiment, by how they ended",
            ["arm", "outcome"],
            registry=registry,
        )
        self.arm_first_token = Spreads(
            "tfirst_arm_first_token_seconds",
            "Arrival to first token by arm of the experiment, streams",
            "arm",
            LATENCY_BUCKETS,
            registry=registry,
        )
        self.client_requests = Tally(
            "tfirst_client_requests", "Requests by the name of the key they came with", ["client"], registry=registry
        )
        self.choices = Tally("tfirst_choices", "Decisions by path and reason", ["path", "reason"], registry=registry)
        self.prompt_tokens = Tally(
            "tfirst_prompt_tokens",
            "Prompt tokens by where they were expected from",
            ["source"],
            known=[(path.value,) for path in PATHS],
            registry=registry,
        )
        self.fetched_bytes = Tally(
            "tfirst_fetched_bytes",
            "Bytes of prompt state expected to be fetched, by path",
            ["path"],
            known=[(path.value,) for path in PATHS if path not in (Path.LOCAL, Path.RECOMPUTE)],
            registry=registry,
        )
        self.reported_cached_tokens = Tally(
            "tfirst_reported_cached_tokens", "Prompt tokens engines said they reused", registry=registry
        )
        self.predicted_cached_tokens = Tally(
            "tfirst_predicted_cached_tokens",
            "Prompt tokens predicted to be reused, of the same requests",
            registry=registry,
        )
        self.build = Gauge("tfirst_build_info", "The version that runs", ["version"], registry=registry)
        self.build.labels(router.__version__).set(1)
        self.in_flight = Gauge("tfirst_in_flight_requests", "Requests placed and not yet ended", registry=registry)
        self.price = Gauge(
            "tfirst_replica_usd_per_hour",
            "Price of all cards of a replica, from the fleet file; NaN: not known",
            ["replica"],
            registry=registry,
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
        ProcessCollector(registry=registry)
        self._of_replicas = (self.booked, self.backlog, self.up, self.signal_age, self.health, self.share, self.price)
        self._named: set[str] = set()  # replicas and sources that have series
        self._until_regret = REGRET_EVERY

    def count(self, receipt: Receipt) -> None:
        """Take a finished receipt into account."""
        outcome = receipt.outcome or ""
        self.requests.add((outcome,))
        if receipt.attempts:
            self.attempts.add((), receipt.attempts)
            for replica in receipt.tried:
                self.failed_attempts.add((replica,))
        if receipt.cause in _WHY:
            self.refusals.add((receipt.cause,))
        if receipt.arm is not None and not receipt.override:
            self._count_arm(receipt.arm, outcome, receipt)
        if receipt.client is not None:
            self.client_requests.add((receipt.client,))
        choice = receipt.choice
        if receipt.reason is not None:
            self.choices.add((receipt.path or "unknown", receipt.reason))
            if not receipt.resumes:  # else its last choice was made in the middle of its answer
                self.queue.observe(receipt.placed_s or 0.0)
        if choice is not None:
            self._count_choice(receipt, choice)
        if receipt.first_token_s is not None:
            self.first_token.observe(receipt.first_token_s)
        if receipt.resumes or receipt.not_resumed is not None:
            self._count_resumes(receipt)
        good = outcome == "ok" and self._count_answer(receipt)
        if receipt.usd is not None:
            self.usd.observe(GOOD if good else LATE if outcome == "ok" else LOST, receipt.usd)

    def _count_choice(self, receipt: Receipt, choice: Candidate) -> None:
        """What was expected of its last choice, and how that went."""
        local, fetched = choice.local_tokens, choice.fetched_tokens
        computed = receipt.prompt_tokens - local - fetched
        if local > 0:
            self.prompt_tokens.add(("local",), local)
        if fetched > 0:
            self.prompt_tokens.add((choice.path,), fetched)
            self.fetched_bytes.add((choice.path,), receipt.fetched_bytes or 0.0)
        if computed > 0:
            self.prompt_tokens.add(("recompute",), computed)
        if receipt.cached_tokens is not None:
            self.predicted_cached_tokens.add((), local + fetched)
        waited_s = receipt.waited_s
        if waited_s is not None:
            self.estimate_error.observe(choice.expected_s - waited_s)
            if choice.expected_s > 0.0:
                self.estimate_ratio.observe(waited_s / choice.expected_s)
        if receipt.streamed and choice.first_token_p90_s is not None and choice.first_token_p99_s is not None:
            self._count_forecast(receipt, waited_s, (choice.first_token_p90_s, choice.first_token_p99_s))

    def _count_forecast(self, receipt: Receipt, waited_s: float | None, quantiles_s: tuple[float, ...]) -> None:
        """Whether quantiles held: one that has passed is missed, also when no first token ever comes."""
        seen_s = waited_s
        if seen_s is None:
            ended_s, placed_s = receipt.ended_s, receipt.placed_s
            seen_s = 0.0 if ended_s is None or placed_s is None else ended_s - placed_s
        for forecast, quantile_s in zip(FORECASTS, quantiles_s, strict=True):
            if seen_s > quantile_s:
                self.forecasts.add((forecast, "missed"))
            elif waited_s is not None:
                self.forecasts.add((forecast, "covered"))

    def _count_answer(self, receipt: Receipt) -> bool:
        """A complete answer. Whether it was good."""
        ended_s, first_s = receipt.ended_s or 0.0, receipt.first_token_s
        self.end_to_end.observe(ended_s)
        tokens = receipt.output_tokens if receipt.output_tokens is not None else receipt.events
        if tokens is not None:
            self.output_tokens.add((), tokens)
        pace_s = (
            (ended_s - first_s) / (tokens - 1) if first_s is not None and tokens is not None and tokens > 1 else None
        )
        if pace_s is not None:
            self.inter_token.observe(pace_s)
        if receipt.cached_tokens is not None:
            self.reported_cached_tokens.add((), receipt.cached_tokens)
        good = _is_good(receipt, ended_s if first_s is None else first_s, pace_s)
        if good:
            self.good.add(())
        return good

    def _count_resumes(self, receipt: Receipt) -> None:
        """Breaks of one stream: each that went on, and the one that did not."""
        self.resumes.add(("resumed",), sum(resume.went_on_s is not None for resume in receipt.resumes))
        if receipt.not_resumed is not None:
            self.resumes.add((receipt.not_resumed,))

    def _count_arm(self, arm: str, outcome: str, receipt: Receipt) -> None:
        """One more request of an arm, whose names are a closed set: those of the configuration."""
        self.arm_requests.add((arm, outcome))
        if receipt.first_token_s is not None:
            self.arm_first_token.observe(arm, receipt.first_token_s)

    def count_regret(self, receipt: Receipt, detail: Regretting) -> None:
        """The same for regret, of one in `REGRET_EVERY` of those placed by estimates. detail : what it noted"""
        if receipt.waited_s is None:
            return
        self._until_regret -= 1
        if self._until_regret <= 0:
            self._until_regret = REGRET_EVERY
            regret_s = detail.regret_s(receipt.waited_s)
            if regret_s is not None:
                self.regret.observe(regret_s)

    def follow_traffic(self, counts: Counts, *, poller_errors: Callable[[], int]) -> None:
        """Count what ends at the edge too: every request that is received has one outcome."""
        self.received.beside = lambda: {(): float(counts.received)}
        self.requests.beside = partial(outcomes_at_the_edge, counts)
        self.count_elsewhere(
            "tfirst_rejected_requests",
            "Requests refused before they could be placed, by status",
            "status",
            lambda: {str(status): total for status, total in counts.rejected.items()},
        )
        self.count_elsewhere(
            "tfirst_traffic_incidents",
            "What happened on the traffic port that no outcome tells",
            "kind",
            lambda: {
                "internal_error": counts.internal_errors,
                "reader_failure": counts.reader_failures,
                "repeat_on_new_connection": counts.repeats,
                "poller_error": poller_errors(),
            },
        )

    def show_fleet(self, view: FleetView, up: Callable[[int], bool], step_tokens: int, now_s: float) -> None:
        """Copy the fleet view into gauges; called when somebody scrapes."""
        self.in_flight.set(int(view.booked.sum()))
        waiting = waiting_s(view, step_tokens)
        for row, name in enumerate(view.names):
            if is_nobody(name):
                continue
            self.booked.labels(name).set(int(view.booked[row]))
            head_s = max(0.0, float(view.head_ends_s[row]) - now_s)
            self.backlog.labels(name).set(head_s + float(waiting[row]))
            self.up.labels(name).set(up(row))
            self.price.labels(name).set(float(view.usd_per_hour[row]))
            self.signal_age.labels(name).set(now_s - float(view.sampled_at_s[row]))

    def forget_the_gone(self, names: Iterable[str]) -> None:
        """Drop the series of replicas and sources that are none of `names`; called when somebody scrapes."""
        kept = set(names)
        self.failed_attempts.keep_only(kept)
        gone, self._named = self._named - kept, kept
        for name in gone:
            for gauge in self._of_replicas:
                gauge.remove_by_labels({"replica": name})
            self.event_sources.remove_by_labels({"source": name})

    def show_elsewhere(self, name: str, text: str, label: str, read: Callable[[], Mapping[str, float]]) -> None:
        """Show numbers of now that somebody else has, by the values of one label, read when somebody scrapes."""
        self.registry.register(Elsewhere(GaugeMetricFamily, name, text, label, read))

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
        self.registry.register(Elsewhere(CounterMetricFamily, name, text, label, read))

    def follow_sources(self, read: Callable[[], list[SourceReport]]) -> None:
        """Show age, connection and counters of every event source, read when somebody scrapes."""
        self.registry.register(Sources(read))

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


def outcomes_at_the_edge(counts: Counts) -> dict[tuple[str, ...], float]:
    """Outcomes of requests that no decision was made about."""
    ended = {Outcome.CANCELLED: counts.left_early, Outcome.FAILED: counts.broken}
    for status, total in counts.rejected.items():
        outcome = Outcome.of_own_answer(status)
        ended[outcome] = ended.get(outcome, 0) + total
    return {(outcome.value,): float(total) for outcome, total in ended.items()}


def _is_good(receipt: Receipt, first_s: float, pace_s: float | None) -> bool:
    """Whether a complete answer met the deadlines its client named; one without any is good."""
    in_time = receipt.deadline_s is None or first_s <= receipt.deadline_s
    paced = receipt.pace_deadline_s is None or pace_s is None or pace_s <= receipt.pace_deadline_s
    return in_time and paced


def _by_value(counts: Mapping[Origin, int]) -> dict[str, float]:
    return {origin.value: total for origin, total in counts.items()}

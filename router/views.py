"""What an operator can see of a running router: metrics and the fleet as plain values. Unknown is null, never zero."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict
from typing import Any

import numpy as np

from estimators.queueing import waiting_s
from router.assemble import Core
from router.beside_events import BesideEvents
from router.directing.directions import Directions
from router.discovery.assembly import Discovery
from router.fleet import Fleet
from router.health import Health
from router.http.server import TrafficPort
from router.keys_file import KeysFile
from router.metrics import Metrics
from router.prompts.production import Prompts
from router.receipts import ReceiptWriter
from router.rows import members
from router.signals.load_board import LoadBoard
from router.signals.poller import LoadPoller
from router.signals.sequence import State
from router.signals.states import SourceReport
from router.sources import EventSources


class Views:
    """Reads the router's parts when somebody asks; keeps nothing. tenants : those shown by name in metrics"""

    def __init__(
        self,
        *,
        fleet: Fleet,
        core: Core,
        metrics: Metrics,
        sources: EventSources,
        board: LoadBoard,
        beside: BesideEvents,
        prompts: Prompts,
        poller: LoadPoller,
        traffic: TrafficPort,
        writer: ReceiptWriter | None,
        keys: KeysFile | None,
        discovery: Discovery,
        clock: Callable[[], float],
        tenants: Collection[str],
        directions: Directions | None,
    ) -> None:
        self._directions = directions
        self._tenants = tenants
        self._fleet = fleet
        self._core = core
        self._metrics = metrics
        self._sources = sources
        self._board = board
        self._beside = beside
        self._prompts = prompts
        self._writer = writer
        self._keys = keys
        self._discovery = discovery
        self._clock = clock
        metrics.follow_sources(sources.reports)
        metrics.follow_load(board)
        metrics.follow_lists(discovery.reports)
        metrics.show_elsewhere("tfirst_rows", "Rows by what they are used for", "stage", discovery.counts)
        metrics.follow_traffic(traffic.counts, poller_errors=lambda: poller.errors)
        retries = core.dispatcher.retries
        metrics.count_elsewhere(
            "tfirst_retries",
            "Second attempts of requests, by whether the budget let them",
            "result",
            lambda: {"made": retries.made, "denied": retries.denied},
        )
        metrics.count_elsewhere(
            "tfirst_cache_events", "Cache events by what became of them", "result", self._event_totals
        )
        if directions is not None:
            metrics.count_elsewhere(
                "tfirst_hints",
                "What engines were told of prompts' states, by how and by what became of it",
                "kind",
                lambda: {f"{means.value}_{result}": total for (means, result), total in directions.counts.items()},
            )
        if beside.asks:
            metrics.count_elsewhere(
                "tfirst_look_ups", "Prompts that could be looked up, by what became of them", "result", beside.counted
            )

    def metrics_text(self) -> bytes:
        """Everything in Prometheus' text format, as of now."""
        metrics, dispatcher, now_s = self._metrics, self._core.dispatcher, self._clock()
        dispatcher.settle(now_s)
        metrics.show_fleet(dispatcher.view, dispatcher.is_up, self._fleet.step_tokens, now_s)
        for row, replica in members(self._fleet).items():
            metrics.show_health(replica.name, dispatcher.health(row), now_s)
        metrics.show_queue(dispatcher.queued, self._tenants)
        metrics.retry_budget.set(dispatcher.retries.left(now_s))
        for tier, blocks in self._core.directory.stats().blocks.items():
            metrics.directory_blocks.labels(tier.value).set(blocks)
        metrics.forget_the_gone(report.name for report in self._sources.reports())
        for report in self._sources.reports():
            for state in State:
                metrics.event_sources.labels(report.name, state.value).set(report.state is state)
        metrics.receipts_dropped.set(self._writer.dropped if self._writer is not None else 0)
        metrics.keys_rejected.set(self._keys is not None and self._keys.rejected is not None)
        return metrics.text()

    def fleet(self) -> dict[str, Any]:
        """What the router believes of every replica and event source."""
        dispatcher, view, now_s = self._core.dispatcher, self._core.dispatcher.view, self._clock()
        dispatcher.settle(now_s)
        waiting = waiting_s(view, self._fleet.step_tokens)
        replicas = [
            {
                "name": replica.name,
                "url": replica.url,
                "card": replica.card,
                "role": replica.role,
                "up": dispatcher.is_up(row),
                "drained": dispatcher.is_drained(row),
                "health": _health(dispatcher.health(row), now_s),
                "models": dispatcher.models_of(row),
                "booked": int(view.booked[row]),
                "decoding": int(view.decode_batch[row]),
                "prefill_ahead_s": known(max(0.0, float(view.head_ends_s[row]) - now_s) + float(waiting[row])),
                "foreign_waiting": known(view.foreign_waiting[row]),
                "foreign_decoding": known(view.foreign_decoding[row]),
                "signal_age_s": known(now_s - view.sampled_at_s[row]),
                "load_age_s": {origin.value: age_s for origin, age_s in self._board.age_s(row, now_s).items()},
                "coefficients": view.coefficients[row].tolist(),
                "samples": int(view.samples[row]),
                "calibration": dispatcher.learning.calibration_state(int(view.samples[row])),
                "pace_scale": float(view.pace_scale[row]),
                "discipline": view.disciplines[row].value,
                "capacity_tokens": known(view.capacity_tokens[row]),
                "kv_used_share": known(view.kv_used_share[row]),
                "cache_is_guessed": self._sources.is_guessed(row),
            }
            for row, replica in members(self._fleet).items()
        ]
        return {
            "policy": dispatcher.policy_name,
            "block_tokens": self._core.prompts.block_tokens,
            "in_flight": dispatcher.in_flight,
            "queued": dispatcher.queued,
            "retries": {
                "made": dispatcher.retries.made,
                "denied": dispatcher.retries.denied,
                "left": dispatcher.retries.left(now_s),
            },
            "replicas": replicas,
            "event_sources": [_source(report) for report in self._sources.reports()],
            "directory_blocks": {tier.value: n for tier, n in self._core.directory.stats().blocks.items()},
            "other_tiers": self._beside.report(),
            "prompts": self._prompts.report().as_values(),
            "discovery": self._discovery.report(),
            "client_keys": None if self._keys is None else self._keys.report(),
            "directions": None if self._directions is None else self._directions.report(now_s),
            "experiment": self._core.experiments.report(),
            "receipts": None if self._writer is None else self._writer.report(),
        }

    def _event_totals(self) -> dict[str, float]:
        return asdict(self._core.directory.stats().totals)


def _health(health: Health, now_s: float) -> dict[str, Any]:
    return {
        "state": health.state().value,
        "trouble": None if health.trouble is None else health.trouble.value,
        "share": health.share(now_s),
        "failures": health.failures,
    }


def known(value: float) -> float | None:
    """A number as JSON can carry it: unknown (NaN) is null."""
    return None if np.isnan(value) else float(value)


def _source(report: SourceReport) -> dict[str, Any]:
    return {
        "name": report.name,
        "carrier": report.carrier.value,
        "address": report.address,
        "state": report.state.value,
        "connected": report.connected,
        "age_s": report.age_s,
        **report.counts,
    }

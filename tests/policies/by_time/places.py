"""Fleets whose replicas can fetch when told to, from a store and from each other."""

from __future__ import annotations

from estimators.estimates import Estimator
from estimators.links import LinkTable
from estimators.routes import Routes
from estimators.shape_costs import costs_of
from estimators.shapes import QWEN3_8B
from estimators.view import FleetView
from policies.base import Policy
from tests.policies.desk import Desk, some_fleet


def directed(
    *,
    rows: int,
    store_bytes_per_s: float | None = 12.5e9,
    peer_bytes_per_s: float | None = None,
    look_up_s: float = 0.0,
    engine_decides: bool = False,
) -> Estimator:
    """A shared network to the store, then each replica's own link, and one link that leaves each replica."""
    table = LinkTable(
        bytes_per_s=[store_bytes_per_s or 1.0] + [25e9] * rows + [peer_bytes_per_s or 1.0] * rows,
        look_up_s=[look_up_s] + [0.0] * (2 * rows),
    )
    routes = Routes(
        table=table,
        store=[[0, 1 + row] for row in range(rows)] if store_bytes_per_s else [],
        egress=[1 + rows + row for row in range(rows)] if peer_bytes_per_s else [],
    )
    return Estimator(
        costs=costs_of(QWEN3_8B), layers=QWEN3_8B.layers, rows=rows, routes=routes, engine_decides=engine_decides
    )


def told(policy: Policy, rows: int = 2, view: FleetView | None = None, **links: float | bool | None) -> Desk:
    """A desk of replicas that fetch only what they are told to; `links` as of `directed`."""
    estimator = directed(rows=rows, **links)  # type: ignore[arg-type]
    return Desk(policy, view or some_fleet(rows), estimator=estimator)


def busy(desk: Desk, row: int, seconds: float) -> None:
    """The prefill in service on `row` has so long to go."""
    desk.view.head_ends_s[row] = desk.view.head_compute_s[row] = seconds

"""Builders that name only what a test is about."""

from __future__ import annotations

import numpy as np

from estimators.estimates import Doubt, Estimates, Estimator, Surroundings
from estimators.first_token import Discipline
from estimators.hardware import CARDS
from estimators.links import LinkTable
from estimators.request import RequestFacts
from estimators.roofline import rates_of
from estimators.routes import Held, Routes
from estimators.shape_costs import costs_of
from estimators.shapes import QWEN3_8B
from estimators.view import FleetView
from router.holdings import Holdings

MODEL = "Qwen/Qwen3-8B"
GIB = 2.0**30


def a_fleet(*cards: str, names: list[str] | None = None, discipline: Discipline = Discipline.OVERLAPPED) -> FleetView:
    """A ready, idle fleet with these cards (two A100 when none is named), calibrated to the pure roofline."""
    cards = cards or ("A100", "A100")
    view = FleetView(
        names=names or [f"{card.lower()}-{i}" for i, card in enumerate(cards)],
        rates=[rates_of(QWEN3_8B, CARDS[card]) for card in cards],
    )
    view.ready[:] = True
    view.disciplines[:] = [discipline] * view.rows
    return view


def a_request(prompt_tokens: int = 8448, **changes: object) -> RequestFacts:
    """A streamed request for the fleet's model."""
    facts: dict[str, object] = {"request_id": "r-1", "model": MODEL, "streams": True}
    return RequestFacts(prompt_tokens=prompt_tokens, **{**facts, **changes})  # type: ignore[arg-type]


def an_estimator(
    *,
    network_bytes_per_s: float | None = None,
    minimum_fetch_tokens: int = 1,
    rows: int = 2,
    engine_decides: bool = True,
    doubt: Doubt | None = None,
) -> Estimator:
    """The model on its links: 10 ms look-up and the network, then PCIe at 25 GB/s; no store without a rate."""
    routes = None
    if network_bytes_per_s is not None:
        table = LinkTable(bytes_per_s=[network_bytes_per_s] + [25e9] * rows, look_up_s=[0.010] + [0.0] * rows)
        routes = Routes(table=table, store=[[0, 1 + row] for row in range(rows)])
    return Estimator(
        costs=costs_of(QWEN3_8B),
        layers=QWEN3_8B.layers,
        rows=rows,
        routes=routes,
        minimum_fetch_tokens=minimum_fetch_tokens,
        engine_decides=engine_decides,
        doubt=doubt,
    )


def held(local_blocks: list[int], store_blocks: int = 0) -> Held:
    """Leading blocks in each replica's memory and in the store."""
    return Held(local_blocks=np.array(local_blocks, dtype=np.int32), store_blocks=store_blocks)


def quiet(
    output_tokens: float = 256.0,
    arrival_rps: float = 0.0,
    mean_compute_s: float = 0.0,
    mean_context_tokens: float = 0.0,
) -> Surroundings:
    """A fleet to which nothing else arrives."""
    return Surroundings(
        arrival_rps=arrival_rps,
        mean_compute_s=mean_compute_s,
        mean_context_tokens=mean_context_tokens,
        output_tokens=output_tokens,
        others_output_tokens=256.0,
    )


def estimate(view: FleetView, where: Held, estimator: Estimator | None = None, now_s: float = 0.0) -> Estimates:
    """Estimates of the standard request."""
    return (estimator or an_estimator(rows=view.rows)).estimate(a_request(), where, view, quiet(), now_s)


class NoHoldings(Holdings):
    """A directory that knows nothing, or says what it was told to, and learns nothing."""

    def __init__(self, where: Held | None = None) -> None:
        self.where = where

    def held(self, chain: list[int], now_s: float) -> Held:
        return self.where or held([0] * 8)

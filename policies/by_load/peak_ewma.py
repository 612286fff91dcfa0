"""The cheaper of two replicas drawn at random, where a slow answer is believed at once and forgotten slowly.

Model    cost e (pending + 1), pending the requests booked there. On a first token after rtt: if rtt > e then e = rtt,
         else e = e w + rtt (1 - w), w = exp(-dt/tau), dt since e was last read or learned. Reading decays e by w too,
         so a replica that nobody tries becomes cheap again
Reads    requests booked per replica, and how long their first tokens took
Ties     go to the first drawn
Blind to the cache, the length of prompts (a long prompt makes its replica look slow), and who was not drawn
Source   Twitter Finagle, PeakEwma; the same in tower (Rust) and Linkerd
"""

from __future__ import annotations

import numpy as np

from estimators.estimates import Estimates
from estimators.ranges import require
from estimators.request import RequestFacts
from estimators.view import Column, FleetView
from policies.base import Choice
from policies.by_load.two_choices import better_of, two_drawn
from policies.newcomers import Newcomers
from policies.watcher import Placed, Watcher


class PeakEwma(Watcher):
    """tau_s : after so long without news a cost has fallen to 37 %, > 0; start_s : of replicas never tried, > 0"""

    summary = "the lower latency x (pending + 1) of two replicas drawn at random, peaks believed at once"
    reads = "requests booked per replica, times of first tokens"
    source = "Finagle and tower, PeakEwma"

    def __init__(self, rng: np.random.Generator, *, tau_s: float = 10.0, start_s: float = 1.0) -> None:
        require(0 < tau_s < float("inf"), "tau_s", tau_s)
        require(0 < start_s < float("inf"), "start_s", start_s)
        self._rng = rng
        self._tau_s = tau_s
        self._start_s = start_s
        self._newcomers = Newcomers()
        self._latency_s: Column = np.empty(0)
        self._touched_s: Column = np.empty(0)

    def choose(self, request: RequestFacts, fleet: FleetView, estimates: Estimates) -> Choice:
        self._meet(fleet)
        pair = two_drawn(estimates.usable_rows, self._rng)
        latency_s = self._latency_s * np.exp((self._touched_s - fleet.now_s) / self._tau_s)
        for row in pair:  # being read is being touched, as at the source; it decides what counts as a peak
            self._latency_s[row], self._touched_s[row] = latency_s[row], fleet.now_s
        return better_of(pair, latency_s * (fleet.booked + 1.0), estimates)

    def first_token(self, placed: Placed, fleet: FleetView) -> None:
        self._meet(fleet)
        row, took_s = placed.row, fleet.now_s - placed.placed_at_s
        known_s = self._latency_s.item(row)
        weight = np.exp((self._touched_s.item(row) - fleet.now_s) / self._tau_s)
        self._latency_s[row] = took_s if took_s > known_s else known_s * weight + took_s * (1.0 - weight)
        self._touched_s[row] = fleet.now_s

    def _meet(self, fleet: FleetView) -> None:
        for row in self._newcomers.rows(fleet):
            if len(self._latency_s) != fleet.rows:
                self._latency_s, self._touched_s = np.empty((2, fleet.rows))
            self._latency_s[row], self._touched_s[row] = self._start_s, fleet.now_s

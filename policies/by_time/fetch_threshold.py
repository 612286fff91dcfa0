"""The fewest in-flight tokens; then fetch what a holder has beyond it, if that is faster than computing it.

Model     placement first. Then, of delta tokens beyond the replica's own: fetch if t0 + delta beta < delta / R, R the
          card's peak prefill rate, halved linearly towards a full batch of decodes. The longest of store and peer
Reads    own bookings, cached tokens of every place, the card's roofline; the link as two constants
Ties     broken uniformly at random
Blind to the queue on the link, attention, and caches when it places. On engines that decide by themselves the second
         step changes nothing
Source   proposal for llm-d-router: fetch or recompute after placement
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from estimators.estimates import Estimates
from estimators.paths import COLUMN, PATHS, Path
from estimators.ranges import require
from estimators.request import RequestFacts
from estimators.view import FleetView
from policies.base import Choice, Reason, choose_replica
from policies.symbols import path_without_fetch, peak_prefill_tokens_per_s, reach_tokens

FETCHES = (COLUMN[Path.REMOTE], COLUMN[Path.PEER])


class FetchThreshold:
    """start_s (t0) : before a fetch brings anything, >= 0; full_batch : decodes at which the rate is halved, >= 1

    token_s (beta) : of one token over the link, > 0: its KV bytes over the link's rate. The default is that of an 8B
    model with 147,456 bytes a token on 100 Gbit/s
    """

    summary = "the least in-flight tokens; then fetch if faster than computing"
    reads = "tokens placed and not yet prefilled, cached tokens of every place, peak prefill rate of the card"
    source = "proposal in llm-d-router"

    def __init__(
        self, rng: np.random.Generator, *, start_s: float = 0.005, token_s: float = 11.8e-6, full_batch: int = 256
    ) -> None:
        require(0 <= start_s < float("inf"), "start_s", start_s)
        require(0 < token_s < float("inf"), "token_s", token_s)
        require(full_batch >= 1, "full_batch", full_batch)
        self._rng = rng
        self._start_s, self._token_s, self._full_batch = start_s, token_s, full_batch

    def choose(self, request: RequestFacts, fleet: FleetView, estimates: Estimates) -> Choice:
        choice = choose_replica(fleet.prefill_tokens, Reason.LOWER_LOAD, estimates, self._rng)
        return replace(choice, path=self._path(choice.row, fleet, estimates))

    def _path(self, row: int, fleet: FleetView, estimates: Estimates) -> Path:
        reused = estimates.reused_tokens
        fetches = [column for column in FETCHES if column < len(reused) and estimates.possible[column, row]]
        if not fetches:
            return path_without_fetch(estimates, row)
        longest = max(fetches, key=lambda column: reused.item((column, row)))
        gained = reused.item((longest, row)) - reach_tokens(estimates, Path.DISK).item(row)
        fullness = min(fleet.decode_batch.item(row) / self._full_batch, 1.0)
        rate = peak_prefill_tokens_per_s(fleet).item(row) * (1.0 - 0.5 * fullness)
        faster = self._start_s + gained * self._token_s < gained / rate
        return PATHS[longest] if faster else path_without_fetch(estimates, row)

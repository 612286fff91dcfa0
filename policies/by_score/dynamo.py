"""NVIDIA Dynamo's KV router: prefill blocks still to compute there, plus blocks in use there.

Model     the smallest s max(0, (P + n)/B - credit) + D, in blocks of B tokens. P is placed and not yet prefilled,
          uncached part; credit is 1.0 for each block of the prompt in HBM, 0.75 in host memory, 0.25 on disk, 0.5 in
          the shared store where that is known, each place counted for what it adds to the ones before; D are blocks of
          the requests in flight with those of this one, shared ones once. With a temperature: drawn by softmax of the
          negative cost, min-max normalised
Reads    cached tokens by tier, own bookings
Ties     broken uniformly at random
Blind to the speed of the card, the length of answers, and that a second block costs more than the first
Source   NVIDIA Dynamo 1.6, KV router cost function
"""

from __future__ import annotations

import numpy as np

from estimators.estimates import Estimates
from estimators.paths import COLUMN, Path
from estimators.ranges import require
from estimators.request import RequestFacts
from estimators.view import Column, FleetView
from policies.base import Choice, Reason, choice_of, choose_replica
from policies.by_score.active_blocks import ActiveBlocks
from policies.symbols import cached_tokens, reach_tokens
from policies.watcher import Placed, Watcher


class Dynamo(Watcher):
    """overlap (s) : weight of prefill work, >= 0; temperature : >= 0, 0 takes the smallest

    hbm, host, disk, store : credit for a block there, >= 0
    """

    summary = "the fewest blocks to prefill and in use, less credit for cached ones"
    reads = "cached tokens by tier, tokens placed and not yet prefilled, blocks of requests in flight"
    source = "NVIDIA Dynamo 1.6 KV router"

    def __init__(
        self,
        rng: np.random.Generator,
        *,
        overlap: float = 1.0,
        temperature: float = 0.0,
        hbm: float = 1.0,
        host: float = 0.75,
        disk: float = 0.25,
        store: float = 0.5,
    ) -> None:
        named = {"overlap": overlap, "temperature": temperature, "hbm": hbm, "host": host, "disk": disk, "store": store}
        for name, value in named.items():
            require(0 <= value < float("inf"), name, value)
        self._rng = rng
        self._overlap, self._temperature = overlap, temperature
        self._hbm, self._host, self._disk, self._store = hbm, host, disk, store
        self._active = ActiveBlocks()

    def choose(self, request: RequestFacts, fleet: FleetView, estimates: Estimates) -> Choice:
        block = request.block_tokens
        work = (fleet.prefill_tokens + request.prompt_tokens) / block - self._credit(request, estimates) / block
        in_use = np.array([self._active.with_request(row, request) for row in range(fleet.rows)], dtype=np.float64)
        cost = self._overlap * np.maximum(work, 0.0) + in_use
        if self._temperature == 0:
            return choose_replica(cost, Reason.BEST_SCORE, estimates, self._rng)
        chances = softmax_chances(cost[estimates.usable_rows], self._temperature)
        drawn = int(self._rng.choice(len(chances), p=chances))
        row = int(estimates.usable_rows.nonzero()[0][drawn])
        return choice_of(row, Reason.BEST_SCORE, estimates, probability=chances.item(drawn))

    def placed(self, placed: Placed, fleet: FleetView, estimates: Estimates) -> None:
        self._active.add(placed)

    def ended(self, placed: Placed, fleet: FleetView) -> None:
        self._active.remove(placed)

    def _credit(self, request: RequestFacts, estimates: Estimates) -> Column:
        """Tokens of the prompt that count as had already."""
        hbm = reach_tokens(estimates, Path.LOCAL)
        host, disk = reach_tokens(estimates, Path.HOST), reach_tokens(estimates, Path.DISK)
        credit = self._hbm * cached_tokens(request, estimates) + self._host * (host - hbm) + self._disk * (disk - host)
        if len(estimates.reused_tokens) > COLUMN[Path.REMOTE]:
            credit += self._store * np.maximum(reach_tokens(estimates, Path.REMOTE) - disk, 0.0)
        return credit


def softmax_chances(cost: Column, temperature: float) -> Column:
    """Chance of each by softmax of its negative cost, costs normalised to 0..1; equal ones are equally likely."""
    width = np.ptp(cost)
    weights = np.exp(-(cost - cost.min()) / (width or 1.0) / temperature)
    return np.asarray(weights / weights.sum())

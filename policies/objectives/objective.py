"""What all objectives share: deadlines come first, then the measure, and a share is explored.

Model     of the possible candidates those that meet the deadlines are left, where any does; of these the measure
          names the best, equal ones are drawn uniformly; with probability `explore` any that are left are drawn
          uniformly instead. The probability of what was drawn, by either way, is in the choice
Valid     at least one candidate is possible
Blind to  what an explored candidate costs: with `explore` 0.01 one request in a hundred takes a random replica, however
          long its queue. Deadlines bound it
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypedDict

import numpy as np

from estimators.candidates import Few, Grid
from estimators.estimates import Estimates
from estimators.paths import PATHS
from estimators.ranges import require
from estimators.request import RequestFacts
from estimators.view import FleetView
from policies.base import Choice, Reason, Refused, Wait, choose_of_few
from policies.objectives.deadlines import Deadlines, Late, Mask

TIE = 1e-12  # measures closer than that, relative, are equal
_NO_DEADLINES = (None, None)


class Common(TypedDict, total=False):
    """Settings of every objective, as keywords of its constructor; see `Objective`."""

    explore: float
    slo_ttft_ms: float | None
    slo_tpot_ms: float | None
    meets: float
    late: str


class Objective(ABC):
    """explore : share of requests that are placed at random, to learn what else would have happened, 0 <= explore <= 1
    slo_ttft_ms, slo_tpot_ms : deadlines of requests that name none, milliseconds, > 0; None: none
    meets : probability of being in time that counts as in time, 0 < meets < 1
    late : when nobody reaches it: best_effort, queue or refuse
    """

    def __init__(
        self,
        rng: np.random.Generator,
        *,
        explore: float = 0.0,
        slo_ttft_ms: float | None = None,
        slo_tpot_ms: float | None = None,
        meets: float = 0.9,
        late: str = "best_effort",
    ) -> None:
        require(0 <= explore <= 1, "explore", explore)
        self._rng = rng
        self._explore = explore
        self._deadlines = Deadlines.of_settings(
            slo_ttft_ms=slo_ttft_ms, slo_tpot_ms=slo_tpot_ms, meets=meets, late=late
        )

    @abstractmethod
    def best(self, request: RequestFacts, fleet: FleetView, estimates: Estimates, among: Mask) -> Mask:
        """Of the candidates in `among` (paths, rows), at least one, those that nothing else is better than."""

    def choose(self, request: RequestFacts, fleet: FleetView, estimates: Estimates) -> Choice:
        among, reason = estimates.possible, Reason.LOWEST_ESTIMATE
        chance = self._deadlines.probability(request, estimates)
        if chance is not None:
            in_time = among & (chance >= self._deadlines.meets)
            if in_time.any():
                among = in_time
            else:
                reason = self._late(request)
        return self._drawn(self.best(request, fleet, estimates, among), among, reason, estimates)

    def _late(self, request: RequestFacts) -> Reason:
        """What to do where nobody is in time. Raises Refused, or Wait."""
        deadlines = self._deadlines
        if deadlines.late is Late.BEST_EFFORT:
            return Reason.BEST_EFFORT
        sentence = f"no replica is expected to meet {_written(*deadlines.of(request))} of this request"
        raise Wait(sentence) if deadlines.late is Late.QUEUE else Refused(sentence)

    def _drawn(self, best: Mask, among: Mask, reason: Reason, estimates: Estimates) -> Choice:
        """One of the best, or of all, with the probability that either way leads to it."""
        candidates = best.ravel().nonzero()[0]
        probability = 1.0 / len(candidates)
        flat = candidates.item() if len(candidates) == 1 else int(self._rng.choice(candidates))
        if self._explore > 0.0:
            everyone = among.ravel().nonzero()[0]
            if self._rng.random() < self._explore:
                flat = int(self._rng.choice(everyone))
                reason = Reason.EXPLORED
            of_best = probability if best.flat[flat] else 0.0
            probability = (1.0 - self._explore) * of_best + self._explore / len(everyone)
        if np.count_nonzero(estimates.usable_rows) == 1:
            reason = Reason.ONLY_READY
        column, row = divmod(flat, among.shape[1])
        return Choice(row, PATHS[column], reason, probability)


class Measured(Objective):
    """An objective that is one number for each candidate."""

    @abstractmethod
    def value(self, request: RequestFacts, estimates: Estimates) -> Grid:
        """The measure of every candidate, (paths, rows); the smallest is the best. Impossible ones are not read."""

    def value_of_few(self, estimates: Estimates, few: Sequence[Few]) -> list[float] | None:
        """The same of the possible candidates in plain numbers, summed alike; None: only the grids have it."""
        del estimates, few
        return None

    def choose(self, request: RequestFacts, fleet: FleetView, estimates: Estimates) -> Choice:
        few = estimates.few
        if few is not None and self._explore == 0.0 and self._deadlines.of(request) == _NO_DEADLINES:
            values = self.value_of_few(estimates, few)
            if values is not None:
                return choose_of_few(values, few, self._rng)
        return super().choose(request, fleet, estimates)

    def best(self, request: RequestFacts, fleet: FleetView, estimates: Estimates, among: Mask) -> Mask:
        return smallest(self.value(request, estimates), among, TIE)


def smallest(values: Grid, among: Mask, tolerance: float) -> Mask:
    """Those of `among` whose value is within `tolerance`, relative, of the smallest among them."""
    masked = np.where(among, values, np.inf)
    least = masked.min().item()
    return np.asarray(masked <= least + tolerance * abs(least))


def _written(first_s: float | None, pace_s: float | None) -> str:
    parts = ["" if first_s is None else f"a first token within {first_s:g} s"]
    parts += ["" if pace_s is None else f"{pace_s * 1000:g} ms for each further token"]
    return "the deadline (" + " and ".join(part for part in parts if part) + ")"

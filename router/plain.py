"""A dispatcher that forecasts nothing: for rules that read no estimate, where nobody asks what was expected.

Model     requests in flight are counted, and that is all such rules read; health, retries and refusals are those of
          `dispatch.py`
Valid     policies that say `reads_estimates = False`, without receipts and without learned state that is to be kept,
          and without limits or deadlines at admission, which compare expectations
Blind to  how long anything takes: no forecast, no booked work, nothing learned. Counts by path say "unknown"
"""

from __future__ import annotations

from math import nan
from typing import Any

import numpy as np
import numpy.typing as npt

from estimators.estimates import Estimates, Surroundings
from estimators.paths import COLUMN, Path
from estimators.request import RequestFacts
from estimators.routes import Held
from estimators.view import FleetView
from policies.base import Choice, Policy
from policies.watcher import Watcher
from router.actions import Ended, Send
from router.bookings import Booking, Forecast
from router.dispatch import Dispatcher
from router.placing import Expected, Placement, Placer, Replica
from router.receipts import Receipt

_RECOMPUTE = COLUMN[Path.RECOMPUTE]
_UNKNOWN = Forecast(
    first_token_s=nan,
    recompute_s=nan,
    hit_probability=nan,
    raw_quantiles_s=[],
    quantiles_s=[],
    queue_s=nan,
    fetch_s=nan,
    local_tokens=0.0,
    host_tokens=0.0,
    disk_tokens=0.0,
    age_s=[],
)


def reads_estimates(policy: Policy) -> bool:
    """Whether a rule reads estimates or bookings; one that does not say is taken to, and so is one that watches."""
    return isinstance(policy, Watcher) or bool(getattr(policy, "reads_estimates", True))


class PlainDispatcher(Dispatcher):
    """See the module. The arguments are those of `Dispatcher`; its policy reads no estimates."""

    def __init__(self, **parts: Any) -> None:
        assert not reads_estimates(parts["policy"]), "a rule that reads estimates needs them"
        super().__init__(**parts, placing=PlainPlacer)
        self.view.waiting[:] = nan  # work that is booked is not known, so nobody is shown a zero
        self.view.prefill_tokens[:] = nan

    def joins(self, row: int, replica: Replica) -> None:
        super().joins(row, replica)
        self.view.waiting[:, row] = nan


class PlainPlacer(Placer):
    """Counts what is in flight, and nothing else."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self._nothing = nothing_estimated(self._view)
        self._rows: list[int] = []  # that may be chosen
        self._expected = Expected(Held(np.zeros(self._view.rows, dtype=np.int64), 0), self._nothing)

    def noticed(self, request: RequestFacts, now_s: float) -> None:
        """Nothing is learned of traffic."""

    def expected(self, request: RequestFacts, rows: list[int], replicas: int, now_s: float) -> Expected:
        if rows != self._rows:  # the same from one request to the next, nearly always
            self._rows = rows.copy()
            self._nothing.only(rows)
        return self._expected

    def place(
        self,
        request: RequestFacts,
        expected: Expected,
        choice: Choice,
        receipt: Receipt,
        *,
        arrived_at_s: float,
        tried: frozenset[int],
        now_s: float,
    ) -> Send:
        self._view.booked[choice.row] += 1
        receipt.reason, receipt.probability = choice.reason.value, choice.probability
        receipt.placed_s = now_s - arrived_at_s
        receipt.attempts += 1
        replica = self._replicas[choice.row]
        placement = Placement(
            booking=_counted(request, choice, now_s),
            receipt=receipt,
            notes=None,
            arrived_at_s=arrived_at_s,
            tried=tried,
            promised=[],
            room=None,
            belief=None,
            expected=None,
            began_s=self._busy.begins(choice.row, now_s),
        )
        return Send(
            request=request,
            row=choice.row,
            replica=replica.name,
            base_url=replica.base_url,
            attempt=receipt.attempts,
            explain=receipt.summary() if request.explain else None,
            placement=placement,
        )

    def first_token(self, placement: Placement, now_s: float) -> None:
        """No prefill was booked."""

    def answered(self, placement: Placement, ended: Ended, now_s: float) -> None:
        """Nothing is learned of answers."""

    def end(self, placement: Placement, now_s: float) -> None:
        self._view.booked[placement.booking.row] -= 1
        self._charge(placement, now_s)


class NothingEstimated(Estimates):
    """Which replicas may be chosen, and nothing else: no path is known, so every prompt is computed."""

    _ready_rows: list[int] | None = None  # until somebody asks

    def only(self, rows: list[int]) -> None:
        """No others may be chosen."""
        self.possible[_RECOMPUTE] = False
        self.possible[_RECOMPUTE, rows] = True
        self._ready_rows = None

    @property
    def ready_rows(self) -> list[int]:
        if self._ready_rows is None:
            self._ready_rows = super().ready_rows
        return self._ready_rows

    @property
    def usable_rows(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self.possible[_RECOMPUTE])

    def path_at(self, row: int) -> Path:
        return Path.RECOMPUTE


def nothing_estimated(view: FleetView) -> NothingEstimated:
    """For a fleet of which no replica may be chosen yet."""
    grid, column = np.zeros((_RECOMPUTE + 1, view.rows)), np.zeros(view.rows)
    return NothingEstimated(
        possible=np.zeros(grid.shape, dtype=np.bool_),
        reused_tokens=grid,
        queue_s=column,
        fetch_s=grid,
        ready_s=grid,
        prefill_s=grid,
        compute_s=grid,
        first_token_s=grid,
        hit_probability=grid,
        stored_probability=grid,
        stored_s=column,
        age_s=grid,
        pace_s=column,
        decoding=column,
        remaining_tokens=column,
        step_growth_s=column,
        around=Surroundings(nan, nan, nan, nan, nan),
        prompt_tokens=0,
        pace_scale=column,
        weights_s=column,
        usd_per_hour=column,
    )


def _counted(request: RequestFacts, choice: Choice, now_s: float) -> Booking:
    """A booking without work."""
    return Booking(
        request=request,
        row=choice.row,
        placed_at_s=now_s,
        ready_at_s=nan,
        compute_s=nan,
        linear_s=nan,
        attention_s=nan,
        held_s=nan,
        path=choice.path,
        forecast=_UNKNOWN,
        remaining_tokens=nan,
        read_tokens=nan,
        new_tokens=nan,
        reused_tokens=0.0,
        output_tokens=nan,
    )

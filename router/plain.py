"""A dispatcher that forecasts nothing: for rules that read no estimate, where nobody asks what was expected.

Model     requests in flight are counted, and that is all such rules read; health, retries and refusals are those of
          `dispatch.py`
Valid     policies that say `reads_estimates = False`, without receipts and without learned state that is to be kept
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
from estimators.view import FleetView
from policies.base import Choice, Policy
from policies.watcher import Watcher
from router.actions import Action, Ended, Send
from router.bookings import Booking, Forecast
from router.dispatch import Dispatcher, Placement
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
        super().__init__(**parts)
        assert not reads_estimates(self._policy), "a rule that reads estimates needs them"
        self.view.waiting[:] = nan  # work that is booked is not known, so nobody is shown a zero
        self.view.prefill_tokens[:] = nan
        self._nothing = nothing_estimated(self.view)
        self._may_run = self._nothing.usable_rows  # the same memory

    def first_token(self, sent: Send, now_s: float) -> list[Action]:
        placement = sent.placement
        assert isinstance(placement, Placement), "a Send made by this dispatcher"
        placement.receipt.first_token_s = now_s - placement.arrived_at_s
        return []

    def _noticed(self, request: RequestFacts, now_s: float) -> None:
        """Nothing is learned of traffic."""

    def _answered(self, placement: Placement, ended: Ended, now_s: float) -> None:
        """Nothing is learned of answers."""

    def _decide(
        self,
        request: RequestFacts,
        receipt: Receipt,
        rows: list[int],
        replicas: int,
        arrived_at_s: float,
        tried: set[int],
        now_s: float,
    ) -> Send:
        self._may_run[:] = False
        self._may_run[rows] = True
        policy = self._policy if request.generates else self._by_load
        choice = policy.choose(request, self.view, self._nothing)
        self.view.booked[choice.row] += 1
        receipt.reason, receipt.probability = choice.reason.value, choice.probability
        receipt.placed_s = now_s - arrived_at_s
        receipt.attempts += 1
        replica = self.replicas[choice.row]
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

    def _end_booking(self, placement: Placement, now_s: float) -> None:
        row = placement.booking.row
        self.view.booked[row] -= 1
        self._standing[row].ended_at_s.append(now_s)


class NothingEstimated(Estimates):
    """Which replicas may be chosen, and nothing else: no path is known, so every prompt is computed."""

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

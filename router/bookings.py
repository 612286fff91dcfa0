"""What the router has given each replica and not yet seen finished.

Each booking is waiting (prefill not known to be over) or decoding. Waiting ones are kept in the order they were
placed, which is the order an engine serves them in; the first is the one in service. The ledger keeps the fleet
view's columns in step, and learns from each first token how long the prefill really took.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from estimators.estimates import Estimates
from estimators.paths import COLUMN, Path
from estimators.request import RequestFacts
from estimators.view import FleetView


@dataclass(slots=True, eq=False)
class Booking:
    """One request on one replica. Times absolute on the dispatcher's clock unless they end in a phase's name.

    compute_s : expected prefill, this long; features, shared_s : what it is made of, for calibration
    ready_at_s : when its fetched state should be there
    starts_at_s : when its prefill should start, known once it is the first waiting
    """

    request: RequestFacts
    row: int
    placed_at_s: float
    ready_at_s: float
    compute_s: float
    features: npt.NDArray[np.float64]
    shared_s: float
    output_tokens: float
    starts_at_s: float = np.nan
    first_token_at_s: float = np.nan
    decoding: bool = False
    released: bool = False


class Ledger:
    """Bookings of a whole fleet. Every `place` is ended by exactly one `release`."""

    def __init__(self, view: FleetView) -> None:
        self._view = view
        self._waiting: list[dict[Booking, None]] = [{} for _ in range(view.rows)]

    def place(self, request: RequestFacts, row: int, path: Path, estimates: Estimates, now_s: float) -> Booking:
        """Book `request` on `row` by `path`, as estimated."""
        column = COLUMN[path]
        compute_s = float(estimates.compute_s[row, column]) if request.generates else 0.0
        features = estimates.features[row, column].copy()
        booking = Booking(
            request=request,
            row=row,
            placed_at_s=now_s,
            ready_at_s=now_s + float(estimates.fetch_s[row, column]),
            compute_s=compute_s,
            features=features,
            shared_s=max(0.0, compute_s - float(features @ self._view.coefficients[row])),
            output_tokens=estimates.output_tokens if request.generates else 0.0,
        )
        view = self._view
        view.booked[row] += 1
        if request.generates:
            view.kv_tokens[row] += request.prompt_tokens
            waiting = self._waiting[row]
            waiting[booking] = None
            if len(waiting) == 1:
                self._serve(booking, now_s)
            else:
                view.waiting_compute_s[row] += compute_s
        return booking

    def first_token(self, booking: Booking, now_s: float) -> float | None:
        """Its first token came at `now_s`. Returns how long its prefill took, None when that cannot be told.

        It can be told of the request in service: it had the GPU from its expected start, or from the moment the one
        before it got its own first token, until now.
        """
        booking.first_token_at_s = now_s
        if booking.decoding or booking.released or not booking.request.generates:
            return None
        starts_at_s = booking.starts_at_s
        self._end_prefill(booking, now_s)
        took_s = now_s - starts_at_s
        return took_s if took_s > 0 else None  # NaN: it was not in service

    def release(self, booking: Booking, now_s: float) -> None:
        """It ended, whatever the way. Idempotent, so that no path can release twice."""
        if booking.released:
            return
        booking.released = True
        view, row = self._view, booking.row
        view.booked[row] -= 1
        if not booking.request.generates:
            return
        if booking.decoding:
            view.decode_batch[row] -= 1
            view.decode_context_tokens[row] -= self._context(booking)
        else:
            self._leave_queue(booking, now_s)
        view.kv_tokens[row] -= booking.request.prompt_tokens

    def settle(self, now_s: float) -> None:
        """Let time pass: a request that is not streamed shows no first token, so its prefill ends as expected."""
        for row in np.flatnonzero(self._view.head_ends_s <= now_s):
            while (head := next(iter(self._waiting[row]), None)) is not None:
                ends_s = float(self._view.head_ends_s[row])
                if head.request.streams or ends_s > now_s:
                    break
                self._end_prefill(head, ends_s)

    def waiting_on(self, row: int) -> int:
        """Bookings on `row` whose prefill is not known to be over."""
        return len(self._waiting[row])

    def _context(self, booking: Booking) -> float:
        """Mean context of a decode over its life: the prompt and half of the expected output."""
        return booking.request.prompt_tokens + booking.output_tokens / 2

    def _serve(self, booking: Booking, from_s: float) -> None:
        booking.starts_at_s = max(from_s, booking.ready_at_s)
        self._view.head_ends_s[booking.row] = booking.starts_at_s + booking.compute_s
        self._view.head_compute_s[booking.row] = booking.compute_s

    def _end_prefill(self, booking: Booking, now_s: float) -> None:
        self._leave_queue(booking, now_s)
        booking.decoding = True
        self._view.decode_batch[booking.row] += 1
        self._view.decode_context_tokens[booking.row] += self._context(booking)

    def _leave_queue(self, booking: Booking, now_s: float) -> None:
        row = booking.row
        waiting = self._waiting[row]
        view = self._view
        was_head = next(iter(waiting)) is booking
        del waiting[booking]
        if not was_head:
            view.waiting_compute_s[row] -= booking.compute_s
        if not waiting:
            view.head_ends_s[row] = -np.inf
            view.head_compute_s[row] = 0.0
            view.waiting_compute_s[row] = 0.0  # also clears what rounding left
        elif was_head:
            head = next(iter(waiting))
            view.waiting_compute_s[row] = max(0.0, view.waiting_compute_s[row] - head.compute_s)
            self._serve(head, now_s)

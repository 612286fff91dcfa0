"""What an engine's load report says beyond the router's own bookings.

Model     ours are the requests booked there now, or ended since the poll went out, so nothing of ours is taken for
          foreign; the rest of what the engine counts is of others
Valid     counts as engines report them; None where one does not. A report that stops coming keeps its last value, and
          estimates there widen with its age (`estimators/spread.py`)
"""

from __future__ import annotations

import numpy as np

from estimators.view import FleetView


def take_in(
    view: FleetView,
    row: int,
    *,
    running: float | None,
    waiting: float | None,
    ended_since: int,
    kv_used_share: float | None,
    now_s: float,
) -> None:
    """Write one report into the columns of `row`. ended_since : requests of ours that ended since it was asked for"""
    view.kv_used_share[row] = np.nan if kv_used_share is None else kv_used_share
    if running is None or waiting is None:
        view.foreign_waiting[row] = view.foreign_decoding[row] = view.sampled_at_s[row] = np.nan
        _note_oldest(view)
        return
    ours = view.booked.item(row) + ended_since  # items: sums of numpy's scalars cost ten times
    ours_waiting = ours - view.decode_batch.item(row)
    foreign = max(0.0, running + waiting - ours)
    foreign_waiting = min(foreign, max(0.0, waiting - ours_waiting))
    view.foreign_waiting[row] = foreign_waiting
    view.foreign_decoding[row] = foreign - foreign_waiting
    view.sampled_at_s[row] = now_s
    _note_oldest(view)


def _note_oldest(view: FleetView) -> None:
    view.oldest_report_s = float(np.fmin.reduce(view.sampled_at_s))  # NaN only where all are

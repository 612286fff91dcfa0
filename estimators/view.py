"""The fleet as columns: one row per replica, lent read-only to estimators and policies for one decision.

The `Dispatcher` owns and updates it in place; nobody keeps a reference past the decision. Unknown is NaN, never zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from estimators.calibration import FEATURES, prior_coefficients
from estimators.ranges import require
from estimators.roofline import Rates

Column = npt.NDArray[np.float64]


class FleetView:
    """Columns of shape (rows,), float64 unless said.

    What a replica is
        names : of the replicas, in order
        rates : its roofline, seconds per unit of work
    What it is doing, from the router's own bookings
        ready (bool) : may be chosen for the request being decided
        booked (int64) : requests chosen for it and not yet ended
        head_ends_s : when the prefill now in service should end, absolute; -inf when none is
        head_compute_s : length of that prefill
        waiting_work (rows, features) : prefill work booked behind it, see `estimators.calibration`; summed over the
            requests, but for the step count, which is that of all their tokens together
        waiting_tokens : prompt tokens in that work
        decode_batch : booked requests past their first token
        decode_context_tokens : their context, prompt and output so far
    What it reports, with its age
        foreign_waiting, foreign_decoding : requests of others queued and running there; NaN unknown
        sampled_at_s : when that was last reported; NaN never
    What was learned
        coefficients (rows, features) : prefill corrections, see `estimators.calibration`
        pace_scale : observed over ideal time per output token
    """

    def __init__(self, names: Sequence[str], rates: Sequence[Rates]) -> None:
        require(len(names) == len(rates), "rates", len(rates), "not one for each name")
        rows = len(names)
        self.names = tuple(names)
        self.rows = rows
        self.linear_s_per_token = np.array([r.linear_s_per_token for r in rates])
        self.attention_s_per_pair = np.array([r.attention_s_per_pair for r in rates])
        self.head_s = np.array([r.head_s for r in rates])
        self.weights_s = np.array([r.weights_s for r in rates])
        self.context_s_per_token = np.array([r.context_s_per_token for r in rates])

        self.ready = np.zeros(rows, dtype=np.bool_)
        self.booked = np.zeros(rows, dtype=np.int64)
        self.head_ends_s = np.full(rows, -np.inf)
        self.head_compute_s = np.zeros(rows)
        self.waiting_work = np.zeros((rows, len(FEATURES)))
        self.waiting_tokens = np.zeros(rows)
        self.decode_batch = np.zeros(rows)
        self.decode_context_tokens = np.zeros(rows)

        self.foreign_waiting = np.full(rows, np.nan)
        self.foreign_decoding = np.full(rows, np.nan)
        self.sampled_at_s = np.full(rows, np.nan)

        self.coefficients = np.tile(prior_coefficients(), (rows, 1))
        self.pace_scale = np.ones(rows)

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
        names, models : name and served model names
        rates : its roofline, seconds per unit of work
        kv_capacity_tokens : tokens of KV it can hold; NaN unknown
    What it is doing, from the router's own bookings
        ready (bool) : may be chosen at all
        booked (int64) : requests chosen for it and not yet ended
        head_ends_s : when the prefill now in service should end, absolute; -inf when none is
        head_compute_s : length of that prefill
        waiting_compute_s : prefill work booked behind it
        decode_batch : booked requests past their first token
        decode_context_tokens : their context, prompt and output so far
        kv_tokens : context of everything booked, shared blocks counted for each request
    What it reports, with its age
        reported_requests : running plus waiting, as last reported; NaN unknown
        foreign_requests : of those, the ones that are not ours
        sampled_at_s : when that sample was taken; NaN never
    What was learned
        coefficients (rows, features) : prefill corrections, see `estimators.calibration`
        pace_scale : observed over ideal time per output token
    """

    def __init__(self, names: Sequence[str], rates: Sequence[Rates], kv_capacity_tokens: Sequence[float]) -> None:
        require(len(names) == len(rates) == len(kv_capacity_tokens), "rates", len(rates), "not one for each name")
        rows = len(names)
        self.names = tuple(names)
        self.rows = rows
        self.models: list[frozenset[str]] = [frozenset()] * rows
        self.linear_s_per_token = np.array([r.linear_s_per_token for r in rates])
        self.attention_s_per_pair = np.array([r.attention_s_per_pair for r in rates])
        self.head_s = np.array([r.head_s for r in rates])
        self.weights_s = np.array([r.weights_s for r in rates])
        self.context_s_per_token = np.array([r.context_s_per_token for r in rates])
        self.kv_capacity_tokens = np.array(kv_capacity_tokens, dtype=np.float64)

        self.ready = np.zeros(rows, dtype=np.bool_)
        self.booked = np.zeros(rows, dtype=np.int64)
        self.head_ends_s = np.full(rows, -np.inf)
        self.head_compute_s = np.zeros(rows)
        self.waiting_compute_s = np.zeros(rows)
        self.decode_batch = np.zeros(rows)
        self.decode_context_tokens = np.zeros(rows)
        self.kv_tokens = np.zeros(rows)

        self.reported_requests = np.full(rows, np.nan)
        self.foreign_requests = np.zeros(rows)
        self.sampled_at_s = np.full(rows, np.nan)

        self.coefficients = np.tile(prior_coefficients(), (rows, 1))
        self.pace_scale = np.ones(rows)
        assert self.coefficients.shape == (rows, len(FEATURES))

    @property
    def ready_rows(self) -> npt.NDArray[np.intp]:
        """Rows that may be chosen, ascending."""
        return np.flatnonzero(self.ready)

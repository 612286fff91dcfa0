"""How long until a replica's GPU can start one more request, from the router's own bookings.

Model     prefills are served in order of arrival, one after the other; the one in service has what is left of
          its expected length, the ones behind it their whole length; a replica with running decodes and no
          prefill starts at the end of the step in progress, half a step away on average
Valid     bookings cover the replica's work; requests of others count with the mean work of ours
Blind to  prefills sharing a step; a request that overtakes one still waiting for its fetch
Source    work conservation: a first-come server's wait is the work in front of it
"""

from __future__ import annotations

import numpy as np

from estimators.view import Column, FleetView

# A prefill past its expected end is still running: some of it must be left.
OVERDUE_SHARE = 0.05


def queue_s(view: FleetView, now_s: float, mean_compute_s: float = 0.0) -> Column:
    """Q of every replica at `now_s`: seconds until its GPU could start a new request, shape (rows,), >= 0.

    mean_compute_s : mean prefill of a request of this router, the price of one foreign request, >= 0.
    """
    serving = view.head_ends_s > -np.inf
    left_s = np.maximum(view.head_ends_s - now_s, OVERDUE_SHARE * view.head_compute_s)
    half_step_s = np.where(
        view.decode_batch > 0,
        0.5 * (view.weights_s + view.decode_context_tokens * view.context_s_per_token),
        0.0,
    )
    own_s = np.where(serving, left_s, half_step_s) + view.waiting_compute_s
    return own_s + view.foreign_requests * mean_compute_s


def step_share_s(view: FleetView) -> Column:
    """What the running decodes add to each step of a prefill, seconds, shape (rows,): reading their KV."""
    return view.decode_context_tokens * view.context_s_per_token  # type: ignore[no-any-return]

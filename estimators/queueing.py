"""How long until a replica's GPU can start one more request, from bookings and reported load.

Model     prefills are served in order of arrival, one after the other; the one in service has what is left of
          its expected length; the ones behind it are one batch of work, since an engine packs their tokens into
          common steps; a replica with running decodes and no prefill starts at the end of the step in progress,
          half a step away on average
Valid     bookings cover the router's own work; queued requests of others count with the mean work of ours, and a
          replica that does not report gets the mean of those that do
Blind to  a request that overtakes one still waiting for its fetch; KV space
Source    work conservation: a first-come server's wait is the work in front of it
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from estimators.view import Column, FleetView

# A prefill past its expected end is still running: some of it must be left.
OVERDUE_SHARE = 0.05


def queue_s(view: FleetView, now_s: float, *, step_share_s: Column, mean_compute_s: float) -> Column:
    """Q of every replica at `now_s`: seconds until its GPU could start a new request, shape (rows,), >= 0.

    step_share_s : what running decodes add to each step of a prefill, shape (rows,), see `step_share_s`
    mean_compute_s : mean prefill of a request of this router, the price of one queued foreign request, >= 0
    """
    serving = view.head_ends_s > -np.inf
    left_s = np.maximum(view.head_ends_s - now_s, OVERDUE_SHARE * view.head_compute_s)
    idle_s = np.where(decodes(view) > 0, 0.5 * (view.weights_s + step_share_s), 0.0)
    foreign_s = or_mean_of_known(view.foreign_waiting, view.ready) * mean_compute_s
    return np.asarray(np.where(serving, left_s, idle_s) + waiting_s(view, step_share_s) + foreign_s)


def waiting_s(view: FleetView, step_share_s: Column) -> Column:
    """Prefill work booked behind the one in service, seconds, shape (rows,)."""
    steps = view.waiting_work[:, 2] / view.weights_s
    work_s = np.einsum("rf,rf->r", view.waiting_work, view.coefficients)
    return np.asarray(work_s + steps * step_share_s)


def decodes(view: FleetView) -> Column:
    """Decodes running on each replica, ours and those of others, shape (rows,)."""
    return np.asarray(view.decode_batch + or_mean_of_known(view.foreign_decoding, view.ready))


def step_share_s(view: FleetView, mean_context_tokens: float) -> Column:
    """What the running decodes add to each step, seconds, shape (rows,): reading their KV.

    mean_context_tokens : context of one foreign decode, taken to be that of ours, >= 0.
    """
    context = view.decode_context_tokens + or_mean_of_known(view.foreign_decoding, view.ready) * mean_context_tokens
    return np.asarray(context * view.context_s_per_token)


def or_mean_of_known(reported: Column, alike: npt.NDArray[np.bool_]) -> Column:
    """Reported numbers; unknown ones (NaN) become the mean of the known `alike`, and zero only when none is known.

    alike : replicas that may stand for each other, those that may take the request; bool, shape (rows,).
    """
    unknown = np.isnan(reported)
    if not unknown.any():
        return reported
    known = alike & ~unknown
    return np.where(unknown, float(reported[known].mean()) if known.any() else 0.0, reported)

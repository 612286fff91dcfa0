"""How long until a replica can start one more request, from bookings and reported load.

Model     prefills are served in order of arrival, one after the other; the one in service has what is left of
          its expected length; the ones behind it are one batch of work, since an engine packs their tokens into
          common steps; a replica with running decodes and no prefill starts at the end of the step in progress,
          half a step away on average. A request also needs KV memory for its prompt: where what is booked and what
          it needs exceed the replica's, it waits until enough of it is given back, at the rate at which
          running requests end. The later of the two moments counts
Valid     bookings cover the router's own work; queued requests of others count with the mean work of ours, and a
          replica that does not report gets the mean of those that do. Unknown capacity: no wait for memory
Blind to  a request that overtakes one still waiting for its fetch; which requests share blocks (a learned ratio
          of memory used to context booked stands for that)
Source    work conservation: a first-come server's wait is the work in front of it; Little's law for the memory
"""

from __future__ import annotations

from math import isnan

import numpy as np
import numpy.typing as npt

from estimators.prefill_features import Beside, prefill_features
from estimators.view import Column, FleetView

# A prefill past its expected end is still running: some of it must be left.
OVERDUE_SHARE = 0.05

# As arrays: a Python number among the operands is converted at every call, for as much as the call itself.
_HALF, _OVERDUE_SHARE = np.array(0.5), np.array(OVERDUE_SHARE)


def start_s(
    view: FleetView,
    now_s: float,
    *,
    step_s: Column,
    waiting_s: Column,
    foreign_waiting: Column,
    mean_compute_s: Column | float,
) -> Column:
    """When the GPU of every replica could start a new request, KV memory aside: seconds from `now_s`, (rows,), >= 0.

    step_s : length of a step that only decodes, zero where nothing decodes, (rows,)
    waiting_s : prefill work booked behind the one in service, seconds, (rows,)
    foreign_waiting : queued requests of others, known everywhere, (rows,)
    mean_compute_s : mean prefill of a request of this router, the price of one queued foreign request, >= 0
    """
    queue_s: Column = view.head_ends_s - now_s
    np.maximum(queue_s, view.head_compute_s * _OVERDUE_SHARE, out=queue_s)
    np.putmask(queue_s, np.isinf(view.head_ends_s), step_s * _HALF)
    queue_s += waiting_s
    queue_s += foreign_waiting * mean_compute_s
    return queue_s


def waiting_s(view: FleetView, step_tokens: int, mean_context_tokens: float = 0.0) -> Column:
    """Prefill work booked behind the one in service, seconds, shape (rows,)."""
    features = prefill_features(
        linear_s=view.waiting_linear_s,
        attention_s=view.waiting_attention_s,
        new_tokens=np.maximum(view.waiting_tokens, 1.0),
        beside=beside(view, mean_context_tokens),
        step_tokens=step_tokens,
    )
    return np.asarray(np.einsum("fr,rf->r", features, view.coefficients) * (view.waiting_tokens > 0))


def beside(view: FleetView, mean_context_tokens: float) -> Beside:
    """What the running decodes, ours and those of others, add to each step of a prefill; columns (rows,).

    mean_context_tokens : what a step reads of one foreign decode, taken to be that of ours, >= 0
    """
    foreign = or_mean_of_known(view.foreign_decoding, view.ready)
    batch = view.decode_batch + foreign
    context = foreign * mean_context_tokens
    context += view.decode_read_tokens
    return Beside(
        decodes=batch,
        linear_s=batch * (view.linear_s_per_token + view.head_s),
        attention_s=context * view.decode_attention_s_per_pair,
        memory_s=view.weights_s + context * view.context_s_per_token,
        weights_s=view.weights_s,
    )


def lacking_tokens(view: FleetView, *, needed_tokens: Column | float, foreign_tokens: Column) -> tuple[Column, Column]:
    """Context for which every replica lacks KV memory if one more request joins, and what is used; both (rows,).

    Below zero there is as much to spare; NaN where the capacity is unknown.

    needed_tokens : context the request adds, >= 0
    foreign_tokens : context of requests of others, running and queued, (rows,), >= 0
    """
    used = view.decode_context_tokens + view.head_tokens
    used += view.waiting_context_tokens
    used += foreign_tokens
    used *= view.occupancy
    over = used + needed_tokens
    over -= view.capacity_tokens
    return over, used


def memory_wait_s(view: FleetView, *, over_tokens: Column, used_tokens: Column, turnover_s: Column | float) -> Column:
    """How long until every replica has KV memory for one more prompt, seconds, shape (rows,), >= 0.

    With U tokens used, m needed and a capacity K: (U + m - K) / (min(U, K) / turnover). Zero where K is unknown.

    over_tokens, used_tokens : of `lacking_tokens`
    turnover_s : expected time until a running request ends, > 0
    """
    wait_s = over_tokens * turnover_s
    wait_s /= np.maximum(np.minimum(used_tokens, view.capacity_tokens), 1.0)
    return np.asarray(np.fmax(wait_s, 0.0))  # of NaN, where the capacity is unknown, and zero it is zero


def beside_one(view: FleetView, row: int, mean_context_tokens: float) -> Beside:
    """`beside` of one replica, as scalars."""
    foreign = view.foreign_decoding.item(row)
    if isnan(foreign):
        foreign = or_mean_of_known(view.foreign_decoding, view.ready).item(row)
    batch = view.decode_batch.item(row) + foreign
    context = view.decode_read_tokens.item(row) + foreign * mean_context_tokens
    weights_s = view.weights_s.item(row)
    return Beside(
        decodes=batch,
        linear_s=batch * (view.linear_s_per_token.item(row) + view.head_s.item(row)),
        attention_s=context * view.decode_attention_s_per_pair.item(row),
        memory_s=weights_s + context * view.context_s_per_token.item(row),
        weights_s=weights_s,
    )


def decode_step_s(view: FleetView, near: Beside) -> Column:
    """A step of every replica that holds its decodes alone, at the roofline, shape (rows,): few touch few experts."""
    if view.chosen_share >= 1.0:
        return np.asarray(near.memory_s)
    return np.asarray(near.memory_s - view.experts_s * (1.0 - view.chosen_share) ** np.asarray(near.decodes))


def decode_step_one_s(view: FleetView, row: int, near: Beside) -> float:
    """`decode_step_s` of one replica, whose `beside_one` is `near`."""
    untouched = 0.0 if view.chosen_share >= 1.0 else (1.0 - view.chosen_share) ** float(near.decodes)
    return float(near.memory_s) - view.experts_s.item(row) * untouched


def or_mean_of_known(reported: Column, alike: npt.NDArray[np.bool_]) -> Column:
    """Reported numbers; unknown ones (NaN) become the mean of the known `alike`, and zero only when none is known.

    alike : replicas that may stand for each other, those that may take the request; bool, shape (rows,).
    """
    if not isnan(reported.dot(reported)):  # the cheapest look for a NaN
        return reported
    unknown = np.isnan(reported)
    known = alike & ~unknown
    return np.where(unknown, float(reported[known].mean()) if known.any() else 0.0, reported)

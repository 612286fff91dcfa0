"""When everything the fleet has been given is done, and what one more request makes of it.

Model     a replica's prefills end after its queue, and the last answer behind them as long after as such answers take;
          of n running answers the rests are memoryless, so the longest is the mean rest times 1 + 1/2 + ... + 1/n.
          One more request there ends by itself, and puts the others off by its prefill, during which their decodes
          stand still, and by what its context adds to their steps. Elsewhere it puts off fetches that share a link
          with its own, and so the prefills that wait for them
Valid     for the moment of the decision; what each replica has is what the router booked and what it reports
Blind to  which prefill waits for which fetch: while any is put off, all waiting prefills are
Source    largest of n exponential variables: Renyi 1953; fair links: `estimators/links.py`
"""

from __future__ import annotations

import numpy as np

from estimators.candidates import Estimates, Grid
from estimators.queueing import or_mean_of_known
from estimators.view import Column, FleetView

EULER = 0.5772156649015329  # the harmonic numbers are ln(n + 1/2) + this, and 1/24 (n + 1/2)^-2, to 0.2 %


def done_s(estimates: Estimates, fleet: FleetView) -> Grid:
    """When all that is outstanding on any replica would be done if this request took each candidate, (paths, rows)."""
    waits = waiting(fleet)
    there_s = outstanding_s(estimates, fleet)
    rest_tokens = estimates.remaining_tokens / np.maximum(estimates.decoding, 1.0)
    put_off_s = estimates.compute_s + estimates.pace_scale * estimates.step_growth_s * rest_tokens
    own_s = estimates.expected_s + estimates.output_tokens * estimates.pace_s
    here_s = np.maximum(own_s, (there_s + put_off_s) * (there_s > 0.0))
    fetching_s = largest_of_others(np.where(waits, there_s, 0.0))
    fetching_s = (fetching_s + estimates.put_off_s) * (fetching_s > 0.0)
    return np.maximum(here_s, np.maximum(fetching_s, largest_of_others(there_s)))


def outstanding_s(estimates: Estimates, fleet: FleetView) -> Column:
    """When what each replica has now is done, without this request: seconds, (rows,); zero: it has nothing."""
    pace_s = estimates.pace_s - estimates.pace_scale * estimates.step_growth_s
    answers = np.maximum(estimates.decoding, 1.0)
    longest_tokens = estimates.remaining_tokens / answers * harmonic(answers)
    answered_s = estimates.queue_s + estimates.around.others_output_tokens * pace_s
    return np.maximum(longest_tokens * pace_s, answered_s * waiting(fleet))


def added_s(estimates: Estimates) -> Grid:
    """GPU seconds by which the fleet works longer for this request, (paths, rows).

    Its prefill, and what its context adds to each step it decodes in; these steps themselves only where nothing else
    decodes. What others share with it is not added: a count that divides it (`cost.decode_share_s`) sends everything
    to the fullest replica.
    """
    own_steps_s = estimates.step_growth_s + estimates.weights_s * (estimates.decoding < 1.0)
    return np.asarray(estimates.compute_s + estimates.output_tokens * estimates.pace_scale * own_steps_s)


def waiting(fleet: FleetView) -> Column:
    """Whether each replica has prefills that are not over, (rows,), bool."""
    return np.asarray((fleet.head_ends_s > -np.inf) | (or_mean_of_known(fleet.foreign_waiting, fleet.ready) > 0.0))


def harmonic(n: Column) -> Column:
    """1 + 1/2 + ... + 1/n, and smoothly between whole n >= 1."""
    middle = n + 0.5
    return np.asarray(np.log(middle) + EULER + 1.0 / (24.0 * middle * middle))


def largest_of_others(values: Column) -> Column:
    """For each row the largest value of all other rows, (rows,); 0 where there is no other. values : >= 0"""
    if len(values) == 1:
        return np.zeros(1)
    first = int(values.argmax())
    others = np.full(len(values), values[first])
    others[first] = np.delete(values, first).max()
    return others

"""What placing one request costs everybody else, in seconds: the price of work.

Model     queue behind      lambda / (2 (1 - rho)) ((Q + w)^2 - Q^2), the difference of the M/G/1 first-come
                            value function before and after w seconds of work join. Later arrivals only: this
                            request's own wait is in T_first already. The variance of the work is not in it: the
                            value function's slope in the backlog does not depend on it
          joining a queue   lambda Q w: who arrives while the queue that is there now lasts waits w longer, whatever
                            comes after it. Zero on a replica without a queue; lambda is at most what one serves
          levelling         mean over replicas of min(w', how much longer their queue is), w' what w has beyond a mean
                            request's: whoever comes next takes a short queue, so w behind the shortest delays all of
                            them and behind the longest nobody. Equal requests have equal queues
          backlog           lambda mean(Q) w / (1 - rho): who comes until all queues are gone waits w longer, wherever
                            that is. The value function again, with the mean queue instead of one replica's: it says
                            what computing less is worth, and not where to wait
          running decodes   n_dec C + d_step x their expected remaining tokens: they stand still while this
                            prefill runs, and this request's KV lengthens each of their later steps
Valid     rho < 1; clipped at 0.95, where the price is high and still finite. Exact for Poisson arrivals at a replica
          that keeps getting lambda; a rule that reads the price sends fewer to a long queue, so it is then too high
          Levelling and backlog are for times in which no replica is free: while one is, who comes next takes that one
Blind to  chunking, which hides part of the stand-still; a policy's weight stands for that
Source    shape of the value function: Krishnan 1990, Hyytiae et al. 2012; terms as in docs/objectives.md. That unequal
          queues serve first-come servers better, long requests behind the long ones: Harchol-Balter, Crovella, Murta
          1999 (by size alone), Xie, Grosof, Scully 2024 (by size and state)
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from estimators.ranges import require
from estimators.view import Column

LARGEST_UTILISATION = 0.95


def queue_behind_s(*, arrival_rps: float, utilisation: float, queue_s: Column, work_s: Column) -> Column:
    """Expected delay, summed over later arrivals, of `work_s` joining behind `queue_s`. Arrays of one shape, >= 0.

    arrival_rps : arrivals per second at one replica, >= 0; the same for all, since per-replica rates feed back
    utilisation : arrival_rps x mean work, clipped to 0.95
    """
    factor_rps = queue_factor_rps(arrival_rps=arrival_rps, utilisation=utilisation)
    return factor_rps * work_s * (2.0 * queue_s + work_s)


def queue_factor_rps(*, arrival_rps: float, utilisation: float) -> float:
    """lambda / (2 (1 - rho)): what a product of seconds is multiplied with in `queue_behind_s`."""
    require(0 <= arrival_rps < float("inf"), "arrival_rps", arrival_rps)
    require(0 <= utilisation < float("inf"), "utilisation", utilisation)
    return arrival_rps / (2.0 * (1.0 - min(utilisation, LARGEST_UTILISATION)))


def joining_s(*, joining_rps: float, queue_s: Column, work_s: Column) -> Column:
    """Expected delay of those who arrive while the queue of now lasts, when `work_s` joins it; arrays of one shape.

    Of `queue_behind_s` it is what a queue is the reason for, without those whom its delays delay in turn.

    joining_rps : see `joining_rate_rps`
    """
    return np.asarray(joining_rps * queue_s * work_s)


def joining_rate_rps(*, arrival_rps: float, mean_work_s: float) -> float:
    """lambda, and no more than a replica serves: in a burst the others go elsewhere.

    mean_work_s : of a request, seconds, >= 0; 0 : nobody knows yet, and then nothing is said: 0.
    """
    return min(arrival_rps, 1.0 / mean_work_s) if mean_work_s > 0.0 else 0.0


def levelling_s(*, queue_s: Column, work_s: Column, among: npt.NDArray[np.bool_]) -> Column:
    """By how much `work_s` behind each queue lengthens it as far as there are longer ones, mean over those `among`.

    queue_s : (rows,), >= 0; work_s : (..., rows), >= 0; among : replicas that can be chosen, (rows,), at least one
    """
    others_s = np.sort(queue_s[among])
    below_s = np.concatenate(([0.0], np.cumsum(others_s)))  # of the k shortest, at place k
    reached = np.searchsorted(others_s, queue_s + work_s)
    shorter = np.searchsorted(others_s, queue_s)
    passed_s = below_s[reached] - below_s[shorter] - (reached - shorter) * queue_s
    return np.asarray((passed_s + (len(others_s) - reached) * work_s) / len(others_s))


def backlog_s(
    *, arrival_rps: float, utilisation: float, queue_s: Column, work_s: Column, among: npt.NDArray[np.bool_]
) -> Column:
    """Expected delay, summed over all who come while there are queues, of `work_s` more to compute in the fleet.

    arrival_rps, utilisation : as in `queue_behind_s`
    queue_s : (rows,), >= 0; work_s : (..., rows), >= 0; among : replicas that can be chosen, (rows,), at least one
    """
    factor_rps = queue_factor_rps(arrival_rps=arrival_rps, utilisation=utilisation)
    return np.asarray(2.0 * factor_rps * queue_s[among].mean() * work_s)


def running_decodes_s(
    *, decode_batch: Column, work_s: Column, step_growth_s: Column, remaining_tokens: Column
) -> Column:
    """Delay, summed over running decodes, of a prefill of `work_s` whose KV adds `step_growth_s` to each later step.

    decode_batch : running decodes, >= 0; remaining_tokens : tokens they have yet to produce, summed, >= 0.
    """
    return np.add(decode_batch * work_s, step_growth_s * remaining_tokens)

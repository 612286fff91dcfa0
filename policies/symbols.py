"""The symbols published rules are written in, read from what a policy is lent. Columns of shape (rows,).

Model     h cached tokens; q queued and r running requests. What is cached is what is there now: a rule that knows of
          blocks still being computed has an index of its own, in its module
Valid     for the one decision or event the columns are lent for
Blind to  requests of other routers where replicas report no load: those are taken to be as elsewhere, or none
"""

from __future__ import annotations

import numpy as np

from estimators.estimates import Estimates
from estimators.paths import COLUMN, Path
from estimators.queueing import or_mean_of_known
from estimators.request import RequestFacts
from estimators.view import Column, FleetView

_LOCAL, _RECOMPUTE = COLUMN[Path.LOCAL], COLUMN[Path.RECOMPUTE]


def cached_tokens(request: RequestFacts, estimates: Estimates) -> Column:
    """h: leading tokens of the prompt in each replica's HBM, 0 to n - 1."""
    believed = estimates.reused_tokens[_LOCAL]
    held = estimates.held
    if held is None or held.confirmed_blocks is None:
        return np.asarray(believed)
    return np.asarray(np.minimum(held.confirmed_blocks * float(request.block_tokens), believed))


def reach_tokens(estimates: Estimates, path: Path) -> Column:
    """Leading tokens that need not be computed by `path`; as many as HBM has where the fleet has no such path."""
    reused, column = estimates.reused_tokens, COLUMN[path]
    return np.asarray(reused[column if column < len(reused) else _LOCAL])


def queued(fleet: FleetView) -> Column:
    """q: requests that wait behind the prefill in service, >= 0."""
    in_service = fleet.head_ends_s > -np.inf
    foreign = or_mean_of_known(fleet.foreign_waiting, fleet.ready)
    return np.maximum(fleet.booked - fleet.decode_batch - in_service, 0.0) + foreign


def running(fleet: FleetView) -> Column:
    """r: requests that decode, and the one whose prefill is in service."""
    in_service = fleet.head_ends_s > -np.inf
    return fleet.decode_batch + in_service + or_mean_of_known(fleet.foreign_decoding, fleet.ready)


def peak_prefill_tokens_per_s(fleet: FleetView) -> Column:
    """Prompt tokens a replica's card computes in a second when nothing but matrix work limits it, > 0."""
    return 1.0 / fleet.linear_s_per_token


def path_without_fetch(estimates: Estimates, row: int) -> Path:
    """What `row` does when told to fetch nothing; its best path where it fetches without being asked."""
    for path in (Path.LOCAL, Path.RECOMPUTE):
        if estimates.possible[COLUMN[path], row]:
            return path
    return estimates.path_at(row)

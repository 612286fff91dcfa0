"""Mooncake's conductor: the smallest transfer + queue + prefill, where a transfer is made when it is long enough.

Model     on each replica: when the best holder's prefix (store or peer) is more than `factor` times the replica's own,
          it is fetched, T = transfer + queue + prefill of the rest; else T = queue + prefill. The smallest T. Times are
          added although they overlap on many engines: that is the published rule
Reads    estimated queue, fetch and prefill of every replica and path
Ties     broken uniformly at random
Blind to what the choice costs others; on engines that decide by themselves only what they will do is possible
Source   Qin et al., Mooncake, FAST 2025, algorithm 1. Requests are refused only where `deadline_s` is given
"""

from __future__ import annotations

import numpy as np

from estimators.candidates import Grid
from estimators.estimates import Estimates
from estimators.paths import COLUMN, Path
from estimators.ranges import require
from estimators.request import RequestFacts
from estimators.view import FleetView
from policies.base import Choice, Mask, Refused, choose_candidate
from policies.symbols import reach_tokens

FETCHES = (COLUMN[Path.REMOTE], COLUMN[Path.PEER])


class Conductor:
    """factor : >= 1, published 1.2; deadline_s : of the first token, > 0; None refuses nobody"""

    summary = "the smallest transfer + queue + prefill, fetching prefixes that are much longer elsewhere"
    reads = "estimated queue, fetch and prefill of every replica and path"
    source = "Mooncake, FAST 2025"

    def __init__(self, rng: np.random.Generator, *, factor: float = 1.2, deadline_s: float | None = None) -> None:
        require(1 <= factor < float("inf"), "factor", factor)
        require(deadline_s is None or deadline_s > 0, "deadline_s", deadline_s)
        self._rng = rng
        self._factor = factor
        self._deadline_s = deadline_s

    def choose(self, request: RequestFacts, fleet: FleetView, estimates: Estimates) -> Choice:
        first_token_s = estimates.queue_s + estimates.fetch_s + estimates.prefill_s
        first_token_s[~wanted(estimates, self._factor)] = np.inf
        soonest_s = first_token_s[estimates.possible].min()
        if self._deadline_s is not None and soonest_s > self._deadline_s:
            raise Refused(f"no replica answers within {self._deadline_s:g} s; the soonest would take {soonest_s:.3g} s")
        return choose_candidate(first_token_s, estimates, self._rng)


def wanted(estimates: Estimates, factor: float) -> Mask:
    """Paths the rule takes, (paths, rows): the longest fetch where it is worth it, else the others; possible ones."""
    possible = estimates.possible
    fetched = worth_fetching(estimates, factor)
    taken = possible.copy()
    for column in FETCHES:
        if column < len(possible):
            taken[column] &= fetched[column]
    taken &= fetched | ~fetched.any(axis=0)
    alone = ~taken.any(axis=0)  # nothing the rule would take: what its engine does by itself
    taken[:, alone] = possible[:, alone]
    return np.asarray(taken)


def worth_fetching(estimates: Estimates, factor: float) -> Mask:
    """The possible fetch with the longest prefix on each replica, where it beats its own by `factor`: (paths, rows)."""
    own = reach_tokens(estimates, Path.DISK)
    reach: Grid = np.zeros(estimates.possible.shape)
    for column in FETCHES:
        if column < len(reach):
            reach[column] = np.where(estimates.possible[column], estimates.reused_tokens[column], 0.0)
    longest = reach.max(axis=0)
    return np.asarray((reach == longest) & (longest > factor * own))

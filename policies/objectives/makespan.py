"""The earliest moment at which everything outstanding, this request included, is done.

Model    the moment of each candidate, see `estimators/outstanding.py`; of those within 1 % of the earliest, the least
         added GPU seconds over the fleet, and of those within 1 % of these the earliest first token
Reads    queue, fetch, compute, pace, decodes and links of every replica and path
Blind to how long this request itself takes, as long as something else takes longer; requests yet to come
Source   AI Infra textbook, section 9.5.4: one request may end 1.05 s sooner and everything 0.16 s later
"""

from __future__ import annotations

from estimators.estimates import Estimates
from estimators.outstanding import added_s, done_s
from estimators.request import RequestFacts
from estimators.view import FleetView
from policies.objectives.deadlines import Mask
from policies.objectives.objective import TIE, Objective, smallest

ALIKE = 0.01  # relative: closer than estimates are


class Makespan(Objective):
    summary = "the earliest end of everything outstanding, this request included"
    reads = "queue, fetch, compute, decode pace, running decodes and links of every replica and path"
    source = "AI Infra textbook, section 9.5.4"

    def best(self, request: RequestFacts, fleet: FleetView, estimates: Estimates, among: Mask) -> Mask:
        soonest = smallest(done_s(estimates, fleet), among, ALIKE)
        leanest = smallest(added_s(estimates), soonest, ALIKE)
        return smallest(estimates.expected_s, leanest, TIE)

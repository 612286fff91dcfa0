"""The earliest first token of this request: pure and selfish, for comparison and for idle fleets.

Reads    queue, fetch and compute of every replica and path, and how likely the believed copies are there
Blind to everybody else: near saturation it recomputes a prefix elsewhere to save its own wait, and on a mixed fleet it
         sends everything to the cards with the fastest prefill until their decodes starve
Source   T_first = max(Q, R) + C: AI Infra textbook, section 9.5.4
"""

from __future__ import annotations

from collections.abc import Sequence

from estimators.candidates import Few, Grid
from estimators.estimates import Estimates
from estimators.request import RequestFacts
from policies.objectives.objective import Measured


class FirstToken(Measured):
    summary = "the earliest first token of this request (selfish)"
    reads = "queue, fetch and compute of every replica and path"
    source = "T_first = max(Q, R) + C"

    def value(self, request: RequestFacts, estimates: Estimates) -> Grid:
        return estimates.expected_s

    def value_of_few(self, estimates: Estimates, few: Sequence[Few]) -> list[float]:
        return [one.expected_s for one in few]

"""What others lose by a choice, weighted into one number of seconds.

Model    queue_behind x delay of later requests + running_decodes x delay of running decodes + joining x delay of those
         who come while the queue of now lasts, all from `estimators/price.py`,
         + fetch x utilisation x duration of the fetch: what comes over a link is in the way of what others want over
         it, and the memory it comes into is held from the request's arrival, not from its turn. With nobody else
         about it costs nothing
Why more than the delay itself, with joining: of many replicas the one whose queue is estimated too short is taken, so
         the queue that is joined is longer than it looks. That there is none is known without an estimate
Blind to how full each link and each memory is
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from estimators.candidates import Few, Grid
from estimators.estimates import Estimates
from estimators.ranges import require


@dataclass(frozen=True, slots=True)
class Price:
    """Weights, >= 0 and finite; ValueError names the one that is not."""

    queue_behind: float
    running_decodes: float
    fetch: float = 0.0
    joining: float = 0.0

    def __post_init__(self) -> None:
        weight("queue_behind", self.queue_behind)
        weight("running_decodes", self.running_decodes)
        weight("fetch", self.fetch)
        weight("joining", self.joining)

    def of(self, estimates: Estimates) -> Grid:
        """Seconds that others lose by each candidate, (paths, rows)."""
        around = estimates.around
        utilisation = min(1.0, around.arrival_rps * around.mean_compute_s)
        price_s = self.queue_behind * estimates.queue_price_s
        price_s = price_s + self.running_decodes * estimates.decode_price_s
        price_s = price_s + self.fetch * utilisation * estimates.fetch_s
        return price_s if self.joining == 0.0 else price_s + self.joining * estimates.joining_price_s

    def of_few(self, estimates: Estimates, few: Iterable[Few]) -> list[float]:
        """The same of each of `few`, in plain numbers."""
        around = estimates.around
        fetch = self.fetch * min(1.0, around.arrival_rps * around.mean_compute_s)
        queue, decodes, joining = self.queue_behind, self.running_decodes, self.joining
        return [
            queue * one.queue_price_s
            + decodes * one.decode_price_s
            + fetch * one.fetch_s
            + joining * one.joining_price_s
            for one in few
        ]


def weight(name: str, value: float) -> float:
    """`value`, if it can be a weight."""
    require(0 <= value < inf, name, value)
    return value

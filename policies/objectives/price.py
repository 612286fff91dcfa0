"""What others lose by a choice, weighted into one number of seconds.

Model    queue_behind x delay of later requests + running_decodes x delay of running decodes, both from
         `estimators/price.py`
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from estimators.candidates import Grid
from estimators.estimates import Estimates
from estimators.ranges import require


@dataclass(frozen=True, slots=True)
class Price:
    """Weights, >= 0 and finite; ValueError names the one that is not."""

    queue_behind: float
    running_decodes: float

    def __post_init__(self) -> None:
        weight("queue_behind", self.queue_behind)
        weight("running_decodes", self.running_decodes)

    def of(self, estimates: Estimates) -> Grid:
        """Seconds that others lose by each candidate, (paths, rows)."""
        return self.queue_behind * estimates.queue_price_s + self.running_decodes * estimates.decode_price_s


def weight(name: str, value: float) -> float:
    """`value`, if it can be a weight."""
    require(0 <= value < inf, name, value)
    return value

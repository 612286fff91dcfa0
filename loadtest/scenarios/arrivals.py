"""When requests of an open loop come: whether or not earlier ones were answered.

Model     a Poisson process whose rate may change over time, by thinning: candidates at the highest rate, each kept
          with the share that the rate at its moment is of the highest
Valid     rates >= 0 that never exceed the stated highest
Source    Lewis and Shedler, Naval Research Logistics 26(3), 1979
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

Rate = Callable[[float], float]  # requests per second at a moment in seconds


def poisson_times(rate: Rate, *, most_rps: float, until_s: float, rng: random.Random) -> Iterator[float]:
    """Moments in 0..until_s, ascending.

    Raises
    ------
    ValueError : most_rps is not above 0 or not finite, or a rate is outside 0..most_rps.
    """
    if not 0.0 < most_rps < float("inf"):
        raise ValueError(f"the highest rate must be above 0 and finite, not {most_rps}")
    at_s = 0.0
    while (at_s := at_s + rng.expovariate(most_rps)) < until_s:
        now_rps = rate(at_s)
        if not 0.0 <= now_rps <= most_rps * (1 + 1e-9):
            raise ValueError(f"the rate at {at_s:.3f} s is {now_rps}, outside 0..{most_rps}")
        if rng.random() * most_rps < now_rps:
            yield at_s


def bursts(*, base_rps: float, factor: float, every_s: float, for_s: float) -> Rate:
    """`base_rps`, and `factor` times that in the last `for_s` of each `every_s`."""

    def rate(at_s: float) -> float:
        return base_rps * (factor if at_s % every_s >= every_s - for_s else 1.0)

    return rate


def ramp(*, from_rps: float, to_rps: float, over_s: float) -> Rate:
    """Straight from one rate to the other, and there it stays."""

    def rate(at_s: float) -> float:
        return from_rps + (to_rps - from_rps) * min(1.0, at_s / over_s)

    return rate

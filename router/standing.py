"""How each replica has been doing: up or down, what it serves, failures in a row and the rest after them.

Model     a replica that failed rests, twice as long after each failure in a row; one that rests is chosen only when
          nobody else can be. Failures of requests that were placed before the last failure are the same incident
Valid     any order of reports and failures
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

FIRST_REST_S = 1.0
LONGEST_REST_S = 30.0


@dataclass(slots=True)
class Standing:
    """One replica. models : None until it has said what it serves; empty when it does not say."""

    up: bool = False
    models: frozenset[str] | None = None
    failures: int = 0  # in a row
    failed_at_s: float = -np.inf
    rests_until_s: float = -np.inf
    ended_at_s: deque[float] = field(default_factory=lambda: deque(maxlen=1024))  # recent ends, for load reports

    def may_serve(self, model: str) -> bool:
        """Whether it serves `model`, as far as is known; "" is any model."""
        return not model or not self.models or model in self.models

    def came_up(self, models: frozenset[str]) -> None:
        """It answers its probes and serves `models`."""
        self.up, self.models = True, models
        self.failures, self.rests_until_s = 0, -np.inf

    def failed(self, placed_at_s: float, now_s: float) -> None:
        """A request that was placed at `placed_at_s` failed there: one more in a row, unless of the same incident."""
        if placed_at_s < self.failed_at_s:
            return
        self.failures += 1
        self.failed_at_s = now_s
        rest_s = min(LONGEST_REST_S, FIRST_REST_S * 2.0 ** min(self.failures - 1, 10))
        self.rests_until_s = now_s + rest_s

    def overloaded(self, now_s: float, rest_s: float) -> None:
        """It answered that it has too much to do: no failure, but others first for `rest_s`."""
        self.rests_until_s = max(self.rests_until_s, now_s + rest_s)

    def ended_since(self, at_s: float) -> int:
        """Requests that ended there since `at_s`, of the last thousand."""
        count = 0
        for ended_s in reversed(self.ended_at_s):
            if ended_s < at_s:
                break
            count += 1
        return count


def serving(standings: list[Standing], model: str) -> list[int]:
    """Rows that are up and may serve `model`."""
    return [
        row
        for row, standing in enumerate(standings)
        if standing.up and (not model or not standing.models or model in standing.models)
    ]


def rested(standings: list[Standing], rows: list[int], tried: set[int], now_s: float) -> list[int]:
    """Of `rows`, those to choose from: not tried yet, and resting only when there is no other."""
    if tried:
        rows = [row for row in rows if row not in tried]
    return [row for row in rows if standings[row].rests_until_s <= now_s] or rows

"""Which candidates are in time, and what to do when none is.

Model     a candidate meets the deadlines where the probability that its first token comes in time, times that of its
          pace, is at least `meets`. A request's own deadlines count before those of the configuration
Valid     deadlines counted from the choice
Blind to  time a request has spent before its choice; the spread of one replica's pace, see `estimators.likely`
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import inf

import numpy as np
import numpy.typing as npt

from estimators.candidates import Grid
from estimators.estimates import Estimates
from estimators.likely import in_time, on_pace
from estimators.ranges import require
from estimators.request import RequestFacts

Mask = npt.NDArray[np.bool_]

LARGEST_MS = 1e9  # a deadline beyond it is none


class Late(Enum):
    """What happens to a request that no candidate serves in time."""

    BEST_EFFORT = "best_effort"  # the best of the late ones takes it
    QUEUE = "queue"  # it waits until somebody can, or its time is up
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Those of the configuration.

    first_token_s, pace_s : seconds to the first token, and for each further one on average, > 0; None: no deadline
    meets : probability of being in time that counts as in time, 0 < meets < 1
    late : what to do when nobody reaches it
    """

    first_token_s: float | None = None
    pace_s: float | None = None
    meets: float = 0.9
    late: Late = Late.BEST_EFFORT

    @classmethod
    def of_settings(cls, *, slo_ttft_ms: float | None, slo_tpot_ms: float | None, meets: float, late: str) -> Deadlines:
        """As a configuration writes them; ValueError says which is wrong."""
        require(0 < meets < 1, "meets", meets)
        require(late in {way.value for way in Late}, "late", late, f"none of {', '.join(way.value for way in Late)}")
        return cls(_seconds(slo_ttft_ms, "slo_ttft_ms"), _seconds(slo_tpot_ms, "slo_tpot_ms"), meets, Late(late))

    def of(self, request: RequestFacts) -> tuple[float | None, float | None]:
        """(first token, pace) deadlines that count for `request`, seconds."""
        first_s = self.first_token_s if request.deadline_s is None else request.deadline_s
        pace_s = self.pace_s if request.pace_deadline_s is None else request.pace_deadline_s
        return first_s, pace_s

    def probability(self, request: RequestFacts, estimates: Estimates) -> Grid | None:
        """That each candidate is in time, (paths, rows); None where nothing has to be."""
        first_s, pace_s = self.of(request)
        if first_s is None and pace_s is None:
            return None
        chance = np.ones(estimates.possible.shape)
        if first_s is not None:
            chance = in_time(estimates, first_s, level=self.meets)
        return chance if pace_s is None else chance * on_pace(estimates, pace_s)


def _seconds(value_ms: float | None, name: str) -> float | None:
    if value_ms is None:
        return None
    usable = isinstance(value_ms, int | float) and not isinstance(value_ms, bool) and 0 < value_ms < inf
    require(usable, name, value_ms, "not milliseconds above 0")
    return None if value_ms > LARGEST_MS else value_ms / 1000.0

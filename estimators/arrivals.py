"""Arrival rate and mean prefill work of the fleet, learned online.

Model     exponentially weighted mean of gaps between arrivals and of work per arrival, over `memory` arrivals
Valid     from the second arrival on; before that the rate is unknown and taken as zero
Blind to  bursts shorter than the memory
"""

from __future__ import annotations

from estimators.ranges import require


class ArrivalRate:
    """Arrivals of the whole fleet.

    rate_rps : arrivals per second, >= 0; reading never changes it
    mean_work_s : mean prefill time of a placed request, >= 0
    """

    def __init__(self, memory: int = 100) -> None:
        require(memory >= 1, "memory", memory)
        self._gain = 1.0 / memory
        self._last_s: float | None = None
        self._gap_s = 0.0
        self._gaps = 0
        self._works = 0
        self.mean_work_s = 0.0

    def arrived(self, now_s: float) -> None:
        """One request arrived at `now_s`, on a clock that does not go back."""
        if self._last_s is not None:
            self._gaps += 1
            self._gap_s += max(self._gain, 1.0 / self._gaps) * (now_s - self._last_s - self._gap_s)
        self._last_s = now_s

    def placed(self, work_s: float) -> None:
        """One request was placed and will take `work_s` (>= 0) GPU seconds of prefill."""
        self._works += 1
        self.mean_work_s += max(self._gain, 1.0 / self._works) * (work_s - self.mean_work_s)

    @property
    def rate_rps(self) -> float:
        return 1.0 / self._gap_s if self._gap_s > 0 else 0.0

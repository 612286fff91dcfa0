"""Arrival rate, mean prefill work and mean context of one model's requests, learned online.

Model     arrivals: a count that fades with time over the time it stands for, both with constant `memory_s`, so a
          quiet hour is forgotten as fast as a burst; work and context: exponentially weighted means
Valid     rate from the second arrival on; means of nothing are zero. Unbiased for Poisson arrivals at any rate:
          neither the arrival that began the count nor the one that asks is counted
Blind to  bursts much shorter than the memory. The variance of the work is not kept: it moves the mean wait of a
          queue, but drops out of the price of adding to one (`price.py`)
"""

from __future__ import annotations

from math import exp, inf

from estimators.ranges import require

LEAST_WINDOW_S = 1.0  # a burst in the first moments is no rate
SAMPLES = 100  # requests the two means look back on


class Traffic:
    """Requests of one model over all its replicas.

    mean_compute_s : mean prefill time of an answered request, >= 0
    mean_context_tokens : mean prompt of an answered request, >= 0
    """

    def __init__(self, memory_s: float = 30.0) -> None:
        require(0 < memory_s < inf, "memory_s", memory_s)
        self._memory_s = memory_s
        self._began_s: float | None = None
        self._last_s = 0.0
        self._count = 0.0
        self._answered = 0
        self.mean_compute_s = 0.0
        self.mean_context_tokens = 0.0

    def arrived(self, now_s: float) -> None:
        """One request arrived at `now_s`, on a clock that does not go back."""
        if self._began_s is None:
            self._began_s = now_s
        self._count = self._faded(now_s) + 1.0
        self._last_s = now_s

    def answered(self, compute_s: float, context_tokens: float) -> None:
        """One request was answered; its prefill took `compute_s` (>= 0) for a prompt of `context_tokens` (>= 0)."""
        require(0 <= compute_s < inf, "compute_s", compute_s)
        require(0 <= context_tokens < inf, "context_tokens", context_tokens)
        self._answered += 1
        gain = max(1.0 / SAMPLES, 1.0 / self._answered)
        self.mean_compute_s += gain * (compute_s - self.mean_compute_s)
        self.mean_context_tokens += gain * (context_tokens - self.mean_context_tokens)

    def rate_rps(self, now_s: float) -> float:
        """Arrivals per second as of `now_s`, >= 0; reading changes nothing. Zero before a second arrival.

        An arrival at exactly `now_s` is taken for the one that asks: a request does not wait behind itself.
        """
        if self._began_s is None or now_s <= self._began_s:
            return 0.0
        began = exp((self._began_s - now_s) / self._memory_s)
        asking = 1.0 if now_s == self._last_s else 0.0
        count = max(0.0, self._faded(now_s) - began - asking)
        return count / max(self._memory_s * (1.0 - began), LEAST_WINDOW_S)

    def utilisation(self, now_s: float, *, replicas: int) -> float:
        """Share of each replica's time that prefills would take, were they spread evenly over `replicas` (>= 1).

        Arrival rate x mean work, >= 0. More than one says the fleet falls behind; zero while nothing was answered.
        """
        require(replicas >= 1, "replicas", replicas)
        return self.rate_rps(now_s) * self.mean_compute_s / replicas

    def _faded(self, now_s: float) -> float:
        return self._count * exp((self._last_s - now_s) / self._memory_s)

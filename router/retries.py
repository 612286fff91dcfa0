"""How many second attempts the router allows itself, so that an outage is not multiplied by retries.

Model     a bucket of tokens: every request adds a share of one, every second adds some, an attempt after the first
          takes a whole one, and what is above the burst is lost. So in any stretch of time
          retries <= burst + share x requests + per_s x seconds
Valid     calls in order of time; a time before the last one counts as the last one
Blind to  who retries: one client's failing requests can spend what all share
Source    retry budgets of Finagle and linkerd
"""

from __future__ import annotations

from typing import Annotated

import msgspec

NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class RetryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `retries`: what second attempts may cost. All three at 0: there are none."""

    share: NotNegative = 0.2  # of requests; at 1 a total outage doubles the traffic
    per_s: NotNegative = 1.0  # beside it, so that a router with little traffic can retry too
    burst: NotNegative = 10.0  # saved up in good times: what one dying replica's requests may take at once


class RetryBudget:
    """Tokens for attempts after the first. Starts full."""

    def __init__(self, config: RetryConfig) -> None:
        self._config = config
        self._tokens = config.burst
        self._counted_to_s: float | None = None

    def request(self, now_s: float) -> None:
        """A request arrived at `now_s`: first attempts are free and earn."""
        self._refill(now_s, self._config.share)

    def take(self, now_s: float) -> bool:
        """Spend one token, if there is one."""
        self._refill(now_s, 0.0)
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def left(self, now_s: float) -> float:
        """Attempts that could be made at `now_s`, with its fraction. Reading changes nothing."""
        return self._after(now_s, 0.0)

    def _refill(self, now_s: float, earned: float) -> None:
        self._tokens = self._after(now_s, earned)
        if self._counted_to_s is None or now_s > self._counted_to_s:
            self._counted_to_s = now_s

    def _after(self, now_s: float, earned: float) -> float:
        passed_s = 0.0 if self._counted_to_s is None else max(0.0, now_s - self._counted_to_s)
        return min(self._config.burst, self._tokens + earned + passed_s * self._config.per_s)

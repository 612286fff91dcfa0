"""How many second attempts the router allows itself, so that an outage is not multiplied by retries.

Model     a bucket of tokens: every request adds a share of one, every second adds some, an attempt after the first
          takes a whole one, and what is above the burst is lost. So in any stretch of time
          retries <= burst + share x requests + per_s x seconds
Valid     calls in order of time; a time before the last one counts as the last one
Blind to  who retries: one client's failing requests can spend what all share
Source    retry budgets of Finagle and linkerd
"""

from __future__ import annotations

from math import inf
from typing import Annotated

import msgspec

NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class RetryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `retries`: what second attempts may cost. All three at 0: there are none."""

    share: NotNegative = 0.2  # of requests; at 1 a total outage doubles the traffic
    per_s: NotNegative = 1.0  # beside it, so that a router with little traffic can retry too
    burst: NotNegative = 10.0  # saved up in good times: what one dying replica's requests may take at once


class RetryBudget:
    """Tokens for attempts after the first. Starts full. made, denied : attempts that were asked for, so far"""

    def __init__(self, config: RetryConfig) -> None:
        self._share, self._per_s, self._burst = config.share, config.per_s, config.burst
        self._tokens = config.burst
        self.made = self.denied = 0
        self._counted_to_s = inf  # nothing was counted yet

    def request(self, now_s: float) -> None:
        """A request arrived at `now_s`: first attempts are free and earn."""
        self._refill(now_s, self._share)

    def take(self, now_s: float) -> bool:
        """Spend one token, if there is one."""
        self._refill(now_s, 0.0)
        if self._tokens < 1.0:
            self.denied += 1
            return False
        self._tokens -= 1.0
        self.made += 1
        return True

    def left(self, now_s: float) -> float:
        """Attempts that could be made at `now_s`, with its fraction. Reading changes nothing."""
        return self._after(now_s, 0.0)

    def _refill(self, now_s: float, earned: float) -> None:
        self._tokens = self._after(now_s, earned)
        if now_s > self._counted_to_s or self._counted_to_s == inf:
            self._counted_to_s = now_s

    def _after(self, now_s: float, earned: float) -> float:
        tokens = self._tokens + earned
        if now_s > self._counted_to_s:
            tokens += (now_s - self._counted_to_s) * self._per_s
        return tokens if tokens < self._burst else self._burst

"""How many tokens a request will still produce, learned from those that ended.

Model     exponentially weighted mean over the last answers, from a prior of 256, capped by the client's limit
Valid     answers whose usage was seen
Blind to  the request itself: prompt length, route and session are not used yet
"""

from __future__ import annotations

from estimators.ranges import require

PRIOR_TOKENS = 256.0


class OutputLength:
    """mean_tokens : expected output of the next answer, tokens, > 0."""

    def __init__(self, memory: int = 100) -> None:
        require(memory >= 1, "memory", memory)
        self._gain = 1.0 / memory
        self._seen = 0
        self.mean_tokens = PRIOR_TOKENS

    def observe(self, tokens: int) -> None:
        """One answer ended with `tokens` (>= 0) output tokens."""
        require(tokens >= 0, "tokens", tokens)
        self._seen += 1
        # The prior counts as ten answers, then fades.
        self.mean_tokens += max(self._gain, 1.0 / (10 + self._seen)) * (tokens - self.mean_tokens)

    def expected(self, max_tokens: int | None) -> float:
        """Expected output tokens of a request limited to `max_tokens` (None: no limit)."""
        return self.mean_tokens if max_tokens is None else min(self.mean_tokens, float(max_tokens))

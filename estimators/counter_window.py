"""What a replica's prefix cache counters say about the hits of our own requests.

Model     over one window: `hit` and `query` tokens by the counters, `reuse` and `prompt` tokens by our own requests.
          Queries beyond our prompts are other clients'. Theirs may or may not have hit, which leaves an interval
          for ours, [hit - foreign, hit]; its point nearest to what is believed is taken. It is shared out over the
          ages by shifting every belief by the same amount of log odds
Valid     windows of several requests: those across a border are counted on one side and expected on the other
Blind to  hits nobody expected: they hide misses of the same size
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import exp, inf

from estimators.ranges import require
from estimators.survival import AGES_S, OLDEST_S, USUAL_AGE_S

AGES = tuple(AGES_S.tolist())
CERTAIN = 1e-9  # beliefs are kept this far from 0 and 1, so that no evidence is beyond them
FURTHEST = 50.0  # shift of the log odds that takes any belief to 0 or 1
HALVINGS = 40


class CounterWindow:
    """Requests of one tier of one replica, and the growth of its counters, since both were last compared.

    requests : ours, started in the window
    """

    __slots__ = ("_hit_tokens", "_prompt_tokens", "_query_tokens", "_tokens_at", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self._tokens_at: dict[float, float] = {}  # age to tokens expected; ages of the table, so few
        self._prompt_tokens = self._hit_tokens = self._query_tokens = 0.0

    def expect(self, *, reuse_tokens: float, prompt_tokens: float, age_s: float) -> None:
        """A request that should reuse so many of its tokens (0 <= reuse <= prompt), last used `age_s` (>= 0) ago."""
        require(0.0 <= reuse_tokens <= prompt_tokens < inf, "reuse_tokens", reuse_tokens)
        require(not age_s < 0.0, "age_s", age_s)
        self.requests += 1
        self._prompt_tokens += prompt_tokens
        if reuse_tokens > 0.0:
            age_s = min(USUAL_AGE_S if age_s != age_s else age_s, OLDEST_S)
            age_s = AGES[bisect_left(AGES, age_s)]
            self._tokens_at[age_s] = self._tokens_at.get(age_s, 0.0) + reuse_tokens

    def count(self, *, hit_tokens: float, query_tokens: float) -> None:
        """The counters grew by so many tokens, both >= 0."""
        require(0.0 <= hit_tokens < inf, "hit_tokens", hit_tokens)
        require(0.0 <= query_tokens < inf, "query_tokens", query_tokens)
        self._hit_tokens += hit_tokens
        self._query_tokens += query_tokens

    @property
    def ages_s(self) -> list[float]:
        """Ages something was expected at, each rounded up to one of `AGES`."""
        return list(self._tokens_at)

    @property
    def parts(self) -> list[float]:
        """Part of the expected tokens at each of `ages_s`; they sum to 1."""
        reuse_tokens = sum(self._tokens_at.values())
        return [tokens / reuse_tokens for tokens in self._tokens_at.values()]

    def shares(self, believed: Sequence[float]) -> tuple[list[float], float]:
        """Part of what was expected at each of `ages_s` that hit, and how well all of it is known; 0..1.

        believed : the shares thought likely before. Something must have been expected.
        """
        reuse_tokens = sum(self._tokens_at.values())
        foreign = max(0.0, self._query_tokens - self._prompt_tokens)
        most = min(1.0, self._hit_tokens / reuse_tokens)
        least = min(most, max(0.0, self._hit_tokens - foreign) / reuse_tokens)
        odds = [(p / (1.0 - p)) for p in (min(max(p, CERTAIN), 1.0 - CERTAIN) for p in believed)]
        factor = exp(self._shift(odds, least, most))
        return [factor * o / (1.0 + factor * o) for o in odds], 1.0 - most + least

    def _shift(self, odds: Sequence[float], least: float, most: float) -> float:
        """Of the log odds, nearest to zero, that brings the total within [least, most]."""
        parts = self.parts

        def total(shift: float) -> float:
            factor = exp(shift)
            return sum(part * factor * o / (1.0 + factor * o) for part, o in zip(parts, odds, strict=True))

        before = total(0.0)
        if least <= before <= most:
            return 0.0
        aim = least if before < least else most
        low, high = (0.0, FURTHEST) if before < least else (-FURTHEST, 0.0)
        for _ in range(HALVINGS):
            middle = (low + high) / 2.0
            low, high = (middle, high) if total(middle) < aim else (low, middle)
        return (low + high) / 2.0

"""What is believed of a list that can only be asked for: the last good answer, for as long as it may count.

Model     an entry is there from the answer that first names it until it has been missing from good answers for
          `grace_s`. An answer that fails, or cannot be used, changes nothing for `keep_s`; after that nothing is listed
Valid     calls in order of time
Blind to  changes between two answers
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from math import inf
from typing import Generic, TypeVar

from estimators.ranges import require

Entry = TypeVar("Entry", bound=Hashable)


class Kept(Generic[Entry]):
    """One list.

    grace_s : how long an entry outlives good answers without it, >= 0; lists that are told in parts need some
    keep_s : how long the last good answer outlives failures, > 0; inf: for good

    failure : why the last answer could not be used; None when it could
    failed_since_s : time of the first failure since the last good answer; NaN without one
    """

    def __init__(self, *, grace_s: float = 0.0, keep_s: float = inf) -> None:
        require(0.0 <= grace_s < inf, "grace_s", grace_s)
        require(keep_s > 0.0, "keep_s", keep_s)
        self._grace_s = grace_s
        self._keep_s = keep_s
        self._seen_s: dict[Entry, float] = {}  # when each was last in a good answer, in the order of that answer
        self._answered = False
        self.failure: str | None = None
        self.failed_since_s = float("nan")

    @property
    def answered(self) -> bool:
        """Whether there has been a good answer."""
        return self._answered

    def good(self, entries: Iterable[Entry], now_s: float) -> None:
        """A whole list, as of `now_s`. An entry that is named twice counts once."""
        named = dict.fromkeys(entries, now_s)
        lately = {entry: seen_s for entry, seen_s in self._seen_s.items() if now_s - seen_s < self._grace_s}
        self._seen_s = {**named, **{entry: seen_s for entry, seen_s in lately.items() if entry not in named}}
        self._answered = True
        self.failure, self.failed_since_s = None, float("nan")

    def failed(self, reason: str, now_s: float) -> bool:
        """No answer, or none that can be used. Whether that is news: the first failure, or another reason."""
        news = self.failure != reason
        if self.failure is None:
            self.failed_since_s = now_s
        self.failure = reason
        return news

    def entries(self, now_s: float) -> list[Entry]:
        """What counts at `now_s`."""
        if self.failure is not None and now_s - self.failed_since_s >= self._keep_s:
            return []
        return list(self._seen_s)

"""Whether the router's tokens are the engine's.

Model     two kinds of evidence for each model and form of prompt. Prompts that were tokenised on both sides: one
          difference is enough. Answers: the engine's `prompt_tokens` against the router's count, and its
          `cached_tokens` against what the directory promised. Answers are judged by the last eight
Valid     prompts the router tokenised itself; what contradicts is believed for a minute at least, then tried again
Blind to  a difference that neither changes a length nor loses a hit
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from router.tokenizing.asked import Form

MOST_MODELS = 64  # whose prompts are judged apart
WRONG_COUNTS, WRONG_HITS, OF_LAST = 3, 5, 8
SURE_HIT_TOKENS = 64  # a promise of less proves nothing when it is not kept
BELIEVED_S = 60.0  # lost hits may have other causes, so they count against the tokens for no longer than this


class State(Enum):
    """What is known about one model and form. A closed set: it becomes a metric label."""

    UNKNOWN = "unknown"
    AGREES = "agrees"
    DISAGREES = "disagrees"


@dataclass(slots=True)
class _Record:
    checks: dict[str, bool] = field(default_factory=dict)  # by replica
    counts: deque[bool] = field(default_factory=lambda: deque(maxlen=OF_LAST))  # whether lengths were equal
    hits: deque[bool] = field(default_factory=lambda: deque(maxlen=OF_LAST))  # whether a promised hit came
    lost_at_s: float = float("-inf")


class Agreement:
    """Evidence for every model and form, and what follows from it."""

    def __init__(self) -> None:
        self._records: dict[tuple[str, Form], _Record] = {}

    def checked(self, model: str, form: Form, replica: str, agrees: bool) -> None:
        """`replica` was asked for the tokens of a prompt the router tokenised too."""
        record = self._record(model, form)
        record.checks[replica] = agrees

    def observed(
        self,
        model: str,
        form: Form,
        *,
        ours: int,
        reported: int | None,
        promised_tokens: float,
        cached: int | None,
        now_s: float,
    ) -> None:
        """An answer came to a prompt the router tokenised.

        ours, reported : its tokens, as counted here and by the engine
        promised_tokens, cached : tokens it was to reuse, and did; None where the engine does not say
        """
        record = self._record(model, form)
        if reported is not None:
            record.counts.append(reported == ours)
        if cached is not None and promised_tokens >= SURE_HIT_TOKENS:
            record.hits.append(cached > 0)
            if cached == 0:
                record.lost_at_s = now_s

    def state(self, model: str, form: Form, now_s: float) -> State:
        """What the evidence says."""
        record = self._records.get((model, form))
        if record is None:
            return State.UNKNOWN
        lost = record.hits.count(False) >= WRONG_HITS
        if lost and now_s - record.lost_at_s >= BELIEVED_S:
            record.hits.clear()  # without credit no hit is promised, so nothing else would end it
            lost = False
        if lost or False in record.checks.values() or record.counts.count(False) >= WRONG_COUNTS:
            return State.DISAGREES
        return State.AGREES if record.checks or True in record.counts else State.UNKNOWN

    def states(self, now_s: float) -> dict[tuple[str, Form], State]:
        """Everything known, by model and form."""
        return {key: self.state(*key, now_s) for key in list(self._records)}

    def differing(self) -> dict[str, list[str]]:
        """Forms of which each replica made other tokens when it was last asked, by replica."""
        found: dict[str, list[str]] = {}
        for (_, form), record in self._records.items():
            for replica, agrees in record.checks.items():
                if not agrees:
                    found.setdefault(replica, []).append(form.value)
        return found

    def _record(self, model: str, form: Form) -> _Record:
        """Evidence of one model; beyond a number of names, which clients could choose freely, they share one."""
        key = (model, form)
        if key not in self._records and len(self._records) >= MOST_MODELS * len(Form):
            key = ("", form)
        return self._records.setdefault(key, _Record())

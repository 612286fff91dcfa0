"""What the router knows of each replica beside its load: its health, what it serves, when requests ended there.

Model     a replica that serves the model is fit if its health lets it take a request. Of the fit, those that nobody
          was asked to leave alone for a moment come first. Where nobody is fit, those that answer with errors are
          better than nobody. A trial that is due takes the next request that has not failed anywhere; one that has is
          a trial only where there is nobody else. Who starts slowly is passed over in turns that are not of its
          share, unless alone
Valid     any order of reports and failures
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from router.health import Health, Trouble


@dataclass(slots=True)
class Standing:
    """One row.

    models : None until its replica has said what it serves; empty when it does not say
    present : it is some replica's; else nothing is asked of it
    drained : nothing new for it, by an operator's wish
    """

    health: Health
    models: frozenset[str] | None = None
    present: bool = True
    drained: bool = False
    ended_at_s: deque[float] = field(default_factory=lambda: deque(maxlen=1024))  # recent ends, for load reports

    @property
    def up(self) -> bool:
        """Whether it answers its probes."""
        return self.health.up

    def may_serve(self, model: str) -> bool:
        """Whether it serves `model`, as far as is known; "" is any model."""
        return self.present and (not model or not self.models or model in self.models)

    def ended_since(self, at_s: float) -> int:
        """Requests that ended there since `at_s`, of the last thousand."""
        count = 0
        for ended_s in reversed(self.ended_at_s):
            if ended_s < at_s:
                break
            count += 1
        return count


def may_serve(standings: Sequence[Standing], model: str) -> bool:
    """Whether anybody may serve `model`, up or not; mostly the first one does."""
    for standing in standings:  # noqa: SIM110  # a generator costs more than the first look
        if standing.may_serve(model):
            return True
    return False


def serving(standings: Sequence[Standing], model: str) -> list[int]:
    """Rows that are up, may serve `model` and are not drained."""
    return [
        row
        for row, standing in enumerate(standings)
        if standing.health.up
        and not standing.drained
        and (not model or not standing.models or model in standing.models)
    ]


def fit(standings: Sequence[Standing], rows: list[int], tried: Collection[int], now_s: float) -> list[int]:
    """Of `rows`, those to choose from, full ones included: see the model above.

    `rows` itself, the same list, when all of them may be given any request: then nobody is on trial or starts slowly.
    """
    if tried:
        rows = [row for row in rows if row not in tried]
    elif rows and max([standings[row].health.at_ease_s for row in rows]) <= now_s:  # nearly always
        return rows
    able = [row for row in rows if standings[row].health.may_take(now_s)]
    if tried:
        able = [row for row in able if standings[row].health.trouble is None] or able
    if not able:
        return [row for row in rows if standings[row].health.trouble is Trouble.ERRORS]
    return [row for row in able if standings[row].health.avoid_until_s <= now_s] or able


def on_trial(standings: Sequence[Standing], rows: list[int], now_s: float) -> list[int]:
    """Of `rows`, the one whose trial is due, alone: by estimates it might never be chosen. Empty: there is none."""
    for row in rows:
        health = standings[row].health
        if health.trouble is not None and health.may_take(now_s):
            return [row]
    return []


def in_turn(standings: Sequence[Standing], rows: list[int], now_s: float) -> list[int]:
    """Of `rows`, those whose turn it is, for one choice; all of them if it is nobody's."""
    if len(rows) < 2:
        return rows
    return [row for row in rows if standings[row].health.takes_turn(now_s)] or rows


def next_change_s(standings: Sequence[Standing], now_s: float) -> float | None:
    """When time alone makes a replica fit that is not; None when it does not."""
    times_s = [standing.health.avoid_until_s for standing in standings if standing.health.avoid_until_s > now_s]
    for standing in standings:
        trial_s = standing.health.next_trial_s()
        if trial_s is not None and trial_s > now_s:
            times_s.append(trial_s)
    return min(times_s, default=None)

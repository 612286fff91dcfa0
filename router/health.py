"""Whether one replica may be sent requests, from probes, from what its answers show, and from time.

Model     Up or down is what probes say: several misses in a row take it out, and a miss counts only while nothing else
          is heard of it, since a busy server is late with a probe and a dead one is silent. A breaker is what requests
          say: several failures with no success between them open it; then one trial at a time is let through, the next
          no sooner than an interval after the last, and a trial that is answered closes it. An engine with requests
          running whose counters stand still, and that is not heard of for as long as a first byte may take, is
          frozen, which opens it too. Who returns starts slowly: its share of turns grows in a straight line
Valid     calls in order of time. A silent replica is back within two intervals after it answers again if a first byte
          may take no longer than one; one that could not be reached, with the next probe it answers
Neutral   client errors, which depend on the request; overloaded answers, which ask for patience; clients that leave
Source    circuit breaker: Nygard, Release It!, 2007
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from enum import Enum
from math import inf
from typing import Annotated

import msgspec

Seconds = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]

LEAST_SHARE = 0.1  # of turns, at the start of a slow start


class HealthConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `health`: when a replica is left alone, and how it comes back."""

    probe_period_s: Seconds = 1.0  # between two questions for health; never oftener than load is asked for
    misses_to_eject: Count = 3  # one missed probe proves nothing
    failures_to_open: Count = 3  # with no success between them; 1 makes every broken request an outage
    trial_interval_s: Seconds = 5.0  # longer spares clients the trials and brings a replica back later
    avoid_s: NotNegative = 1.0  # after any failure: others first for this long
    frozen_s: Seconds = 60.0  # no shorter than the longest prefill: counters stand still during one
    slow_start_s: NotNegative = 10.0  # a cold cache and a cold engine are slower than learned; 0: at once


class State(Enum):
    """A closed set: each becomes a metric label."""

    DOWN = "down"  # does not answer probes
    CLOSED = "closed"  # as it should be
    OPEN = "open"  # left alone until the next trial
    TRIAL = "trial"  # one request decides


class Trouble(Enum):
    """Why a request failed, or a breaker opened."""

    UNREACHABLE = "unreachable"  # no connection: a probe that is answered shows the end of it
    SILENT = "silent"  # no answer, a broken one, or no HTTP
    ERRORS = "errors"  # 5xx: it answers, so it is better than nobody
    FROZEN = "frozen"  # requests run, but nothing moves


class Health:
    """One replica."""

    def __init__(self, config: HealthConfig) -> None:
        self._config = config
        self.up = False
        self.trouble: Trouble | None = None  # what opened the breaker; None: it is closed
        self.avoid_until_s = -inf  # others first until then
        self.failures = 0  # since the last success
        self._misses = 0
        self._was_up = False
        self._trial_out = False
        self._next_trial_s = -inf
        self._opened_at_s = -inf
        self._probed_at_s = -inf
        self._heard_at_s = -inf
        self._still_since_s = inf  # when counters were first seen not to move while requests ran; inf: they do
        self._slow_until_s = -inf  # not every turn until then
        self.at_ease_s = -inf  # from when it may be given any request; inf while its breaker is open
        self._turns = 0.0
        self._identity: dict[str, Hashable] = {}

    def state(self) -> State:
        """What is shown of it."""
        if not self.up:
            return State.DOWN
        if self.trouble is None:
            return State.CLOSED
        return State.TRIAL if self._trial_out else State.OPEN

    # Probes

    def came_up(self, now_s: float) -> None:
        """It answers its probes. After an absence that is a return, and what was held against it is void."""
        self._misses = 0
        if not self.up:
            self.up = True
            self.failures, self.avoid_until_s = 0, -inf
            self._close(now_s, slowly=self._was_up)
            self._was_up = True
            self._still_since_s = inf

    def went_down(self) -> None:
        """It does not answer any more: not chosen until it does."""
        self.up = False

    def probed(self, now_s: float, *, alive: bool, progress: bool | None = None, running: float | None = None) -> None:
        """Take in one probe.

        progress : whether the engine's counters moved since the last one; None: they were not seen
        running : requests in the engine; None: it did not say
        """
        heard_since = self._heard_at_s > self._probed_at_s
        self._probed_at_s = now_s
        if not alive:
            self._misses = 0 if heard_since else self._misses + 1
            if self._misses >= self._config.misses_to_eject:
                self.went_down()
            return
        self.came_up(now_s)
        if self.trouble is Trouble.UNREACHABLE:
            self._close(now_s, slowly=True)
        self._watch_progress(now_s, progress, running)

    def _watch_progress(self, now_s: float, progress: bool | None, running: float | None) -> None:
        if progress is None:
            return
        if progress or not running:
            self._still_since_s = inf
            if progress and self.trouble in (Trouble.FROZEN, Trouble.SILENT):
                self._next_trial_s = min(self._next_trial_s, now_s)
            return
        self._still_since_s = min(self._still_since_s, now_s)
        if now_s - max(self._still_since_s, self._heard_at_s) >= self._config.frozen_s:
            self._open(Trouble.FROZEN, now_s)

    def identified(self, facts: Mapping[str, Hashable], now_s: float) -> bool:
        """Whether another backend answers at the same address than the one known so far; it starts slowly then.

        facts : by which backends can be told apart, those that are known now
        """
        known = self._identity
        changed = any(known.get(name, fact) != fact for name, fact in facts.items())
        self._identity = dict(facts) if changed else {**known, **facts}
        if changed:
            self._close(now_s, slowly=True)
        return changed

    # Requests

    def heard(self, now_s: float) -> None:
        """Bytes of an answer came from it."""
        self._heard_at_s = now_s

    def answered(self, placed_at_s: float, now_s: float) -> None:
        """It gave a first token, or a good answer, to a request placed at `placed_at_s`.

        One from before the trouble began does not end it: old streams may flow where new requests fail.
        """
        self._heard_at_s = now_s
        if placed_at_s < self._opened_at_s:
            return
        self.failures = 0
        if self.trouble is not None:
            self._close(now_s, slowly=True)

    def failed(self, trouble: Trouble, now_s: float) -> None:
        """A request failed there."""
        self.failures += 1
        self.avoid_until_s = max(self.avoid_until_s, now_s + self._config.avoid_s)
        self._ease()
        if self.trouble is not None or self.failures >= self._config.failures_to_open:
            self._open(trouble, now_s)

    def overloaded(self, now_s: float, patience_s: float) -> None:
        """It said that it has too much to do: no failure, but others first for `patience_s`."""
        self.avoid_until_s = max(self.avoid_until_s, now_s + patience_s)
        self._ease()

    def trial_over(self, now_s: float) -> None:
        """A trial ended without showing anything, by a client error or a client that left: the next may begin."""
        if self._trial_out:
            self._trial_out = False
            self._next_trial_s = now_s

    # Choice

    def may_take(self, now_s: float) -> bool:
        """Whether it may be sent a request: all of them, or the trial that is due."""
        return self.up and (self.trouble is None or (not self._trial_out and now_s >= self._next_trial_s))

    def chosen(self, now_s: float) -> bool:
        """It was chosen; whether the request is a trial."""
        if self.trouble is None:
            return False
        self._trial_out = True
        self._next_trial_s = now_s + self._config.trial_interval_s
        return True

    def share(self, now_s: float) -> float:
        """Of its turns, how many it should get: 1, or less while it starts slowly."""
        length_s = self._config.slow_start_s
        if now_s >= self._slow_until_s:
            return 1.0
        passed_s = max(0.0, now_s - (self._slow_until_s - length_s))
        return LEAST_SHARE + (1.0 - LEAST_SHARE) * passed_s / length_s

    def takes_turn(self, now_s: float) -> bool:
        """Whether this turn is one of its share; spread evenly. To be asked once for each choice."""
        if self.share(now_s) >= 1.0:
            return True
        self._turns += self.share(now_s)
        if self._turns < 1.0:
            return False
        self._turns -= 1.0
        return True

    def next_trial_s(self) -> float | None:
        """When a trial is due that nothing holds up; None when there is none to wait for."""
        if not self.up or self.trouble is None or self._trial_out:
            return None
        return self._next_trial_s

    # Inside

    def _open(self, trouble: Trouble, now_s: float) -> None:
        if self.trouble is None:
            self._opened_at_s = now_s
            self._next_trial_s = now_s + self._config.trial_interval_s
        self._trial_out = False
        self.trouble = trouble
        self._ease()

    def _close(self, now_s: float, *, slowly: bool) -> None:
        self.trouble, self.failures, self._trial_out = None, 0, False
        if slowly:
            self._slow_until_s, self._turns = now_s + self._config.slow_start_s, 0.0
        self._ease()

    def _ease(self) -> None:
        self.at_ease_s = inf if self.trouble is not None else max(self.avoid_until_s, self._slow_until_s)

"""Whether a replica takes requests: it starts, serves, drains, and can be lost.

Model     starting -> ready after `start_s`; ready <-> draining; anything -> down, and from there, if a time is given,
          starting again without any of its state
Blind to  the time between the process being there and its first answer being slow (compilation, cold caches)
"""

from __future__ import annotations

from enum import Enum
from math import inf

from sim_backends.alarms import Alarm, Alarms


class State(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DOWN = "down"


class NotServing(RuntimeError):
    """The replica takes no requests now; a client finds its port closed, or is told with status 503."""

    def __init__(self, name: str, state: State) -> None:
        super().__init__(f"replica {name} is {state.value} and takes no requests")
        self.name = name
        self.state = state


class Lifecycle:
    """One replica's state. `starts` counts how often its process has been started."""

    def __init__(self, name: str, alarms: Alarms) -> None:
        self.name = name
        self.state = State.READY
        self.starts = 1
        self._alarms = alarms
        self._alarm: Alarm | None = None

    def check(self) -> None:
        """Raises NotServing unless requests are taken."""
        if self.state is not State.READY:
            raise NotServing(self.name, self.state)

    def start(self, now_s: float, start_s: float) -> None:
        """Take requests from `now_s + start_s` on; `start_s` >= 0."""
        self._forget_alarm()
        if start_s == 0.0:
            self.state = State.READY
            return
        self.state = State.STARTING
        self._alarm = self._alarms.at(now_s + start_s, self._ready)

    def drain(self) -> None:
        """Take nothing new. Without effect unless ready."""
        if self.state is State.READY:
            self.state = State.DRAINING

    def resume(self) -> None:
        """Take requests again. Without effect unless draining."""
        if self.state is State.DRAINING:
            self.state = State.READY

    def go_down(self, now_s: float, *, back_after_s: float = inf) -> None:
        """Be gone, and ready again after `back_after_s` >= 0; inf stays down."""
        self._forget_alarm()
        if back_after_s == 0.0:
            self._back(now_s)
            return
        self.state = State.DOWN
        if back_after_s < inf:
            self._alarm = self._alarms.at(now_s + back_after_s, self._back)

    def _ready(self, now_s: float) -> None:
        self._alarm = None
        self.state = State.READY

    def _back(self, now_s: float) -> None:
        self.starts += 1
        self._ready(now_s)

    def _forget_alarm(self) -> None:
        if self._alarm is not None:
            self._alarms.cancel(self._alarm)
            self._alarm = None

"""Whether a load balancer should send requests to this router now, and why not.

Model     ready once a replica is up and, where that is wanted, the cache events of all that are up are followed or a
          grace time is over; not ready any more from the wish to stop on, while requests are still served
Valid     calls in order of time. An event source that is lost later makes nobody wait: its replica serves all the same
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec

NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class StartConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `start`: what has to be there before the router says that it is ready."""

    wait_for_events: bool = False  # without, the first requests may find caches that are not known yet
    grace_s: NotNegative = 30.0  # for events: ready after that all the same


class Readiness:
    """One router's. began_s : when it started, on the clock of the questions"""

    def __init__(self, config: StartConfig, began_s: float) -> None:
        self._waits = config.wait_for_events
        self._until_s = began_s + config.grace_s
        self.stopping = False

    def why_not(self, *, up: bool, unheard: Callable[[], Sequence[str]], now_s: float) -> str | None:
        """Why it is not ready; None when it is.

        up : whether any replica is; unheard : those that are up and whose cache events are not followed yet
        """
        if self.stopping:
            return "the router is stopping"
        if not up:
            return "no replica is up"
        if not self._waits:
            return None
        names = unheard() if now_s < self._until_s else ()
        self._waits = bool(names)
        return f"cache events are not followed yet: {', '.join(names)}" if names else None

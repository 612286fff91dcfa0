"""Between the ledger and rules that watch: what a rule does wrong when it is told costs no request.

Model     a rule's own mistake is logged the first time each kind happens, counted every time, and the request goes on.
          A mistake in `choose` is another matter: it has no choice to go on with, and fails its request
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from estimators.estimates import Estimates
from estimators.view import FleetView
from policies.watcher import Placed, Watcher, watcher_of

log = logging.getLogger(__name__)


class Telling(Watcher):
    """Tells `watcher`. failures : times it raised something"""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._logged: set[tuple[str, type[Exception]]] = set()
        self.failures = 0

    def placed(self, placed: Placed, fleet: FleetView, estimates: Estimates) -> None:
        self._tell("placed", lambda: self._watcher.placed(placed, fleet, estimates))

    def first_token(self, placed: Placed, fleet: FleetView) -> None:
        self._tell("first_token", lambda: self._watcher.first_token(placed, fleet))

    def ended(self, placed: Placed, fleet: FleetView) -> None:
        self._tell("ended", lambda: self._watcher.ended(placed, fleet))

    def _tell(self, what: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as exc:  # a rule can be anybody's, and the booking it is told of must still be ended
            self.failures += 1
            if (what, type(exc)) not in self._logged:
                self._logged.add((what, type(exc)))
                log.exception("a policy failed when it was told of %s; further failures of this kind are counted", what)


def telling(*policies: object) -> Telling | None:
    """One that tells all of `policies` that watch; None when none does."""
    watcher = watcher_of(*policies)
    return None if watcher is None else Telling(watcher)

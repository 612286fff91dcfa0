"""Everything of one running router that tells engines where a prompt's state is: the rules and the calls, joined."""

from __future__ import annotations

from collections.abc import Callable

from estimators.request import RequestFacts
from estimators.view import FleetView
from router.actions import Aside, Hint
from router.directing.control import Control
from router.directing.directions import directions_of, listeners_of
from router.directing.wire import SOURCE_HEADER
from router.fleet import Fleet

ReadPrompt = Callable[[RequestFacts, bytes | memoryview, str], None]  # facts, token ids as JSON, salt


class Telling:
    """Made inside a running loop, with the fleet's view; `stop` it once.

    directions : None where the fleet file says nothing of telling
    drops : lower-case names of client fields that are the router's to set
    """

    def __init__(self, fleet: Fleet, view: FleetView, clock: Callable[[], float]) -> None:
        told = [fleet.told_of(replica) for replica in fleet.replicas]
        self._fleet = fleet
        asides = fleet.says_how_told and any(one.needs_tokens for one in told)
        self.directions = directions_of(fleet, view, aside=asides)
        self.drops = frozenset() if self.directions is None else frozenset({SOURCE_HEADER})
        self._clock = clock
        self._control: Control | None = None
        if asides and fleet.lmcache is not None:
            self._instances = _instances_of(fleet)
            self._control = Control(fleet.lmcache, self._instances, self._over)

    def members_changed(self) -> None:
        """Replicas of the fleet came, went, or are told otherwise."""
        if self.directions is not None:
            self.directions.renew(listeners_of(self._fleet))
        if self._control is not None:
            self._instances[:] = _instances_of(self._fleet)

    async def stop(self) -> None:
        """Give up every call under way."""
        if self._control is not None:
            await self._control.stop()

    def aside(self, aside: Aside) -> None:
        """Begin or end what is told aside; never waits."""
        if self._control is not None:
            self._control.obey(aside)

    def reads_too(self, other: ReadPrompt | None) -> ReadPrompt | None:
        """Who is to be told of every prompt's tokens, beside `other`; None: nobody wants to be."""
        if self._control is None:
            return other
        remember = self._control.prompts.remember
        if other is None:
            return remember

        def both(request: RequestFacts, ids: bytes | memoryview, salt: str) -> None:
            other(request, ids, salt)
            remember(request, ids, salt)

        return both

    def _over(self, hint: Hint, result: str) -> None:
        assert self.directions is not None, "it gave the hint"
        self.directions.reported(hint, result, self._clock())


def _instances_of(fleet: Fleet) -> list[str]:
    """LMCache's name of each replica, by row."""
    return [fleet.told_of(replica).instance or replica.name for replica in fleet.replicas]

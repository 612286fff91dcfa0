"""What a source of replicas is, and the simplest one.

A source is asked for its whole list: at the start, at every look, and after every error. News that a source hears by
itself may only make that look come sooner (`Following.look`), so that a lost or wrong event changes nothing for longer
than one look.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from router.errors import RouterError
from router.fleet import ReplicaSpec


class NoList(RouterError):
    """A source has no list that can be used; the sentence says why. The last good one counts."""


class Source(Protocol):
    """Somebody who lists replicas.

    name : shown to operators, and a metric's label, so of a closed set: as many as are configured
    every_s : seconds between two looks, > 0
    """

    name: str
    every_s: float

    async def read(self) -> Sequence[ReplicaSpec]:
        """The whole list as it is now. Entries without a URL are of replicas that are gone.

        Raises
        ------
        NoList : it cannot be had, or not used
        """
        ...


class Flags:
    """The replicas a configuration names itself: always the same."""

    name = "flags"
    every_s = 3600.0  # there is never anything new

    def __init__(self, replicas: Sequence[ReplicaSpec]) -> None:
        self._replicas = tuple(replicas)

    async def read(self) -> Sequence[ReplicaSpec]:
        return self._replicas

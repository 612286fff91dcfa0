"""The fleet file as a source of replicas: read again when it changes, and taken whole or not at all.

Model     the file's time, size and inode are looked at; a change is read at the look after the one that saw it, so that
          a file that is being written in place is rarely met half done. Whatever the stamp says the file is read every
          half minute, since a stamp can stay as it was. What was read is checked like a file at the start
Valid     a file that is replaced by a rename, which is the way to write one; in place at some risk: a list that was cut
          at the end of a line can be a right one
Blind to  all but `replicas` and new `cards`: with another change the file is refused, because the rest is what the
          router was built from, and half a change would be a state that no file describes
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from router.discovery.sources import NoList
from router.errors import ConfigError
from router.fleet import Fleet, ReplicaSpec, load_fleet

READ_EVERY_S = 30.0

_FIXED = ("model", "links", "store", "fetch", "block_tokens", "speed", "engine", "tiers", "peers", "api_key_env")

Stamp = tuple[int, int, int] | None


class FleetFile:
    """One file.

    fleet : what it held when the router was built, which is the list until a look has settled
    check : raises `ConfigError` for a fleet this router cannot have, for example of keys it does not know
    clock : of the router, seconds
    """

    name = "file"

    def __init__(
        self,
        path: Path,
        fleet: Fleet,
        *,
        check: Callable[[Fleet], object],
        clock: Callable[[], float],
        every_s: float = 1.0,
    ) -> None:
        self.every_s = every_s
        self._path = path
        self._built_of = fleet
        self._check = check
        self._clock = clock
        self._last: Fleet | ConfigError = fleet
        self._stamp: Stamp = None
        self._settled = False
        self._asked = False
        self._read_at_s = clock()

    async def read(self) -> Sequence[ReplicaSpec]:
        stamp = await asyncio.to_thread(self._stamp_now)
        moved, self._stamp = stamp != self._stamp, stamp
        if moved and not self._asked:
            self._settled = False
        elif not self._settled or self._clock() - self._read_at_s >= READ_EVERY_S:
            await self._read()
        if isinstance(self._last, ConfigError):
            raise NoList(str(self._last))
        return self._last.replicas

    def read_anew(self) -> None:
        """Whoever asks has written it: the next look reads the file, whatever its stamp says."""
        self._settled, self._asked = False, True

    async def _read(self) -> None:
        self._settled, self._read_at_s = False, self._clock()  # until the end: what nobody foresaw is met again
        try:
            fleet = await asyncio.to_thread(load_fleet, self._path)  # a thousand entries take half a second
            self._check_fixed(fleet)
            self._check(fleet)
        except ConfigError as exc:
            self._last = exc
        else:
            self._last = fleet
        self._settled, self._asked = True, False

    def _check_fixed(self, fleet: Fleet) -> None:
        built = self._built_of
        other = [key for key in _FIXED if getattr(fleet, key) != getattr(built, key)]
        other += [f"cards.{name}" for name, card in built.cards.items() if fleet.cards.get(name, card) != card]
        if other:
            raise ConfigError(
                f"fleet file {self._path}: {', '.join(f'`{key}`' for key in other)} changed; only `replicas`, and cards"
                " for new ones, can change while the router runs, so nothing of the file is taken: restart it for that"
            )

    def _stamp_now(self) -> Stamp:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

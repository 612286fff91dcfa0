"""The file of client keys, read again when it changes or when somebody says so.

Model     the file's time, size and inode are looked at every second; what was read last and was right stays in force
          until the next that is right, so that a half-written or deleted file locks nobody out and lets nobody in
Blind to  a change that leaves all three as they were: `reload` reads the file whatever they say
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path

from router.errors import ConfigError
from router.gate import Gate
from router.keys import load_keys

LOOK_EVERY_S = 1.0  # how long a key that was taken out may still be used

log = logging.getLogger(__name__)

Stamp = tuple[int, int, int] | None


class KeysFile:
    """Keeps a gate's keys as the file has them. `start` it inside a running loop, `stop` it once.

    rejected : why the file as it is now cannot be used; None when it is in force
    """

    def __init__(self, path: Path, gate: Gate) -> None:
        self.rejected: str | None = None
        self._path = path
        self._gate = gate
        self._seen: Stamp = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Read the file, and watch it from now on. Raises `ConfigError` when it cannot be used."""
        self._seen = self._stamp()
        self._gate.keys = load_keys(self._path)
        self._task = asyncio.get_running_loop().create_task(self._watch(), name="client keys")

    def report(self) -> dict[str, object]:
        """What operators see: how many keys are in force, of whom, and what is wrong with the file, if anything is."""
        keys = self._gate.keys
        return {"keys": len(keys or ()), "names": sorted(keys.names) if keys else [], "rejected": self.rejected}

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def look(self) -> None:
        """Read the file if it has changed since it was last read."""
        if self._stamp() != self._seen:
            self.reload()

    def reload(self) -> None:
        """Read the file now; what cannot be used is logged once and changes nothing."""
        self._seen = self._stamp()
        try:
            keys = load_keys(self._path)
        except ConfigError as exc:
            if self.rejected != str(exc):
                log.warning("client keys stay as they were: %s", exc)
            self.rejected = str(exc)
            return
        self._gate.keys = keys
        self.rejected = None
        log.info("%d client keys are in force", len(keys))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.look()

    def _stamp(self) -> Stamp:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

"""Keeps what a running router learns in its state file: read once, written now and then, and at the end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from router.errors import ConfigError
from router.learning import Learning
from router.state import load_state, save_state

log = logging.getLogger(__name__)


class StateKeeper:
    """Owner of one state file and of the task that writes it. Made inside a running loop.

    clock : the router's own, by which `learning` counts
    every_s : between two writes, > 0
    """

    def __init__(self, path: Path, learning: Learning, clock: Callable[[], float], *, every_s: float) -> None:
        self._path = path
        self._learning = learning
        self._clock = clock
        self._every_s = every_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Take over what an earlier router learned, and begin to write.

        Raises
        ------
        ConfigError : the file cannot be read, or holds something else
        """
        try:
            saved = load_state(self._path)
        except (OSError, ValueError) as exc:
            raise ConfigError(f"state.path: {exc}") from exc
        if saved is not None:
            age_s = saved.age_s(time.time())
            for sentence in self._learning.restore(saved.learned, now_s=self._clock(), age_s=age_s):
                log.warning("%s", sentence)
        self._task = asyncio.get_running_loop().create_task(self._keep_saving(), name="state")

    async def stop(self) -> None:
        """Write a last time."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._save()

    async def _keep_saving(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            await self._save()

    async def _save(self) -> None:
        """One write; a disk that is full or gone costs nothing but the state."""
        learned = self._learning.state(self._clock())
        try:
            await asyncio.to_thread(save_state, self._path, learned, saved_at=time.time())
        except OSError as exc:
            log.warning("what was learned cannot be written to %s: %s", self._path, exc.strerror or exc)

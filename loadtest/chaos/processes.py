"""One process of ours that is started, stopped, held still, killed, and started again at the same addresses."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

START_LIMIT_S = 40.0
STOP_LIMIT_S = 20.0
_LOOK_EVERY_S = 0.05
# Below the ports that systems hand out by themselves: while a server is dead, no connection may get its port.
_PORTS = range(20_000, 32_000)


class NotRunning(Exception):
    """A process did not come up, or did not end; the message says which and why."""


class Command:
    """A `tfirst` subcommand and its options, as one process at a time. Its output is appended to `log`."""

    def __init__(self, name: str, arguments: list[str], *, log: Path) -> None:
        self.name = name
        self._arguments = arguments
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the process that runs, or ran last."""
        assert self._process is not None, "it was started"
        return self._process.pid

    async def start(self, ready: Callable[[], Awaitable[bool]]) -> None:
        """Start it and return when `ready`. Raises NotRunning when it ends instead, or takes too long."""
        process = self._process = self._begin()
        loop = asyncio.get_running_loop()
        until_s = loop.time() + START_LIMIT_S
        while loop.time() < until_s:
            if await ready():
                return
            if process.poll() is not None:
                raise NotRunning(f"{self.name} ended at once: {self.last_words()}")
            await asyncio.sleep(_LOOK_EVERY_S)
        raise NotRunning(f"{self.name} was not there within {START_LIMIT_S:.0f} s: {self.last_words()}")

    def _begin(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "router.cli.main", *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def hold_still(self) -> None:
        """It runs no more, and its sockets stay open: the system takes connections for it that nobody serves."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """It is gone at once, without a word."""
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    async def end(self) -> int:
        """Ask it to end, if it runs, and wait for that; its exit status. Raises NotRunning when it does not end."""
        if self._process is None:
            return 0
        self._signal(signal.SIGTERM)
        try:
            return await asyncio.to_thread(self._process.wait, STOP_LIMIT_S)
        except subprocess.TimeoutExpired as exc:
            raise NotRunning(f"{self.name} did not end within {STOP_LIMIT_S:.0f} s of SIGTERM") from exc

    def last_words(self) -> str:
        """The end of its output, on one line."""
        return " | ".join(self._log.read_text(errors="replace").strip().splitlines()[-3:]) or "it printed nothing"

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


def free_ports(count: int) -> list[int]:
    """So many ports on this machine that nobody listens on now."""
    found: list[int] = []
    for port in _PORTS:
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise NotRunning(f"fewer than {count} ports are free from {_PORTS.start} to {_PORTS.stop}")

"""What a process and its children cost, read from /proc, and how one is started on a core of its own.

Model     utime and stime of a process and of all that descend from it, threads included; VmRSS summed alike
Valid     Linux; children that live through the measurement. One tick is 10 ms, so measure for a second or more
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

START_LIMIT_S = 60.0
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


class NotStarted(Exception):
    """A proxy did not come up; the message says why."""


def stat_of(pid: int) -> tuple[int, float]:
    """Parent, and processor seconds used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1]), (int(fields[11]) + int(fields[12])) * _TICK_S


def family_of(pid: int) -> list[int]:
    """The process and all that descend from it."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry)] = stat_of(int(entry))[0]
    family = [pid]
    for member in family:
        family += [child for child, parent in parents.items() if parent == member]
    return family


def busy_s(family: Sequence[int]) -> float:
    """Processor seconds they have used."""
    return sum(stat_of(pid)[1] for pid in family)


def resident_mib(family: Sequence[int]) -> float:
    """Their resident memory; pages they share count once for each."""
    lines = [line for pid in family for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


@contextlib.contextmanager
def running(
    command: Sequence[str], *, core: int, log: Path, extra: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A process pinned to `core`, its output in `log`; asked to end on the way out, then made to."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["taskset", "-c", str(core), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **extra},
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_served(process: subprocess.Popen[bytes], port: int, log: Path, name: str, model: str = "m") -> None:
    """Return when a completion through `port` is answered with 200."""
    until_s = time.monotonic() + START_LIMIT_S
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps({"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "ready?"}]}).encode(),
        {"content-type": "application/json"},
    )
    while time.monotonic() < until_s and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(request, timeout=5):
            return
        time.sleep(0.2)
    last = " | ".join(log.read_text(errors="replace").strip().splitlines()[-3:])
    raise NotStarted(f"{name} did not serve within {START_LIMIT_S:.0f} s: {last or 'it printed nothing'}")

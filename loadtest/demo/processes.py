"""Starts and stops the demo's processes, and finds out where they listen."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_LIMIT_S = 30.0


class DemoError(Exception):
    """The demo cannot go on; the message says why."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where one running fleet and its router can be reached."""

    traffic: str
    admin: str
    replicas: list[str]


@contextmanager
def running_fleet(fleet: Path, policy: str, folder: Path, *, config: Path | None = None) -> Iterator[Addresses]:
    """A simulated fleet with a router in front, ready for traffic; both are ended on the way out.

    config : of the router, for what no flag here says
    """
    resolved = folder / f"fleet-{policy}.yaml"
    resolved.unlink(missing_ok=True)
    sim_log, router_log = folder / f"sim-{policy}.log", folder / f"router-{policy}.log"
    with started(sim_log, "sim", "--fleet", str(fleet), "--port", "0", "--write-fleet", str(resolved)) as sim:
        wait_for(resolved.exists, sim, sim_log, "the simulated replicas")
        with started(
            router_log,
            "serve",
            *("--fleet", str(resolved), "--policy", policy, "--host", "127.0.0.1", "--port", "0"),
            *("--admin-host", "127.0.0.1", "--admin-port", "0", "--receipts", str(folder / f"receipts-{policy}.jsonl")),
            *(() if config is None else ("--config", str(config))),
        ) as router:
            wait_for(lambda: len(listening(router_log)) == 2, router, router_log, "the router")
            addresses = listening(router_log)
            state: dict[str, Any] = {}

            def all_up() -> bool:
                state.update(get_json(f"{addresses['admin']}/fleet"))
                return all(replica["up"] for replica in state["replicas"]) and all(
                    source["state"] in ("live", "silent") for source in state["event_sources"]
                )

            wait_for(all_up, router, router_log, "the router's view of the fleet")
            urls = [replica["url"] for replica in state["replicas"]]
            yield Addresses(addresses["traffic"], addresses["admin"], urls)


@contextmanager
def started(log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A `tfirst` command running with its output in `log`; asked to end on the way out, then made to."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "router.cli.main", *arguments], stdout=output, stderr=subprocess.STDOUT
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


def wait_for(ready: Any, process: subprocess.Popen[bytes], log: Path, what: str) -> None:
    """Return when `ready()` is true; `DemoError` with the end of its output when the process ends or takes too long."""
    limit = time.monotonic() + START_LIMIT_S
    while time.monotonic() < limit:
        try:
            if ready():
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass  # not listening yet
        if process.poll() is not None:
            raise DemoError(f"{what} ended at once: {tail(log)}")
        time.sleep(0.05)
    raise DemoError(f"{what} did not get ready within {START_LIMIT_S:.0f} s: {tail(log)}")


def listening(log: Path) -> dict[str, str]:
    """Addresses a router printed: `traffic` and `admin`."""
    return dict(re.findall(r"^(traffic|admin)\s+(http://\S+)", log.read_text(), flags=re.MULTILINE))


def get_json(url: str) -> dict[str, Any]:
    """The JSON object at `url`, which is on this machine."""
    with urllib.request.urlopen(url, timeout=5) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def get_text(url: str) -> str:
    """The text at `url`, which is on this machine."""
    with urllib.request.urlopen(url, timeout=5) as response:
        text: str = response.read().decode()
    return text


def tail(log: Path) -> str:
    """The last lines of a log, on one line."""
    return " | ".join(log.read_text(errors="replace").strip().splitlines()[-5:]) or "it printed nothing"

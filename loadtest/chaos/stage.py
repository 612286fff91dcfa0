"""The fleet and the router as processes of their own, and the hands that phases lay on them.

Every replica is one process with one simulated engine of the demo's fleet, so that it can be killed or held still
alone. There is no shared store: it would have to be a process of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from loadtest.chaos.processes import Command, NotRunning, free_ports
from loadtest.chaos.sockets import Sockets, sockets_of

DEMO_FLEET = Path(__file__).parent.parent / "demo" / "fleet.yaml"
SEEN_LIMIT_S = 20.0
_CALL_LIMIT = aiohttp.ClientTimeout(total=5.0)

# Shorter than the defaults, so that a run of minutes sees what takes an hour in production: a dead replica is left
# alone after about a second, a silent one after three, and is back within three.
ROUTER: dict[str, Any] = {
    "host": "127.0.0.1",
    "admin_host": "127.0.0.1",
    "load": {"period_s": 0.25, "timeout_s": 1.0},
    "health": {
        "probe_period_s": 0.5,
        "misses_to_eject": 2,
        "trial_interval_s": 1.0,
        "frozen_s": 3.0,
        "slow_start_s": 2.0,
    },
    "time_outs": {"connect_s": 1.0, "response_head_s": 3.0, "first_byte_s": 3.0, "stall_s": 3.0, "pool_idle_s": 1.0},
    "drain_s": 10.0,
}


@dataclass(frozen=True, slots=True)
class SimReplica:
    """One replica: its process and where it answers."""

    url: str
    command: Command


class Stage:
    """Made by `stage`, which starts and ends everything. `session` is for calls to the router and the replicas."""

    def __init__(
        self, session: aiohttp.ClientSession, folder: Path, *, seed: int, speed: float, replicas: int | None
    ) -> None:
        self.session = session
        self.target = ""  # name of the replica that was harmed last
        self._receipts = folder / "receipts.jsonl"
        self._fleet_file = folder / "fleet.yaml"
        demo = msgspec.yaml.decode(DEMO_FLEET.read_bytes())
        rows = demo["replicas"][:replicas]
        ports = free_ports(2 + 3 * len(rows))
        self._traffic_port, admin_port = ports.pop(), ports.pop()
        self.traffic = f"http://127.0.0.1:{self._traffic_port}"
        self.admin = f"http://127.0.0.1:{admin_port}"
        self.model: str = demo["model"]["name"]
        self._common = {key: demo[key] for key in ("model", "block_tokens", "cards")} | {"speed": speed}
        self._rows = [with_addresses(row, ports) for row in rows]
        self.replicas: dict[str, SimReplica] = {}
        for index, row in enumerate(self._rows):
            own_file = folder / f"fleet-{row['name']}.yaml"
            own_file.write_bytes(msgspec.yaml.encode({**self._common, "replicas": [row]}))
            arguments = ["sim", "--fleet", str(own_file), "--seed", str(seed + index)]
            command = Command(row["name"], arguments, log=folder / f"{row['name']}.log")
            self.replicas[row["name"]] = SimReplica(row["url"], command)
        self.put_fleet(self.fleet_text())
        own = {
            "fleet": str(self._fleet_file),
            "port": self._traffic_port,
            "admin_port": admin_port,
            "seed": seed,
            "receipts": {"path": str(self._receipts)},
            "state": {"path": str(folder / "learned.json"), "every_s": 2.0},
        }
        config_file = folder / "router.yaml"
        config_file.write_bytes(msgspec.yaml.encode(ROUTER | own))
        self.router = Command("the router", ["serve", "--config", str(config_file)], log=folder / "router.log")

    # The fleet

    async def start_replica(self, name: str) -> None:
        """Start its process anew, or for the first time, and return when it answers."""
        replica = self.replicas[name]
        await replica.command.start(self._answers(f"{replica.url}/health"))

    async def set_faults(self, name: str, **faults: object) -> None:
        """Have these faults beside those it has."""
        await self._post(f"{self.replicas[name].url}/sim/faults", faults)

    async def end_faults(self, name: str) -> None:
        async with self.session.delete(f"{self.replicas[name].url}/sim/faults", timeout=_CALL_LIMIT) as response:
            response.raise_for_status()

    async def empty_replica(self, name: str, *, down_s: float) -> None:
        """Have it be a new engine in the same process: connections dropped, 503 for `down_s`, then empty."""
        await self._post(f"{self.replicas[name].url}/sim/restart", {"down_s": down_s})

    def fleet_text(self, *, without: str | None = None) -> bytes:
        """The fleet file with all replicas, or all but one."""
        return msgspec.yaml.encode({**self._common, "replicas": [row for row in self._rows if row["name"] != without]})

    def put_fleet(self, text: bytes) -> None:
        """Have the watched fleet file hold `text`, written as an editor does that cares for nothing: in place."""
        self._fleet_file.write_bytes(text)

    # The router

    async def start_router(self) -> None:
        """Start it and return when it is ready for requests."""
        await self.router.start(self._answers(f"{self.admin}/ready"))

    async def fleet(self) -> dict[str, Any]:
        """What the router says of everything now. Raises aiohttp.ClientError or TimeoutError while it cannot."""
        async with self.session.get(f"{self.admin}/fleet", timeout=_CALL_LIMIT) as response:
            shown: dict[str, Any] = msgspec.json.decode(await response.read())
            return shown

    async def until(self, seen: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait until what the router says is as it has to be, and return that; NotRunning when it is not in time."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + SEEN_LIMIT_S
        while not seen(shown := await self.fleet()):
            if loop.time() > until_s:
                raise NotRunning(f"the router never said what it has to within {SEEN_LIMIT_S:.0f} s")
            await asyncio.sleep(0.05)
        return shown

    def router_sockets(self) -> Sockets:
        """What the router's process holds open now."""
        return sockets_of(self.router.pid, port=self._traffic_port)

    def receipts_text(self) -> bytes:
        """All receipts written so far, of all routers of this run, up to the last whole line."""
        text = self._receipts.read_bytes()
        return text[: text.rfind(b"\n") + 1]

    # Inside

    def _answers(self, url: str) -> Callable[[], Awaitable[bool]]:
        async def ready() -> bool:
            try:
                async with self.session.get(url, timeout=_CALL_LIMIT) as response:
                    return response.status == 200
            except (aiohttp.ClientError, ConnectionError, TimeoutError):
                return False

        return ready

    async def _post(self, url: str, values: object) -> None:
        async with self.session.post(url, data=msgspec.json.encode(values), timeout=_CALL_LIMIT) as response:
            response.raise_for_status()


def with_addresses(row: dict[str, str], ports: list[int]) -> dict[str, str]:
    """A row of `replicas` with three of `ports` for its own, which are taken off."""
    events, replay = (f"tcp://127.0.0.1:{ports.pop()}" for _ in range(2))
    return {**row, "url": f"http://127.0.0.1:{ports.pop()}", "events": events, "replay": replay}


@asynccontextmanager
async def stage(folder: Path, *, seed: int, speed: float, replicas: int | None = None) -> AsyncIterator[Stage]:
    """A running fleet with a router that sees all of it; all of it is ended on the way out.

    folder : for logs, receipts, files; holds none of an earlier run. speed : of the cards. replicas : only the first
    so many of the demo's; None: all of them
    """
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        made = Stage(session, folder, seed=seed, speed=speed, replicas=replicas)
        try:
            await asyncio.gather(*(made.start_replica(name) for name in made.replicas))
            await made.start_router()
            yield made
        finally:
            try:
                await made.router.end()
            except NotRunning:
                made.router.kill()
            for replica in made.replicas.values():
                replica.command.kill()

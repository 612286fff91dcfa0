"""`/sim/*` of one replica: change its faults and restart it. No engine has such routes, and every answer says so.

Served beside the engine's own routes, on the same port, because a fault belongs to one replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from aiohttp import web

from sim_backends.faults import NONE, BadFault, FaultPlan, faults_of

Restart = Callable[[asyncio.BaseTransport | None, float], Awaitable[None]]


class _Restart(msgspec.Struct, forbid_unknown_fields=True):
    """Body of /sim/restart. down_s : how long the replica answers 503 before it is back."""

    down_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class SimFace:
    """Routes over one replica's fault plan.

    restart : makes the replica a new process; told the connection that asks, which alone survives, and how many
        seconds it is away
    drain : has it take nothing new (True), or take requests again (False)
    changed : called after the plan's faults have changed
    """

    def __init__(
        self,
        replica: str,
        plan: FaultPlan,
        *,
        restart: Restart,
        drain: Callable[[bool], None],
        changed: Callable[[], None],
    ) -> None:
        self._replica = replica
        self._plan = plan
        self._restart = restart
        self._drain = drain
        self._changed = changed

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/sim/faults", self._tell)
        app.router.add_post("/sim/faults", self._change)
        app.router.add_delete("/sim/faults", self._end)
        app.router.add_post("/sim/restart", self._be_new)
        app.router.add_post("/sim/drain", self._begin_drain)
        app.router.add_delete("/sim/drain", self._end_drain)

    async def _tell(self, request: web.Request) -> web.Response:
        return self._faults()

    async def _change(self, request: web.Request) -> web.Response:
        """The faults named in the body change, the others stay."""
        try:
            values = msgspec.json.decode(await request.read(), type=dict[str, Any])
            self._plan.set(faults_of(values, base=self._plan.now()))
        except (msgspec.DecodeError, BadFault) as exc:
            return self._answer({"problem": str(exc)}, status=400)
        self._changed()
        return self._faults()

    async def _end(self, request: web.Request) -> web.Response:
        self._plan.set(NONE)
        self._changed()
        return self._faults()

    async def _be_new(self, request: web.Request) -> web.Response:
        try:
            wanted = msgspec.json.decode(await request.read() or b"{}", type=_Restart)
        except msgspec.DecodeError as exc:
            return self._answer({"problem": str(exc)}, status=400)
        await self._restart(request.transport, wanted.down_s)
        return self._answer({"restarted": True})

    async def _begin_drain(self, request: web.Request) -> web.Response:
        self._drain(True)
        return self._answer({"draining": True})

    async def _end_drain(self, request: web.Request) -> web.Response:
        self._drain(False)
        return self._answer({"draining": False})

    def _faults(self) -> web.Response:
        faults = msgspec.structs.asdict(self._plan.now())
        return self._answer({"faults": faults, "struck": dict(self._plan.struck)})

    def _answer(self, said: dict[str, Any], *, status: int = 200) -> web.Response:
        return web.Response(
            body=msgspec.json.encode({"simulated": True, "replica": self._replica, **said}),
            status=status,
            content_type="application/json",
            headers={"x-tfirst-simulated": self._replica},
        )

"""All about a gateway's replicas that a configuration says: who is there at the start, and who follows changes."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan
from pathlib import Path
from typing import Any

import msgspec

from router.config import RouterConfig
from router.discovery.edits import Edits, Reply
from router.discovery.fleet_file import FleetFile
from router.discovery.following import LOOK_EVERY_S, Following, ListReport
from router.discovery.membership import Membership
from router.discovery.names import Names
from router.discovery.reconcile import Stage
from router.discovery.sources import Flags, Source
from router.errors import ConfigError
from router.fleet import Fleet, ReplicaSpec, check_fleet, is_dns
from router.outbound import Outbound
from router.rows import with_spares
from router.sources import event_addresses, replay_addresses

LEAST_ROWS = 8  # where replicas can come


class Discovery:
    """Owner of all sources of replicas of one router.

    fleet : as configured, with names that stand for many replicas
    sources : others than the configured ones
    """

    def __init__(
        self, config: RouterConfig, fleet: Fleet, *, clock: Callable[[], float], sources: tuple[Source, ...] = ()
    ) -> None:
        self._config = config
        self._configured = fleet
        self._outbound: Outbound | None = None
        self._membership: Membership | None = None
        self._fleet: Fleet
        self._file: FleetFile | None = None
        if config.fleet is not None and config.discovery.watch_fleet:
            self._file = FleetFile(Path(config.fleet), fleet, check=self._check_file, clock=clock, every_s=LOOK_EVERY_S)
        first: Source = self._file or Flags(fleet.replicas)
        discovery = config.discovery
        self._names = Names(grace_s=discovery.dns_grace_s, keep_s=discovery.dns_keep_s, every_s=discovery.dns_every_s)
        self.edits = Edits(check=self._check_edit, room=self._room)
        self._following = Following(
            [first, *sources], names=self._names, edits=self.edits, clock=clock, look_every_s=LOOK_EVERY_S
        )
        self._grows = bool(self._file or sources or config.admin_key_env) or any(
            is_dns(replica.url or "") for replica in fleet.replicas
        )

    async def first(self) -> Fleet:
        """The fleet to start with: replicas that are known by now, and spare rows for others.

        Raises
        ------
        ConfigError : more replicas are there than `discovery.max_replicas`
        """
        wanted = await self._following.first()
        rows = rows_for(len(wanted), self._config.discovery.max_replicas, grows=self._grows)
        if len(wanted) > rows:
            raise ConfigError(f"there are {len(wanted)} replicas; discovery.max_replicas is {rows}")
        self._fleet = with_spares(msgspec.structs.replace(self._configured, replicas=wanted), rows)
        return self._fleet

    def start(self, membership: Membership, outbound: Outbound) -> None:
        """Follow what changes from now on."""
        self._membership, self._outbound = membership, outbound
        self._following.start(membership.apply)

    async def stop(self) -> None:
        await self._following.stop()

    def reload(self) -> None:
        """Read every source anew, now."""
        if self._file is not None:
            self._file.read_anew()
        self._following.look(anew=True)

    def check(self, replica: ReplicaSpec) -> None:
        """Raise `ConfigError` for a replica this router cannot have."""
        check_fleet(msgspec.structs.replace(self._fleet, replicas=[replica]))
        if self._outbound is not None:
            self._outbound.check(replica)

    # What operators ask and see

    def edited(self, what: str, body: Any) -> Reply:
        """An admin call: `add`, `drain`, `undrain` or `remove`, with decoded JSON. Its change counts at once."""
        calls = {
            "add": self.edits.add,
            "drain": self.edits.drain,
            "undrain": self.edits.undrain,
            "remove": self.edits.remove,
        }
        if what not in calls:
            return 404, {"error": f"there is no call {what!r}; there are: {', '.join(calls)}"}
        status, answer = calls[what](body)
        if status in (200, 201):
            self._following.apply_now()
        return status, answer

    def reports(self) -> list[ListReport]:
        """Every source, and every DNS name."""
        return self._following.reports()

    def counts(self) -> dict[str, float]:
        """Rows by what they are used for, and replicas that wait for one."""
        rows = [] if self._membership is None else self._membership.rows
        stages = {stage.value: float(sum(row.stage is stage for row in rows)) for stage in Stage}
        waiting = 0 if self._membership is None else len(self._membership.waiting)
        return {**stages, "waiting": float(waiting)}

    def report(self) -> dict[str, Any]:
        """The same and more, as plain values."""
        membership = self._membership
        return {
            "sources": [
                {
                    "name": one.source,
                    "replicas": one.replicas,
                    "rejected": one.failure,
                    "rejected_for_s": None if isnan(one.failed_s) else one.failed_s,
                }
                for one in self.reports()
            ],
            "rows": self.counts(),
            "leaving": [] if membership is None else membership.leaving(),
            "waiting": [] if membership is None else [replica.name for replica in membership.waiting],
            "left_out": [*self._following.left_out, *(() if membership is None else membership.refused)],
        }

    # Inside

    def _room(self) -> int:
        return 0 if self._membership is None else self._membership.room()

    def _check_edit(self, replica: ReplicaSpec) -> None:
        """Whoever may call may name only keys that the configuration names: others are not for replicas."""
        self.check(replica)
        keys = {self._config.api_key_env, self._configured.api_key_env, None}
        keys |= {one.api_key_env for one in self._configured.replicas}
        if replica.api_key_env not in keys:
            raise ConfigError(f"api_key_env: {replica.api_key_env!r} is named by no file of this router")

    def _check_file(self, fleet: Fleet) -> None:
        """Of a whole file, what only a running router can say."""
        if self._outbound is None:  # at the start others check
            return
        event_addresses(fleet)
        replay_addresses(fleet)
        for replica in fleet.replicas:
            self._outbound.check(replica)
        rows = len(self._fleet.replicas)
        if len(fleet.replicas) > rows:
            raise ConfigError(
                f"it lists {len(fleet.replicas)} replicas and this router has room for {rows}:"
                " raise discovery.max_replicas and restart"
            )
        self._fleet.cards.update(fleet.cards)  # those that are known are the same


def rows_for(replicas: int, most: int | None, *, grows: bool) -> int:
    """Rows of a core that starts with so many replicas.

    >>> rows_for(6, None, grows=True), rows_for(6, None, grows=False), rows_for(1, None, grows=True)
    (12, 6, 8)
    """
    if most is not None:
        return most
    return max(LEAST_ROWS, 2 * replicas) if grows else max(1, replicas)

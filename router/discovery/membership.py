"""Carries out what `reconcile` says: rows of the core, and with them whoever polls, follows, relays and shows replicas.

Nothing here decides but the order: who leaves is forgotten by all before anybody else can take its place, and a row is
known to all who address replicas before its replica is watched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from estimators.view import is_nobody, spare_name
from router.assemble import Core
from router.beside_events import BesideEvents
from router.decider import TimedDecider, ranks_of
from router.directing.telling import Telling
from router.discovery.reconcile import SPARE, Row, Stage, Steps, reconcile, same_replica
from router.errors import ConfigError
from router.fleet import Fleet, ReplicaSpec
from router.outbound import Outbound
from router.reported import Reported
from router.rows import left_name
from router.signals.load_board import LoadBoard
from router.signals.poller import LoadPoller
from router.sources import EventSources

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """Whoever has to know of replicas."""

    core: Core
    outbound: Outbound
    sources: EventSources
    poller: LoadPoller
    board: LoadBoard
    reported: Reported
    beside: BesideEvents
    decider: TimedDecider
    telling: Telling


class Membership:
    """Owner of which row is whose.

    fleet : with its spare rows; its list of replicas is kept up to date
    ranks : of each row behind its URL, kept up to date
    look : to be called when the dispatcher was told something: who waits may go, or has nowhere to go
    check : raises `ConfigError` for a replica this router cannot have
    """

    def __init__(
        self,
        fleet: Fleet,
        parts: Parts,
        *,
        ranks: list[int | None],
        look: Callable[[], object],
        check: Callable[[ReplicaSpec], object],
        clock: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._parts = parts
        self._ranks = ranks
        self._look = look
        self._check = check
        self._clock = clock
        self._rows = rows_of(fleet)
        self._waiting: list[ReplicaSpec] = []
        self._refused: dict[ReplicaSpec, str] = {}

    @property
    def rows(self) -> Sequence[Row]:
        """What each row is used for."""
        return self._rows

    @property
    def waiting(self) -> Sequence[ReplicaSpec]:
        """Those that are wanted and have no row yet."""
        return self._waiting

    @property
    def refused(self) -> Collection[str]:
        """Why others that are wanted cannot be had, a sentence each."""
        return self._refused.values()

    def leaving(self) -> list[dict[str, object]]:
        """Those that are gone but for their last requests, as plain values."""
        booked = self._parts.core.dispatcher.view.booked
        return [
            {"name": row.replica.name, "url": row.replica.url, "booked": int(booked[number])}
            for number, row in enumerate(self._rows)
            if row.stage is Stage.LEAVING and row.replica is not None
        ]

    def room(self) -> int:
        """Rows that nobody has or waits for."""
        return sum(row.stage is Stage.SPARE for row in self._rows) - len(self._waiting)

    def apply(self, wanted: list[ReplicaSpec], drained: Collection[str]) -> None:
        """Make the members those that are `wanted`, as far as there is room, and give the `drained` nothing new."""
        freed = self._free_the_empty()
        steps = reconcile(self._possible(wanted), self._rows)
        if steps or freed:
            self._carry_out(steps)
        if steps.waiting != self._waiting:
            self._waiting = steps.waiting
            for replica in steps.waiting:
                log.warning("%s waits for a row: all %d are taken", replica.name, len(self._rows))
        for row, now in enumerate(self._rows):
            if now.stage is Stage.MEMBER and now.replica is not None:
                self._parts.core.dispatcher.drain(row, drained=now.replica.name in drained)
        self._look()

    def _possible(self, wanted: list[ReplicaSpec]) -> list[ReplicaSpec]:
        """Those that can be had; each of the others is in the log once.

        A member whose entry changed into one that cannot be had stays as it is.
        """
        present = {row.replica for row in self._rows if row.replica is not None and row.stage is Stage.MEMBER}
        refused: dict[ReplicaSpec, str] = {}
        possible: list[ReplicaSpec] = []
        for replica in wanted:
            try:
                if replica not in present:
                    self._check(replica)
                possible.append(replica)
            except ConfigError as exc:
                refused[replica] = str(exc)
                if replica not in self._refused:
                    log.warning("%s cannot be a replica: %s", replica.name, exc)
                possible += [known for known in present if same_replica(known, replica)]
        self._refused = refused
        return possible

    def _free_the_empty(self) -> bool:
        """Rows whose last request has ended are spare."""
        core, freed = self._parts.core, False
        for row, now in enumerate(self._rows):
            if now.stage is Stage.LEAVING and core.rows.is_empty(row):
                assert now.replica is not None, "only spare rows are nobody's"
                core.rows.freed(row, now.replica.name, self._clock())
                self._set(row, SPARE, ReplicaSpec(name=spare_name(row)))
                freed = True
        return freed

    def _carry_out(self, steps: Steps) -> None:
        parts, now_s = self._parts, self._clock()
        for row in steps.left:
            self._leave(row, now_s)
        for row, replica in steps.changed.items():
            self._change(row, replica)
        for row, replica in steps.returned.items():
            parts.core.rows.returned(row, replica)
        for row, replica in steps.joined.items():
            parts.core.rows.joined(row, replica, now_s)
        here = steps.returned | steps.changed | steps.joined
        for row, replica in here.items():
            self._set(row, Row(Stage.MEMBER, replica), replica)
        self._tell_all()
        for row, replica in here.items():
            rank = self._ranks[row]
            parts.poller.watch(row, replica.url or "", None if rank is None else str(rank))
        self._log(steps)

    def _leave(self, row: int, now_s: float) -> None:
        parts = self._parts
        parts.sources.removed(row)  # while its name is known there
        parts.poller.unwatch(row)
        parts.core.rows.left(row, now_s)
        parts.board.forget(row)
        parts.reported.forget(row)
        self._set(row, Row(Stage.LEAVING, self._rows[row].replica), ReplicaSpec(name=left_name(row)))

    def _change(self, row: int, replica: ReplicaSpec) -> None:
        """Another entry about the same replica: it keeps all it taught, and its cache unless others tell of it now."""
        parts, before = self._parts, self._rows[row].replica
        assert before is not None, "spare rows do not change"
        parts.poller.unwatch(row)  # it may want another key
        if (before.events, before.replay) != (replica.events, replica.replay):
            parts.sources.removed(row)
            parts.core.directory.clear(row)

    def _set(self, row: int, now: Row, shown: ReplicaSpec) -> None:
        self._rows[row] = now
        self._fleet.replicas[row] = shown

    def _tell_all(self) -> None:
        parts = self._parts
        self._ranks[:] = ranks_of([replica.url for replica in self._fleet.replicas])
        parts.outbound.members_changed()
        parts.sources.members_changed()
        parts.beside.members_changed()
        parts.decider.members_changed(self._ranks)
        parts.telling.members_changed()

    def _log(self, steps: Steps) -> None:
        for row in steps.left:
            replica = self._rows[row].replica
            assert replica is not None, "somebody left it"
            log.info("%s is no replica any more: nothing new goes there", replica.name)
        for verb, replicas in (("joined", steps.joined), ("is back", steps.returned), ("changed", steps.changed)):
            for replica in replicas.values():
                log.info("%s at %s %s", replica.name, replica.url, verb)


def rows_of(fleet: Fleet) -> list[Row]:
    """The rows of a fleet as a router starts with them."""
    return [SPARE if is_nobody(replica.name) else Row(Stage.MEMBER, replica) for replica in fleet.replicas]

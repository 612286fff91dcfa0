"""Which telling belongs to which placement, when it is taken back, and who is not told any more for a while.

Model     what is read with the request is told with it, in its head or body; what has to be there before is told aside,
          as soon as the replica is known, and taken back when the request goes elsewhere or ends before its first
          token. Whether a telling did any good is learned from the reused tokens that engines report, and from the
          answers of those who are told aside; what fails constantly rests (`rests.py`), and meanwhile estimates are of
          what the replica does untold
Valid     one object for each router, told of everything in order of time
Blind to  engines that do not report reused tokens, as vLLM by default: their peers are taken to be read
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import Any
from urllib.parse import urlsplit

from estimators.paths import Path
from estimators.told import Told
from estimators.view import FleetView, is_nobody
from router.actions import Action, Aside, Ended, Hint, Hold, Means, Refuse, Send, Withdraw
from router.directing.rests import Rests
from router.directing.settings import ToldSpec, host_and_port
from router.directing.wire import TRANSFER_FIELD, source_field, source_member
from router.fleet import Fleet, ReplicaSpec
from router.placing import Placement

WORKED_SHARE = 0.5  # of what was to be read, reported as reused: a block that has just gone is no engine's fault

_PEER = {"header": Means.HEADER, "body": Means.BODY, "move": Means.MOVE}
_WITH_REQUEST = (Means.HEADER, Means.BODY)


@dataclass(frozen=True, slots=True)
class Listener:
    """One replica, as it is told. host, port : where the others read it"""

    name: str
    told: ToldSpec
    host: str
    port: int

    def means(self, path: Path) -> Means | None:
        """How it is told to take `path`; None: it does that by itself, or not at all."""
        if path is Path.PEER and self.told.peer is not None:
            return _PEER[self.told.peer]
        if path is Path.REMOTE and self.told.store == "prefetch":
            return Means.PREFETCH
        if path in (Path.HOST, Path.DISK) and self.told.own == "pin":
            return Means.PIN
        return None


class Directions:
    """Owner of what is told and not yet over.

    listeners : the replicas, by row; counts : tellings by means and by what became of them

    aside : whether there is somebody who tells what is told aside; else replicas told so are told nothing
    has_store : whether the fleet has a store, which replicas may look up by themselves
    """

    def __init__(
        self, listeners: Sequence[Listener], view: FleetView, *, has_store: bool = True, aside: bool = True
    ) -> None:
        self.counts: Counter[tuple[Means, str]] = Counter()
        self.listeners = list(listeners)
        self._rows = {listener.name: row for row, listener in enumerate(listeners)}
        self._has_store = has_store
        self._told = view.told = Told.nothing(view.rows)
        self._aside = aside
        self._by_row = [Rests() for _ in listeners]  # of what is told with the request
        self._services = {means: Rests() for means in Means}  # of who is told aside, which all replicas share
        self._open: dict[int, Hint] = {}  # by the request's identity: clients choose ids, and may choose one twice
        self._numbers = count(1)  # of tellings in a body
        self._look_s = -inf  # when somebody's rest is over
        self._look_anew()

    def renew(self, listeners: Sequence[Listener]) -> None:
        """Replicas came, went or are told otherwise. listeners : as at the start; of others nothing is known yet."""
        for row, listener in enumerate(listeners):
            if listener != self.listeners[row]:
                self._by_row[row] = Rests()
        self.listeners = list(listeners)
        self._rows = {listener.name: row for row, listener in enumerate(listeners)}
        self._look_anew()

    def _look_anew(self) -> None:
        asks = [self._has_store and listener.told.store == "engine" for listener in self.listeners]
        self._told.asks_store[:] = asks
        self._look_s = -inf
        self.look(0.0)

    # Who can be told

    def look(self, now_s: float) -> None:
        """Before a decision: rests that are over by now are."""
        if now_s < self._look_s:
            return
        self._look_s = inf
        for row, listener in enumerate(self.listeners):
            peer, store = listener.means(Path.PEER), listener.means(Path.REMOTE)
            self._told.peer[row] = self._can(peer, row, now_s)
            self._told.store[row] = self._can(store, row, now_s)
            self._told.ahead_peer[row] = peer is Means.MOVE
            self._told.ahead_store[row] = store is Means.PREFETCH

    def _can(self, means: Means | None, row: int, now_s: float) -> bool:
        if means is None or not (self._aside or means in _WITH_REQUEST):
            return False
        rests = self._rests(means, row)
        if rests.usable(now_s):
            return True
        self._look_s = min(self._look_s, rests.until_s)
        return False

    def report(self, now_s: float) -> dict[str, Any]:
        """What operators see. resting : replicas that are told nothing for a while, with the means that failed"""
        resting = {
            listener.name: means.value
            for row, listener in enumerate(self.listeners)
            for means in (listener.means(Path.PEER), listener.means(Path.REMOTE))
            if means is not None and not self._rests(means, row).usable(now_s)
        }
        kinds = {f"{means.value}_{result}": total for (means, result), total in self.counts.items()}
        return {"hints": kinds, "resting": resting, "open": len(self._open)}

    def _rests(self, means: Means, row: int) -> Rests:
        return self._by_row[row] if means in _WITH_REQUEST else self._services[means]

    # What is told

    def directed(self, actions: Sequence[Action], now_s: float) -> list[Aside]:
        """Put into each Send what its engine is told with it; what is to be told aside."""
        asides: list[Aside] = []
        for action in actions:
            if isinstance(action, Send):
                asides += self._directed(action, now_s)
            elif isinstance(action, Hold) and action.row >= 0:
                means = self.listeners[action.row].means(action.path)
                if means is not None and means not in _WITH_REQUEST:
                    asides += self._aside_for(self._hint(action, means, action.row, action.source), now_s)
            elif isinstance(action, Refuse) and action.held is not None:
                asides += self.over(action.held)
        return asides

    def over(self, gone: Send | Hold) -> list[Aside]:
        """The request will not need what was told aside for it: it is over, it failed there, or its client left."""
        hint = self._open.pop(id(gone.request), None)
        return [] if hint is None else [Withdraw(hint)]

    def first_token(self, sent: Send) -> None:
        """What was told aside has been used, or never will be."""
        self._open.pop(id(sent.request), None)

    def finished(self, sent: Send, ended: Ended, now_s: float) -> list[Aside]:
        """`sent` was answered: what that says of having been told."""
        means = self.listeners[sent.row].means(sent.path)
        if means in _WITH_REQUEST and isinstance(sent.placement, Placement) and sent.placement.receipt.directed:
            worked = _worked(sent, sent.placement, ended)
            if worked is not None:
                self.reported(Hint(means, sent.request, sent.row), "worked" if worked else "failed", now_s)
        if ended.status < 300:
            self.first_token(sent)
        return self.over(sent)

    def reported(self, hint: Hint, result: str, now_s: float) -> None:
        """What became of a telling. result : `worked` and `failed` tell whether to go on with it, others do not"""
        self.counts[hint.means, result] += 1
        rests = self._rests(hint.means, hint.row)
        if result == "worked":
            rested = not rests.usable(now_s)
            rests.worked()
            if rested:
                self._look_s = -inf
        elif result == "failed" and rests.failed(now_s):
            self.counts[hint.means, "rest"] += 1
            self._look_s = -inf

    def _directed(self, sent: Send, now_s: float) -> list[Aside]:
        means = self.listeners[sent.row].means(sent.path)
        if means is None:
            return self.over(sent)
        if means not in _WITH_REQUEST:
            asides = self._aside_for(self._hint(sent, means, sent.row, sent.source), now_s)
            if id(sent.request) in self._open:
                _note(sent, means)
            return asides
        source = None if sent.source is None else self.listeners[self._rows[sent.source]]
        if source is None:
            return self.over(sent)
        if means is Means.HEADER:
            sent.extra_headers.append(source_field(source.host, source.port))
        else:
            own_id = f"{sent.request.request_id}-{next(self._numbers)}"
            sent.members[TRANSFER_FIELD] = source_member(source.host, source.port, own_id)
        self.counts[means, "told"] += 1
        _note(sent, means)
        return self.over(sent)

    def _hint(self, action: Send | Hold, means: Means, row: int, source: str | None) -> Hint:
        return Hint(means, action.request, row, -1 if source is None else self._rows[source])

    def _aside_for(self, hint: Hint, now_s: float) -> list[Aside]:
        """Tell it, unless that was told already; what was told for another replica is taken back."""
        key = id(hint.request)
        before = self._open.get(key)
        if before is not None and (before.means, before.row, before.source) == (hint.means, hint.row, hint.source):
            return []
        asides: list[Aside] = []
        if before is not None:
            del self._open[key]
            asides.append(Withdraw(before))
        if self._aside and self._services[hint.means].usable(now_s):
            self._open[key] = hint  # which keeps the request, and so its identity
            asides.append(hint)
        return asides


def directions_of(fleet: Fleet, view: FleetView, *, aside: bool) -> Directions | None:
    """Of a fleet file that says how replicas are told; None where it does not.

    aside : see `Directions`
    """
    if not fleet.says_how_told:
        return None
    return Directions(listeners_of(fleet), view, has_store=fleet.store is not None, aside=aside)


def listeners_of(fleet: Fleet) -> list[Listener]:
    """The replicas of `fleet` as they are told, by row. Rows that are nobody's, or left, are told nothing."""
    return [_listener(fleet, replica) for replica in fleet.replicas]


def _listener(fleet: Fleet, replica: ReplicaSpec) -> Listener:
    if is_nobody(replica.name):
        return Listener(replica.name, ToldSpec(), "", 0)
    told = fleet.told_of(replica)
    url = urlsplit(replica.url or "")
    here = (url.hostname or "", url.port or (443 if url.scheme == "https" else 80))
    host, port = here if told.read_at is None else host_and_port(told.read_at, "read_at")
    return Listener(replica.name, told, host, port)


def _note(sent: Send, means: Means) -> None:
    """The receipt says how its engine was told, and that the body was changed."""
    if not isinstance(sent.placement, Placement):
        return
    receipt = sent.placement.receipt
    receipt.directed = means.value
    if sent.members:
        receipt.edited = (*(one for one in receipt.edited if one not in sent.members), *sent.members)


def _worked(sent: Send, placement: Placement, ended: Ended) -> bool | None:
    """Whether the engine read what it was told to read; None: the answer does not say."""
    if ended.status == 400 and sent.members:
        return False  # it may not know such a member
    booking = placement.booking
    own, to_reuse = booking.forecast.disk_tokens, booking.reused_tokens
    if ended.status >= 300 or ended.cached_tokens is None or to_reuse <= own:
        return None
    return ended.cached_tokens >= own + WORKED_SHARE * (to_reuse - own)

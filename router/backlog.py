"""Requests that wait because every replica is full: one bounded queue, fair between groups, ordered within each.

Model     a group is a tenant, or whoever shares a prefix. Next is the group served least so far, in seconds of work
          over its weight; of that group the request with the smallest key. A key is a moment,
              arrived + stretch x work - priority step x priority
          and never changes, so ageing is built in: of one group a request is overtaken only by those that arrived
          less than  stretch x its work + priority step x (their priority - its)  seconds after it. When the queue is
          full, the group with the most places over its weight gives up its last one; the newcomer counts, and loses
          ties
Valid     a group that arrives starts level with the least served group that waits, and keeps its debt while anybody
          waits. Of two groups that wait all the time and can go everywhere, work served over weight differs by no
          more than the largest work over weight of each. A group with no more than its part of the places,
          weight over the weights of all that wait, loses none
Blind to  requests that never waited; pools: a group that was held up by one is ahead in all others afterwards
Cost      choosing sorts the groups that wait; the rest are searches in sorted lists. Taking out of the middle
          moves pointers: 2 us in a list of 10,000
Source    start-time fair queueing: Goyal, Vin, Cheng, SIGCOMM 1996; longest-queue drop: Suter et al., INFOCOM 1998
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice
from math import inf

LEAST_WORK_S = 1e-3  # what a request of no known work costs its group


@dataclass(slots=True, eq=False)
class Ticket:
    """One waiting request. Times are absolute.

    key_s : its place within its group, the smallest first
    group : who shares; where : what kind of replicas can take it, compared only for being equal
    work_s : expected to be asked of a replica, seconds, >= 0
    expires_at_s : when it waits no longer; inf never
    what : the caller's own
    """

    key_s: float
    group: str
    where: Hashable
    work_s: float
    expires_at_s: float
    what: object
    number: int = field(default=-1, compare=False)  # in order of coming; -1: it does not wait


_Entry = tuple[float, int, Ticket]  # (key or expiry, number, ticket): numbers differ, so tickets are never compared


@dataclass(slots=True)
class _Group:
    weight: float
    served: float  # work over weight, on the clock all groups share
    lanes: dict[Hashable, list[_Entry]] = field(default_factory=dict)  # by `where`, none empty
    count: int = 0
    work_s: float = 0.0

    def in_order(self, can_go: Callable[[Hashable], bool]) -> Iterator[Ticket]:
        """Its requests that can go, the next one first."""
        lanes = [lane for where, lane in self.lanes.items() if can_go(where)]
        return (entry[2] for entry in (merge(*lanes) if len(lanes) != 1 else lanes[0]))

    def last(self) -> Ticket:
        """The one that would be served last."""
        return max(lane[-1] for lane in self.lanes.values())[2]


class Backlog:
    """The queue. Each ticket that is put leaves once: taken, removed, expired, flushed, or pushed out by `put`.

    places : that wait at most, >= 1
    weights : of groups, > 0; of those not named 1
    """

    def __init__(self, places: int, weights: Mapping[str, float] | None = None) -> None:
        self._places = places
        self._weights = dict(weights or {})
        self._groups: dict[str, _Group] = {}
        self._debts: dict[str, float] = {}  # `served` of groups that wait no more
        self._expiries: list[_Entry] = []
        self._numbers = 0
        self._level = 0.0  # of the group served last

    def __len__(self) -> int:
        return len(self._expiries)

    @property
    def work_s(self) -> float:
        """Work of all that wait, seconds."""
        return sum(group.work_s for group in self._groups.values())

    @property
    def next_expiry_s(self) -> float | None:
        """When the first one waits no longer; None while nobody waits, or all wait for ever."""
        expires_at_s = self._expiries[0][0] if self._expiries else inf
        return None if expires_at_s == inf else expires_at_s

    def counts(self) -> dict[str, int]:
        """How many of each group wait."""
        return {name: group.count for name, group in self._groups.items()}

    def kinds(self) -> set[Hashable]:
        """Every `where` that somebody waits for."""
        return {where for group in self._groups.values() for where in group.lanes}

    def put(self, ticket: Ticket) -> Ticket | None:
        """Let `ticket` wait. Returned is who has no place any more, which may be itself; usually None."""
        assert ticket.number < 0, "a ticket waits once at a time"
        group = self._groups.get(ticket.group)
        if group is None:
            group = self._groups[ticket.group] = self._a_group(ticket.group)
            self._debts.pop(ticket.group, None)
        ticket.number = self._numbers
        self._numbers += 1
        insort(group.lanes.setdefault(ticket.where, []), (ticket.key_s, ticket.number, ticket))
        insort(self._expiries, (ticket.expires_at_s, ticket.number, ticket))
        group.count += 1
        group.work_s += ticket.work_s
        if len(self) <= self._places:
            return None
        largest = max(self._groups.values(), key=lambda other: (other.count / other.weight, other is group))
        pushed_out = largest.last()
        self.remove(pushed_out)
        return pushed_out

    def take(
        self,
        can_go: Callable[[Hashable], bool],
        wants: Callable[[Ticket], bool] = lambda ticket: True,
        *,
        looks: int = 1,
    ) -> Ticket | None:
        """The next request of those whose `where` can be gone to, out of the queue and charged to its group.

        wants : asked in that order, of at most `looks` (>= 1) requests: who does not want to go now lets others pass
        """
        groups = sorted(self._groups.values(), key=lambda group: group.served)
        in_order = (ticket for group in groups for ticket in group.in_order(can_go))
        chosen = next((ticket for ticket in islice(in_order, looks) if wants(ticket)), None)
        if chosen is not None:
            group = self._groups[chosen.group]
            self._level = group.served
            group.served += max(chosen.work_s, LEAST_WORK_S) / group.weight
            self.remove(chosen)
        return chosen

    def remove(self, ticket: Ticket) -> bool:
        """Forget one that waits; False when it does not."""
        if ticket.number < 0:
            return False
        group = self._groups[ticket.group]
        lane = group.lanes[ticket.where]
        del lane[bisect_left(lane, (ticket.key_s, ticket.number))]
        del self._expiries[bisect_left(self._expiries, (ticket.expires_at_s, ticket.number))]
        ticket.number = -1
        group.count -= 1
        group.work_s -= ticket.work_s
        if not lane:
            del group.lanes[ticket.where]
        if not group.lanes:
            self._dissolve(ticket.group)
        return True

    def expired(self, now_s: float) -> list[Ticket]:
        """Those that wait no longer at `now_s`, out of the queue, the first to expire first."""
        return self._removed([entry[2] for entry in self._expiries[: bisect_left(self._expiries, (now_s, inf))]])

    def flush(self, where: Hashable) -> list[Ticket]:
        """All that wait for `where`, out of the queue, in order of coming."""
        lanes = [group.lanes.get(where, []) for group in self._groups.values()]
        return self._removed([ticket for lane in lanes for _, _, ticket in lane])

    def ahead_s(self, ticket: Ticket) -> float:
        """Work served before `ticket`, whether it waits or would, if everybody waited for the same replicas, seconds.

        That of its group with smaller keys, and what the other groups are due meanwhile: each at most what it has.
        """
        group = self._groups.get(ticket.group) or self._a_group(ticket.group)
        number = ticket.number if ticket.number >= 0 else inf
        own_s = sum(
            entry[2].work_s
            for lane in group.lanes.values()
            for entry in lane[: bisect_left(lane, (ticket.key_s, number))]
        )
        level = group.served + own_s / group.weight
        others_s = (
            min(other.work_s, max(0.0, level - other.served) * other.weight)
            for other in self._groups.values()
            if other is not group
        )
        return own_s + sum(others_s)

    def _removed(self, tickets: list[Ticket]) -> list[Ticket]:
        for ticket in sorted(tickets, key=lambda ticket: ticket.number):
            self.remove(ticket)
        return tickets

    def _a_group(self, name: str) -> _Group:
        """A group of which nobody waits, as it would start now."""
        level = min((group.served for group in self._groups.values()), default=self._level)
        return _Group(self._weights.get(name, 1.0), max(level, self._debts.get(name, 0.0)))

    def _dissolve(self, name: str) -> None:
        """Nobody of a group waits: keep what it is ahead by, as long as that means anything."""
        served = self._groups.pop(name).served
        if not self._groups:
            self._debts.clear()
            return
        self._debts[name] = served
        if len(self._debts) > 2 * self._places:
            level = min(group.served for group in self._groups.values())
            self._debts = {name: debt for name, debt in self._debts.items() if debt > level}

"""The queue of waiting requests against a slow and obvious model, and the laws it promises."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.backlog import LEAST_WORK_S, Backlog, Ticket


def a_ticket(
    key_s: float = 0.0,
    *,
    group: str = "",
    where: str = "m",
    work_s: float = 1.0,
    expires_at_s: float = inf,
    what: object = None,
) -> Ticket:
    return Ticket(key_s, group, where, work_s, expires_at_s, what)


def anywhere(where: object) -> bool:
    return True


def drained(backlog: Backlog) -> list[Ticket]:
    tickets = []
    while (ticket := backlog.take(anywhere)) is not None:
        tickets.append(ticket)
    return tickets


@dataclass
class Obvious:
    """The same rules as a list that is searched from end to end every time."""

    places: int
    weights: dict[str, float]
    waiting: list[tuple[int, Ticket]] = field(default_factory=list)
    served: dict[str, float] = field(default_factory=dict)
    level: float = 0.0
    numbers: count[int] = field(default_factory=count)

    def weight(self, group: str) -> float:
        return self.weights.get(group, 1.0)

    def groups(self) -> set[str]:
        return {ticket.group for _, ticket in self.waiting}

    def put(self, ticket: Ticket) -> list[Ticket]:
        """Who may lose the place: nobody, or several where groups are equally large."""
        if ticket.group not in self.groups():
            level = min((self.served[group] for group in self.groups()), default=self.level)
            self.served[ticket.group] = max(level, self.served.get(ticket.group, 0.0))
        self.waiting.append((next(self.numbers), ticket))
        if len(self.waiting) <= self.places:
            return []
        sizes = Counter(ticket.group for _, ticket in self.waiting)
        most = max(sizes[group] / self.weight(group) for group in sizes)
        largest = {group for group in sizes if sizes[group] / self.weight(group) == most}
        return [max(entry for entry in self.entries() if entry[2].group == group)[2] for group in largest]

    def entries(self) -> list[tuple[float, int, Ticket]]:
        return [(ticket.key_s, number, ticket) for number, ticket in self.waiting]

    def leave(self, ticket: Ticket) -> None:
        self.waiting = [(number, other) for number, other in self.waiting if other is not ticket]
        if not self.waiting:
            self.served.clear()

    def next(self, can_go: set[str]) -> list[Ticket]:
        """Whom the rules allow to be next: several where groups are level."""
        able = [entry for entry in self.entries() if entry[2].where in can_go]
        if not able:
            return []
        least = min(self.served[ticket.group] for _, _, ticket in able)
        level = {ticket.group for _, _, ticket in able if self.served[ticket.group] == least}
        return [min(entry for entry in able if entry[2].group == group)[2] for group in level]

    def took(self, ticket: Ticket) -> None:
        self.level = self.served[ticket.group]
        self.served[ticket.group] += max(ticket.work_s, LEAST_WORK_S) / self.weight(ticket.group)
        self.leave(ticket)


PUT = st.tuples(
    st.just("put"), st.integers(0, 9), st.sampled_from("abc"), st.sampled_from("mn"), st.integers(0, 4), st.integers()
)
TAKE = st.tuples(st.just("take"), st.sampled_from([{"m"}, {"n"}, {"m", "n"}, set[str]()]))
REMOVE = st.tuples(st.just("remove"), st.integers(0, 30))
FLUSH = st.tuples(st.just("flush"), st.sampled_from("mn"))
STEPS = st.lists(st.one_of(PUT, PUT, TAKE, TAKE, REMOVE, FLUSH), max_size=60)


@given(steps=STEPS, places=st.integers(1, 8), weight=st.sampled_from([0.5, 1.0, 3.0]))
def test_the_queue_is_the_obvious_list(steps: list[tuple], places: int, weight: float) -> None:  # type: ignore[type-arg]
    weights = {"a": weight}
    backlog, model = Backlog(places, weights), Obvious(places, weights)
    put: list[Ticket] = []
    left: list[Ticket] = []
    for kind, *facts in steps:
        if kind == "put":
            key, group, where, work, _ = facts
            ticket = a_ticket(float(key), group=group, where=where, work_s=float(work))
            put.append(ticket)
            allowed, out = model.put(ticket), backlog.put(ticket)
            assert (out in allowed) if allowed else out is None
            if out is not None:
                model.leave(out)
                left.append(out)
        elif kind == "take":
            taken, allowed = backlog.take(facts[0].__contains__), model.next(facts[0])
            assert (taken in allowed) if allowed else taken is None  # it is idle only when nobody can go
            if taken is not None:
                model.took(taken)
                left.append(taken)
        elif kind == "remove" and put:
            ticket = put[facts[0] % len(put)]
            waits = any(other is ticket for _, other in model.waiting)
            assert backlog.remove(ticket) is waits
            if waits:
                model.leave(ticket)
                left.append(ticket)
        elif kind == "flush":
            gone = backlog.flush(facts[0])
            assert set(gone) == {ticket for _, ticket in model.waiting if ticket.where == facts[0]}
            for ticket in gone:
                model.leave(ticket)
            left += gone
        assert len(backlog) == len(model.waiting) <= places
        assert backlog.counts() == Counter(ticket.group for _, ticket in model.waiting)
        assert backlog.work_s == pytest.approx(sum(ticket.work_s for _, ticket in model.waiting))
    left += drained(backlog)
    assert len(left) == len(put)  # everybody left,
    assert set(left) == set(put)  # and once
    assert backlog.next_expiry_s is None
    assert backlog.kinds() == set()


@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0, 4), st.integers(-2, 2)), min_size=2, max_size=40),
    st.floats(0, 6),
    st.floats(0, 10),
)
def test_nobody_is_overtaken_by_whoever_arrives_later_than_its_patience(
    requests: list[tuple[float, float, int]], stretch: float, step_s: float
) -> None:
    backlog, arrived_s = Backlog(1000), 0.0
    for gap_s, work_s, priority in requests:
        arrived_s += gap_s
        key_s = arrived_s + stretch * work_s - step_s * priority
        backlog.put(a_ticket(key_s, work_s=work_s, what=(arrived_s, work_s, priority)))
    order = [ticket.what for ticket in drained(backlog)]
    for place, first in enumerate(order):
        for later in order[place + 1 :]:  # first overtook later, if it arrived after it
            assert isinstance(first, tuple)
            assert isinstance(later, tuple)
            patience_s = stretch * later[1] + step_s * (first[2] - later[2])
            assert first[0] - later[0] <= max(patience_s, 0.0) + 1e-9


@given(
    works=st.lists(st.tuples(st.sampled_from("ab"), st.floats(0.01, 5.0)), min_size=20, max_size=120),
    weight=st.floats(0.25, 4.0),
)
def test_two_groups_that_keep_waiting_are_served_in_proportion_to_their_weights(
    works: list[tuple[str, float]], weight: float
) -> None:
    backlog, weights = Backlog(1000, {"a": weight}), {"a": weight, "b": 1.0}
    for key, (group, work_s) in enumerate(works):
        backlog.put(a_ticket(float(key), group=group, work_s=work_s))
    largest = {group: max((work for name, work in works if name == group), default=0.0) for group in "ab"}
    served = {"a": 0.0, "b": 0.0}
    bound = sum(largest[group] / weights[group] for group in "ab") + 1e-9
    while set(backlog.counts()) == {"a", "b"}:
        ticket = backlog.take(anywhere)
        assert ticket is not None
        served[ticket.group] += ticket.work_s / weights[ticket.group]
        assert abs(served["a"] - served["b"]) <= bound


def test_a_newcomer_goes_next_however_long_the_queue_of_another_tenant_is() -> None:
    backlog = Backlog(1000)
    for number in range(500):
        backlog.put(a_ticket(float(number), group="flood"))
    for _ in range(50):
        backlog.take(anywhere)
    backlog.put(a_ticket(501.0, group="small", what="mine"))
    assert "mine" in [ticket.what for ticket in drained(backlog)[:2]]


def test_leaving_and_coming_back_wipes_out_no_debt_while_others_wait() -> None:
    backlog = Backlog(1000)
    for number in range(50):
        backlog.put(a_ticket(float(number), group="patient"))
    order = []
    for number in range(20):  # one at a time, always there when it is chosen
        if "coming" not in backlog.counts():
            backlog.put(a_ticket(100.0 + number, group="coming"))
        ticket = backlog.take(anywhere)
        assert ticket is not None
        order.append(ticket.group)
    assert abs(order.count("coming") - order.count("patient")) <= 1


def test_a_full_queue_drops_the_last_of_the_group_with_most_places() -> None:
    backlog = Backlog(4)
    flood = [a_ticket(float(number), group="flood") for number in range(4)]
    assert [backlog.put(ticket) for ticket in flood] == [None] * 4
    late = a_ticket(9.0, group="flood")
    assert backlog.put(late) is late
    assert backlog.put(a_ticket(10.0, group="small")) is flood[3]
    assert backlog.put(a_ticket(11.0, group="small")) is flood[2]
    assert backlog.counts() == {"flood": 2, "small": 2}


def test_requests_expire_at_their_time_and_are_in_no_list_afterwards() -> None:
    backlog = Backlog(10)
    soon, later = a_ticket(0.0, expires_at_s=5.0), a_ticket(0.0, expires_at_s=7.0)
    for ticket in (later, soon):
        backlog.put(ticket)
    assert backlog.next_expiry_s == 5.0
    assert backlog.expired(4.9) == []
    assert backlog.expired(5.0) == [soon]
    assert not backlog.remove(soon)
    assert backlog.next_expiry_s == 7.0
    assert drained(backlog) == [later]


def test_work_ahead_is_that_of_smaller_keys_and_what_other_groups_are_due() -> None:
    backlog = Backlog(10)
    for key, work_s in ((1.0, 2.0), (3.0, 5.0)):
        backlog.put(a_ticket(key, work_s=work_s))
    mine = a_ticket(2.0, work_s=1.0)
    backlog.put(mine)
    assert backlog.ahead_s(mine) == 2.0
    for key in (1.0, 2.0, 3.0):
        backlog.put(a_ticket(key, group="other", work_s=0.75))
    assert backlog.ahead_s(mine) == pytest.approx(2.0 + 2.0)


def test_of_groups_with_equally_many_places_the_newcomers_gives_up_its_own() -> None:
    backlog = Backlog(places=2)
    waiting = [a_ticket(group=name) for name in ("a", "b")]
    assert [backlog.put(ticket) for ticket in waiting] == [None, None]
    late = a_ticket(group="c")
    assert backlog.put(late) is late

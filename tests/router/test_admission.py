"""Limits, places in the queue, and what clients are told about it."""

from __future__ import annotations

from math import inf, nan

import pytest

from router.admission import MOST_PRIORITY, MOST_RETRY_AFTER_S, Admission, AdmissionConfig, whole_seconds
from router.backlog import Ticket
from tests.builders import a_request


def an_admission(in_flight: int = 0, prefills: int = 0, **config: object) -> Admission:
    return Admission(
        AdmissionConfig(**config),  # type: ignore[arg-type]
        2,
        in_flight=lambda row: in_flight,
        prefills=lambda row: prefills,
    )


def a_ticket(admission: Admission, work_s: float = 1.0, arrived_at_s: float = 0.0, **request: object) -> Ticket:
    facts = a_request(**request)  # type: ignore[arg-type]
    return admission.ticket(facts, "m", None, work_s=work_s, arrived_at_s=arrived_at_s, now_s=arrived_at_s)


@pytest.mark.parametrize(
    ("config", "in_flight", "prefills", "has_room"),
    [
        ({}, 10**6, 10**6, True),
        ({"max_in_flight": 4}, 3, 3, True),
        ({"max_in_flight": 4}, 4, 0, False),
        ({"max_prefills": 2}, 100, 1, True),
        ({"max_prefills": 2}, 100, 2, False),
        ({"max_in_flight": 4, "max_prefills": 2}, 3, 2, False),
    ],
)
def test_a_replica_is_full_when_any_limit_is_reached(
    config: dict[str, int], in_flight: int, prefills: int, has_room: bool
) -> None:
    admission = an_admission(in_flight, prefills, **config)
    assert admission.has_room(0) is has_room
    assert admission.with_room([1, 0]) == ([1, 0] if has_room else [])


def test_what_an_engine_runs_at_once_lowers_a_limit_and_never_raises_it() -> None:
    admission = an_admission(in_flight=5, max_in_flight=10)
    admission.learned(0, 4)
    admission.learned(1, 99)
    assert (admission.has_room(0), admission.has_room(1)) == (False, True)
    unlimited = an_admission(in_flight=5)
    unlimited.learned(0, 4)
    assert unlimited.has_room(0)


def test_first_come_first_served_looks_at_arrival_and_priority_alone() -> None:
    admission = an_admission(priority_step_s=10.0)
    assert a_ticket(admission, 50.0, 3.0).key_s == a_ticket(admission, 1.0, 3.0).key_s == 3.0
    assert a_ticket(admission, 1.0, 3.0, priority=2).key_s == -17.0


def test_expected_work_counts_as_age_when_asked_for() -> None:
    admission = an_admission(order="wspt", stretch=20.0)
    long, short = a_ticket(admission, 2.0, 0.0), a_ticket(admission, 0.5, 29.0)
    late = a_ticket(admission, 0.5, 31.0)
    assert short.key_s < long.key_s < late.key_s  # overtaken up to 20 x 1.5 s later, and no more


def test_priorities_cannot_be_outbid_without_end() -> None:
    admission = an_admission()
    assert a_ticket(admission, priority=10**9).key_s == a_ticket(admission, priority=MOST_PRIORITY).key_s
    assert a_ticket(admission, priority=-(10**9)).key_s == a_ticket(admission, priority=-MOST_PRIORITY).key_s


def test_tenants_share_by_name_and_prefixes_by_their_first_blocks() -> None:
    assert an_admission().group_of(a_request(tenant="a")) == "a"
    by_prefix = an_admission(share_by="prefix")
    same = {by_prefix.group_of(a_request(chain=[7, 8, last], tenant=str(last))) for last in range(5)}
    assert len(same) == 1
    assert by_prefix.group_of(a_request(chain=[7, 9])) not in same
    assert by_prefix.group_of(a_request(chain=[7])) != ""
    assert by_prefix.group_of(a_request()) == ""


def test_a_request_waits_until_its_time_out_or_until_its_deadline_cannot_be_met() -> None:
    assert a_ticket(an_admission(queue_timeout_s=9.0), 2.0, 1.0, deadline_s=3.0).expires_at_s == 10.0
    refusing = an_admission(queue_timeout_s=9.0, late="refuse", deadline_s=5.0)
    assert a_ticket(refusing, 2.0, 1.0).expires_at_s == 4.0
    assert a_ticket(refusing, 2.0, 1.0, deadline_s=3.0).expires_at_s == 2.0
    assert a_ticket(refusing, 9.0, 1.0).expires_at_s == 1.0


def test_clients_are_told_to_come_back_when_the_backlog_will_have_left() -> None:
    admission = an_admission(max_prefills=1)
    for second in range(40):
        admission.backlog.put(a_ticket(admission, 2.0, float(second)))
    assert admission.retry_after_s(4, 0.0) == 20  # 80 s of work, and four replicas are supposed to do a second each
    for second in range(20):  # two seconds of work leave in each
        admission.take(lambda where: True, lambda ticket: True, float(second), looks=1)
    assert admission.retry_after_s(4, 19.0) == 20
    assert admission.wait_s(a_last(admission), 4, 19.0) == pytest.approx(19.0)


def a_last(admission: Admission) -> Ticket:
    ticket = a_ticket(admission, 2.0, 38.5)
    admission.backlog.put(ticket)
    return ticket


def test_nobody_is_told_to_come_back_at_once_or_next_year() -> None:
    told = [whole_seconds(wait_s) for wait_s in (0.0, 0.1, 1.2, 1e9, inf, nan, -5.0)]
    assert told == [1, 1, 2, MOST_RETRY_AFTER_S, MOST_RETRY_AFTER_S, 1, 1]

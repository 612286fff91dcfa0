from __future__ import annotations

import pytest

from estimators.view import Column, FleetView
from policies.reports import Reports
from tests.policies.desk import some_fleet


def booked(fleet: FleetView) -> tuple[Column, ...]:
    return (fleet.booked.astype(float),)


def at(fleet: FleetView, now_s: float, count: int | None = None) -> FleetView:
    fleet.now_s = now_s
    if count is not None:
        fleet.booked[0] = count
    return fleet


def test_between_two_reports_the_last_one_stands() -> None:
    fleet, reports = some_fleet(1), Reports(0.1, booked)
    reports.note(at(fleet, 0.01, 1))
    assert reports.last(at(fleet, 0.02))[0] == [1]
    reports.note(at(fleet, 0.05, 7))
    assert reports.last(at(fleet, 0.099))[0] == [1]
    assert reports.last(at(fleet, 0.1))[0] == [7]


def test_a_report_says_what_was_so_at_its_own_moment_not_at_the_next_event() -> None:
    fleet, reports = some_fleet(1), Reports(0.1, booked)
    reports.note(at(fleet, 0.05, 3))
    reports.note(at(fleet, 0.13, 9))  # the report of 0.1 was before
    assert reports.last(at(fleet, 0.14))[0] == [3]
    assert reports.last(at(fleet, 0.5))[0] == [9]


def test_a_period_of_nothing_reports_everything_at_once() -> None:
    fleet, reports = some_fleet(1), Reports(0.0, booked)
    reports.note(at(fleet, 0.0, 2))
    assert reports.last(at(fleet, 0.0, 5))[0] == [5]


def test_a_report_arrives_once() -> None:
    fleet, reports = some_fleet(1), Reports(0.1, booked)
    assert not reports.arrived(at(fleet, 0.05))
    assert reports.arrived(at(fleet, 0.25))
    assert not reports.arrived(at(fleet, 0.29))


@pytest.mark.parametrize("bad", [-0.1, float("nan"), float("inf")])
def test_a_period_that_is_no_time_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="period_s"):
        Reports(bad, booked)

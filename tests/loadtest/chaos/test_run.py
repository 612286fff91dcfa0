"""A chaos run in small: two replicas, a router, and failures of seconds, all as processes of their own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from loadtest.chaos.phases import PHASES
from loadtest.chaos.run import Result, Sizes, all_seen, bookings_left, run

BY_NAME = {phase.name: phase for phase in PHASES}
SMALL = Sizes(
    rate_rps=12.0,
    pattern_s=0.5,
    before_patterns=2,
    warm_up_patterns=2,
    speed=4.0,
    replicas=2,
    recover_within_s=0.5,
)


def shown(**changes: Any) -> dict[str, Any]:
    """What /fleet says of one idle replica, with changes to the fleet or to the replica."""
    replica = {"name": "a", "up": True, "booked": 0, "decoding": 0}
    replica |= {key: changes.pop(key) for key in list(changes) if key in replica}
    fleet = {"in_flight": 0, "queued": {}, "receipts": {"dropped": 0, "waiting": 0}, "event_sources": []}
    return {**fleet, **changes, "replicas": [replica]}


@pytest.mark.slow
async def test_a_killed_replica_and_a_restarted_router_leave_every_request_with_one_end(tmp_path: Path) -> None:
    """How fast first tokens are again depends on the machine, so it is not looked at here."""
    ended: list[Result] = []
    phases = [dataclasses.replace(BY_NAME["killed"], lasts_s=0.0), BY_NAME["stopping"]]
    results = await run(phases, tmp_path, seed=3, sizes=SMALL, on_end=ended.append)
    assert [result.name for result in ended] == ["killed", "stopping"]
    assert results == ended
    assert [result.wrong for result in results] == [[], []]
    assert all(result.counts["ok"] > 0 for result in results)
    killed, stopping = (result.counts for result in results)
    assert killed["refused"] == killed["failed"] == stopping["cut"] == stopping["refused"] == 0


def test_an_idle_fleet_has_nothing_left() -> None:
    assert bookings_left(shown()) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"in_flight": 2}, "/fleet says in_flight: 2"),
        ({"queued": {"": 1}}, "/fleet says queued: {'': 1}"),
        ({"booked": 1}, "a has booked: 1"),
        ({"decoding": 3}, "a has decoding: 3"),
        ({"receipts": {"dropped": 4, "waiting": 0}}, "4 receipts were dropped"),
        ({"receipts": {"dropped": 0, "waiting": 1}}, "1 receipts are not written"),
    ],
)
def test_each_thing_that_was_not_let_go_of_is_named(change: dict[str, Any], sentence: str) -> None:
    assert bookings_left(shown(**change)) == [sentence]


def test_a_fleet_is_seen_once_all_are_up_and_listened_to() -> None:
    assert all_seen(shown())
    assert all_seen(shown(event_sources=[{"state": "silent"}, {"state": "live"}]))
    assert not all_seen(shown(up=False))
    assert not all_seen(shown(event_sources=[{"state": "never_connected"}]))


def test_phases_have_names_of_their_own_and_no_failure_may_leave_requests_hanging_or_short() -> None:
    assert len(BY_NAME) == len(PHASES)
    for phase in PHASES:
        assert not {"hung", "short", "ok"} & {outcome.value for outcome in phase.may}, phase.name

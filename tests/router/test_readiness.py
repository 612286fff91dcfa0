from __future__ import annotations

import pytest

from router.readiness import Readiness, StartConfig


def a_readiness(**config: object) -> Readiness:
    return Readiness(StartConfig(**config), began_s=100.0)  # type: ignore[arg-type]


def asked(readiness: Readiness, now_s: float, *unheard: str, up: bool = True) -> str | None:
    return readiness.why_not(up=up, unheard=lambda: unheard, now_s=now_s)


def test_a_replica_that_is_up_is_all_it_takes() -> None:
    readiness = a_readiness()
    assert asked(readiness, 100.0, up=False) == "no replica is up"
    assert asked(readiness, 100.0, "a", "b") is None
    assert asked(readiness, 101.0, up=False) == "no replica is up"


def test_events_are_waited_for_by_name_until_they_are_there() -> None:
    readiness = a_readiness(wait_for_events=True)
    assert asked(readiness, 100.0, up=False) == "no replica is up"
    assert asked(readiness, 101.0, "a", "b") == "cache events are not followed yet: a, b"
    assert asked(readiness, 102.0) is None
    assert asked(readiness, 103.0, "a") is None, "a source that is lost later makes nobody wait"


@pytest.mark.parametrize("grace_s", [0.0, 5.0])
def test_events_are_waited_for_no_longer_than_the_grace_time(grace_s: float) -> None:
    readiness = a_readiness(wait_for_events=True, grace_s=grace_s)
    assert (asked(readiness, 100.0 + 0.9 * grace_s, "a") is None) == (grace_s == 0.0)
    assert asked(readiness, 100.0 + grace_s, "a") is None


def test_whoever_is_to_stop_is_not_ready_whatever_is_up() -> None:
    readiness = a_readiness()
    readiness.stopping = True
    assert asked(readiness, 100.0) == "the router is stopping"

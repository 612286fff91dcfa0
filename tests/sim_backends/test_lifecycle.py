from __future__ import annotations

from math import inf

import pytest

from sim_backends.alarms import Alarms
from sim_backends.lifecycle import Lifecycle, NotServing, State


def test_a_starting_replica_takes_requests_after_its_start_up_time() -> None:
    alarms = Alarms()
    life = Lifecycle("a", alarms)
    life.start(10.0, 30.0)
    with pytest.raises(NotServing, match="replica a is starting"):
        life.check()
    assert alarms.due_s == 40.0
    alarms.run_due()
    life.check()


def test_without_a_start_up_time_a_replica_serves_at_once() -> None:
    alarms = Alarms()
    life = Lifecycle("a", alarms)
    life.start(10.0, 0.0)
    life.check()
    assert alarms.due_s == inf


def test_a_draining_replica_takes_nothing_until_it_is_resumed() -> None:
    life = Lifecycle("a", Alarms())
    life.drain()
    with pytest.raises(NotServing, match="draining"):
        life.check()
    life.resume()
    life.check()


def test_a_lost_replica_comes_back_by_its_time_and_counts_its_starts() -> None:
    alarms = Alarms()
    life = Lifecycle("a", alarms)
    life.go_down(5.0, back_after_s=2.0)
    life.resume()
    life.drain()
    assert life.state is State.DOWN
    assert alarms.due_s == 7.0
    alarms.run_due()
    assert (life.state, life.starts) == (State.READY, 2)


def test_a_replica_that_is_back_at_once_has_been_started_again() -> None:
    alarms = Alarms()
    life = Lifecycle("a", alarms)
    life.go_down(5.0, back_after_s=0.0)
    assert (life.state, life.starts, alarms.due_s) == (State.READY, 2, inf)


def test_a_replica_lost_while_it_starts_does_not_become_ready() -> None:
    alarms = Alarms()
    life = Lifecycle("a", alarms)
    life.start(0.0, 30.0)
    life.go_down(5.0)
    assert (life.state, alarms.due_s) == (State.DOWN, inf)

from __future__ import annotations

from math import inf

from sim_backends.alarms import Alarms


def test_alarms_ring_in_order_of_time_and_equal_ones_as_they_were_set() -> None:
    alarms, rung = Alarms(), list[tuple[str, float]]()
    for name, at_s in (("late", 3.0), ("first", 1.0), ("second", 1.0)):
        alarms.at(at_s, lambda now_s, name=name: rung.append((name, now_s)))  # type: ignore[misc]
    while alarms.due_s < inf:
        alarms.run_due()
    assert rung == [("first", 1.0), ("second", 1.0), ("late", 3.0)]


def test_a_cancelled_alarm_does_not_ring_and_is_not_waited_for() -> None:
    alarms, rung = Alarms(), list[float]()
    alarm = alarms.at(1.0, rung.append)
    alarms.at(2.0, rung.append)
    alarms.cancel(alarm)
    assert alarms.due_s == 2.0
    alarms.run_due()
    alarms.cancel(alarm)
    assert (rung, alarms.due_s) == ([2.0], inf)


def test_an_alarm_may_set_the_next_one() -> None:
    alarms, rung = Alarms(), list[float]()

    def again(now_s: float) -> None:
        rung.append(now_s)
        if now_s < 3.0:
            alarms.at(now_s + 1.0, again)

    alarms.at(1.0, again)
    while alarms.due_s < inf:
        alarms.run_due()
    assert rung == [1.0, 2.0, 3.0]

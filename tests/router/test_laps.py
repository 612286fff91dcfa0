from __future__ import annotations

from router.laps import Lap, Phase, TimedLaps


def test_each_phase_takes_from_the_end_of_the_one_before() -> None:
    now_s = 1.0
    took: list[tuple[str, float]] = []
    laps = TimedLaps(lambda: now_s, lambda phase, phase_s: took.append((phase, phase_s)))
    laps.begin()
    now_s = 1.5
    laps.end(Phase.MATCH)
    now_s = 3.5
    laps.end(Phase.ESTIMATE)
    now_s = 10.0
    laps.begin()  # nothing was decided in between
    now_s = 11.0
    laps.end(Phase.CHOOSE)
    assert took == [("match", 0.5), ("estimate", 2.0), ("choose", 1.0)]


def test_phases_are_kept_only_while_somebody_wants_them() -> None:
    laps = TimedLaps(iter([1.0, 2.0, 4.0, 7.0]).__next__, lambda phase, phase_s: None)
    laps.begin()
    laps.end(Phase.CHOOSE)
    laps.last = []
    laps.end(Phase.BOOK)
    assert laps.last == [Lap(Phase.BOOK, 2.0, 4.0)]

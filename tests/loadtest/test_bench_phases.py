from __future__ import annotations

from collections.abc import Callable

import pytest

from loadtest.replay.bench_phases import PARTS, PHASES, RELAY, TIMERS, Phases, table, timer_cost_s


class Clock:
    """A clock that moves when it is told to."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def taking(clock: Clock, seconds: float, then: Callable[[], object] = lambda: None) -> Callable[[], None]:
    def rule() -> None:
        clock.now_s += seconds
        then()

    return rule


def test_a_phase_is_charged_without_the_phases_it_calls_and_the_sum_is_the_total() -> None:
    clock = Clock()
    phases = Phases(clock)
    inner = phases.charged("estimate", taking(clock, 3.0))
    outer = phases.charged("decide, rest", taking(clock, 2.0, inner))
    clock.now_s += 1.0
    outer()
    clock.now_s += 0.5
    spent_s = phases.spent(timer_s=0.0)
    assert (spent_s["estimate"], spent_s["decide, rest"], spent_s[RELAY]) == (3.0, 2.0, 1.5)
    assert sum(spent_s.values()) == pytest.approx(6.5)


def test_a_phase_that_raises_is_charged_and_left() -> None:
    clock = Clock()
    phases = Phases(clock)

    def fail() -> None:
        clock.now_s += 1.0
        raise LookupError

    with pytest.raises(LookupError):
        phases.charged("match", fail)()
    clock.now_s += 2.0
    spent_s = phases.spent(timer_s=0.0)
    assert (spent_s["match"], spent_s[RELAY]) == (1.0, 2.0)


def test_timers_move_to_their_own_line_and_the_sum_stays() -> None:
    clock = Clock()
    phases = Phases(clock)
    rule = phases.charged("hash", taking(clock, 1.0))
    for _ in range(4):
        rule()
    spent_s = phases.spent(timer_s=0.25)
    assert (spent_s["hash"], spent_s[TIMERS]) == (3.0, 1.0)
    assert sum(spent_s.values()) == pytest.approx(4.0)
    assert f"{1e6:8.1f} us" in table(spent_s, answered=4)


def test_every_rule_that_is_charged_exists_and_is_put_back() -> None:
    rules = [(owner, name) for part in PARTS.values() for owner, name in part]
    before = [getattr(owner, name) for owner, name in rules]
    with Phases().watching():
        assert all(getattr(owner, name) is not rule for (owner, name), rule in zip(rules, before, strict=True))
    assert [getattr(owner, name) for owner, name in rules] == before
    assert set(PARTS) < set(PHASES)


def test_timers_cost_something_and_little() -> None:
    assert 0.0 < timer_cost_s(times=2000) < 1e-3

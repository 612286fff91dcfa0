from __future__ import annotations

import pytest

from loadtest.replay.bench_estimates import CASES, JUDGED, LIMITS_US, ROWS, Case, Decisions, failures, measured, table


@pytest.mark.parametrize("case", CASES)
def test_every_case_is_estimated_on_small_and_large_fleets(case: Case) -> None:
    for rows in (4, 64):
        taken_s = Decisions(case, rows).take(5)
        assert len(taken_s) == 5
        assert min(taken_s) > 0.0


def test_each_case_and_size_has_its_place_in_the_table() -> None:
    taken, yardstick_us = measured(JUDGED, (4, 16), rounds=2, calls=3)
    lines = table(taken).splitlines()
    assert yardstick_us > 0.0
    assert lines[0].split()[-2:] == ["4", "16"]
    assert [line.split("  ")[0] for line in lines[1:]] == [case.name for case in JUDGED]


def test_a_median_at_its_limit_fails_and_says_which() -> None:
    fast = {(case, rows): 0.9 * LIMITS_US.get(rows, 1e9) for case in CASES for rows in ROWS}
    assert failures(fast) == []
    slow = {**fast, (JUDGED[1], 64): LIMITS_US[64]}
    assert failures(slow) == [f"{JUDGED[1].name}: 64 replicas took 60.0 us, not under 60"]

"""How fast a queue empties."""

from __future__ import annotations

import pytest

from router.drain_rate import REMEMBERED, DrainRate


def test_a_steady_queue_empties_at_its_rate() -> None:
    rate = DrainRate()
    for number in range(3 * REMEMBERED):
        rate.departed(2.0, number * 0.5)
    last_s = (3 * REMEMBERED - 1) * 0.5
    assert rate.rate(last_s, supposed=99.0) == pytest.approx(4.0)


def test_until_two_have_left_the_rate_is_what_is_supposed() -> None:
    rate = DrainRate()
    assert rate.rate(0.0, supposed=3.0) == 3.0
    rate.departed(1.0, 1.0)
    assert rate.rate(5.0, supposed=3.0) == 3.0
    rate.departed(1.0, 1.0)
    assert rate.rate(1.0, supposed=3.0) == 3.0  # both at once say nothing yet


def test_a_queue_that_stands_still_empties_ever_slower() -> None:
    rate = DrainRate()
    for now_s in (0.0, 1.0, 2.0):
        rate.departed(1.0, now_s)
    assert rate.rate(2.0, supposed=9.0) > rate.rate(4.0, supposed=9.0) > rate.rate(40.0, supposed=9.0) > 0
    rate.emptied()
    assert rate.rate(41.0, supposed=9.0) == 9.0

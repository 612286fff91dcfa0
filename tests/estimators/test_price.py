from __future__ import annotations

import numpy as np
import pytest

from estimators.price import queue_behind_s, running_decodes_s


def behind(queue_s: float, work_s: float, arrival_rps: float = 0.5, utilisation: float = 0.5) -> float:
    return float(
        queue_behind_s(
            arrival_rps=arrival_rps,
            utilisation=utilisation,
            queue_s=np.array([queue_s]),
            work_s=np.array([work_s]),
        )[0]
    )


def test_queue_price_is_the_difference_of_the_mg1_value_function() -> None:
    def value(backlog_s: float) -> float:
        return 0.5 / (2 * (1 - 0.5)) * backlog_s**2

    assert behind(queue_s=2.0, work_s=3.0) == pytest.approx(value(5.0) - value(2.0))


def test_queue_price_equals_the_area_of_delay_until_the_queue_is_gone() -> None:
    """Independent route at small load: arrivals of rate lambda during the drain each wait for what is left."""
    lam, queue_s, work_s, step = 1e-4, 1.5, 0.8, 1e-4
    left = np.arange(0, queue_s + work_s, step)
    with_s = lam * left.sum() * step
    without_s = lam * np.arange(0, queue_s, step).sum() * step
    assert behind(queue_s, work_s, lam, 0.0) == pytest.approx(with_s - without_s, rel=1e-3)


def test_the_same_work_is_dearer_behind_a_longer_queue_and_under_more_load() -> None:
    assert behind(4.0, 1.0) > behind(1.0, 1.0) > behind(0.0, 1.0)
    assert behind(1.0, 1.0, utilisation=0.9) > behind(1.0, 1.0, utilisation=0.3)


def test_an_overloaded_fleet_has_a_high_but_finite_price() -> None:
    assert behind(1.0, 1.0, utilisation=3.0) == behind(1.0, 1.0, utilisation=0.95) < np.inf


def test_nobody_arriving_means_nobody_to_pay_for() -> None:
    assert behind(5.0, 5.0, arrival_rps=0.0) == 0.0


def test_running_decodes_stand_still_and_later_step_over_more_context() -> None:
    price_s = running_decodes_s(
        decode_batch=np.array([8.0]),
        work_s=np.array([0.5]),
        step_growth_s=np.array([1e-3]),
        remaining_tokens=np.array([800.0]),
    )
    assert price_s == pytest.approx([8 * 0.5 + 0.8])

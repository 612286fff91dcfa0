"""The decisions of the textbook's section 9.5.4, each by the objective that it is about."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from estimators.estimates import Estimates
from estimators.paths import COLUMN, Path
from estimators.view import FleetView
from policies.base import Choice
from policies.objectives import EndToEnd, FirstToken, Makespan, Quantile
from policies.objectives.objective import Objective
from tests.builders import a_fleet, a_request, estimate, held
from tests.policies.tables import Row, table, with_hits

A, B = 0, 1


def choose(rule: type[Objective], estimates: Estimates, view: FleetView | None = None, **settings: Any) -> Choice:
    view = view or a_fleet("A100", "A100")
    return rule(np.random.default_rng(7), **settings).choose(a_request(), view, estimates)


def two_tasks() -> tuple[Estimates, FleetView]:
    """The other task ends at 1.37 s on A. The target ends at 1.38 s behind it, and so does everything; on B at 0.33 s,
    but its fetch puts the other's off by 0.17 s, to 1.54 s."""
    view = a_fleet("A100", "A100")
    view.head_ends_s[A] = view.head_compute_s[A] = 1.37
    return (
        table(
            Row(A, Path.LOCAL, queue_s=1.37, compute_s=0.01),
            Row(B, Path.REMOTE, ready_s=0.32, compute_s=0.01, put_off_s=0.17),
        ),
        view,
    )


@pytest.mark.parametrize("rule", [FirstToken, EndToEnd])
def test_of_two_tasks_the_target_alone_goes_to_the_idle_replica(rule: type[Objective]) -> None:
    estimates, view = two_tasks()
    assert choose(rule, estimates, view).row == B


def test_of_two_tasks_the_end_of_both_sends_the_target_to_its_cache() -> None:
    estimates, view = two_tasks()
    assert choose(Makespan, estimates, view).row == A


def test_without_a_common_link_the_end_of_both_too_sends_it_to_the_idle_replica() -> None:
    _, view = two_tasks()
    estimates = table(
        Row(A, Path.LOCAL, queue_s=1.37, compute_s=0.03), Row(B, Path.REMOTE, ready_s=0.32, compute_s=0.01)
    )
    assert choose(Makespan, estimates, view).row == B


def uncertain(probability: float) -> Estimates:
    """A holds 8,192 of 8,448 tokens with `probability` and queues 80 ms; B has nothing and queues 20 ms."""
    view = a_fleet("A100", "A100")
    view.head_ends_s[:] = (0.080, 0.020)
    return with_hits(estimate(view, held([512, 0])), Path.LOCAL, A, probability)


def test_the_two_points_are_those_of_the_textbook() -> None:
    first_s = uncertain(1.0).first_token_s
    assert first_s[COLUMN[Path.LOCAL], A] == pytest.approx(0.1109, abs=0.0006)
    assert first_s[COLUMN[Path.RECOMPUTE], A] == pytest.approx(0.9672, abs=0.0006)
    assert first_s[COLUMN[Path.RECOMPUTE], B] == pytest.approx(0.907, abs=0.0006)


def test_by_the_mean_an_uncertain_copy_is_worth_a_visit_from_7_percent_on() -> None:
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if choose(FirstToken, uncertain(middle)).row == A else (middle, high)
    assert high == pytest.approx(0.070, abs=0.0005)


@pytest.mark.parametrize(("probability", "row"), [(0.10, B), (0.90, B), (0.989, B), (0.99, A), (0.999, A)])
def test_by_p99_an_uncertain_copy_is_worth_a_visit_from_99_percent_on(probability: float, row: int) -> None:
    assert choose(Quantile, uncertain(probability)).row == row


def test_by_another_quantile_it_is_worth_it_from_that_probability_on() -> None:
    assert choose(Quantile, uncertain(0.79), quantile=0.8).row == B
    assert choose(Quantile, uncertain(0.80), quantile=0.8).row == A


def test_by_p99_the_expected_price_of_work_counts_too() -> None:
    """Alike in first token and unlike in what they keep from others."""
    estimates = table(
        Row(A, Path.RECOMPUTE, compute_s=1.0), Row(B, Path.RECOMPUTE, compute_s=1.0), decoding=[40.0, 0.0]
    )
    assert choose(Quantile, estimates).row == B


@pytest.mark.parametrize("rule", [FirstToken, EndToEnd, Quantile, Makespan])
@pytest.mark.parametrize(("queue_ms", "row"), [(10.0, A), (12.5, A), (12.9, B), (20.0, B)])
def test_a_queue_of_12_666_ms_moves_the_session_to_the_replica_that_restores_its_state(
    rule: type[Objective], queue_ms: float, row: int
) -> None:
    """B transfers global state for 4.666 ms, then restores its encoder's for 8 ms; the rest is alike on both."""
    view = a_fleet("A100", "A100")
    view.head_ends_s[A] = view.head_compute_s[A] = queue_ms / 1000
    preparation_s = (4.666 + 8.0) / 1000
    rest_s = 0.00002  # short, so that the two ends differ by more than the 1 % that is alike to the makespan
    estimates = table(
        Row(A, Path.LOCAL, queue_s=queue_ms / 1000, compute_s=rest_s),
        Row(B, Path.REMOTE, ready_s=preparation_s, compute_s=rest_s),
    )
    assert choose(rule, estimates, view).row == row


def test_the_threshold_itself_is_12_666_ms() -> None:
    low, high = 0.0, 1.0
    for _ in range(50):
        queue_s = (low + high) / 2
        candidates = Row(A, Path.LOCAL, queue_s=queue_s), Row(B, Path.REMOTE, ready_s=0.004666 + 0.008)
        low, high = (queue_s, high) if choose(FirstToken, table(*candidates)).row == A else (low, queue_s)
    assert high * 1000 == pytest.approx(12.666, abs=0.001)

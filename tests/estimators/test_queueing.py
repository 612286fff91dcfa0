from __future__ import annotations

import numpy as np
import pytest

from estimators.queueing import OVERDUE_SHARE, decodes, or_mean_of_known, queue_s, step_share_s, waiting_s
from estimators.view import Column, FleetView
from tests.builders import a_fleet


def q(view: FleetView, now_s: float = 0.0, mean_compute_s: float = 0.0, mean_context_tokens: float = 0.0) -> Column:
    share_s = step_share_s(view, mean_context_tokens)
    return queue_s(view, now_s, step_share_s=share_s, mean_compute_s=mean_compute_s)


def test_an_idle_replica_starts_at_once() -> None:
    assert q(a_fleet(), now_s=5.0) == pytest.approx([0.0, 0.0])


def test_the_queue_is_what_is_left_of_the_prefill_in_service_and_all_behind_it() -> None:
    view = a_fleet()
    view.head_ends_s[0], view.head_compute_s[0] = 10.4, 0.9
    view.waiting_work[0] = [1.5, 0.5, 0.0, 0.0]
    assert q(view, now_s=10.0)[0] == pytest.approx(2.4)


def test_work_behind_is_priced_with_the_corrections_of_its_replica() -> None:
    view = a_fleet()
    view.waiting_work[:] = [1.0, 0.5, 0.2, 0.1]
    view.coefficients[1] = [2.0, 3.0, 1.0, 1.0]
    assert waiting_s(view, np.zeros(2)) == pytest.approx([1.5, 2.0 + 1.5 + 0.2 + 0.1])


def test_steps_of_the_work_behind_each_carry_the_running_decodes() -> None:
    view = a_fleet()
    view.waiting_work[0, 2] = 3 * view.weights_s[0]
    assert waiting_s(view, np.array([0.01, 0.01]))[0] == pytest.approx(0.03)


def test_a_prefill_past_its_expected_end_has_something_left() -> None:
    view = a_fleet()
    view.head_ends_s[0], view.head_compute_s[0] = 10.0, 2.0
    assert q(view, now_s=11.0)[0] == pytest.approx(2.0 * OVERDUE_SHARE)


def test_running_decodes_without_a_prefill_cost_half_a_step() -> None:
    view = a_fleet()
    view.decode_batch[1], view.decode_context_tokens[1] = 4, 40_000
    step_s = view.weights_s[1] + 40_000 * view.context_s_per_token[1]
    assert q(view) == pytest.approx([0.0, step_s / 2])


def test_queued_requests_of_others_count_with_the_mean_work_of_ours() -> None:
    view = a_fleet()
    view.foreign_waiting[:], view.foreign_decoding[:] = (0, 3), 0
    assert q(view, mean_compute_s=0.5) == pytest.approx([0.0, 1.5])


def test_running_requests_of_others_are_decodes_and_no_prefills_in_front() -> None:
    view = a_fleet()
    view.foreign_waiting[:], view.foreign_decoding[:] = 0, (30, 0)
    waits_s = q(view, mean_compute_s=0.9, mean_context_tokens=4000)
    step_s = view.weights_s[0] + 30 * 4000 * view.context_s_per_token[0]
    assert waits_s == pytest.approx([step_s / 2, 0.0])
    assert decodes(view) == pytest.approx([30, 0])


def test_a_replica_that_does_not_report_is_taken_to_be_as_loaded_as_those_that_do() -> None:
    every, first_two = np.array([True] * 3), np.array([True, True, False])
    assert or_mean_of_known(np.array([np.nan, 4.0, 0.0]), every) == pytest.approx([2.0, 4.0, 0.0])
    assert or_mean_of_known(np.array([np.nan, 4.0, 50.0]), first_two) == pytest.approx([4.0, 4.0, 50.0])
    assert or_mean_of_known(np.array([np.nan] * 3), every) == pytest.approx([0.0, 0.0, 0.0])


def test_time_passing_only_shortens_the_queue() -> None:
    view = a_fleet()
    view.head_ends_s[0], view.head_compute_s[0] = 3.0, 3.0
    view.waiting_work[0, 0] = 1.0
    waits_s = [float(q(view, now_s=t)[0]) for t in np.linspace(0, 6, 50)]
    assert waits_s == sorted(waits_s, reverse=True)
    assert waits_s[-1] > 1.0

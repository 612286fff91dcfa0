from __future__ import annotations

import numpy as np
import pytest

from estimators.queueing import OVERDUE_SHARE, queue_s
from tests.builders import a_fleet


def test_an_idle_replica_starts_at_once() -> None:
    assert queue_s(a_fleet(), now_s=5.0) == pytest.approx([0.0, 0.0])


def test_the_queue_is_what_is_left_of_the_prefill_in_service_and_all_behind_it() -> None:
    view = a_fleet()
    view.head_ends_s[0], view.head_compute_s[0], view.waiting_compute_s[0] = 10.4, 0.9, 2.0
    assert queue_s(view, now_s=10.0)[0] == pytest.approx(2.4)


def test_a_prefill_past_its_expected_end_has_something_left() -> None:
    view = a_fleet()
    view.head_ends_s[0], view.head_compute_s[0] = 10.0, 2.0
    assert queue_s(view, now_s=11.0)[0] == pytest.approx(2.0 * OVERDUE_SHARE)


def test_running_decodes_without_a_prefill_cost_half_a_step() -> None:
    view = a_fleet()
    view.decode_batch[1], view.decode_context_tokens[1] = 4, 40_000
    step_s = view.weights_s[1] + 40_000 * view.context_s_per_token[1]
    assert queue_s(view, now_s=0.0) == pytest.approx([0.0, step_s / 2])


def test_requests_of_others_count_with_the_mean_work_of_ours() -> None:
    view = a_fleet()
    view.foreign_requests[:] = (0, 3)
    assert queue_s(view, now_s=0.0, mean_compute_s=0.5) == pytest.approx([0.0, 1.5])


def test_time_passing_only_shortens_the_queue() -> None:
    view = a_fleet()
    view.head_ends_s[0], view.head_compute_s[0], view.waiting_compute_s[0] = 3.0, 3.0, 1.0
    waits_s = [float(queue_s(view, now_s=t)[0]) for t in np.linspace(0, 6, 50)]
    assert waits_s == sorted(waits_s, reverse=True)
    assert waits_s[-1] > 0

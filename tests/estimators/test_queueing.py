from __future__ import annotations

import numpy as np
import pytest

from estimators.queueing import (
    OVERDUE_SHARE,
    beside,
    lacking_tokens,
    memory_wait_s,
    or_mean_of_known,
    start_s,
    waiting_s,
)
from estimators.view import Column, FleetView
from tests.builders import a_fleet

STEP_TOKENS = 2048


def q(view: FleetView, now_s: float = 0.0, mean_compute_s: float = 0.0, mean_context_tokens: float = 0.0) -> Column:
    near = beside(view, mean_context_tokens)
    return start_s(
        view,
        now_s,
        step_s=np.where(np.asarray(near.decodes) > 0, near.memory_s, 0.0),
        waiting_s=waiting_s(view, STEP_TOKENS, mean_context_tokens),
        foreign_waiting=or_mean_of_known(view.foreign_waiting, view.ready),
        mean_compute_s=mean_compute_s,
    )


def behind(view: FleetView, row: int, *, linear_s: float, attention_s: float = 0.0, tokens: float = 2048) -> None:
    view.waiting_linear_s[row], view.waiting_attention_s[row] = linear_s, attention_s
    view.waiting_tokens[row] = tokens


def test_an_idle_replica_starts_at_once() -> None:
    assert q(a_fleet(), now_s=5.0) == pytest.approx([0.0, 0.0])


def test_the_queue_is_what_is_left_of_the_prefill_in_service_and_all_behind_it() -> None:
    view = a_fleet()
    view.head_ends_s[0], view.head_compute_s[0] = 10.4, 0.9
    behind(view, 0, linear_s=1.5, attention_s=0.5)
    assert q(view, now_s=10.0)[0] == pytest.approx(2.4)


def test_work_behind_is_priced_with_the_corrections_of_its_replica() -> None:
    view = a_fleet()
    for row in (0, 1):
        behind(view, row, linear_s=1.0, attention_s=0.5, tokens=4096)
    view.coefficients[1] = [2.0, 3.0, 1.0, 1.0, 1.0]
    passes_s = 3 * view.weights_s[1]  # two steps and a constant
    assert waiting_s(view, STEP_TOKENS) == pytest.approx([1.5, 2.0 + 1.5 + passes_s])


def test_steps_of_the_work_behind_each_carry_the_tokens_of_running_decodes() -> None:
    view = a_fleet()
    behind(view, 0, linear_s=1.0, tokens=3 * 2000)
    view.decode_batch[0] = 48
    carried_s = 3 * 48 * (view.linear_s_per_token[0] + view.head_s[0])
    assert waiting_s(view, STEP_TOKENS)[0] == pytest.approx(1.0 + carried_s)


def test_a_prefill_past_its_expected_end_has_something_left() -> None:
    view = a_fleet()
    view.head_ends_s[0], view.head_compute_s[0] = 10.0, 2.0
    assert q(view, now_s=11.0)[0] == pytest.approx(2.0 * OVERDUE_SHARE)


def test_running_decodes_without_a_prefill_cost_half_a_step() -> None:
    view = a_fleet()
    view.decode_batch[1], view.decode_read_tokens[1] = 4, 40_000
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
    assert beside(view, 4000).decodes == pytest.approx([30, 0])


def test_a_replica_that_does_not_report_is_taken_to_be_as_loaded_as_those_that_do() -> None:
    every, first_two = np.array([True] * 3), np.array([True, True, False])
    assert or_mean_of_known(np.array([np.nan, 4.0, 0.0]), every) == pytest.approx([2.0, 4.0, 0.0])
    assert or_mean_of_known(np.array([np.nan, 4.0, 50.0]), first_two) == pytest.approx([4.0, 4.0, 50.0])
    assert or_mean_of_known(np.array([np.nan] * 3), every) == pytest.approx([0.0, 0.0, 0.0])


def test_time_passing_only_shortens_the_queue() -> None:
    view = a_fleet()
    view.head_ends_s[0], view.head_compute_s[0] = 3.0, 3.0
    behind(view, 0, linear_s=1.0)
    waits_s = [float(q(view, now_s=t)[0]) for t in np.linspace(0, 6, 50)]
    assert waits_s == sorted(waits_s, reverse=True)
    assert waits_s[-1] > 1.0


def memory(view: FleetView, needed_tokens: float, foreign_tokens: float = 0.0) -> float:
    foreign = np.full(view.rows, foreign_tokens)
    over, used = lacking_tokens(view, needed_tokens=needed_tokens, foreign_tokens=foreign)
    waits_s = memory_wait_s(view, over_tokens=over, used_tokens=used, turnover_s=20.0)
    return float(waits_s[0])


def test_a_prompt_that_fits_beside_what_is_booked_does_not_wait_for_memory() -> None:
    view = a_fleet()
    view.has_capacity(0, 100_000)
    view.decode_context_tokens[0] = 80_000
    assert memory(view, 20_000) == 0.0
    assert memory(view, 20_000, foreign_tokens=1_000) > 0.0


def test_unknown_capacity_is_no_wait() -> None:
    view = a_fleet()
    view.decode_context_tokens[0] = 1e9
    assert memory(view, 8192) == 0.0


def test_a_full_replica_gives_its_whole_memory_back_within_one_turnover() -> None:
    """K tokens held by requests that end at random, on average after 20 s: K / 20 tokens a second come free."""
    view = a_fleet()
    view.has_capacity(0, 100_000)
    view.decode_context_tokens[0] = 100_000
    assert memory(view, 100_000) == pytest.approx(20.0)
    assert memory(view, 25_000) == pytest.approx(5.0)


def test_prompts_that_wait_for_memory_already_are_served_before() -> None:
    view = a_fleet()
    view.has_capacity(0, 100_000)
    view.decode_context_tokens[0], view.waiting_context_tokens[0] = 100_000, 50_000
    assert memory(view, 25_000) == pytest.approx(15.0)


def test_requests_that_share_blocks_leave_room() -> None:
    view = a_fleet()
    view.has_capacity(0, 100_000)
    view.decode_context_tokens[0] = 100_000
    view.occupancy[0] = 0.5
    assert memory(view, 50_000) == 0.0

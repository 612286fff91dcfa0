from __future__ import annotations

from policies.by_load.llumnix import Llumnix
from tests.policies.desk import Desk, rng, some_fleet


def with_capacity(desk: Desk, *tokens: float) -> Desk:
    for row, capacity in enumerate(tokens):
        desk.view.has_capacity(row, capacity)
    return desk


def test_free_memory_counts_for_each_request_there() -> None:
    desk = with_capacity(Desk(Llumnix(rng()), some_fleet(2)), 100_000.0, 100_000.0)
    desk.view.kv_used_share[:] = [0.1, 0.4]
    desk.view.booked[:] = [3, 1]  # 30,000 each against 60,000
    assert desk.ask().row == 1


def test_an_idle_replica_is_not_divided_by_nothing() -> None:
    desk = with_capacity(Desk(Llumnix(rng()), some_fleet(2)), 50_000.0, 100_000.0)
    desk.view.kv_used_share[:] = 0.0
    desk.view.booked[:] = [0, 1]  # both count as one
    assert desk.ask().row == 1


def test_what_the_oldest_waiting_prompt_needs_is_not_free() -> None:
    desk = with_capacity(Desk(Llumnix(rng()), some_fleet(2)), 100_000.0, 100_000.0)
    desk.view.kv_used_share[:] = [0.5, 0.52]
    assert desk.ask().row == 0
    desk.view.head_tokens[0] = 8000
    assert desk.ask().row == 1


def test_a_replica_without_a_report_counts_what_is_booked_there() -> None:
    desk = with_capacity(Desk(Llumnix(rng()), some_fleet(2)), 100_000.0, 100_000.0)
    desk.view.kv_used_share[1] = 0.3
    desk.view.decode_context_tokens[0] = 40_000
    assert desk.ask().row == 1
    desk.view.decode_context_tokens[0] = 20_000
    assert desk.ask().row == 0


def test_unknown_capacity_is_the_mean_of_the_known_and_without_any_requests_decide() -> None:
    desk = Desk(Llumnix(rng()), some_fleet(3))
    desk.view.booked[:] = [2, 1, 3]
    assert desk.ask().row == 1
    with_capacity(desk, 90_000.0, 30_000.0)
    desk.view.booked[:] = 1
    desk.view.kv_used_share[:] = [0.5, 0.0, 0.0]  # 45,000, 30,000, and 60,000 by the mean
    assert desk.ask().row == 2

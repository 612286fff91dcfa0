"""The ledger: columns of the fleet view always say what is booked, and a booking what was expected of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimators.conformal import Conformal
from estimators.estimates import LEVELS, Doubt, Estimates, Estimator
from estimators.first_token import Discipline
from estimators.hit_probability import HitProbability
from estimators.paths import COLUMN, Path
from estimators.queueing import waiting_s
from estimators.routes import Held
from estimators.spread import ResidualSpread
from estimators.tiers import Tier
from estimators.view import FleetView
from policies.base import Choice, Reason
from router.bookings import Booking, Forecast, Ledger
from tests.builders import a_fleet, a_request, an_estimator, held, quiet

STEP_TOKENS = 2048
KEPT_TOKENS = 77.0  # output each booking here has yet to produce


def a_choice(estimates: Estimates, row: int = 0, path: Path | None = None) -> Choice:
    return Choice(row, path or estimates.path_at(row), Reason.LOWEST_ESTIMATE)


def a_ledger(view: FleetView | None = None) -> tuple[FleetView, Ledger, Callable[..., Booking]]:
    view = view or a_fleet("A100")
    ledger = Ledger(view)

    def place(
        now_s: float = 0.0,
        tokens: int = 4096,
        *,
        row: int = 0,
        local: int = 0,
        store: int = 0,
        estimator: Estimator | None = None,
        streams: bool = True,
        generates: bool = True,
    ) -> Booking:
        estimator = estimator or an_estimator(rows=view.rows)
        request = a_request(tokens, streams=streams, generates=generates)
        estimates = estimator.estimate(request, held([local] * view.rows, store), view, quiet(), now_s)
        choice = a_choice(estimates, row)
        reused = float(estimates.reused_tokens[COLUMN[choice.path], row])
        return ledger.place(
            request,
            choice,
            estimates,
            now_s,
            own_work_s=estimator.work_s(row, tokens - reused, reused, view),
            remaining_tokens=KEPT_TOKENS,
        )

    return view, ledger, place


def fetching(**changes: object) -> Estimator:
    return an_estimator(network_bytes_per_s=1e9, rows=1, **changes)  # type: ignore[arg-type]


# Columns


def test_the_first_is_in_service_and_the_others_are_behind_it() -> None:
    view, _, place = a_ledger()
    first, second, third = place(1.0), place(1.0, 3000), place(1.0, 5000, local=100)
    assert view.booked[0] == 3
    assert view.head_ends_s[0] == pytest.approx(1.0 + first.compute_s)
    assert (view.head_compute_s[0], view.head_tokens[0]) == (first.compute_s, 4096)
    assert view.waiting_tokens[0] == 3000 + (5000 - 1600)
    assert view.waiting_context_tokens[0] == 3000 + 5000
    assert view.waiting_linear_s[0] == pytest.approx(second.linear_s + third.linear_s)
    assert view.waiting_attention_s[0] == pytest.approx(second.attention_s + third.attention_s)
    assert view.waiting_held_s[0] == 0


def test_short_prompts_behind_share_a_step_as_they_do_in_an_engine() -> None:
    """Eight prompts of 8 tokens: one pass over the weights together, and one each if they came alone."""
    view, _, place = a_ledger()
    alone = [place(0.0, tokens=8) for _ in range(9)]
    assert waiting_s(view, STEP_TOKENS)[0] == pytest.approx(view.weights_s[0])
    assert sum(booking.compute_s for booking in alone[1:]) == pytest.approx(8 * view.weights_s[0])


def test_a_booked_prefill_is_as_long_behind_another_as_it_was_estimated_alone() -> None:
    view, _, place = a_ledger()
    place(0.0)
    behind = place(0.0, 6000, local=50)
    assert waiting_s(view, STEP_TOKENS)[0] == pytest.approx(behind.compute_s)


def test_a_first_token_hands_the_gpu_to_the_next_at_that_moment() -> None:
    view, ledger, place = a_ledger()
    first, second = place(0.0), place(0.0)
    ledger.first_token(first, 5.0)
    assert first.first_token_at_s == 5.0
    assert second.starts_at_s == 5.0
    assert view.head_ends_s[0] == pytest.approx(5.0 + second.compute_s)
    assert all(column[0] == 0 for column in view.waiting)
    assert view.decode_batch[0] == 1
    assert view.decode_context_tokens[0] == 4096 + 128  # the prompt and half of the expected output
    assert view.remaining_tokens[0] == KEPT_TOKENS


def test_one_in_service_whose_state_is_still_on_its_way_starts_when_it_is_there() -> None:
    view, _, place = a_ledger()
    fetches = place(2.0, tokens=8448, store=512, estimator=fetching())
    assert fetches.starts_at_s == fetches.ready_at_s > 3.0
    assert view.head_ends_s[0] == pytest.approx(fetches.ready_at_s + fetches.compute_s)


def test_a_fetch_holds_the_gpu_only_where_the_engine_waits_for_it_there() -> None:
    def booked(discipline: Discipline) -> tuple[FleetView, Booking]:
        view, _, place = a_ledger(a_fleet("A100", discipline=discipline))
        place(0.0)
        return view, place(0.0, tokens=8448, store=512, estimator=fetching())

    view, blocking = booked(Discipline.BLOCKING)
    assert blocking.forecast.fetch_s > 1.0
    assert blocking.held_s == pytest.approx(blocking.forecast.fetch_s)
    assert view.waiting_held_s[0] == blocking.held_s
    for discipline in (Discipline.OVERLAPPED, Discipline.SERIAL, Discipline.LAYERWISE):
        view, free = booked(discipline)
        assert free.forecast.fetch_s > 1.0
        assert free.held_s == pytest.approx(0.0, abs=1e-12), discipline


def test_one_that_leaves_the_queue_takes_only_its_own_work_along() -> None:
    view, ledger, place = a_ledger()
    _, leaves, stays = place(0.0, 3000), place(0.0, 5000), place(0.0, 900)
    ledger.release(leaves, 0.1)
    assert (view.waiting_tokens[0], view.waiting_context_tokens[0]) == (900, 900)
    assert view.waiting_linear_s[0] == pytest.approx(stays.linear_s)
    assert view.waiting_attention_s[0] == pytest.approx(stays.attention_s)


def test_one_that_leaves_while_it_is_served_lets_the_next_start_at_that_moment() -> None:
    _, ledger, place = a_ledger()
    leaves, follows = place(0.0), place(0.0)
    ledger.release(leaves, 0.1)
    assert follows.starts_at_s == 0.1


@pytest.mark.parametrize("decoding", [False, True])
def test_releasing_twice_changes_nothing(decoding: bool) -> None:
    view, ledger, place = a_ledger()
    booking = place()
    if decoding:
        ledger.first_token(booking, 0.5)
    ledger.release(booking, 1.0)
    ledger.release(booking, 2.0)
    assert (view.booked[0], view.decode_batch[0], view.remaining_tokens[0]) == (0, 0, 0)


def test_a_first_token_after_the_release_changes_nothing_on_the_replica() -> None:
    view, ledger, place = a_ledger()
    booking = place()
    ledger.release(booking, 1.0)
    ledger.first_token(booking, 1.5)
    assert (view.decode_batch[0], view.head_ends_s[0]) == (0, -np.inf)


def test_prefills_nobody_can_see_end_in_their_turn_when_they_should() -> None:
    view, ledger, place = a_ledger()
    first, second = place(0.0, streams=False), place(0.0, streams=False)
    assert ledger.next_settled_s() == pytest.approx(first.compute_s)
    ledger.settle(first.compute_s + 1e-6)
    assert (first.decoding, second.decoding) == (True, False)
    ledger.settle(first.compute_s + second.compute_s + 1e-6)
    assert view.decode_batch[0] == 2
    assert ledger.next_settled_s() is None


def test_a_request_without_a_prefill_is_counted_and_takes_no_gpu_time() -> None:
    view, ledger, place = a_ledger()
    booking = place(0.0, generates=False)
    assert (view.booked[0], view.head_ends_s[0]) == (1, -np.inf)
    ledger.first_token(booking, 0.1)
    assert view.decode_batch[0] == 0
    ledger.release(booking, 0.2)
    assert view.booked[0] == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["place", "first", "release", "settle"]), st.integers(0, 30)), max_size=80))
def test_after_any_history_the_columns_equal_what_is_booked(history: list[tuple[str, int]]) -> None:
    view, ledger, place = a_ledger(a_fleet("A100", "H20", discipline=Discipline.BLOCKING))
    estimator = an_estimator(network_bytes_per_s=5e9, rows=2)
    open_ones: list[Booking] = []
    for step, (what, which) in enumerate(history):
        now_s = 0.05 * step
        if what == "place":
            tokens, streams = 200 + 300 * which, which % 3 > 0
            open_ones.append(place(now_s, tokens, row=which % 2, streams=streams, store=which % 5, estimator=estimator))
        elif what == "settle":
            ledger.settle(now_s)
        elif open_ones:
            booking = open_ones[which % len(open_ones)]
            if what == "first":
                ledger.first_token(booking, now_s)
            else:
                ledger.release(booking, now_s)
                open_ones.remove(booking)
    for row in range(2):
        mine = [booking for booking in open_ones if booking.row == row]
        decoding = [booking for booking in mine if booking.decoding]
        waiting = [booking for booking in mine if not booking.decoding]
        assert view.booked[row] == len(mine)
        assert view.decode_batch[row] == len(decoding)
        assert view.decode_context_tokens[row] == pytest.approx(sum(b.mean_context_tokens for b in decoding))
        assert view.remaining_tokens[row] == pytest.approx(KEPT_TOKENS * len(decoding))
        assert (view.head_ends_s[row] > -np.inf) == bool(waiting)
        assert view.head_compute_s[row] == (waiting[0].compute_s if waiting else 0.0)
        assert view.head_tokens[row] == (waiting[0].request.prompt_tokens if waiting else 0.0)
        assert view.prefill_tokens[row] == pytest.approx(sum(b.new_tokens for b in waiting), abs=1e-9)
        behind = waiting[1:]
        assert [column[row] for column in view.waiting] == [
            pytest.approx(sum(b.linear_s for b in behind), abs=1e-9),
            pytest.approx(sum(b.attention_s for b in behind), abs=1e-9),
            pytest.approx(sum(b.new_tokens for b in behind), abs=1e-9),
            pytest.approx(sum(b.request.prompt_tokens for b in behind), abs=1e-9),
            pytest.approx(sum(b.held_s for b in behind), abs=1e-9),
        ]


# What is booked


def test_a_local_path_books_only_what_it_computes() -> None:
    view, _, place = a_ledger()
    booking = place(0.0, 8448, local=512)
    assert (booking.path, booking.new_tokens, booking.reused_tokens) == (Path.LOCAL, 256, 8192)
    assert booking.linear_s == pytest.approx(256 * view.linear_s_per_token[0] + view.head_s[0])
    assert booking.linear_s + booking.attention_s == pytest.approx(booking.compute_s)  # compute bound


def test_a_fetch_books_what_is_left_to_compute_and_when_it_may_start() -> None:
    _, _, place = a_ledger()
    booking = place(3.0, 8448, store=512, estimator=fetching())
    assert (booking.path, booking.new_tokens, booking.reused_tokens) == (Path.REMOTE, 256, 8192)
    assert booking.ready_at_s == pytest.approx(3.0 + booking.forecast.fetch_s)


# Forecasts


def a_doubt(view: FleetView) -> Doubt:
    return Doubt(HitProbability(view.names), ResidualSpread(view.names), Conformal(LEVELS))


def test_a_forecast_is_that_of_the_chosen_path_and_replica() -> None:
    view = a_fleet("A100", "H20")
    estimator = an_estimator(network_bytes_per_s=1e9, engine_decides=False, doubt=a_doubt(view))
    estimates = estimator.estimate(a_request(), held([0, 100], 512), view, quiet(), 0.0)
    forecast = Forecast.of(estimates, a_choice(estimates, 1, Path.REMOTE))
    other = Forecast.of(estimates, a_choice(estimates, 1, Path.LOCAL))
    assert forecast.first_token_s == estimates.first_token_s[COLUMN[Path.REMOTE], 1]
    assert forecast.recompute_s == other.recompute_s == estimates.first_token_s[COLUMN[Path.RECOMPUTE], 1]
    assert forecast.local_tokens == other.local_tokens == forecast.disk_tokens == 1600
    assert forecast.fetch_s > 0.5
    assert other.fetch_s == 0.0
    assert forecast.queue_s == other.queue_s == 0.0
    assert 0 < forecast.hit_probability < other.hit_probability < 1  # HBM must hold for both, the store for one


def test_quantiles_rise_with_their_level_and_doubt_puts_them_above_the_first_token() -> None:
    view = a_fleet("A100")
    estimates = an_estimator(rows=1, doubt=a_doubt(view)).estimate(a_request(), held([512]), view, quiet(), 0.0)
    forecast = Forecast.of(estimates, a_choice(estimates))
    assert forecast.first_token_s < forecast.quantiles_s[0] < forecast.quantiles_s[1]
    assert forecast.raw_quantiles_s == forecast.quantiles_s  # nothing was learned to correct them by


def test_without_doubt_every_quantile_is_the_first_token() -> None:
    view = a_fleet("A100")
    estimates = an_estimator(rows=1).estimate(a_request(), held([512]), view, quiet(), 0.0)
    forecast = Forecast.of(estimates, a_choice(estimates))
    assert forecast.quantiles_s == pytest.approx([forecast.first_token_s] * len(LEVELS), rel=1e-3)


def test_a_forecast_keeps_the_ages_of_its_own_moment() -> None:
    """The directory lends its ages for one decision, and may write the next ones into the same array."""
    view = a_fleet("A100", "A100")
    ages_s = np.array([[1.0, 2.0], [np.nan, np.nan], [np.nan, np.nan], [30.0, 30.0]])
    where = Held(local_blocks=held([10, 10]).local_blocks, store_blocks=512, age_s=ages_s)
    estimates = an_estimator(network_bytes_per_s=1e9).estimate(a_request(), where, view, quiet(), 0.0)
    forecast = Forecast.of(estimates, a_choice(estimates, 1))
    ages_s[:] = 999.0
    assert (forecast.age_of(Tier.HBM), forecast.age_of(Tier.REMOTE)) == (2.0, 30.0)
    assert np.isnan(forecast.age_of(Tier.HOST))

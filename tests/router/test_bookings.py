"""The ledger: columns of the fleet view always say what is booked."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimators.estimates import Estimator
from estimators.paths import Path
from estimators.view import FleetView
from router.bookings import Booking, Ledger
from router.samples import Computed, PrefillSamples
from tests.builders import a_fleet, a_request, an_estimator, held, quiet

STEP_TOKENS = 2048


def a_ledger(view: FleetView | None = None) -> tuple[FleetView, Ledger, Callable[..., Booking]]:
    view = view or a_fleet("A100")
    ledger = Ledger(view, STEP_TOKENS)

    def place(
        now_s: float = 0.0,
        tokens: int = 4096,
        *,
        row: int = 0,
        store: int = 0,
        estimator: Estimator | None = None,
        streams: bool = True,
    ) -> Booking:
        estimator = estimator or an_estimator(rows=view.rows)
        request = a_request(tokens, streams=streams)
        estimates = estimator.estimate(request, held([0] * view.rows, store), view, quiet(), now_s)
        return ledger.place(request, row, estimates.path_at(row), estimates, now_s)

    return view, ledger, place


def test_the_first_is_in_service_and_the_others_are_behind_it() -> None:
    view, _, place = a_ledger()
    first, second, third = place(1.0), place(1.0), place(1.0)
    assert view.booked[0] == 3
    assert view.head_ends_s[0] == pytest.approx(1.0 + first.compute_s)
    assert view.waiting_tokens[0] == second.new_tokens + third.new_tokens
    assert view.waiting_work[0, :2] == pytest.approx((second.features + third.features)[:2])


def test_short_prompts_behind_share_steps_in_the_books_as_they_do_in_an_engine() -> None:
    view, _, place = a_ledger()
    for _ in range(9):
        place(0.0, tokens=256)
    assert view.waiting_work[0, 2] == pytest.approx(view.weights_s[0])  # 8 x 256 tokens are one step of 2048
    assert view.waiting_work[0, 3] == pytest.approx(view.weights_s[0])


def test_a_first_token_hands_the_gpu_to_the_next_at_that_moment() -> None:
    view, ledger, place = a_ledger()
    first, second = place(0.0), place(0.0)
    ledger.first_token(first, 5.0)
    assert second.starts_at_s == 5.0
    assert view.head_ends_s[0] == pytest.approx(5.0 + second.compute_s)
    assert np.all(view.waiting_work[0] == 0)
    assert view.decode_batch[0] == 1
    assert view.decode_context_tokens[0] == 4096 + 128  # the prompt and half of the expected output


def test_one_in_service_whose_state_is_still_on_its_way_starts_when_it_is_there() -> None:
    view = a_fleet("A100")
    _, _, place = a_ledger(view)
    fetching = place(2.0, tokens=8448, store=512, estimator=an_estimator(network_bytes_per_s=1e9, rows=1))
    assert not fetching.start_seen
    assert fetching.starts_at_s == fetching.ready_at_s > 3.0
    assert view.head_ends_s[0] == pytest.approx(fetching.ready_at_s + fetching.compute_s)


def test_one_that_leaves_the_queue_takes_only_its_own_work_along() -> None:
    view, ledger, place = a_ledger()
    _, leaves, stays = place(0.0, 3000), place(0.0, 5000), place(0.0, 900)
    ledger.release(leaves, 0.1)
    assert view.waiting_tokens[0] == 900
    assert view.waiting_work[0, :2] == pytest.approx(stays.features[:2])


def test_releasing_twice_changes_nothing() -> None:
    view, ledger, place = a_ledger()
    booking = place()
    ledger.release(booking, 1.0)
    ledger.release(booking, 2.0)
    assert view.booked[0] == 0


def test_prefills_nobody_can_see_end_in_their_turn_when_they_should() -> None:
    view, ledger, place = a_ledger()
    first, second = place(0.0, streams=False), place(0.0, streams=False)
    assert ledger.next_settled_s() == pytest.approx(first.compute_s)
    ledger.settle(first.compute_s + 1e-6)
    assert (first.decoding, second.decoding) == (True, False)
    ledger.settle(first.compute_s + second.compute_s + 1e-6)
    assert view.decode_batch[0] == 2
    assert ledger.next_settled_s() is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["place", "first", "release", "settle"]), st.integers(0, 30)), max_size=80))
def test_after_any_history_the_columns_equal_what_is_booked(history: list[tuple[str, int]]) -> None:
    view, ledger, place = a_ledger(a_fleet("A100", "H20"))
    open_ones: list[Booking] = []
    for step, (what, which) in enumerate(history):
        now_s = 0.05 * step
        if what == "place":
            open_ones.append(place(now_s, 200 + 300 * which, row=which % 2, streams=which % 3 > 0))
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
        assert (view.head_ends_s[row] > -np.inf) == bool(waiting)
        assert view.waiting_tokens[row] == pytest.approx(sum(b.new_tokens for b in waiting[1:]))
        linear_s = sum(float(b.features[0]) for b in waiting[1:])
        assert view.waiting_work[row, 0] == pytest.approx(linear_s, abs=1e-9)


# Samples of prefill time


class Samples:
    """A ledger and its samples, as the dispatcher drives them."""

    def __init__(self) -> None:
        self.view, self.ledger, self.place = a_ledger()
        self.seen: list[tuple[float, float]] = []  # linear seconds of the work, seconds taken
        self.estimator = an_estimator(rows=1)
        self.samples = PrefillSamples(
            self.view, self.estimator, lambda row, features, shared_s, took_s: self.seen.append((features[0], took_s))
        )

    def first(self, booking: Booking, now_s: float) -> None:
        self.samples.first_token(booking, now_s)
        self.ledger.first_token(booking, now_s)

    def end(self, booking: Booking, now_s: float, tokens: float | None = 4096.0) -> None:
        self.samples.ended(booking, None if tokens is None else Computed(tokens, 0.0), now_s)
        self.ledger.release(booking, now_s)


def test_under_load_a_prefill_took_from_the_first_token_before_it_to_its_own() -> None:
    bench = Samples()
    first, second = bench.place(0.0), bench.place(0.0)
    bench.first(first, 0.6)
    bench.first(second, 1.4)
    bench.end(second, 3.0)
    bench.end(first, 3.0)
    assert [took_s for _, took_s in bench.seen] == pytest.approx([0.8, 0.6])


def test_first_tokens_of_one_step_are_one_sample_of_all_their_work() -> None:
    bench = Samples()
    bookings = [bench.place(0.0, 256) for _ in range(4)]
    for booking in bookings:
        bench.first(booking, 0.2)
    for booking in bookings:
        bench.end(booking, 1.0, 256.0)
    ((linear_s, took_s),) = bench.seen
    assert took_s == pytest.approx(0.2)
    assert linear_s == pytest.approx(sum(float(booking.features[0]) for booking in bookings))


def test_what_was_really_computed_is_learned_from_and_not_what_was_expected() -> None:
    bench = Samples()
    booking = bench.place(0.0)
    bench.first(booking, 0.3)
    bench.end(booking, 1.0, tokens=1024.0)
    expected = bench.estimator.features_at(0, new_tokens=1024, cached_tokens=0, view=bench.view)
    assert bench.seen[0][0] == pytest.approx(float(expected[0]))


def test_one_member_whose_work_is_unknown_makes_the_step_useless() -> None:
    bench = Samples()
    known, unknown = bench.place(0.0, 256), bench.place(0.0, 256)
    for booking in (known, unknown):
        bench.first(booking, 0.2)
    bench.end(unknown, 1.0, None)
    bench.end(known, 1.0)
    assert bench.seen == []


def test_a_start_that_a_fetch_decided_says_nothing_about_the_gpu() -> None:
    bench = Samples()
    booking = bench.place(0.0, 8448, store=512, estimator=an_estimator(network_bytes_per_s=1e9, rows=1))
    bench.first(booking, 9.0)
    bench.end(booking, 10.0)
    assert bench.seen == []


def test_the_one_behind_a_request_that_left_starts_at_a_moment_nobody_saw() -> None:
    bench = Samples()
    leaves, follows, after = bench.place(0.0), bench.place(0.0), bench.place(0.0)
    bench.end(leaves, 0.3, None)
    bench.first(follows, 0.5)
    bench.first(after, 1.1)
    for booking in (follows, after):
        bench.end(booking, 4.0)
    assert [took_s for _, took_s in bench.seen] == pytest.approx([0.6])


def test_one_that_was_overtaken_is_no_sample_and_the_next_one_is() -> None:
    bench = Samples()
    overtaken, overtakes, after = bench.place(0.0), bench.place(0.0), bench.place(0.0)
    bench.first(overtakes, 0.4)
    bench.first(overtaken, 1.0)
    bench.first(after, 1.5)
    for booking in (overtakes, overtaken, after):
        bench.end(booking, 4.0)
    assert [took_s for _, took_s in bench.seen] == pytest.approx([0.5])


def test_a_local_path_books_only_what_it_computes() -> None:
    view = a_fleet("A100")
    ledger = Ledger(view, STEP_TOKENS)
    request = a_request(8448)
    estimates = an_estimator(rows=1).estimate(request, held([512]), view, quiet(), 0.0)
    booking = ledger.place(request, 0, Path.LOCAL, estimates, 0.0)
    assert (booking.new_tokens, booking.reused_tokens) == (256, 8192)

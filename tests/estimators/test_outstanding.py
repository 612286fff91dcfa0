from __future__ import annotations

import numpy as np
import pytest

from estimators.estimates import Estimates
from estimators.outstanding import added_s, done_s, harmonic, largest_of_others, outstanding_s
from estimators.paths import COLUMN, Path
from estimators.view import FleetView
from tests.builders import a_fleet, a_request, an_estimator, estimate, held, quiet

LOCAL, RECOMPUTE, REMOTE = COLUMN[Path.LOCAL], COLUMN[Path.RECOMPUTE], COLUMN[Path.REMOTE]


def decoding(view: FleetView, row: int, batch: int, rest_tokens: float) -> None:
    view.decode_batch[row] = batch
    view.decode_context_tokens[row] = view.decode_read_tokens[row] = batch * 8000.0
    view.remaining_tokens[row] = batch * rest_tokens


@pytest.mark.parametrize("n", [1, 2, 3, 10, 1000])
def test_the_harmonic_numbers_are_sums_of_reciprocals(n: int) -> None:
    assert harmonic(np.array([float(n)]))[0] == pytest.approx(sum(1 / i for i in range(1, n + 1)), rel=0.002)


def test_the_longest_of_memoryless_rests_is_what_drawing_them_gives() -> None:
    view, chance = a_fleet("A100"), np.random.default_rng(2)
    decoding(view, 0, 12, 200.0)
    estimates = estimate(view, held([0]))
    longest = chance.exponential(200.0, size=(20_000, 12)).max(axis=1).mean()
    pace_s = (estimates.pace_s - estimates.step_growth_s)[0]
    assert outstanding_s(estimates, view)[0] == pytest.approx(longest * pace_s, rel=0.02)


def test_an_idle_replica_has_nothing_outstanding() -> None:
    view = a_fleet("A100", "A100")
    assert outstanding_s(estimate(view, held([0, 0])), view).tolist() == [0.0, 0.0]


def test_a_waiting_prefill_ends_with_its_answer() -> None:
    view = a_fleet("A100", "A100")
    view.head_ends_s[0] = view.head_compute_s[0] = 2.0
    estimates = estimate(view, held([0, 0]))
    there_s = outstanding_s(estimates, view)
    assert there_s[0] == pytest.approx(2.0 + 256 * (estimates.pace_s - estimates.step_growth_s)[0])
    assert there_s[1] == 0.0


def test_everything_is_done_no_sooner_than_any_part_of_it() -> None:
    chance = np.random.default_rng(11)
    for _ in range(50):
        view = a_fleet("A100", "H20", "A100", "H20")
        view.head_ends_s[:] = view.head_compute_s[:] = chance.uniform(0, 5, 4)
        for row in range(4):
            decoding(view, row, int(chance.integers(0, 30)), chance.uniform(1, 500))
        estimates = estimate(view, held(chance.integers(0, 500, 4).tolist()))
        done, there = done_s(estimates, view), outstanding_s(estimates, view)
        own = estimates.expected_s + estimates.output_tokens * estimates.pace_s
        assert (done >= there.max() - 1e-12).all()
        assert (done >= own - 1e-12).all()
        assert (done <= np.maximum(own, there.max() + estimates.compute_s + 60.0)).all()


def test_a_request_puts_off_the_decodes_it_joins_and_no_others() -> None:
    view = a_fleet("A100", "A100")
    decoding(view, 0, 20, 400.0)
    estimates = estimate(view, held([0, 0]))
    there_s, done = outstanding_s(estimates, view), done_s(estimates, view)[RECOMPUTE]
    assert done[0] >= there_s[0] + estimates.compute_s[RECOMPUTE, 0]
    assert done[1] == pytest.approx(there_s[0])


def test_steps_that_run_anyway_are_not_added_and_a_replica_that_decodes_nothing_adds_them() -> None:
    view = a_fleet("A100", "A100", "A100")
    decoding(view, 0, 1, 100.0)
    decoding(view, 1, 20, 100.0)
    estimates = estimate(view, held([0, 0, 0]))
    steps_s = added_s(estimates) - estimates.compute_s
    assert steps_s[RECOMPUTE, 0] == pytest.approx(steps_s[RECOMPUTE, 1])
    assert steps_s[RECOMPUTE, 2] - steps_s[RECOMPUTE, 0] == pytest.approx(256 * estimates.weights_s[2])


def test_of_all_other_rows_the_largest() -> None:
    assert largest_of_others(np.array([3.0, 5.0, 4.0])).tolist() == [5.0, 4.0, 5.0]
    assert largest_of_others(np.array([5.0, 5.0])).tolist() == [5.0, 5.0]
    assert largest_of_others(np.array([5.0])).tolist() == [0.0]


# What a fetch does to those under way


def fetching(rows: int, under_way_bytes: float) -> Estimates:
    """A store behind 3.125 GB/s, with one fetch under way to the first replica."""
    view = a_fleet(*["A100"] * rows)
    view.head_ends_s[0] = view.head_compute_s[0] = 1.4
    estimator = an_estimator(network_bytes_per_s=3.125e9, rows=rows)
    if under_way_bytes:
        estimator.routes.table.promise([0, 1], under_way_bytes, now_s=0.0)
    return estimator.estimate(a_request(), held([0] * rows, 512), view, quiet(), 0.0)


@pytest.mark.parametrize("rows", [2, 12])
def test_a_fetch_puts_off_the_longest_on_its_link_by_its_own_bytes_or_what_that_has_left(rows: int) -> None:
    own_bytes = 8192 * 147_456
    for under_way in (4e9, 0.5e9):
        late_s = fetching(rows, under_way).put_off_s
        assert late_s[REMOTE] == pytest.approx(min(own_bytes, under_way) / 3.125e9)
        assert late_s[RECOMPUTE].max() == late_s[LOCAL].max() == 0.0


@pytest.mark.parametrize("rows", [2, 12])
def test_where_nothing_is_under_way_a_fetch_puts_nobody_off(rows: int) -> None:
    assert not fetching(rows, 0.0).put_off_s.any()


def test_a_fair_link_ends_the_others_as_much_later_as_is_said() -> None:
    """By the link table itself: what it expects of the same fetch with and without the new one on the link."""
    table = an_estimator(network_bytes_per_s=3.125e9).routes.table
    first = table.promise([0], 4e9, now_s=0.0)
    alone_s = table.fetch_one([0], 4e9, 0.0)[0]
    late_s = table.put_off_s(np.array([[0], [-1]]), np.array([1e9, 1e9]))
    table.take_back(first, 0.0)
    table.promise([0], 1e9, now_s=0.0)
    beside_new_s = table.fetch_one([0], 4e9, 0.0)[0]
    table.promise([0], 4e9, now_s=0.0)
    assert late_s.tolist() == pytest.approx([1e9 / 3.125e9, 0.0])
    assert alone_s - 4e9 / 3.125e9 == pytest.approx(4e9 / 3.125e9 + 0.01)  # two equal ones take turns
    assert beside_new_s == pytest.approx(0.01 + (4e9 + 1e9) / 3.125e9)

from __future__ import annotations

import numpy as np
import pytest

from estimators.first_token import Discipline
from estimators.hardware import CARDS
from estimators.prefill_features import prior_coefficients
from estimators.roofline import rates_of
from estimators.shapes import QWEN3_8B
from estimators.view import TABLE, FleetView
from tests.builders import a_fleet


def test_a_column_of_the_table_and_the_one_of_that_name_are_the_same_numbers() -> None:
    view = a_fleet("A100", "H20", "A100")
    for number, name in enumerate(TABLE):
        if not name.startswith("coefficient_"):
            getattr(view, name)[1] = 100.0 + number
            assert view.table[number, 1] == 100.0 + number


def test_the_corrections_of_a_replica_are_a_row_that_is_written_in_place() -> None:
    view = a_fleet("A100", "H20")
    first = TABLE.index("coefficient_linear")
    row = view.coefficients[1]
    row *= 3.0
    assert view.table[first : first + 5, 1].tolist() == (3.0 * prior_coefficients()).tolist()
    assert view.table[first : first + 5, 0].tolist() == prior_coefficients().tolist()


def test_columns_that_are_read_together_are_the_single_ones() -> None:
    view = a_fleet("A100", "H20")
    view.waiting_linear_s[:], view.waiting_held_s[:] = 1.0, 5.0
    assert view.waiting[[0, 4]].tolist() == [[1.0, 1.0], [5.0, 5.0]]
    single = (view.linear_s_per_token, view.attention_s_per_pair, view.head_s)
    for column, together in zip(single, view.work_rates, strict=True):
        assert column.tolist() == together.tolist()


def test_a_new_fleet_is_idle_knows_its_cards_and_nothing_that_is_reported() -> None:
    rates = [rates_of(QWEN3_8B, CARDS[card]) for card in ("A100", "H20")]
    view = FleetView(["a", "b"], rates)
    assert view.weights_s.tolist() == [one.weights_s for one in rates]
    assert np.isneginf(view.head_ends_s).all()
    assert np.isnan([view.foreign_waiting, view.foreign_decoding, view.capacity_tokens]).all()
    assert not view.ready.any()
    assert not view.knows_capacity
    assert view.pace_scale.tolist() == view.occupancy.tolist() == [1.0, 1.0]


def test_a_fleet_has_a_discipline_when_all_replicas_have_it() -> None:
    view = a_fleet(discipline=Discipline.SERIAL)
    assert view.discipline is Discipline.SERIAL
    view.disciplines[1] = Discipline.OVERLAPPED
    assert view.discipline is None


def test_names_without_their_rates_are_refused() -> None:
    with pytest.raises(ValueError, match="rates"):
        FleetView(["a", "b"], [rates_of(QWEN3_8B, CARDS["A100"])])


# Rows that are given to other replicas


def renewed(view: FleetView, row: int, name: str = "new") -> None:
    rates = rates_of(QWEN3_8B, CARDS["H20"])
    view.renew(row, name, rates, usd_per_hour=2.0, discipline=Discipline.OVERLAPPED, limit_s=0.0)


def test_a_renewed_row_is_as_that_of_a_view_made_with_its_replica() -> None:
    view, made = a_fleet("A100", "A100"), a_fleet("A100", "H20")
    view.table[:, 1] = 7.0
    view.kv_used_share[1] = view.sampled_at_s[1] = view.samples[1] = 3
    renewed(view, 1)
    np.testing.assert_array_equal(view.table[:, 1], made.table[:, 1])
    assert np.isnan([view.kv_used_share[1], view.sampled_at_s[1]]).all()
    assert (view.samples[1], view.up[1], view.names[1]) == (0, False, "new")
    np.testing.assert_array_equal(view.table[:, 0], made.table[:, 0])


def test_a_row_with_requests_is_not_given_away() -> None:
    view = a_fleet("A100", "H20")
    view.booked[1] = 1
    with pytest.raises(ValueError, match="still has requests"):
        renewed(view, 1)


def test_two_rows_never_have_one_name() -> None:
    view = a_fleet("A100", "H20")
    with pytest.raises(ValueError, match="another row"):
        renewed(view, 1, view.names[0])


def test_capacity_is_unknown_again_once_nobody_that_told_it_is_left() -> None:
    view = a_fleet("A100", "H20")
    view.has_capacity(1, 1000.0)
    renewed(view, 1)
    assert not view.knows_capacity

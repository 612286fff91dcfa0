from __future__ import annotations

import pytest

from estimators.stored import items, mapping, number, numbers, weights


def test_what_was_stored_is_read_back() -> None:
    assert mapping({"a": 1}, "x") == {"a": 1}
    assert items([1, 2], "x", 2) == [1, 2]
    assert number(3, "x", least=3.0, most=3.0) == 3.0
    assert weights([0, 1.5], "x", 2) == [0.0, 1.5]


@pytest.mark.parametrize("value", [None, 1.0, "ab", [("a", 1)]])
def test_only_mappings_are_mappings(value: object) -> None:
    with pytest.raises(ValueError, match=r"x = .* is not a mapping"):
        mapping(value, "x")


@pytest.mark.parametrize("value", [None, "ab", (1, 2), [1], [1, 2, 3]])
def test_only_lists_of_the_right_length_are_lists(value: object) -> None:
    with pytest.raises(ValueError, match=r"x = .* is not a list of 2"):
        items(value, "x", 2)


@pytest.mark.parametrize("value", [None, "1", True, float("nan"), float("inf"), -0.1, 1.1, [1.0]])
def test_only_finite_numbers_in_range_are_numbers(value: object) -> None:
    with pytest.raises(ValueError, match="x ="):
        number(value, "x", least=0.0, most=1.0)


@pytest.mark.parametrize("value", [[1.0, -1.0], [1.0, None], [1.0]])
def test_only_lists_of_counts_are_weights(value: object) -> None:
    with pytest.raises(ValueError, match="x ="):
        weights(value, "x", 2)


def test_numbers_come_back_in_the_shape_they_had_and_in_no_other() -> None:
    assert numbers([[1, 2.5], [3, 4]], "x", (2, 2)).tolist() == [[1.0, 2.5], [3.0, 4.0]]
    for bad in ([1, 2], [[1, 2], [3]], [[1, 2], [3, float("nan")]], None, "ab"):
        with pytest.raises(ValueError, match="x"):
            numbers(bad, "x", (2, 2))

from __future__ import annotations

import pytest

from router.stored_answers import LONGEST_ID, StoredAnswers


def test_the_last_replica_that_answered_with_an_id_keeps_it() -> None:
    stored = StoredAnswers()
    stored.note("resp_1", "a")
    stored.note("resp_1", "b")
    assert (stored.holder("resp_1"), stored.holder("resp_2")) == ("b", "")


def test_beyond_the_capacity_the_id_that_was_not_used_for_longest_goes() -> None:
    stored = StoredAnswers(capacity=2)
    for number in (1, 2):
        stored.note(f"resp_{number}", "a")
    stored.holder("resp_1")
    stored.note("resp_3", "a")
    assert [stored.holder(f"resp_{number}") for number in (1, 2, 3)] == ["a", "", "a"]
    assert len(stored) == 2


def test_an_id_no_engine_makes_takes_no_memory() -> None:
    stored = StoredAnswers()
    stored.note("", "a")
    stored.note("x" * (LONGEST_ID + 1), "a")
    assert len(stored) == 0


def test_a_memory_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity"):
        StoredAnswers(capacity=0)

"""The last good answer counts, for as long as it may."""

from __future__ import annotations

from math import isnan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.discovery.kept import Kept

NAMES = st.lists(st.sampled_from("abcd"), max_size=4)


def test_nothing_is_listed_before_the_first_answer() -> None:
    kept = Kept[str]()
    assert (kept.entries(0.0), kept.answered) == ([], False)


def test_without_grace_an_entry_is_gone_with_the_first_answer_that_lacks_it() -> None:
    kept = Kept[str]()
    kept.good(["a", "b"], 0.0)
    kept.good(["b"], 1.0)
    assert kept.entries(1.0) == ["b"]


def test_with_grace_an_entry_outlives_answers_that_lack_it_for_that_long() -> None:
    kept = Kept[str](grace_s=10.0)
    kept.good(["a", "b"], 0.0)
    kept.good(["b"], 9.0)
    assert kept.entries(9.0) == ["b", "a"]
    kept.good(["b"], 10.0)
    assert kept.entries(10.0) == ["b"]


def test_an_answer_that_names_nothing_empties_the_list_after_the_grace() -> None:
    kept = Kept[str](grace_s=10.0)
    kept.good(["a"], 0.0)
    kept.good([], 5.0)
    assert kept.entries(5.0) == ["a"]
    kept.good([], 10.0)
    assert kept.entries(10.0) == []


def test_failures_keep_the_last_answer_for_a_bounded_time() -> None:
    kept = Kept[str](keep_s=300.0)
    kept.good(["a"], 0.0)
    kept.failed("no answer", 1.0)
    kept.failed("no answer", 200.0)
    assert kept.entries(300.9) == ["a"]
    assert kept.entries(301.0) == []


def test_without_a_bound_failures_keep_it_for_good() -> None:
    kept = Kept[str]()
    kept.good(["a"], 0.0)
    kept.failed("half written", 1.0)
    assert kept.entries(1e9) == ["a"]


def test_a_failure_is_news_once_and_again_for_another_reason() -> None:
    kept = Kept[str]()
    assert [kept.failed(reason, 0.0) for reason in ("x", "x", "y", "y")] == [True, False, True, False]


def test_the_same_good_answer_as_before_ends_a_failure() -> None:
    kept = Kept[str]()
    kept.good(["a"], 0.0)
    kept.failed("half written", 1.0)
    assert (kept.failure, kept.failed_since_s) == ("half written", 1.0)
    kept.good(["a"], 2.0)
    assert kept.failure is None
    assert isnan(kept.failed_since_s)


@given(st.lists(st.one_of(NAMES, st.none()), max_size=8))
def test_without_grace_and_bound_the_list_is_that_of_the_last_good_answer(answers: list[list[str] | None]) -> None:
    kept = Kept[str]()
    last: list[str] = []
    for number, answer in enumerate(answers):
        if answer is None:
            kept.failed("no answer", float(number))
        else:
            kept.good(answer, float(number))
            last = list(dict.fromkeys(answer))
        assert kept.entries(float(number)) == last


@pytest.mark.parametrize(("grace_s", "keep_s"), [(-1.0, 1.0), (float("nan"), 1.0), (0.0, 0.0), (0.0, float("nan"))])
def test_times_out_of_range_are_refused(grace_s: float, keep_s: float) -> None:
    with pytest.raises(ValueError, match=r"grace_s|keep_s"):
        Kept[str](grace_s=grace_s, keep_s=keep_s)

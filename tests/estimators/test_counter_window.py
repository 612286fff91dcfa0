from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.counter_window import CounterWindow

tokens = st.floats(0.0, 1e6)


def a_window(*, hit_tokens: float, query_tokens: float) -> CounterWindow:
    """Ten requests of 1,500 tokens that should each reuse 1,000."""
    window = CounterWindow()
    for _ in range(10):
        window.expect(reuse_tokens=1000.0, prompt_tokens=1500.0, age_s=30.0)
    window.count(hit_tokens=hit_tokens, query_tokens=query_tokens)
    return window


@pytest.mark.parametrize("believed", [0.0, 0.5, 1.0])
def test_counters_of_our_requests_alone_are_the_whole_truth(believed: float) -> None:
    shares, known = a_window(hit_tokens=7000.0, query_tokens=15000.0).shares([believed])
    assert shares == pytest.approx([0.7], abs=1e-6)
    assert known == 1.0


def test_hits_nobody_expected_count_as_hits_at_most() -> None:
    shares, known = a_window(hit_tokens=14000.0, query_tokens=15000.0).shares([0.5])
    assert shares == pytest.approx([1.0], abs=1e-6)
    assert known == 1.0


@pytest.mark.parametrize(("believed", "share"), [(0.0, 0.4), (0.55, 0.55), (1.0, 0.7)])
def test_tokens_of_others_leave_an_interval_and_its_likeliest_point_is_taken(believed: float, share: float) -> None:
    """3,000 foreign tokens may hold up to 3,000 of the 7,000 hits: ours are 4,000 to 7,000 of 10,000."""
    shares, known = a_window(hit_tokens=7000.0, query_tokens=18000.0).shares([believed])
    assert shares == pytest.approx([share], abs=1e-6)
    assert known == pytest.approx(0.7)


def two_ages(hit_tokens: float) -> CounterWindow:
    """3,000 tokens of 10 s and 1,000 of 900 s."""
    window = CounterWindow()
    for _ in range(3):
        window.expect(reuse_tokens=1000.0, prompt_tokens=1000.0, age_s=10.0)
    window.expect(reuse_tokens=1000.0, prompt_tokens=1000.0, age_s=900.0)
    window.expect(reuse_tokens=0.0, prompt_tokens=1000.0, age_s=1e6)
    window.count(hit_tokens=hit_tokens, query_tokens=5000.0)
    return window


def test_each_age_has_its_part_and_nothing_expected_has_none() -> None:
    window = two_ages(2000.0)
    assert window.requests == 5
    assert window.parts == [0.75, 0.25]
    for found_s, told_s in zip(window.ages_s, (10.0, 900.0), strict=True):
        assert told_s <= found_s <= told_s * 1.5


@given(hit=tokens, query=tokens, beliefs=st.lists(st.floats(0.0, 1.0), min_size=2, max_size=2))
def test_the_shares_make_up_the_hits_and_keep_the_order_of_the_beliefs(
    hit: float, query: float, beliefs: list[float]
) -> None:
    window = two_ages(hit)
    window.count(hit_tokens=0.0, query_tokens=query)
    shares, known = window.shares(beliefs)
    assert all(0.0 <= share <= 1.0 for share in shares)
    assert 0.0 <= known <= 1.0
    assert (shares[0] - shares[1]) * (beliefs[0] - beliefs[1]) >= -1e-9
    total = 0.75 * shares[0] + 0.25 * shares[1]
    believed = 0.75 * beliefs[0] + 0.25 * beliefs[1]
    least, most = max(0.0, hit - query) / 4000.0, min(1.0, hit / 4000.0)
    assert total == pytest.approx(min(most, max(least, believed)), abs=1e-6)


def test_ages_are_few_however_many_requests_there_are() -> None:
    window = CounterWindow()
    for request in range(5000):
        window.expect(reuse_tokens=1.0, prompt_tokens=1.0, age_s=0.37 * request**2)
    window.expect(reuse_tokens=1.0, prompt_tokens=1.0, age_s=float("nan"))
    window.expect(reuse_tokens=1.0, prompt_tokens=1.0, age_s=float("inf"))
    assert len(window.ages_s) < 50
    assert sum(window.parts) == pytest.approx(1.0)


@pytest.mark.parametrize(("reuse", "prompt", "age"), [(2.0, 1.0, 0.0), (-1.0, 1.0, 0.0), (1.0, 2.0, -1.0)])
def test_expectations_out_of_range_are_refused(reuse: float, prompt: float, age: float) -> None:
    with pytest.raises(ValueError, match="out of range"):
        CounterWindow().expect(reuse_tokens=reuse, prompt_tokens=prompt, age_s=age)


@pytest.mark.parametrize(("hit", "query"), [(-1.0, 1.0), (1.0, -1.0), (float("nan"), 1.0), (1.0, float("inf"))])
def test_counters_that_run_backwards_are_refused(hit: float, query: float) -> None:
    with pytest.raises(ValueError, match="out of range"):
        CounterWindow().count(hit_tokens=hit, query_tokens=query)

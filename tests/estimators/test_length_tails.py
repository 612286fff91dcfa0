"""Tail sums: what they say about lengths must be what the lengths themselves say."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.length_tails import (
    EDGES,
    LARGEST,
    WHOLE,
    Table,
    area,
    drop_forgotten,
    mean_left_at_random,
    mean_left_of_parts,
    mixture,
    of_longer,
    of_memoryless,
    of_one,
    smallest_at,
    tail_at,
)

Lengths = npt.NDArray[np.int64]

some_lengths = st.lists(st.integers(1, 20_000), min_size=1, max_size=12).map(lambda them: np.array(them))


def table_of(lengths: Lengths) -> Table:
    return np.asarray(np.mean([of_one(float(length)) for length in lengths], axis=0))


def tail(table: Table, tokens: float) -> tuple[float, float]:
    return tail_at(tokens, [(1.0, table.reshape(-1))])


def counted(lengths: Lengths, tokens: float) -> tuple[float, float]:
    return float(np.mean(lengths > tokens)), float(np.mean(np.maximum(lengths - tokens, 0)))


def test_edges_ascend_to_the_largest_length_and_hold_every_small_one() -> None:
    assert np.all(np.diff(EDGES) > 0)
    assert EDGES[: WHOLE + 1] == tuple(range(WHOLE + 1))
    assert EDGES[-1] == LARGEST


@given(some_lengths)
def test_at_an_edge_the_tail_is_counted_exactly(lengths: Lengths) -> None:
    table = table_of(lengths)
    for edge in EDGES[:100:7]:
        assert tail(table, edge) == pytest.approx(counted(lengths, edge), rel=1e-9, abs=1e-12)


@given(some_lengths, st.integers(0, 25_000))
def test_between_edges_the_excess_is_off_by_less_than_one_bin(lengths: Lengths, tokens: int) -> None:
    """Only where the lengths of the bin around `tokens` lie is unknown, and they are at most its width away."""
    low = max(edge for edge in EDGES if edge <= tokens)
    high = min(edge for edge in EDGES if edge > tokens)
    inside = float(np.mean((lengths > low) & (lengths <= high)))
    share, excess = tail(table_of(lengths), tokens)
    true_share, true_excess = counted(lengths, tokens)
    assert excess == pytest.approx(true_excess, rel=1e-9, abs=1e-9 + inside * (high - low) / 4)
    assert share == pytest.approx(true_share, rel=1e-9, abs=1e-9 + inside)


@given(some_lengths, st.integers(0, 25_000), st.integers(1, 3000))
def test_a_tail_only_falls_and_its_excess_falls_no_faster_than_its_share(
    lengths: Lengths, tokens: int, further: int
) -> None:
    table = table_of(lengths)
    share, excess = tail(table, tokens)
    later_share, later_excess = tail(table, tokens + further)
    assert later_share <= share + 1e-12
    assert later_share * further - 1e-9 <= excess - later_excess <= share * further + 1e-9


def test_the_memoryless_tail_has_the_same_rest_everywhere() -> None:
    table = of_memoryless(256.0)
    assert table[:, 1] / table[:, 0] == pytest.approx(np.full(len(EDGES), 256.0))
    for tokens in (3, 100, 250, 777, 1500):
        share, excess = tail(table, tokens)
        assert excess / share == pytest.approx(256.0, rel=0.02)
        assert share == pytest.approx((255 / 256) ** tokens, rel=0.02)


def test_a_single_length_has_no_spread() -> None:
    table = of_one(1000.0)
    assert tail(table, 0) == (1.0, 1000.0)
    assert tail(table, 900) == (1.0, 100.0)
    assert tail(table, 1100) == (0.0, 0.0)


@given(some_lengths, st.integers(0, 90))
def test_longer_than_is_the_conditional_distribution(lengths: Lengths, index: int) -> None:
    tokens = float(EDGES[index])
    longer = lengths[lengths > tokens]
    if longer.size:
        assert of_longer(table_of(lengths), tokens) == pytest.approx(table_of(longer), rel=1e-9, abs=1e-12)


def test_longer_than_anything_possible_is_taken_for_that_long() -> None:
    assert of_longer(of_one(50.0), 200.0) == pytest.approx(of_one(200.0))


def test_answers_longer_than_the_last_edge_keep_their_mean_and_fall_off_above_it() -> None:
    table = of_one(4.0 * LARGEST)
    assert tail(table, 0) == (1.0, 4.0 * LARGEST)
    share, excess = tail(table, LARGEST + 1000.0)
    assert excess / share == pytest.approx(3.0 * LARGEST)
    assert tail(table, 2.0 * LARGEST)[0] < share < 1.0
    assert smallest_at(0.5, table) == pytest.approx(LARGEST + 3 * LARGEST * np.log(2))
    assert tail(of_one(5.0), 2.0 * LARGEST) == (0.0, 0.0)


@given(st.lists(st.integers(1, WHOLE), min_size=1, max_size=20), st.integers(1, 99))
def test_small_quantiles_are_those_of_the_sample(lengths: list[int], percent: int) -> None:
    expected = next(x for x in range(WHOLE + 1) if sum(n <= x for n in lengths) * 100 >= percent * len(lengths))
    assert smallest_at(1.0 - percent / 100, table_of(np.array(lengths))) == pytest.approx(expected, abs=1e-9)


@given(some_lengths, st.floats(0.001, 1.0))
def test_the_quantile_inverts_the_tail(lengths: Lengths, target: float) -> None:
    table = table_of(lengths)
    assert tail(table, smallest_at(target, table) + 1e-6)[0] <= target * (1 + 1e-6)


def test_an_answer_met_at_random_has_half_of_a_constant_left_and_all_of_a_memoryless_one() -> None:
    assert mean_left_at_random(of_one(1000.0)) == pytest.approx(500.0, rel=0.01)
    for mean_tokens in (256.0, 3.0 * LARGEST):
        assert mean_left_at_random(of_memoryless(mean_tokens)) == pytest.approx(mean_tokens, rel=0.01)


@given(some_lengths)
def test_an_answer_met_at_random_is_a_token_drawn_at_random(lengths: Lengths) -> None:
    """Independent route: list every token of every answer, and what is left half a token before it."""
    left = np.concatenate([np.arange(length, 0, -1) - 0.5 for length in lengths])
    assert mean_left_at_random(table_of(lengths)) == pytest.approx(float(left.mean()), rel=0.02)


@given(some_lengths, some_lengths, st.floats(0.0, 1.0))
def test_a_mixture_met_at_random_is_read_from_its_parts(one: Lengths, other: Lengths, weight: float) -> None:
    parts = [(weight, table_of(one).reshape(-1)), (1.0 - weight, table_of(other).reshape(-1))]
    read = mean_left_of_parts([(share, flat, area(flat)) for share, flat in parts])
    assert read == pytest.approx(mean_left_at_random(mixture(parts)), rel=1e-12)


@given(some_lengths, some_lengths, st.floats(0.0, 1.0))
def test_a_mixture_is_the_weighted_mean_of_its_parts(first: Lengths, second: Lengths, weight: float) -> None:
    tables = table_of(first), table_of(second)
    parts = [(weight, tables[0].reshape(-1)), (1.0 - weight, tables[1].reshape(-1))]
    mixed = mixture(parts)
    assert mixed == pytest.approx(weight * tables[0] + (1.0 - weight) * tables[1])
    assert tail_at(123.4, parts) == pytest.approx(tail(mixed, 123.4))


def test_what_has_faded_is_dropped_and_the_rest_stays() -> None:
    table = 1e-12 * of_one(3000.0) + (1 - 1e-12) * of_one(20.0)
    before = table.copy()
    drop_forgotten(table)
    kept = np.array(EDGES) < 20
    assert np.array_equal(table[kept], before[kept])
    assert not table[~kept].any()


@pytest.mark.parametrize("mean_tokens", [1.0, 0.0, float("nan"), float("inf")])
def test_a_memoryless_mean_must_exceed_one_token(mean_tokens: float) -> None:
    with pytest.raises(ValueError, match="mean_tokens"):
        of_memoryless(mean_tokens)


@pytest.mark.parametrize("target", [0.0, 1.5, float("nan")])
def test_a_quantile_needs_a_probability(target: float) -> None:
    with pytest.raises(ValueError, match="target"):
        smallest_at(target, of_one(5.0))

"""Skew of expert-parallel groups: conservation, exact limits, chance against its distribution."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from math import comb, inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.planning.expert_parallel import (
    Cut,
    Fabric,
    card_rows,
    compute_s,
    exchange_bound,
    layer_bound,
    one_hot_expert,
    random_rows,
    skew,
)

tables = st.integers(1, 5).flatmap(
    lambda width: st.lists(st.lists(st.integers(0, 9), min_size=width, max_size=width), min_size=1, max_size=5)
)


@given(st.integers(2, 64), st.integers(1, 300), st.data())
def test_a_hot_expert_takes_its_rows_from_the_others(experts: int, tokens: int, data: st.DataObject) -> None:
    chosen = data.draw(st.integers(1, experts))
    hot = data.draw(st.integers(0, tokens))
    rows = one_hot_expert(tokens=tokens, chosen=chosen, experts=experts, hot_rows=hot)
    assert rows.sum() == pytest.approx(tokens * chosen)
    assert rows[0] == hot
    assert np.ptp(rows[1:]) == 0


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50), st.data())
def test_no_row_is_lost_between_experts_and_cards(rows: list[float], data: st.DataObject) -> None:
    cards = data.draw(st.integers(1, len(rows)))
    on_cards = card_rows(rows, cards)
    assert len(on_cards) == cards
    assert on_cards.sum() == pytest.approx(sum(rows))
    assert [part.sum() for part in np.array_split(np.array(rows), cards)] == pytest.approx(on_cards.tolist())


def test_larger_groups_dilute_a_hot_expert_less() -> None:
    rows = one_hot_expert(tokens=1024, chosen=8, experts=256, hot_rows=128)
    shares = [float(skew(card_rows(rows, cards))) for cards in (1, 2, 8, 32, 128, 256)]
    assert shares == sorted(shares)
    assert shares[0] == 1
    assert shares[-1] == pytest.approx(4)


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=20), st.floats(0.01, 100))
def test_skew_is_at_least_one_at_most_the_cards_and_without_a_scale(rows: list[float], factor: float) -> None:
    value = float(skew(rows))
    assert 1 - 1e-12 <= value <= len(rows) * (1 + 1e-12)
    assert float(skew([each * factor for each in rows])) == pytest.approx(value)


def test_every_token_passes_as_many_different_experts_as_it_chooses() -> None:
    rows = random_rows(np.random.default_rng(3), tokens=50, chosen=5, experts=5, batches=3)
    assert (rows == 50).all()  # all five of five
    rows = random_rows(np.random.default_rng(3), tokens=50, chosen=3, experts=9, batches=4)
    assert (rows.sum(axis=1) == 150).all()
    assert (rows <= 50).all()


def test_every_subset_is_alike_likely() -> None:
    """Chi-square over the subsets one token draws; 9 degrees of freedom, 99.9 % below 27.9."""
    drawn = random_rows(np.random.default_rng(5), tokens=1, chosen=3, experts=5, batches=5000)
    seen = Counter(tuple(np.flatnonzero(row).tolist()) for row in drawn)
    assert set(seen) == set(combinations(range(5), 3))
    expected = 5000 / comb(5, 3)
    assert sum((count - expected) ** 2 / expected for count in seen.values()) < 27.9


def test_one_seed_gives_one_result() -> None:
    first, again, other = (
        random_rows(np.random.default_rng(seed), tokens=64, chosen=4, experts=32, batches=5) for seed in (1, 1, 2)
    )
    assert (first == again).all()
    assert (first != other).any()


def expected_maximum_of_independent(tokens: int, share: float, cards: int) -> float:
    """Mean of the largest of `cards` independent binomial counts: sum over x of 1 - F(x)^cards."""
    pmf = np.array([comb(tokens, hits) * share**hits * (1 - share) ** (tokens - hits) for hits in range(200)])
    return float((1 - np.cumsum(pmf) ** cards).sum())


def test_even_routing_gives_the_textbooks_skew_at_both_ends() -> None:
    """About 4 % on 8 cards and 52 % on 256; the latter is also the largest of 256 binomial counts."""
    rows = random_rows(np.random.default_rng(0), tokens=1024, chosen=8, experts=256, batches=1000)
    small, large = (float(skew(card_rows(rows, cards)).mean()) for cards in (8, 256))
    assert small == pytest.approx(1.04, abs=0.005)
    assert large == pytest.approx(1.52, abs=0.01)
    assert large == pytest.approx(expected_maximum_of_independent(1024, 8 / 256, 256) / 32, abs=0.01)


@given(tables, st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0.1, 10))
def test_an_exchange_takes_as_long_as_its_fullest_part(
    counts: list[list[int]], send: float, receive: float, cut: float
) -> None:
    bound = exchange_bound(
        counts,
        item_bytes=2.0,
        send_bytes_per_s=send,
        receive_bytes_per_s=receive,
        cuts=[Cut(range(len(counts)), range(len(counts[0])), cut)],
    )
    total = sum(map(sum, counts))
    assert bound.send_s == pytest.approx(2 * max(map(sum, counts)) / send)
    assert bound.receive_s == pytest.approx(2 * max(map(sum, zip(*counts, strict=True))) / receive)
    assert bound.cut_s == pytest.approx(2 * total / cut)
    assert bound.least_s == max(bound.send_s, bound.receive_s, bound.cut_s)
    assert bound.least_s >= 2 * total / min(len(counts) * send, len(counts[0]) * receive, cut) * (1 - 1e-12)


def test_cards_with_links_of_their_own_are_judged_by_them() -> None:
    counts = [[4, 0], [0, 1]]
    bound = exchange_bound(counts, item_bytes=1.0, send_bytes_per_s=[4.0, 0.5], receive_bytes_per_s=10.0)
    assert (bound.send_s, bound.limited_by) == (2.0, "sender")


def test_a_cut_counts_only_what_crosses_it() -> None:
    counts = [[5, 1], [1, 5]]
    cut = Cut(senders=[0], receivers=[1], bytes_per_s=1.0)
    bound = exchange_bound(counts, item_bytes=1.0, send_bytes_per_s=100, receive_bytes_per_s=100, cuts=[cut])
    assert (bound.cut_s, bound.limited_by) == (1.0, "cut")


def bound_ms(rows: list[int], *, card: float = 50e9, cut: float = 200e9, dispatch: float = 8192.0) -> list[float]:
    layer = layer_bound(
        np.tile(np.array(rows) / 4, (4, 1)),
        dispatch_bytes=dispatch,
        combine_bytes=8192.0,
        fabric=Fabric(card_bytes_per_s=card, cut_bytes_per_s=cut),
        row_flops=6 * 4096 * 1536,
        flops_per_s=494.7e12,
    )
    return [time_s * 1e3 for time_s in layer.stages_s]


EVEN, HOT = [2048] * 4, [5120, 1024, 1024, 1024]


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        (bound_ms(EVEN), [0.336, 0.156, 0.336]),
        (bound_ms(HOT), [0.839, 0.391, 0.839]),
        (bound_ms(EVEN, cut=50e9), [1.342, 0.156, 1.342]),
        (bound_ms(HOT, dispatch=4096.0), [0.419, 0.391, 0.839]),
        (bound_ms(HOT, card=450e9, cut=inf), [0.093, 0.391, 0.093]),
    ],
)
def test_every_stage_of_the_textbooks_table(stages: list[float], expected: list[float]) -> None:
    assert stages == pytest.approx(expected, abs=0.0005)


def test_the_fuller_a_group_the_longer_all_three_stages() -> None:
    """Rows move from group to group, their sum stays."""
    totals = [sum(bound_ms([2048 + 3 * more, *[2048 - more] * 3])) for more in (0, 256, 512, 1024)]
    assert totals == sorted(totals)
    assert totals[-1] == pytest.approx(2.5 * totals[0])


def test_batches_follow_at_the_pace_of_the_busiest_resource() -> None:
    layer = layer_bound(
        [[1.0]],
        dispatch_bytes=3.0,
        combine_bytes=1.0,
        fabric=Fabric(card_bytes_per_s=1.0),
        row_flops=2.0,
        flops_per_s=1.0,
    )
    assert (layer.stages_s, layer.total_s, layer.batches_per_s) == ((3.0, 2.0, 1.0), 6.0, 1 / 3)


def test_impossible_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="hot_rows"):
        one_hot_expert(tokens=4, chosen=1, experts=2, hot_rows=5)
    with pytest.raises(ValueError, match="experts"):
        one_hot_expert(tokens=4, chosen=1, experts=1, hot_rows=1)
    with pytest.raises(ValueError, match="cards"):
        card_rows([1.0, 2.0], 3)
    with pytest.raises(ValueError, match="nothing to compare"):
        skew([0.0, 0.0])
    with pytest.raises(ValueError, match="chosen"):
        random_rows(np.random.default_rng(0), tokens=1, chosen=3, experts=2, batches=1)
    with pytest.raises(ValueError, match="batches x experts"):
        random_rows(np.random.default_rng(0), tokens=1, chosen=1, experts=1000, batches=1_000_000)
    for counts in ([], [1.0], [[-1.0]], [[float("nan")]]):
        with pytest.raises(ValueError, match="counts"):
            exchange_bound(counts, item_bytes=1.0, send_bytes_per_s=1.0, receive_bytes_per_s=1.0)
    for rate in (0.0, [1.0, 2.0], float("nan")):
        with pytest.raises(ValueError, match="send_bytes_per_s"):
            exchange_bound([[1.0]], item_bytes=1.0, send_bytes_per_s=rate, receive_bytes_per_s=1.0)
    with pytest.raises(ValueError, match="row_flops"):
        compute_s(1.0, row_flops=0.0, flops_per_s=1.0)

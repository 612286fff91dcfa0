"""Money: the textbook's rows, sums over a batch, and what a rule that minimises each number would do."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.cost import (
    GOOD_FLOOR,
    Values,
    decode_share_s,
    fleet_per_thousand_usd,
    good_probability,
    gpu_seconds,
    money_usd,
    net_loss_usd,
    per_good_usd,
    per_thousand_usd,
    unpriced_last,
)

GIB = 2.0**30
# Textbook section 9.2.3: Qwen3-8B, 8192 tokens in, 1024 decode calls, batch 32 at a mean context of 8704 tokens.
WEIGHT_BYTES, KV_BYTES_PER_TOKEN = 15.1e9, 147_456
A100_BYTES_PER_S, H20_BYTES_PER_S = 2039e9 / 2, 4096e9 / 2
A100_PREFILL_S, H20_PREFILL_S = 0.856, 1.805


def column(*values: float) -> Values:
    return np.array(values)


def textbook_decode_s(bytes_per_s: float) -> float:
    share = decode_share_s(
        shared_step_s=column(WEIGHT_BYTES / bytes_per_s),
        own_step_s=column(8704 * KV_BYTES_PER_TOKEN / bytes_per_s),
        decode_batch=column(31.0),
        output_tokens=1024,
    )
    return float(share[0])


@pytest.mark.parametrize(("bytes_per_s", "expected_s"), [(A100_BYTES_PER_S, 1.764), (H20_BYTES_PER_S, 0.878)])
def test_decode_gpu_seconds_of_the_textbook_come_out(bytes_per_s: float, expected_s: float) -> None:
    assert textbook_decode_s(bytes_per_s) == pytest.approx(expected_s, abs=0.001)


def test_the_textbook_s_rates_follow_from_gpu_seconds() -> None:
    a100_s = float(gpu_seconds(compute_s=column(A100_PREFILL_S), decode_s=textbook_decode_s(A100_BYTES_PER_S))[0])
    h20_s = float(gpu_seconds(compute_s=column(H20_PREFILL_S), decode_s=textbook_decode_s(H20_BYTES_PER_S))[0])
    assert 8 / a100_s == pytest.approx(3.05, abs=0.005)
    assert 4 / a100_s + 4 / h20_s == pytest.approx(3.02, abs=0.005)


@pytest.mark.parametrize(
    ("finished_rps", "good_share", "expected", "tolerance"),
    [(3.5, 1.0, 0.63, 0.006), (3.02, 1.0, 0.74, 0.006), (4.55, 1.0, 0.49, 0.006), (4.55, 0.25, 1.95, 0.01)],
)
def test_the_textbook_s_prices_of_a_thousand_come_out(
    finished_rps: float, good_share: float, expected: float, tolerance: float
) -> None:
    """Section 9.7.2: a fleet of eight cards at 8 yuan an hour."""
    price = fleet_per_thousand_usd(usd_per_hour=8.0, finished_rps=finished_rps, good_share=good_share)
    assert price == pytest.approx(expected, abs=tolerance)


def test_a_fleet_that_is_never_idle_costs_what_its_requests_cost() -> None:
    """Two routes to one number: money per request, and the fleet's price over what it finishes when it is full."""
    gpu_s, usd_per_hour = column(2.6), column(1.5)
    per_request = per_thousand_usd(money_usd(gpu_s=gpu_s, usd_per_hour=usd_per_hour))
    fleet = fleet_per_thousand_usd(usd_per_hour=6 * 1.5, finished_rps=6 / 2.6)
    assert per_request == pytest.approx([fleet])


@given(st.lists(st.floats(0.0, 0.01), min_size=1, max_size=12), st.floats(0.001, 0.1))
def test_the_shares_of_one_step_add_up_to_the_step(own_steps_s: list[float], weights_s: float) -> None:
    shares = [
        decode_share_s(
            shared_step_s=column(weights_s),
            own_step_s=column(own_s),
            decode_batch=column(len(own_steps_s) - 1.0),
            output_tokens=1,
        )[0]
        for own_s in own_steps_s
    ]
    assert sum(shares) == pytest.approx(weights_s + sum(own_steps_s))


def test_a_fuller_batch_makes_a_decode_cheaper_down_to_its_own_kv() -> None:
    batch = column(0, 1, 7, 63, 1e9)
    share_s = decode_share_s(
        shared_step_s=column(0.02), own_step_s=column(0.001), decode_batch=batch, output_tokens=100
    )
    assert np.all(np.diff(share_s) < 0)
    assert share_s[0] == pytest.approx(2.1)
    assert share_s[-1] == pytest.approx(0.1)


def test_money_is_a_grid_of_replicas_by_paths() -> None:
    """Two replicas at 3.60 and 7.20 an hour; local, remote, recompute."""
    compute_s = np.array([[0.1, 0.2, 1.0], [0.05, 0.1, 0.5]])
    decode_s, usd_per_hour = column(0.4, 0.3)[:, None], column(3.6, 7.2)[:, None]
    gpu_s = gpu_seconds(compute_s=compute_s, decode_s=decode_s)
    money = money_usd(gpu_s=gpu_s, usd_per_hour=usd_per_hour)
    assert money == pytest.approx(np.array([[5e-4, 6e-4, 14e-4], [7e-4, 8e-4, 16e-4]]))
    assert per_thousand_usd(money)[0, 0] == pytest.approx(0.5)


def test_a_fetch_costs_its_bytes_only_where_the_link_is_priced() -> None:
    gpu_s, usd_per_hour, fetched = np.full((1, 2), 0.1), column(3.6)[:, None], np.array([[0.0, 2e9]])
    free = money_usd(gpu_s=gpu_s, usd_per_hour=usd_per_hour, fetched_bytes=fetched)
    priced = money_usd(gpu_s=gpu_s, usd_per_hour=usd_per_hour, fetched_bytes=fetched, usd_per_gb=0.01)
    assert free == pytest.approx(np.full((1, 2), 1e-4))
    assert (priced - free)[0] == pytest.approx([0.0, 0.02])


def test_a_fetch_that_holds_the_gpu_is_paid_like_work() -> None:
    held = gpu_seconds(compute_s=column(0.1), decode_s=0.5, held_s=column(0.3))
    assert held == pytest.approx([0.9])


def test_an_unknown_price_is_unknown_money_and_never_the_cheapest() -> None:
    money = money_usd(gpu_s=column(1.0, 0.001, 2.0), usd_per_hour=column(9.0, np.nan, 1.0))
    good = column(1.0, 1.0, 1.0)
    for cost in (money, per_good_usd(money=money, good=good), net_loss_usd(money=money, good=good, value_usd=1.0)):
        assert np.isnan(cost).tolist() == [False, True, False]
        assert int(np.argmin(unpriced_last(cost))) == 2
    unknown_odds = per_good_usd(money=column(1.0, 2.0), good=column(np.nan, 0.5))
    assert unpriced_last(unknown_odds).tolist() == [np.inf, 4.0]


def test_an_answer_counts_when_it_is_in_time_and_good_enough() -> None:
    in_time = np.array([[1.0, 0.5], [0.8, 0.0]])
    assert good_probability(meets_deadline=in_time) == pytest.approx(in_time)
    both = good_probability(meets_deadline=in_time, quality=column(1.0, 0.5)[:, None])
    assert both == pytest.approx(np.array([[1.0, 0.5], [0.4, 0.0]]))


def test_rented_cards_take_a_late_answer_only_if_it_is_as_much_cheaper() -> None:
    dear, cheap = 0.010, 0.004
    for late_odds, taken in ((0.5, 1), (0.39, 0)):
        cost = per_good_usd(money=column(dear, cheap), good=column(1.0, late_odds))
        assert int(np.argmin(cost)) == taken


def test_hopeless_candidates_are_ranked_by_money() -> None:
    cost = per_good_usd(money=column(0.02, 0.01), good=column(0.001, 0.0))
    assert cost == pytest.approx([0.02 / GOOD_FLOOR, 0.01 / GOOD_FLOOR])


def test_an_idle_fast_card_that_is_paid_anyway_is_used_and_a_busy_one_must_earn_it() -> None:
    """A dear card that is surely in time, a cheap one that is nearly so."""
    money, good = column(0.010, 0.002), column(0.99, 0.95)
    idle, busy = (
        int(np.argmin(net_loss_usd(money=money, good=good, value_usd=0.1, busy_share=share))) for share in (0.0, 0.9)
    )
    assert (idle, busy) == (0, 1)
    assert int(np.argmin(per_good_usd(money=money, good=good))) == 1


def test_without_value_a_net_loss_is_the_money_and_with_much_of_it_the_odds() -> None:
    money, good = column(0.03, 0.01, 0.02), column(0.9, 0.2, 0.8)
    assert net_loss_usd(money=money, good=good, value_usd=0.0) == pytest.approx(money)
    assert int(np.argmin(net_loss_usd(money=money, good=good, value_usd=1e6))) == int(np.argmax(good))


@pytest.mark.parametrize("seed", range(5))
def test_the_cheapest_good_answers_of_a_fleet_are_those_of_the_net_loss_at_their_own_price(seed: int) -> None:
    """Brute force over every assignment of six requests to three candidates each: smallest sum over sum."""
    rng = np.random.default_rng(seed)
    money, good = rng.uniform(0.001, 0.02, (6, 3)), rng.uniform(0.05, 1.0, (6, 3))
    rows = np.arange(6)
    best = min(money[rows, picks].sum() / good[rows, picks].sum() for picks in map(list, product(range(3), repeat=6)))

    def price(cost: Values) -> float:
        picks = np.argmin(cost, axis=1)
        return float(money[rows, picks].sum() / good[rows, picks].sum())

    assert price(net_loss_usd(money=money, good=good, value_usd=float(best))) == pytest.approx(best)
    assert price(per_good_usd(money=money, good=good)) >= best


def test_the_cheapest_good_answer_of_each_request_need_not_be_that_of_the_fleet() -> None:
    """One request's unlikely candidate has the smaller ratio; beside a request that is dear anyway, odds count more."""
    money, good = np.array([[0.010, 0.004], [0.100, 0.100]]), np.array([[1.0, 0.5], [1.0, 1.0]])
    rows = np.arange(2)

    def price(cost: Values) -> float:
        picks = np.argmin(cost, axis=1)
        return float(money[rows, picks].sum() / good[rows, picks].sum())

    each = price(per_good_usd(money=money, good=good))
    fleet = price(net_loss_usd(money=money, good=good, value_usd=each))
    assert (each, fleet) == pytest.approx((0.104 / 1.5, 0.110 / 2.0))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("usd_per_hour", {"usd_per_hour": 0.0}),
        ("usd_per_hour", {"usd_per_hour": float("nan")}),
        ("finished_rps", {"finished_rps": 0.0}),
        ("good_share", {"good_share": 0.0}),
        ("good_share", {"good_share": 1.1}),
    ],
)
def test_a_fleet_without_price_or_answers_has_no_price_of_a_thousand(name: str, values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=name):
        fleet_per_thousand_usd(**{"usd_per_hour": 8.0, "finished_rps": 3.0, **values})


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_amounts_that_cannot_be_are_refused_by_name(bad: float) -> None:
    one = column(1.0)
    with pytest.raises(ValueError, match="usd_per_gb"):
        money_usd(gpu_s=one, usd_per_hour=one, fetched_bytes=one, usd_per_gb=bad)
    with pytest.raises(ValueError, match="value_usd"):
        net_loss_usd(money=one, good=one, value_usd=bad)
    with pytest.raises(ValueError, match="output_tokens"):
        decode_share_s(shared_step_s=one, own_step_s=one, decode_batch=one, output_tokens=bad)

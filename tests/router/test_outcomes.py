"""Forecasts against outcomes: which tier kept its word, how far off first tokens are, whether quantiles hold."""

from __future__ import annotations

import random
from dataclasses import replace
from math import log

import numpy as np
import pytest

from estimators.hit_probability import Evidence
from estimators.paths import Path
from estimators.routes import Held
from estimators.tiers import Tier
from router.bookings import Booking
from router.outcomes import Outcomes, Part, parts_of
from tests.builders import held
from tests.router.learning_bench import LearningBench

LOCAL = held([512])
MIXED = held([100], 512)  # 1,600 tokens in HBM, 6,592 more in the store


class Bench(LearningBench):
    """Outcomes told directly, of bookings that are ended at once so that each is alone on its replica."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes = Outcomes(self.doubt)

    def booked(self, now_s: float = 0.0, *, where: Held = LOCAL, path: Path = Path.LOCAL) -> Booking:
        booking = self.place(now_s, where=where, path=path)
        self.end(booking, now_s)
        return booking

    def came(self, booking: Booking, after_s: float, cached_tokens: int | None = None) -> None:
        """Its first token came `after_s` after its placing, and then its answer."""
        now_s = booking.placed_at_s + after_s
        booking.first_token_at_s = now_s
        self.outcomes.first_token(booking, now_s)
        self.outcomes.answered(booking, cached_tokens, now_s + 1.0)

    def evidence(self, tier: Tier, now_s: float = 1e3) -> Evidence:
        return self.doubt.hits.evidence(0, tier, now_s)


# Parts


@pytest.mark.parametrize(
    ("where", "path", "parts"),
    [
        (LOCAL, Path.LOCAL, [Part(Tier.HBM, 0.0, 8192.0)]),
        (LOCAL, Path.RECOMPUTE, []),
        (MIXED, Path.REMOTE, [Part(Tier.HBM, 0.0, 1600.0), Part(Tier.REMOTE, 1600.0, 8192.0)]),
        (MIXED, Path.LOCAL, [Part(Tier.HBM, 0.0, 1600.0)]),
        (held([0], 512), Path.REMOTE, [Part(Tier.REMOTE, 0.0, 8192.0)]),
        (held([512], 100), Path.REMOTE, [Part(Tier.HBM, 0.0, 8192.0)]),
    ],
)
def test_a_booking_is_made_of_what_each_tier_was_to_give_in_the_order_of_the_prompt(
    where: Held, path: Path, parts: list[Part]
) -> None:
    assert list(parts_of(Bench().booked(where=where, path=path))) == parts


@pytest.mark.parametrize(
    ("path", "tiers"),
    [
        (Path.LOCAL, {Tier.HBM: 1600.0}),
        (Path.HOST, {Tier.HBM: 1600.0, Tier.HOST: 1400.0}),
        (Path.DISK, {Tier.HBM: 1600.0, Tier.HOST: 1400.0, Tier.DISK: 1000.0}),
        (Path.REMOTE, {Tier.HBM: 1600.0, Tier.HOST: 1400.0, Tier.DISK: 1000.0, Tier.REMOTE: 4192.0}),
        (Path.PEER, {Tier.HBM: 1600.0, Tier.HOST: 1400.0, Tier.DISK: 1000.0}),
    ],
)
def test_each_tier_gives_what_follows_the_ones_above_it_and_a_peers_part_is_nobodys_here(
    path: Path, tiers: dict[Tier, float]
) -> None:
    booking = Bench().booked(where=MIXED, path=Path.REMOTE)
    booking.forecast = replace(booking.forecast, host_tokens=3000.0, disk_tokens=4000.0)
    booking.path = path
    ends = {Path.LOCAL: 1600.0, Path.HOST: 3000.0, Path.DISK: 4000.0}
    booking.reused_tokens = ends.get(path, 8192.0)
    parts = list(parts_of(booking))
    assert {part.tier: part.stop_tokens - part.start_tokens for part in parts} == tiers
    assert [part.start_tokens for part in parts[1:]] == [part.stop_tokens for part in parts[:-1]]


# Reported reuse


@pytest.mark.parametrize("beyond", [0, 5000])
def test_a_report_of_everything_credits_every_tier(beyond: int) -> None:
    bench = Bench()
    before = bench.survival(), bench.survival(tier=Tier.REMOTE)
    for index in range(20):
        bench.came(bench.booked(10.0 * index, where=MIXED, path=Path.REMOTE), 0.3, cached_tokens=8192 + beyond)
    assert bench.evidence(Tier.HBM) is bench.evidence(Tier.REMOTE) is Evidence.REPORTED
    assert bench.survival() > max(0.9, before[0])
    assert bench.survival(tier=Tier.REMOTE) > max(0.9, before[1])


def test_a_chain_that_broke_in_the_store_credits_hbm_and_costs_the_store() -> None:
    bench = Bench()
    for index in range(20):
        bench.came(bench.booked(10.0 * index, where=MIXED, path=Path.REMOTE), 0.9, cached_tokens=1600)
    assert bench.survival() > 0.9
    assert bench.survival(tier=Tier.REMOTE) < 0.4


def test_a_chain_that_broke_in_hbm_says_nothing_of_the_store() -> None:
    bench = Bench()
    store = bench.survival(tier=Tier.REMOTE)
    for index in range(20):
        bench.came(bench.booked(10.0 * index, where=MIXED, path=Path.REMOTE), 0.9, cached_tokens=1000)
    assert bench.evidence(Tier.REMOTE) is Evidence.NONE
    assert bench.survival(tier=Tier.REMOTE) == store
    assert bench.survival() == pytest.approx(1000 / 1600, abs=0.1)  # a part that came counts as that part of a hit


def test_a_recomputed_prompt_says_nothing_of_any_tier() -> None:
    bench = Bench()
    for index in range(20):
        bench.came(bench.booked(10.0 * index, path=Path.RECOMPUTE), 0.9, cached_tokens=0)
    assert {bench.evidence(tier) for tier in Tier} == {Evidence.NONE}


def test_the_age_of_a_block_decides_where_its_fate_counts() -> None:
    """Young blocks are there and old ones are gone; both ages are told, and believed apart."""
    bench = Bench()
    for index in range(60):
        young = index % 2 == 0
        ages_s = np.full((4, 1), np.nan)
        ages_s[0] = 1.0 if young else 300.0
        booking = bench.booked(10.0 * index, where=replace(LOCAL, age_s=ages_s))
        bench.came(booking, 0.1, cached_tokens=8192 if young else 0)
    fates = [float(bench.doubt.hits.survival(Tier.HBM, np.array([age_s]), 600.0)[0]) for age_s in (1.0, 300.0)]
    assert fates[0] > 0.8
    assert fates[1] < 0.2


# First tokens as evidence


def test_without_a_report_the_first_token_tells_a_hit_from_a_miss() -> None:
    hit, missed = Bench(), Bench()
    for index in range(40):
        for bench in (hit, missed):
            booking = bench.booked(10.0 * index)
            forecast = booking.forecast
            bench.came(booking, forecast.first_token_s if bench is hit else forecast.recompute_s)
    assert hit.evidence(Tier.HBM, 400.0) is missed.evidence(Tier.HBM, 400.0) is Evidence.RESIDUAL
    assert missed.survival() < 0.4 < 0.8 < hit.survival()


def test_a_report_outranks_the_first_token() -> None:
    """The engine says that all was reused, however late the first token came."""
    bench = Bench()
    for index in range(20):
        booking = bench.booked(10.0 * index)
        bench.came(booking, booking.forecast.recompute_s, cached_tokens=8192)
    assert bench.evidence(Tier.HBM) is Evidence.REPORTED
    assert bench.survival() > 0.9


def test_an_answer_whose_first_token_nobody_saw_teaches_no_times() -> None:
    bench = Bench()
    before = bench.doubt.spread.state(0.0)
    bench.outcomes.answered(bench.booked(), None, 3.0)
    assert bench.doubt.spread.state(0.0) == before
    assert bench.evidence(Tier.HBM) is Evidence.NONE


# Spread


def test_a_reported_miss_is_compared_with_what_a_miss_should_take() -> None:
    """Recomputing takes exactly as long as expected, so first tokens show no shift although all blocks were lost."""
    bench = Bench()
    for index in range(40):
        booking = bench.booked(10.0 * index)
        bench.came(booking, booking.forecast.recompute_s, cached_tokens=0)
    assert bench.doubt.spread.shift(400.0)[0] == pytest.approx(0.0, abs=0.01)
    assert bench.doubt.spread.scale(400.0)[0] < 0.25 < Bench().doubt.spread.scale(0.0)[0]


def test_a_miss_that_only_its_time_shows_is_compared_with_a_miss_too() -> None:
    bench = Bench()
    for index in range(40):
        booking = bench.booked(10.0 * index)
        late = index % 2
        bench.came(booking, booking.forecast.recompute_s if late else booking.forecast.first_token_s)
    assert abs(float(bench.doubt.spread.shift(400.0)[0])) < 0.1
    assert bench.doubt.spread.scale(400.0)[0] < 0.2


def test_first_tokens_always_late_by_one_factor_are_a_shift_and_not_a_spread() -> None:
    bench = Bench()
    for index in range(100):
        booking = bench.booked(10.0 * index, path=Path.RECOMPUTE)
        bench.came(booking, 1.5 * booking.forecast.first_token_s)
    assert bench.doubt.spread.shift(1000.0)[0] == pytest.approx(log(1.5), abs=0.05)
    assert bench.doubt.spread.scale(1000.0)[0] < 0.1


# Quantiles


def test_quantiles_come_to_cover_what_they_claim() -> None:
    """First tokens vary by a factor the estimates know nothing of; the spread starts far too narrow or too wide."""
    rng = random.Random(7)
    bench = Bench()
    within = [0, 0]
    for index in range(700):
        booking = bench.booked(10.0 * index, path=Path.RECOMPUTE)
        took_s = booking.forecast.first_token_s * rng.lognormvariate(0.4, 0.3)
        if index >= 200:
            for level, bound_s in enumerate(booking.forecast.quantiles_s):
                within[level] += took_s <= bound_s
        bench.came(booking, took_s)
    assert within[0] / 500 == pytest.approx(0.90, abs=0.04)
    assert within[1] / 500 == pytest.approx(0.99, abs=0.01)


def test_a_first_token_in_the_very_moment_of_its_placing_is_taken_in() -> None:
    bench = Bench()
    booking = bench.booked()
    bench.came(booking, 0.0)
    assert np.isfinite(bench.doubt.conformal.factors(8448)).all()


# Counters


def test_requests_are_expected_in_the_counters_from_their_first_token_on() -> None:
    """Eight first tokens make a window; what the counters then lack is missing."""
    started, answered = Bench(), Bench()
    for index in range(8):
        for bench in (started, answered):
            booking = bench.booked(float(index))
            booking.first_token_at_s = index + 0.1
            if bench is started:
                bench.outcomes.first_token(booking, index + 0.1)
    for bench in (started, answered):
        bench.doubt.hits.counted(0, Tier.HBM, hit_tokens=0.0, query_tokens=8 * 8448.0, now_s=9.0)
    assert started.evidence(Tier.HBM, 9.0) is Evidence.COUNTERS
    assert answered.evidence(Tier.HBM, 9.0) is Evidence.NONE
    assert started.survival() < answered.survival() - 0.3


def test_a_quantile_that_passes_without_a_first_token_is_missed_before_that_comes() -> None:
    """Under growing delays the next thousand requests cannot wait for the first of them to be answered."""
    bench = Bench()
    booking = bench.booked()
    late_s = booking.placed_at_s + 10.0 * booking.forecast.quantiles_s[1]
    before = bench.doubt.conformal.factors(8448).tolist()
    bench.outcomes.placed(booking, booking.placed_at_s)
    bench.outcomes.placed(bench.booked(late_s), late_s)
    overdue = bench.doubt.conformal.factors(8448).tolist()
    assert all(after > at_first for after, at_first in zip(overdue, before, strict=True))
    bench.outcomes.first_token(booking, late_s)
    assert bench.doubt.conformal.factors(8448).tolist() == overdue  # counted once


def test_a_request_that_ended_without_a_first_token_is_no_miss() -> None:
    bench = Bench()
    booking = bench.booked()
    before = bench.doubt.conformal.factors(8448).tolist()
    bench.outcomes.placed(booking, booking.placed_at_s)
    bench.outcomes.gone(booking)
    later_s = booking.placed_at_s + 1e6
    bench.outcomes.placed(bench.booked(later_s), later_s)
    assert bench.doubt.conformal.factors(8448).tolist() == before

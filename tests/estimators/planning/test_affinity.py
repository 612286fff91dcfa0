from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.first_token import Discipline
from estimators.planning.affinity import HitOrMiss, chain_s, first_token_s, tie_bytes_per_s

SECONDS = st.floats(1e-3, 10.0)


@given(queue=SECONDS, fetch=SECONDS, work=SECONDS)
def test_overlap_saves_the_shorter_of_queue_and_fetch(queue: float, fetch: float, work: float) -> None:
    serial = first_token_s(Discipline.SERIAL, queue_s=queue, fetch_s=fetch, work_s=work)
    overlapped = first_token_s(Discipline.OVERLAPPED, queue_s=queue, fetch_s=fetch, work_s=work)
    assert serial - overlapped == pytest.approx(min(queue, fetch))


@given(size=st.floats(1e6, 1e11), other=SECONDS, work=SECONDS, rest=SECONDS)
def test_at_the_tie_both_ways_answer_together(size: float, other: float, work: float, rest: float) -> None:
    rate = tie_bytes_per_s(size_bytes=size, other_s=other, work_s=work, rest_of_fetch_s=rest)
    if rate == inf:
        assert work + rest >= other
        return
    fetch_s = chain_s(size_bytes=size, bytes_per_s=(rate,), start_s=rest)
    assert first_token_s(Discipline.OVERLAPPED, queue_s=0.0, fetch_s=fetch_s, work_s=work) == pytest.approx(other)


@given(hit=st.floats(0.01, 1.0), more=st.floats(0.01, 1.0), share=st.floats(0.0, 1.0))
def test_at_the_needed_probability_the_mean_ties(hit: float, more: float, share: float) -> None:
    way = HitOrMiss(hit, hit + more)
    other = hit + share * more
    needed = way.probability_to_beat(other)
    assert way.mean_s(needed) == pytest.approx(other)
    assert way.mean_s(1.0) == hit
    assert way.mean_s(0.0) == hit + more


def test_a_way_that_never_wins_and_one_that_always_does() -> None:
    way = HitOrMiss(0.1, 0.9)
    assert way.probability_to_beat(0.05) == inf
    assert way.probability_to_beat(1.0) == 0.0


@pytest.mark.parametrize("p", [0.2, 0.9, 0.97])
def test_quantiles_are_those_of_draws(p: float) -> None:
    way = HitOrMiss(0.1, 0.9)
    draws = np.where(np.random.default_rng(3).random(200_000) < p, way.hit_s, way.miss_s)
    for q in (0.5, 0.95, 0.99):
        expected = float(np.quantile(draws, q, method="inverted_cdf"))
        assert way.quantile_s(p, q) == expected


def test_a_miss_faster_than_its_hit_is_refused() -> None:
    with pytest.raises(ValueError, match="hit_s"):
        HitOrMiss(1.0, 0.5)

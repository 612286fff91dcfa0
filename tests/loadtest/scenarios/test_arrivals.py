import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.scenarios.arrivals import bursts, poisson_times, ramp


def moments(rate: float, *, until_s: float, seed: int = 1) -> list[float]:
    return list(poisson_times(lambda _: rate, most_rps=rate, until_s=until_s, rng=random.Random(seed)))


def test_one_seed_gives_the_same_moments_and_another_gives_others() -> None:
    assert moments(3.0, until_s=20.0) == moments(3.0, until_s=20.0)
    assert moments(3.0, until_s=20.0) != moments(3.0, until_s=20.0, seed=2)


def test_gaps_of_a_steady_process_are_exponential() -> None:
    """Mean and standard deviation are equal; 40,000 gaps leave about half a per cent of chance in each."""
    at_s = [0.0, *moments(4.0, until_s=10_000.0)]
    gaps = [after - before for before, after in itertools.pairwise(at_s)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(0.25, rel=0.03)
    assert deviation == pytest.approx(mean, rel=0.03)


def test_bursts_have_their_share_of_the_requests() -> None:
    rate = bursts(base_rps=2.0, factor=5.0, every_s=30.0, for_s=5.0)
    at_s = list(poisson_times(rate, most_rps=10.0, until_s=30_000.0, rng=random.Random(1)))
    within = sum(at % 30.0 >= 25.0 for at in at_s)
    assert within / len(at_s) == pytest.approx(10 * 5 / (10 * 5 + 2 * 25), rel=0.03)


def test_a_ramp_has_three_quarters_of_its_requests_in_its_second_half() -> None:
    rate = ramp(from_rps=0.0, to_rps=10.0, over_s=4000.0)
    at_s = list(poisson_times(rate, most_rps=10.0, until_s=4000.0, rng=random.Random(1)))
    assert len(at_s) == pytest.approx(10 * 4000 / 2, rel=0.03)
    assert sum(at > 2000.0 for at in at_s) / len(at_s) == pytest.approx(0.75, rel=0.03)
    assert rate(9999.0) == 10.0


@given(st.floats(0.1, 50.0), st.floats(0.0, 20.0), st.integers(0, 99))
def test_moments_ascend_and_stay_within_the_run(rate: float, until_s: float, seed: int) -> None:
    at_s = moments(rate, until_s=until_s, seed=seed)
    assert at_s == sorted(at_s)
    assert all(0.0 < at < until_s for at in at_s)


@pytest.mark.parametrize("most_rps", [0.0, -1.0, float("nan"), float("inf")])
def test_a_highest_rate_that_is_none_is_refused(most_rps: float) -> None:
    with pytest.raises(ValueError, match="highest rate"):
        next(poisson_times(lambda _: 1.0, most_rps=most_rps, until_s=1.0, rng=random.Random(1)))


def test_a_rate_above_the_highest_is_refused() -> None:
    with pytest.raises(ValueError, match="outside"):
        list(poisson_times(lambda _: 2.0, most_rps=1.0, until_s=100.0, rng=random.Random(1)))

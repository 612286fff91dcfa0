"""Example 9.7 of the textbook, through the functions the router calls: A holds the prefix, B is free sooner."""

from __future__ import annotations

import numpy as np
import pytest

from estimators.estimates import Estimates
from estimators.paths import COLUMN, Path
from policies.objectives import FirstToken
from tests.builders import a_fleet, a_request, an_estimator, estimate, held

A, B = 0, 1
PREFIX_BLOCKS = 8192 // 16


def routes(network_bytes_per_s: float | None) -> Estimates:
    """A queues 250 ms and holds 8192 of 8448 tokens; B queues 20 ms; the store holds the prefix too."""
    view = a_fleet("A100", "A100")
    view.head_ends_s[:] = (0.250, 0.020)
    estimator = an_estimator(network_bytes_per_s=network_bytes_per_s, engine_decides=False)
    return estimate(view, held([PREFIX_BLOCKS, 0], PREFIX_BLOCKS), estimator)


def first_token_ms(estimates: Estimates, row: int, path: Path) -> float:
    return float(estimates.first_token_s[COLUMN[path], row]) * 1000


def test_a_hits_its_own_memory_in_281_ms() -> None:
    assert first_token_ms(routes(None), A, Path.LOCAL) == pytest.approx(281, abs=0.6)


def test_b_recomputes_in_907_ms() -> None:
    assert first_token_ms(routes(None), B, Path.RECOMPUTE) == pytest.approx(907, abs=0.6)


@pytest.mark.parametrize(("network_bytes_per_s", "expected_ms"), [(6.25e9, 282), (25e9, 137)])
def test_b_fetches_over_the_network_then_pcie(network_bytes_per_s: float, expected_ms: float) -> None:
    assert first_token_ms(routes(network_bytes_per_s), B, Path.REMOTE) == pytest.approx(expected_ms, abs=0.6)


@pytest.mark.parametrize(("network_bytes_per_s", "row"), [(6.25e9, A), (25e9, B)])
def test_the_first_token_moves_from_a_to_b_between_50_and_200_gbe(network_bytes_per_s: float, row: int) -> None:
    estimates = routes(network_bytes_per_s)
    choice = FirstToken(np.random.default_rng(1)).choose(a_request(), a_fleet(), estimates)
    assert choice.row == row
    assert choice.path is (Path.LOCAL if row == A else Path.REMOTE)


def test_fetch_and_local_hit_break_even_at_6_3_gb_per_s() -> None:
    """Found by bisection over the whole estimate, not by solving its formula."""
    low, high = 1e9, 25e9
    for _ in range(60):
        middle = (low + high) / 2
        estimates = routes(middle)
        if first_token_ms(estimates, B, Path.REMOTE) > first_token_ms(estimates, A, Path.LOCAL):
            low = middle
        else:
            high = middle
    assert high / 1e9 == pytest.approx(6.30, abs=0.006)

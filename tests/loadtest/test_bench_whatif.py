"""Whether what-if answers hold what the simulated engines give, on few seeds of the demo's traffic.

The whole sweep is `python -m loadtest.replay.bench_whatif`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.replay.bench_whatif import PAIRS, Pair, Trial, line, trial
from loadtest.replay.fleets import of_cards
from loadtest.replay.formats import read_trace

TRAFFIC = Path(__file__).parents[2] / "loadtest" / "demo" / "traffic.jsonl.gz"


def trials(pair: Pair, seeds: int, requests: int) -> list[Trial]:
    trace, fleets = read_trace(TRAFFIC, None), of_cards(4, ["A100", "H20"])
    return [trial(trace, fleets, pair, seed, requests=requests) for seed in range(seeds)]


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS[:3:2], ids=lambda pair: f"{pair.logged}, {pair.asked}")
def test_nearly_all_intervals_hold_the_truth_and_answers_are_near_it(pair: Pair) -> None:
    """Of five that hold it with probability 0.9 each, three or fewer would do so once in twelve such tests."""
    found = trials(pair, seeds=5, requests=120)
    assert sum(one.holds for one in found) >= 4, line(pair, found)
    off = sorted(abs(one.answer.mean_s / one.truth_s - 1.0) for one in found)
    assert off[len(off) // 2] < 0.25, line(pair, found)


def test_asked_about_the_rule_that_was_logged_it_answers_what_was_observed() -> None:
    (one,) = trials(Pair("e2e", "e2e", 0.4), seeds=1, requests=120)
    assert one.truth_s == pytest.approx(one.answer.observed_s)
    assert one.holds
    assert one.answer.mean_s == pytest.approx(one.truth_s, rel=0.15)

from __future__ import annotations

import importlib
from math import inf, isnan, nan
from pathlib import Path

import msgspec
import numpy as np
import pytest

from estimators import paths
from loadtest.replay.bounds import prefill_alone_s
from loadtest.replay.fleets import of_cards
from loadtest.replay.measure import (
    Goodput,
    Summary,
    busy_s,
    ceiling,
    cost_per_request,
    goodput,
    grouped,
    hold_against,
    spread_of,
    summary,
    utilisation,
)
from loadtest.replay.results import Result
from loadtest.traffic import read_traffic
from tests.loadtest.results import a_ceiling, a_result

FLEET = of_cards(2, ["A100"]).engines
DEMO = Path(__file__).parents[2] / "loadtest" / "demo"


def a_summary(
    result: Result, *, warm: int = 0, deadline_s: float = 5.0, prices: dict[str, float] | None = None
) -> Summary:
    limit = a_ceiling(len(result.arrived_s), warm=warm)
    return summary(result, limit, FLEET, load=0.5, seed=0, deadline_s=deadline_s, card_prices=prices)


def at(policy: str, load: float, inside: float, seed: int = 0) -> Summary:
    """A run of which only its goodput matters."""
    run = a_summary(a_result([1.0, 1.0], label=policy))
    run.load, run.inside_deadline, run.seed = load, inside, seed
    return run


def test_quantiles_and_means_are_those_of_the_first_tokens() -> None:
    numbers = a_summary(a_result([1.0, 2.0, 3.0, 4.0, 10.0]))
    assert numbers.first_token_mean_s == 4.0
    assert numbers.first_token_p50_s == 3.0
    assert numbers.first_token_p90_s == pytest.approx(7.6)
    assert numbers.end_to_end_mean_s == 14.0
    assert numbers.per_token_mean_s == pytest.approx(1.0)


def test_slowdown_is_over_each_requests_own_best() -> None:
    result, limit = a_result([1.0, 2.0, 3.0]), a_ceiling(3)
    limit.best_s[:] = [1.0, 1.0, 0.5]
    numbers = summary(result, limit, FLEET, load=None, seed=0, deadline_s=1.0)
    assert numbers.slowdown_p50 == 2.0
    assert numbers.slowdown_p99 == pytest.approx(5.92)
    assert numbers.bound_ratio == 2.0 / 0.25


def test_the_warm_up_is_not_counted() -> None:
    numbers = a_summary(a_result([100.0, 100.0, 1.0, 2.0, 3.0]), warm=2)
    assert (numbers.requests, numbers.first_token_mean_s) == (3, 2.0)


def test_a_refused_request_counts_against_goodput_and_not_as_a_fast_one() -> None:
    numbers = a_summary(a_result([1.0, nan, 9.0, 2.0]))
    assert (numbers.requests, numbers.refused) == (4, 1)
    assert numbers.inside_deadline == 0.5
    assert numbers.first_token_mean_s == 4.0


def test_nothing_answered_gives_unknown_numbers_and_no_error() -> None:
    numbers = a_summary(a_result([nan, nan]))
    assert numbers.refused == 2
    assert numbers.inside_deadline == 0.0
    assert isnan(numbers.first_token_mean_s)
    assert isnan(numbers.imbalance)


def test_hits_are_held_against_a_perfect_cache() -> None:
    result = a_result([1.0, 1.0])
    result.cached_tokens[:] = [512, 0]
    numbers = a_summary(result)
    assert numbers.hit_rate == pytest.approx(0.256)
    assert numbers.hit_ceiling == pytest.approx(0.4)


def test_a_prediction_half_too_high_is_an_error_of_a_half() -> None:
    assert a_summary(a_result([1.0, 2.0])).prediction_error_p50 == pytest.approx(0.5)


def test_a_predicted_quantile_covers_what_comes_at_or_under_it_and_counts_only_where_there_is_one() -> None:
    result = a_result([9.0, 1.0, 2.0, 3.0, 4.0, nan])
    result.predicted_p90_s[:] = [0.0, 1.0, 1.9, 3.5, nan, 5.0]
    numbers = a_summary(result, warm=1)
    assert numbers.coverage_p90 == pytest.approx(2 / 3)
    assert isnan(numbers.coverage_p99)


def test_an_answer_shorter_than_the_traces_is_counted_as_cut_and_a_refused_one_is_not() -> None:
    result = a_result([1.0, 1.0, 1.0, nan])
    result.wanted_tokens[:] = [500, 500, 11, 500]
    assert a_summary(result).cut == 2
    assert a_summary(result, warm=1).cut == 1


def test_paths_are_told_by_where_most_of_a_prompt_came_from() -> None:
    result = a_result([1.0] * 6 + [nan])
    result.local_tokens[:] = [900, 800, 700, 0, 100, 0, 0]
    result.fetched_tokens[:] = [0, 0, 0, 600, 700, 100, 0]
    kinds = paths.Path
    local, remote, recompute = (paths.COLUMN[path] for path in (kinds.LOCAL, kinds.REMOTE, kinds.RECOMPUTE))
    result.path[:] = [local, local, local, remote, remote, recompute, -1]
    numbers = a_summary(result)
    assert (numbers.local_share, numbers.remote_share, numbers.recompute_share) == pytest.approx((1 / 2, 1 / 3, 1 / 6))


def test_all_work_on_one_of_two_replicas_is_an_imbalance_of_two() -> None:
    assert a_summary(a_result([1.0] * 4, rows=[0, 0, 0, 0])).imbalance == pytest.approx(2.0)
    assert a_summary(a_result([1.0] * 4, rows=[0, 1, 0, 1])).imbalance == pytest.approx(1.0)


def test_busy_time_is_the_engines_own_for_what_was_computed() -> None:
    result = a_result([1.0, 1.0], rows=[0, 1])
    result.cached_tokens[:] = [0, 512]
    alone_s = prefill_alone_s(FLEET, prompt_tokens=result.prompt_tokens, cached_tokens=result.cached_tokens)["A100"]
    assert busy_s(result, FLEET).tolist() == alone_s.tolist()
    assert alone_s[1] < alone_s[0]


def test_utilisation_adds_up_to_the_busy_time() -> None:
    result = a_result([1.0, 1.5, 2.0, 2.5])
    edges_s, shares = utilisation(result, FLEET, bins=40)
    assert (shares @ np.diff(edges_s)).tolist() == pytest.approx(busy_s(result, FLEET).tolist())


def test_cost_is_the_whole_fleets_for_each_request_in_time() -> None:
    result = a_result([1.0, 1.0, 9.0])  # the last ends 2 + 9 + 10 s after the first arrival
    numbers = a_summary(result, prices={"A100": 3600.0})
    assert numbers.cost_per_request == pytest.approx(2 * 21.0 / 2)
    assert isnan(a_summary(result).cost_per_request)


def test_cost_is_that_of_the_time_in_which_its_requests_arrived() -> None:
    result = a_result([1.0, 1.0, 1.0, 1.0])
    hours = (float((result.arrived_s + result.ended_s).max()) - float(result.arrived_s[2])) / 3600
    assert cost_per_request(result, 2, {"A100": 3600.0}, warm=2) == pytest.approx(2 * 3600.0 * hours / 2)


def test_the_work_of_a_slow_replica_is_that_much_more() -> None:
    result = a_result([1.0, 1.5])
    slow = msgspec.structs.replace(
        FLEET, replicas=[msgspec.structs.replace(replica, slow=3.0) for replica in FLEET.replicas]
    )
    assert busy_s(result, slow).tolist() == pytest.approx((3.0 * busy_s(result, FLEET)).tolist())


def test_an_interval_over_two_seeds_is_wide_and_over_one_is_unknown() -> None:
    pair = spread_of([1.0, 3.0])
    assert pair.mean == 2.0
    assert pair.half_width == pytest.approx(12.71, rel=1e-3)  # 12.71 sd / sqrt 2, and the sd is sqrt 2
    assert isnan(spread_of([1.0]).half_width)
    assert spread_of([2.0] * 20).half_width == 0.0


def test_seeds_of_one_rule_and_load_are_one_group() -> None:
    groups = grouped([at("a", 0.5, 1.0, 0), at("b", 0.5, 1.0, 0), at("a", 0.5, 0.8, 1), at("a", 0.7, 1.0, 0)])
    assert [(group.policy, group.load, group.seeds) for group in groups] == [
        ("a", 0.5, 2),
        ("b", 0.5, 1),
        ("a", 0.7, 1),
    ]
    assert groups[0].numbers["inside_deadline"].mean == pytest.approx(0.9)


def test_fleets_of_different_sizes_are_different_groups_and_have_a_goodput_each() -> None:
    small, large = at("a", 0.5, 0.95), at("a", 0.5, 0.5)
    large.replicas = 16
    groups = grouped([small, large])
    assert [(group.replicas, group.numbers["inside_deadline"].mean) for group in groups] == [(2, 0.95), (16, 0.5)]
    small_fleet, large_fleet = goodput(groups, shares=[0.9])
    assert (small_fleet.replicas, small_fleet.load) == (2, 0.5)
    assert (large_fleet.replicas, isnan(large_fleet.load)) == (16, True)


def test_a_mean_is_held_against_the_reference_of_its_own_load_fleet_and_seed() -> None:
    def a_mean(policy: str, mean_s: float, load: float, seed: int = 0) -> Summary:
        run = at(policy, load, 1.0, seed)
        run.first_token_mean_s = mean_s
        return run

    runs = [a_mean("a", 3.0, 0.5), a_mean("b", 5.0, 0.9), a_mean("c", 2.0, 0.5), a_mean("c", 4.0, 0.9)]
    runs.append(a_mean("a", 1.0, 0.9, seed=1))
    hold_against(runs, "c")
    assert [run.central_ratio for run in runs[:4]] == [1.5, 1.25, 1.0, 1.0]
    assert isnan(runs[4].central_ratio)


def test_means_of_different_requests_are_not_compared() -> None:
    runs = [at("a", 0.5, 1.0), at("c", 0.5, 1.0)]
    runs[0].refused = 1
    hold_against(runs, "c")
    assert [isnan(run.central_ratio) for run in runs] == [True, False]
    runs[0].refused, runs[1].refused = 0, 1
    runs[0].central_ratio = runs[1].central_ratio = nan
    hold_against(runs, "c")
    assert [isnan(run.central_ratio) for run in runs] == [True, True]


def test_goodput_ends_at_the_first_load_that_fails() -> None:
    groups = grouped([at("a", 0.9, 0.95), at("a", 0.5, 0.999), at("a", 0.7, 0.8), at("b", 0.5, 0.5)])
    assert goodput(groups)[:2] == [Goodput("a", 2, 0.9, 0.5), Goodput("a", 2, 0.99, 0.5)]
    assert [isnan(one.load) for one in goodput(groups)[2:]] == [True, True]


def test_the_ceiling_leaves_room_below_nothing_that_is_possible() -> None:
    rows = read_traffic(DEMO / "traffic.jsonl.gz")[:80]
    limit = ceiling(FLEET, rows, block_tokens=512, warm_up=0.25)
    assert limit.warm == 20
    assert ((limit.best_s > 0) & (limit.best_s < inf)).all()
    assert (limit.ideal_cached_tokens < [row.input_length for row in rows]).all()
    assert limit.mean_bound_s >= float(limit.best_s[20:].mean()) * (1 - 1e-9)


def test_without_the_bound_of_the_mean_the_best_of_each_request_is_still_known() -> None:
    rows = read_traffic(DEMO / "traffic.jsonl.gz")[:20]
    full, bare = (
        ceiling(FLEET, rows, block_tokens=512, warm_up=0.0, with_mean_bound=with_bound) for with_bound in (True, False)
    )
    assert bare.best_s.tolist() == full.best_s.tolist()
    assert isnan(bare.mean_bound_s)


def test_the_warm_up_always_leaves_a_request() -> None:
    rows = read_traffic(DEMO / "traffic.jsonl.gz")[:1]
    assert ceiling(FLEET, rows, block_tokens=512, warm_up=0.99).warm == 0


def test_interval_points_are_those_of_students_distribution() -> None:
    """A second route to the table: the density integrated numerically up to each point holds 95 %."""
    points = importlib.import_module("loadtest.replay.measure").STUDENT_95
    for freedom, point in enumerate(points, 1):
        grid = np.linspace(0.0, 1.0, 200_001)[1:-1]
        tail = grid / (1.0 - grid)  # 0..inf
        density = (1.0 + tail**2 / freedom) ** (-(freedom + 1) / 2) / (1.0 - grid) ** 2
        inside = density[tail <= point].sum() / density.sum()
        assert inside == pytest.approx(0.95, abs=5e-4)

from __future__ import annotations

from loadtest.bench_replay import LIMIT_S, POLICIES, REPLICAS, REQUESTS, Taken, failures, table


def times(seconds_per_request: float, *, per_replica: float = 0.0) -> Taken:
    """Every run as linear as it should be."""
    return {
        (requests, replicas): dict.fromkeys(POLICIES, requests * (seconds_per_request + per_replica * replicas))
        for requests in REQUESTS
        for replicas in REPLICAS
    }


def test_linear_and_fast_enough_passes() -> None:
    assert failures(times(0.0005, per_replica=0.00001)) == []


def test_too_slow_is_said() -> None:
    wrong = failures(times(1.01 * LIMIT_S / max(REQUESTS)))
    assert len(wrong) == len(POLICIES)
    assert "more than 12 s" in wrong[0]


def test_growth_with_requests_is_said() -> None:
    taken = times(0.0001)
    taken[max(REQUESTS), 16]["e2e"] *= 1.5
    assert failures(taken) == ["e2e: a request costs 1.50 times as much at 12000 as at 6000"]


def test_growth_with_replicas_is_said() -> None:
    taken = times(0.0001)
    taken[max(REQUESTS), 64]["e2e"] *= 5
    assert failures(taken) == ["e2e: 64 replicas cost 5.0 times as much as 16"]


def test_the_table_has_a_line_for_each_number_of_requests() -> None:
    lines = table(times(0.001)).splitlines()
    assert [line.split()[0] for line in lines] == ["requests", *map(str, REQUESTS)]
    assert "e2e on 64" in lines[0]

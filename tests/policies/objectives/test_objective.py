from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.candidates import Surroundings
from estimators.estimates import Estimates
from estimators.paths import PATHS, Path
from estimators.request import RequestFacts
from estimators.routes import Held
from policies.base import Choice, Reason, Refused, Wait
from policies.objectives import Cost, EndToEnd, FirstToken, Makespan, Quantile
from policies.objectives.objective import Objective
from tests.builders import a_fleet, a_request, an_estimator
from tests.policies.tables import Row, table

ALL: list[type[Objective]] = [FirstToken, EndToEnd, Makespan, Quantile, Cost]
FAST, SLOW = 0, 1


def choose(
    rule: type[Objective], estimates: Estimates, request: RequestFacts | None = None, *, seed: int = 7, **settings: Any
) -> Choice:
    view = a_fleet(*["A100"] * len(estimates.queue_s))
    return rule(np.random.default_rng(seed), **settings).choose(request or a_request(), view, estimates)


def fast_and_slow(**changes: Any) -> Estimates:
    """A first token after 1 s at 40 ms a token, or after 3 s at 10 ms a token."""
    rows = Row(FAST, Path.RECOMPUTE, compute_s=1.0), Row(SLOW, Path.RECOMPUTE, compute_s=3.0)
    return table(*rows, **{"pace_s": [0.040, 0.010], **changes})


# Deadlines


@pytest.mark.parametrize("rule", ALL)
def test_whoever_meets_the_deadlines_comes_before_whoever_is_better(rule: type[Objective]) -> None:
    estimates = fast_and_slow(output_tokens=1000.0, usd_per_hour=[9.0, 1.0])
    assert choose(rule, estimates, a_request(deadline_s=2.0, pace_deadline_s=9.0)).row == FAST
    assert choose(rule, estimates, a_request(deadline_s=9.0, pace_deadline_s=0.020)).row == SLOW


def test_deadlines_of_the_request_count_before_those_of_the_settings() -> None:
    estimates = fast_and_slow()
    assert choose(FirstToken, estimates, slo_tpot_ms=20).row == SLOW
    assert choose(FirstToken, estimates, a_request(pace_deadline_s=0.1), slo_tpot_ms=20).row == FAST


def test_a_candidate_is_in_time_only_with_the_stated_probability() -> None:
    """The slow one is surely in time; the fast one would be at the median of what is believed of it."""
    estimates = replace(fast_and_slow(pace_s=1e-9), scale=np.array([0.5, 0.001]))
    request = a_request(deadline_s=3.5)
    assert choose(FirstToken, estimates, request, meets=0.9).row == FAST  # 1 s x 9 ** 0.5 is 3 s
    assert choose(FirstToken, estimates, request, meets=0.99).row == SLOW


def test_when_nobody_is_in_time_the_best_of_the_late_takes_it_and_says_so() -> None:
    choice = choose(FirstToken, fast_and_slow(), a_request(deadline_s=0.5))
    assert (choice.row, choice.reason) == (FAST, Reason.BEST_EFFORT)


@pytest.mark.parametrize(("late", "raised"), [("refuse", Refused), ("queue", Wait)])
def test_when_nobody_is_in_time_a_request_can_be_refused_or_wait(late: str, raised: type[Exception]) -> None:
    with pytest.raises(Refused, match=r"a first token within 0\.5 s and 5 ms for each further token") as caught:
        choose(FirstToken, fast_and_slow(), a_request(deadline_s=0.5, pace_deadline_s=0.005), late=late)
    assert type(caught.value) is raised


def test_without_deadlines_nothing_is_late() -> None:
    assert choose(FirstToken, fast_and_slow(), late="refuse").reason is Reason.LOWEST_ESTIMATE


@pytest.mark.parametrize(
    "bad",
    [
        {"meets": 0.0},
        {"meets": 1.0},
        {"late": "never"},
        {"slo_ttft_ms": -1},
        {"slo_ttft_ms": float("nan")},
        {"slo_tpot_ms": 0},
        {"slo_tpot_ms": "20"},
        {"slo_tpot_ms": True},
        {"explore": 1.5},
        {"explore": float("nan")},
    ],
)
def test_settings_that_make_no_sense_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        FirstToken(np.random.default_rng(1), **bad)


# Exploration


def four(*queues_s: float) -> Estimates:
    return table(*[Row(row, Path.RECOMPUTE, queue_s=queue_s) for row, queue_s in enumerate(queues_s)], rows=4)


@pytest.mark.parametrize("queues_s", [(0.0, 1.0, 2.0, 3.0), (0.0, 0.0, 2.0, 3.0), (0.0, 0.0, 0.0, 0.0)])
def test_the_recorded_probability_is_how_often_a_candidate_is_drawn(queues_s: tuple[float, ...]) -> None:
    """With and without ties: what estimates other rules from receipts divides by it."""
    view, policy, estimates = a_fleet(*["A100"] * 4), FirstToken(np.random.default_rng(3), explore=0.2), four(*queues_s)
    drawn: Counter[int] = Counter()
    recorded: dict[int, float] = {}
    for _ in range(4000):
        choice = policy.choose(a_request(), view, estimates)
        drawn[choice.row] += 1
        recorded[choice.row] = choice.probability
    assert sum(recorded.values()) == pytest.approx(1.0)
    for row, probability in recorded.items():
        deviation = np.sqrt(4000 * probability * (1 - probability))
        assert abs(drawn[row] - 4000 * probability) < 5 * deviation


def test_what_is_explored_says_so_and_is_in_time_if_anybody_is() -> None:
    estimates = four(0.0, 1.0, 2.0, 3.0)
    choices = [choose(FirstToken, estimates, a_request(deadline_s=1.5), seed=seed, explore=1.0) for seed in range(40)]
    assert {choice.row for choice in choices} == {0, 1}
    assert {choice.reason for choice in choices} == {Reason.EXPLORED}
    assert {choice.probability for choice in choices} == {0.5}


@pytest.mark.parametrize("rule", ALL)
@given(data=st.data())
def test_only_possible_candidates_are_ever_taken(rule: type[Objective], data: st.DataObject) -> None:
    times_s = st.floats(0.001, 1e4)
    cells = data.draw(st.sets(st.tuples(st.integers(0, 3), st.sampled_from(PATHS)), min_size=1))
    queues_s = data.draw(st.lists(times_s, min_size=4, max_size=4))
    rows = [Row(row, path, queues_s[row], data.draw(times_s), data.draw(times_s)) for row, path in cells]
    pace_s, batch = (data.draw(st.lists(st.floats(1e-3, 1), min_size=4, max_size=4)) for _ in range(2))
    estimates = table(*rows, rows=4, output_tokens=data.draw(times_s), pace_s=pace_s, decoding=batch)
    deadline_s = data.draw(st.none() | times_s)
    choice = choose(rule, estimates, a_request(deadline_s=deadline_s), explore=data.draw(st.sampled_from([0.0, 0.5])))
    assert (choice.row, choice.path) in cells
    assert 0 < choice.probability <= 1


# The measures


def test_the_cheaper_of_two_in_time_is_taken_and_a_late_one_is_not_cheap() -> None:
    estimates = fast_and_slow(pace_s=1e-9, usd_per_hour=[4.0, 1.0])
    assert choose(Cost, estimates).row == SLOW
    assert choose(Cost, estimates, slo_ttft_ms=2000).row == FAST


def test_what_keeps_others_waiting_is_paid_for_too() -> None:
    alike = Row(FAST, Path.RECOMPUTE, compute_s=1.0), Row(SLOW, Path.RECOMPUTE, compute_s=1.01)
    assert choose(Cost, table(*alike, decoding=[30.0, 30.0], usd_per_hour=1.0, pace_s=0.01)).row == FAST
    assert choose(Cost, table(*alike, decoding=[30.0, 0.0], usd_per_hour=1.0, pace_s=0.01)).row == SLOW


def test_a_request_pays_for_the_time_its_answer_takes() -> None:
    alike = Row(FAST, Path.RECOMPUTE, compute_s=1.0), Row(SLOW, Path.RECOMPUTE, compute_s=1.5)
    estimates = table(*alike, output_tokens=100.0, usd_per_hour=1.0, pace_s=[0.05, 0.01])
    assert choose(Cost, estimates, held=0.0).row == FAST
    assert choose(Cost, estimates).row == SLOW


def test_a_request_pays_for_the_time_it_waits() -> None:
    """Behind a queue it would have less to compute, but would be there for longer."""
    rows = Row(FAST, Path.LOCAL, queue_s=3.0, compute_s=1.0), Row(SLOW, Path.RECOMPUTE, compute_s=1.5)
    estimates = table(*rows, usd_per_hour=1.0, pace_s=1e-9)
    assert choose(Cost, estimates, held=0.0).row == FAST
    assert choose(Cost, estimates).row == SLOW


def test_an_answer_is_no_cheaper_for_the_answers_beside_it() -> None:
    alike = Row(FAST, Path.RECOMPUTE, compute_s=1.0), Row(SLOW, Path.RECOMPUTE, compute_s=1.0)
    estimates = table(*alike, output_tokens=1000.0, decoding=[8.0, 1.0], usd_per_hour=1.0, pace_s=[0.011, 0.010])
    assert choose(Cost, estimates, running_decodes=0.0).row == SLOW


@pytest.mark.parametrize(("rule", "name"), [(EndToEnd, "own_pace"), (Cost, "held")])
def test_a_weight_of_the_own_time_that_is_none_is_refused(rule: type[EndToEnd] | type[Cost], name: str) -> None:
    settings: dict[str, Any] = {name: -0.1}
    with pytest.raises(ValueError, match=name):
        rule(np.random.default_rng(1), **settings)


def test_a_replica_of_unknown_price_comes_last_and_seconds_count_where_no_price_is_known() -> None:
    assert choose(Cost, fast_and_slow(pace_s=1e-9, usd_per_hour=[np.nan, 50.0])).row == SLOW
    assert choose(Cost, fast_and_slow(pace_s=1e-9)).row == FAST


def test_ends_within_a_percent_are_alike_to_the_makespan_and_the_leaner_candidate_wins() -> None:
    """Both end before what the third replica has to do anyway."""
    view = a_fleet("A100", "A100", "A100")
    view.head_ends_s[2] = view.head_compute_s[2] = 50.0
    estimates = table(Row(0, Path.RECOMPUTE, compute_s=2.0), Row(1, Path.LOCAL, queue_s=5.0, compute_s=1.0), rows=3)
    estimates.queue_s[2] = 50.0
    assert Makespan(np.random.default_rng(1)).choose(a_request(), view, estimates).row == 1


def test_of_equally_lean_ones_the_makespan_takes_the_earliest_first_token() -> None:
    view = a_fleet("A100", "A100", "A100")
    view.head_ends_s[2] = view.head_compute_s[2] = 50.0
    estimates = table(Row(0, Path.LOCAL, queue_s=3.0), Row(1, Path.LOCAL, queue_s=2.0), rows=3)
    estimates.queue_s[2] = 50.0
    assert Makespan(np.random.default_rng(1)).choose(a_request(), view, estimates).row == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"own_pace": -1.0},
        {"queue_behind": float("nan")},
        {"running_decodes": float("inf")},
        {"joining": -0.1},
        {"levelling": -0.1},
        {"backlog": -0.1},
    ],
)
def test_weights_that_make_no_sense_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        EndToEnd(np.random.default_rng(1), **bad)


def test_an_idle_replica_is_worth_a_little_waiting_to_those_who_come_later() -> None:
    """Behind a short queue the first token is sooner by 0.05 s, if the estimate of that queue is right."""
    rows = Row(0, Path.LOCAL, queue_s=0.5, compute_s=0.50), Row(1, Path.RECOMPUTE, compute_s=1.05)
    alone = table(*rows)
    assert choose(EndToEnd, alone).row == 0
    busy = replace(alone, around=replace(alone.around, arrival_rps=0.5, mean_compute_s=0.5))
    assert choose(EndToEnd, busy, queue_behind=0.0).row == 1
    assert choose(EndToEnd, busy, queue_behind=0.0, joining=0.0).row == 0


def crowd(work_s: float, *queues_s: float) -> Estimates:
    """Replicas by their queues, where requests take 0.5 s on average and one comes every second."""
    rows = [Row(row, Path.RECOMPUTE, queue_s=queue_s, compute_s=work_s) for row, queue_s in enumerate(queues_s)]
    alone = table(*rows, rows=len(rows))
    return replace(alone, around=replace(alone.around, arrival_rps=1.0, mean_compute_s=0.5))


def test_where_none_is_free_long_requests_queue_behind_long_ones_and_leave_short_queues_to_short_ones() -> None:
    assert choose(EndToEnd, crowd(0.1, 1.0, 1.2, 1.5)).row == 0
    assert choose(EndToEnd, crowd(4.0, 1.0, 1.2, 1.5)).row == 2
    assert choose(EndToEnd, crowd(4.0, 1.0, 1.2, 1.5), levelling=0.0).row == 0


def test_equal_requests_take_the_shortest_queue_even_where_none_is_free() -> None:
    assert choose(EndToEnd, crowd(0.5, 1.0, 1.01, 1.02)).row == 0


def test_nobody_is_long_before_it_is_known_what_requests_take() -> None:
    estimates = crowd(4.0, 1.0, 1.2, 1.5)
    assert choose(EndToEnd, replace(estimates, around=replace(estimates.around, mean_compute_s=0.0))).row == 0


def test_no_queue_is_so_short_that_a_request_would_wait_for_ever_to_leave_it_to_others() -> None:
    """What levelling costs ends where the queue is as long as the others; the own wait does not."""
    assert choose(EndToEnd, crowd(4.0, 1.0, 90.0)).row == 0
    assert choose(EndToEnd, crowd(4.0, 1.0, 1.2, 1.5, 300.0)).row == 2


def test_while_a_replica_is_free_nobody_is_sent_behind_a_queue_for_the_sake_of_others() -> None:
    assert choose(EndToEnd, crowd(4.0, 0.04, 1.2, 1.5)).row == 0


def test_where_all_wait_a_request_stays_with_its_state_though_another_queue_looks_shorter() -> None:
    rows = Row(0, Path.LOCAL, queue_s=33.0, compute_s=0.2), Row(1, Path.RECOMPUTE, queue_s=30.0, compute_s=2.0)
    alone = table(*rows)
    full = replace(alone, around=replace(alone.around, arrival_rps=0.38, mean_compute_s=2.5))
    assert choose(EndToEnd, full).row == 0
    assert choose(EndToEnd, full, backlog=0.0).row == 1


@given(
    st.lists(st.floats(0.1, 60.0), min_size=1, max_size=8),
    st.floats(0.01, 30.0),
    st.floats(0.0, 20.0),
)
def test_no_request_waits_longer_for_the_sake_of_others_than_its_own_work_by_the_weight(
    queues_s: list[float], work_s: float, levelling: float
) -> None:
    """So short ones that keep coming put nobody off without bound."""
    chosen_s = queues_s[choose(EndToEnd, crowd(work_s, *queues_s), levelling=levelling).row]
    assert chosen_s <= (min(queues_s) + levelling * work_s) * (1.0 + 1e-9)


@pytest.mark.parametrize("rows", [4, 16])
@pytest.mark.parametrize("card", ["A100", "H100"])
def test_replicas_that_only_decode_are_free_however_short_most_prefills_are(card: str, rows: int) -> None:
    """Half are; the long request among short ones goes to one of them, although all of them together would lose less
    behind a queue."""
    view = a_fleet(*[card] * rows)
    view.decode_batch[:], view.decode_read_tokens[:] = 30.0, 45_000.0
    view.head_ends_s[rows // 2 :], view.head_compute_s[rows // 2 :] = 0.2, 0.2
    around = Surroundings(
        arrival_rps=1.0,
        mean_compute_s=0.01,
        mean_context_tokens=1500.0,
        output_tokens=200.0,
        others_output_tokens=200.0,
    )
    request, held = a_request(16_000), Held(np.zeros(rows, dtype=np.int32), 0)
    estimates = an_estimator(rows=rows).estimate(request, held, view, around, 0.0)
    assert estimates.queue_s.min() > 0.1 * around.mean_compute_s
    assert choose(EndToEnd, estimates, request).row < rows // 2


@pytest.mark.parametrize("quantile", [0.0, 1.0, float("nan")])
def test_a_quantile_outside_0_and_1_is_refused(quantile: float) -> None:
    with pytest.raises(ValueError, match="quantile"):
        Quantile(np.random.default_rng(1), quantile=quantile)


def test_a_fetch_costs_others_as_much_as_there_are_others() -> None:
    """Computing ends as soon as fetching, and leaves links and memory to others, if there are any."""
    rows = Row(0, Path.REMOTE, ready_s=0.9, compute_s=0.10), Row(1, Path.RECOMPUTE, queue_s=0.9, compute_s=0.11)
    idle = table(*rows)
    assert choose(EndToEnd, idle).row == 0
    busy = replace(idle, around=replace(idle.around, arrival_rps=0.1, mean_compute_s=5.0))
    assert choose(EndToEnd, busy, queue_behind=0.0).row == 1
    assert choose(EndToEnd, busy, queue_behind=0.0, fetch=0.0).row == 0

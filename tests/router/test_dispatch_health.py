"""What failing, frozen, busy and returning replicas mean for requests: who gets them, and what clients are told."""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush
from itertools import pairwise

import pytest

from router.actions import Cause, Ended, Send
from router.health import HealthConfig, State, Trouble
from router.retries import RetryConfig
from tests.builders import MODEL, a_request, held
from tests.router.dispatch_bench import Bench, nothing_is_left, only_refusal, only_send

FIRST_BYTE_S = 2.0
TRIAL_S = 2.0
HEALTH = HealthConfig(trial_interval_s=TRIAL_S, frozen_s=FIRST_BYTE_S, slow_start_s=0.0)


class Frozen:
    """Clients send 5 requests a second; replica 0 answers probes, and requests only from `mended_s` on."""

    def __init__(self, *, mended_s: float, sees_counters: bool) -> None:
        self.bench = Bench("A100", "A100", health=HEALTH)
        self.sent_to_first: list[float] = []
        self._mended_s = mended_s
        self._sees_counters = sees_counters
        self._ends: list[tuple[float, int, bool, Send]] = []
        self._number = 0

    def run(self, until_s: float) -> None:
        dispatcher = self.bench.dispatcher
        for step in range(int(until_s / 0.1)):
            now_s = step * 0.1
            while self._ends and self._ends[0][0] <= now_s:
                at_s, _, good, sent = heappop(self._ends)
                if good:
                    dispatcher.finished(sent, Ended(200), at_s)
                else:
                    self._take(only_send(dispatcher.failed(sent, Cause.NO_ANSWER, at_s)), at_s)
            if step % 5 == 0:
                moving = now_s >= self._mended_s if self._sees_counters else None
                dispatcher.probed(0, now_s, alive=True, progress=moving, running=2.0)
                dispatcher.probed(1, now_s, alive=True, progress=True, running=2.0)
            if step % 2 == 0:
                self._take(self.bench.send(now_s, request_id=f"r-{step}"), now_s)

    def _take(self, sent: Send, now_s: float) -> None:
        good = sent.row == 1 or now_s >= self._mended_s
        if sent.row == 0:
            self.sent_to_first.append(now_s)
        self._number += 1
        heappush(self._ends, (now_s + (0.1 if good else FIRST_BYTE_S), self._number, good, sent))


@pytest.mark.parametrize("sees_counters", [True, False])
def test_a_frozen_engine_whose_probes_are_answered_loses_its_traffic_within_six_seconds(sees_counters: bool) -> None:
    frozen = Frozen(mended_s=30.0, sees_counters=sees_counters)
    frozen.run(50.0)
    trials = [at_s for at_s in frozen.sent_to_first if 6.0 <= at_s < 30.0]
    assert all(later - first >= TRIAL_S - 1e-9 for first, later in pairwise(trials))
    back = [at_s for at_s in frozen.sent_to_first if at_s >= 30.0]
    assert back[0] <= 30.0 + 2 * TRIAL_S
    assert len([at_s for at_s in back if at_s >= 30.0 + 2 * TRIAL_S]) > 30  # half of 5 a second for 16 s


def test_a_trial_happens_even_where_estimates_would_never_choose_it() -> None:
    bench = Bench("H20", "A100", "A100", where=held([0, 512, 512]), health=HealthConfig(slow_start_s=0.0))
    for _ in range(3):
        bench.dispatcher.health(0).failed(Trouble.SILENT, 0.0)
    rows = []
    for number in range(80):
        now_s = number * 0.1
        sent = bench.send(now_s, request_id=f"r-{number}")
        rows.append(sent.row)
        bench.finish(sent, now_s + 0.05)
    assert rows.count(0) == 1
    assert bench.dispatcher.health(0).state() is State.CLOSED


def test_a_retry_is_nobodys_trial() -> None:
    bench = Bench("A100", "A100", "A100", health=HEALTH)
    for _ in range(3):
        bench.dispatcher.health(0).failed(Trouble.SILENT, 0.0)
    sent = bench.send(TRIAL_S)
    assert sent.row == 0
    other = bench.send(TRIAL_S, request_id="other")
    bench.dispatcher.health(0).trial_over(TRIAL_S)
    assert only_send(bench.dispatcher.failed(other, Cause.NO_ANSWER, TRIAL_S + 0.1)).row not in (0, other.row)


def test_a_busy_replica_whose_probes_are_late_keeps_its_traffic_while_tokens_flow() -> None:
    bench, rows = Bench("A100", "A100"), Counter[int]()
    for second in range(1, 40):
        bench.dispatcher.heard(0, second - 0.2)
        bench.dispatcher.probed(0, float(second), alive=False)
        bench.dispatcher.probed(1, float(second), alive=True)
        for number in range(4):
            sent = bench.send(float(second), request_id=f"r-{second}-{number}")
            rows[sent.row] += 1
            bench.finish(sent, second + 0.5)
    assert abs(rows[0] - rows[1]) <= 0.2 * rows.total()


def test_a_total_outage_is_answered_at_once_and_ends_with_the_first_probes_after_it() -> None:
    bench = Bench("A100", "A100", health=HealthConfig())
    in_flight = [bench.send(0.0, request_id=f"r-{number}") for number in range(200)]
    for sent in in_flight:
        actions = bench.dispatcher.failed(sent, Cause.CONNECT, 1.0)
        while actions and isinstance(actions[0], Send):
            actions = bench.dispatcher.failed(actions[0], Cause.CONNECT, 1.0)
        assert only_refusal(actions).status == 503
    for number in range(50):
        actions = bench.dispatcher.arrived(a_request(request_id=f"late-{number}"), 1.0 + number * 0.05)
        refusal = only_refusal(actions)
        assert refusal.status == 503
        assert refusal.retry_after_s is not None
    for row in range(2):  # five seconds of silence, no request, and then a probe each
        bench.dispatcher.probed(row, 8.0, alive=True)
    bench.finish(bench.send(8.0, request_id="first"), 9.0)
    assert nothing_is_left(bench)
    assert len(bench.receipts) == 251


def test_an_outage_is_not_multiplied_by_retries() -> None:
    bench = Bench(
        *["A100"] * 4, retries=RetryConfig(share=0.2, per_s=0.0, burst=5.0), health=HealthConfig(failures_to_open=10**6)
    )
    attempts = 0
    for number in range(500):
        now_s = number * 0.01
        actions = bench.dispatcher.arrived(a_request(request_id=f"r-{number}"), now_s)
        while isinstance(actions[0], Send):
            attempts += 1
            actions = bench.dispatcher.failed(actions[0], Cause.NO_ANSWER, now_s)
        refusal = only_refusal(actions)
    assert attempts <= 500 * 1.2 + 5
    assert "budget" in refusal.message


def test_an_overloaded_replica_is_left_alone_for_as_long_as_it_asked() -> None:
    bench = Bench("A100", "A100")
    sent = bench.send(0.0)
    again = only_send(bench.dispatcher.failed(sent, Cause.OVERLOADED, 0.1, retry_after_s=7.0))
    bench.finish(again, 0.2)
    assert {bench.send(7.0, request_id=f"a-{i}").row for i in range(4)} == {again.row}
    assert sent.row in {bench.send(7.2, request_id=f"b-{i}").row for i in range(8)}
    assert bench.dispatcher.health(sent.row).state() is State.CLOSED


def test_a_hundred_client_errors_leave_every_replica_in_place() -> None:
    bench = Bench("A100", "A100")
    for number in range(100):
        bench.finish(
            bench.send(number * 0.1, request_id=f"r-{number}"), number * 0.1, status=(400, 404, 413, 422)[number % 4]
        )
    assert [bench.dispatcher.health(row).state() for row in range(2)] == [State.CLOSED] * 2


def test_a_returning_replica_gets_a_growing_share() -> None:
    bench, by_second = Bench("A100", "A100", health=HealthConfig(slow_start_s=10.0)), Counter[int]()
    bench.dispatcher.replica_down(0)
    bench.dispatcher.replica_up(0, frozenset({MODEL}), 100.0)
    for step in range(1200):
        now_s = 100.0 + step * 0.01
        sent = bench.send(now_s, request_id=f"r-{step}")
        by_second[int(now_s) - 100] += sent.row == 0
        bench.finish(sent, now_s)
    assert by_second[0] < by_second[4] < by_second[9]
    assert by_second[11] == pytest.approx(50, abs=15)


def test_another_backend_at_the_same_address_is_noticed_and_what_was_learned_is_forgotten() -> None:
    bench = Bench("A100", doubts=True)
    old, new = {"models": "m1", "started": 1000.0}, {"models": "m1", "started": 2000.0}
    assert not bench.dispatcher.identified(0, old, 0.0)
    assert not bench.dispatcher.identified(0, old, 1.0)
    assert bench.dispatcher.identified(0, new, 2.0)

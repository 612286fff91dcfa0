"""What the dispatcher tells rules, and what it makes of their refusals."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from policies.base import Choice, Policy, Refused
from policies.by_load.least_request import LeastRequest
from policies.by_load.prequal import Prequal
from policies.by_score.dynamo import Dynamo
from policies.watcher import Watcher
from router.actions import Cause, Send
from router.plain import reads_estimates
from router.plugins import build_policy
from router.telling import Telling
from tests.builders import a_request, held
from tests.policies.test_policies import PUBLISHED
from tests.router.dispatch_bench import Bench, nothing_is_left, only_refusal, only_send


class Listening(Watcher):
    """The fewest requests, with a list of what it was told."""

    reads_estimates = False

    def __init__(self) -> None:
        self.told: list[tuple[str, int, float]] = []
        self._inner = LeastRequest(np.random.default_rng(1))

    def choose(self, request: Any, fleet: Any, estimates: Any) -> Choice:
        self.told.append(("asked", -1, fleet.now_s))
        return self._inner.choose(request, fleet, estimates)

    def placed(self, placed: Any, fleet: Any, estimates: Any) -> None:
        self.told.append(("placed", placed.row, fleet.now_s))

    def first_token(self, placed: Any, fleet: Any) -> None:
        self.told.append(("first_token", placed.row, fleet.now_s))

    def ended(self, placed: Any, fleet: Any) -> None:
        self.told.append(("ended", placed.row, fleet.now_s))


def a_bench(rule: Policy, *cards: str, monkeypatch: pytest.MonkeyPatch, **more: Any) -> Bench:
    """A bench that decides by `rule`."""
    monkeypatch.setattr("tests.router.dispatch_bench.build_policy", lambda *_, **__: rule)
    return Bench(*cards, **more)


def test_a_rule_hears_of_each_attempt_of_a_request_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = Listening()
    bench = a_bench(rule, "A100", "A100", monkeypatch=monkeypatch)
    first = bench.send(1.0)
    second = only_send(bench.dispatcher.failed(first, Cause.CONNECT, 1.5))
    bench.dispatcher.first_token(second, 2.0)
    bench.finish(second, 3.0)
    one, other = first.row, second.row
    assert rule.told == [
        ("asked", -1, 1.0),
        ("placed", one, 1.0),
        ("ended", one, 1.5),
        ("asked", -1, 1.5),
        ("placed", other, 1.5),
        ("first_token", other, 2.0),
        ("ended", other, 3.0),
    ]
    assert {one, other} == {0, 1}
    assert nothing_is_left(bench)


def test_a_rule_hears_of_placements_that_others_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """What generates nothing is placed by load, and is on the replica all the same."""
    rule = Listening()
    bench = a_bench(rule, "A100", monkeypatch=monkeypatch)
    bench.dispatcher.cancelled(bench.send(1.0, generates=False), 2.0)
    assert rule.told == [("placed", 0, 1.0), ("ended", 0, 2.0)]


def test_a_rule_that_watches_gets_bookings_to_watch() -> None:
    assert reads_estimates(Listening())
    assert not reads_estimates(LeastRequest(np.random.default_rng(1)))


class Choosy:
    def choose(self, request: Any, fleet: Any, estimates: Any) -> Choice:
        raise Refused("no replica answers within 2 s")


def test_a_refusal_by_the_rule_is_a_429_with_its_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = a_bench(Choosy(), "A100", monkeypatch=monkeypatch)
    refusal = only_refusal(bench.dispatcher.arrived(a_request(), 1.0))
    assert (refusal.status, refusal.message) == (429, "no replica answers within 2 s")
    (receipt,) = bench.receipts
    assert (receipt.outcome, receipt.status) == ("refused", 429)
    assert nothing_is_left(bench)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_no_rule_loses_or_keeps_a_request_whatever_becomes_of_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas fail, clients leave, first tokens stay away; when all is over nothing is in flight for anybody."""
    chance = random.Random(name)
    rule = build_policy(name, {}, seed=1)
    where = held([300, 0, 20, 0, 0, 7], store_blocks=400)
    bench = a_bench(rule, *["A100", "H20"] * 3, where=where, monkeypatch=monkeypatch)
    open_ones: list[Send] = []
    now_s = 0.0
    for number in range(150):
        now_s += chance.expovariate(20.0)
        prompt, beginning = chance.choice([1, 300, 5000]), 1000 * chance.randrange(3)
        actions = bench.dispatcher.arrived(
            a_request(
                request_id=f"r-{number}",
                prompt_tokens=prompt,
                chain=[beginning + block for block in range((prompt - 1) // 16)],
                streams=chance.random() < 0.8,
                generates=chance.random() < 0.9,
            ),
            now_s,
        )
        open_ones += [action for action in actions if isinstance(action, Send)]
        while open_ones and chance.random() < 0.55:
            open_ones += end_somehow(bench, open_ones.pop(chance.randrange(len(open_ones))), chance, now_s)
    for sent in open_ones:
        bench.finish(sent, now_s + 1.0)
    assert nothing_is_left(bench)
    assert len(bench.receipts) == 150
    watcher = bench.dispatcher._ledger._watcher
    assert watcher is None or (isinstance(watcher, Telling) and watcher.failures == 0)
    if isinstance(rule, Prequal):
        assert not rule._in_flight
    if isinstance(rule, Dynamo):
        assert {rule._active.with_request(row, a_request(prompt_tokens=0)) for row in range(6)} == {0}


def end_somehow(bench: Bench, sent: Send, chance: random.Random, now_s: float) -> list[Send]:
    """What is sent again, if anything is."""
    if chance.random() < 0.6:
        bench.dispatcher.first_token(sent, now_s)
    end = chance.choice(["finished", "cancelled", "broken", "connect"])
    if end == "finished":
        bench.finish(sent, now_s)
        return []
    if end == "cancelled":
        actions = bench.dispatcher.cancelled(sent, now_s)
    else:
        actions = bench.dispatcher.failed(sent, Cause.BROKEN if end == "broken" else Cause.CONNECT, now_s)
    return [action for action in actions if isinstance(action, Send)]

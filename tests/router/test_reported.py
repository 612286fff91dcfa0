"""What replicas tell, and what is heard of them meanwhile, as the dispatcher gets to know it; no socket."""

from __future__ import annotations

from typing import Any, cast

import pytest

from router.actions import Hold, Send
from router.admission import AdmissionConfig
from router.assemble import assemble
from router.config import RouterConfig
from router.fleet import Fleet, ReplicaSpec
from router.health import State
from router.reported import Reported
from router.signals.load import Load
from tests.builders import a_request


class Others:
    """Event sources and prompts, as far as they are told anything. restarted : rows"""

    def __init__(self) -> None:
        self.restarts: list[int] = []

    def is_guessed(self, row: int) -> bool:
        return False

    def replica_up(self, *told: Any, **more: Any) -> None: ...

    def restarted(self, row: int, *, since_s: float) -> None:
        self.restarts.append(row)

    def capacity_reported(self, row: int, blocks: int) -> None: ...


class Table:
    """Two ranks of one server, and a server of its own. spoken : rows of which bytes came since they were asked"""

    def __init__(self, **config: Any) -> None:
        urls = ["http://127.0.0.1:1", "http://127.0.0.1:1", "http://127.0.0.1:2"]
        fleet = Fleet(replicas=[ReplicaSpec(name=name, url=url) for name, url in zip("abc", urls, strict=True)])
        core = assemble(RouterConfig(**config), fleet, on_receipt=lambda receipt: None)
        self.dispatcher, self.now_s, self.looks = core.dispatcher, 0.0, 0
        self.spoken: set[int] = set()
        self.others = Others()
        self.reported = Reported(
            fleet,
            core,
            cast(Any, self.others),
            cast(Any, self.others),
            lambda: self.now_s,
            spoke=self._spoke,
            look=self._look,
        )
        for row in range(3):
            self.reported.up(row, ("m",), {}, {})
        self.probe([0, 1])
        self.probe([2])

    def probe(self, rows: list[int], reason: str | None = None, times: int = 1) -> bool:
        up = True
        for _ in range(times):
            self.now_s += 1.0
            up = self.reported.probed(rows, reason)
        return up

    def _spoke(self, row: int) -> bool:
        spoke = row in self.spoken
        self.spoken.discard(row)
        return spoke

    def _look(self) -> None:
        self.looks += 1


def test_who_waits_is_looked_at_after_every_report() -> None:
    table = Table()
    for tell in (lambda: table.probe([2]), lambda: table.reported.load(2, Load(running=1.0), 0.0, 0.1)):
        before = table.looks
        tell()
        assert table.looks == before + 1


def test_what_one_rank_has_said_shows_that_the_server_of_all_its_ranks_lives() -> None:
    table = Table()
    for _ in range(10):
        table.spoken.add(1)
        assert table.probe([0, 1], "no answer")
    assert [table.dispatcher.is_up(row) for row in range(3)] == [True] * 3
    assert not table.probe([0, 1], "no answer", times=3)
    assert [table.dispatcher.is_up(row) for row in range(3)] == [False, False, True]


def test_a_replica_that_goes_down_is_named_once_and_again_after_it_was_up(caplog: pytest.LogCaptureFixture) -> None:
    table = Table()
    for _ in range(2):
        table.probe([2], "refused", times=6)
        table.reported.up(2, ("m",), {}, {})
        table.probe([2])
    assert sum("c is down: refused" in record.getMessage() for record in caplog.records) == 2


@pytest.mark.parametrize("tell", ["start", "model"])
def test_another_process_or_model_at_one_address_is_told_to_the_event_sources(tell: str) -> None:
    table = Table()
    table.reported.load(2, Load(started_s=1.0), 0.0, 0.1)
    table.reported.load(2, Load(started_s=1.0), 1.0, 1.1)
    table.reported.up(2, ("m", "adapter"), {"adapter": "m"}, {})
    assert table.others.restarts == [], "adapters come and go"
    if tell == "start":
        table.reported.load(2, Load(started_s=2.0), 2.0, 2.1)
    else:
        table.reported.up(2, ("other",), {}, {})
    assert table.others.restarts == [2]
    assert table.dispatcher.health(2).share(table.now_s) < 1.0


def test_an_engine_whose_counters_stand_still_is_found_by_its_loads_and_probes() -> None:
    table = Table()
    for _ in range(80):
        table.reported.load(2, Load(running=2.0, generated_tokens=5.0), table.now_s, table.now_s)
        table.probe([2])
    assert table.dispatcher.health(2).state() is State.OPEN
    assert table.dispatcher.health(0).state() is State.CLOSED


def test_an_engine_that_runs_fewer_at_once_than_it_may_be_given_is_full_sooner() -> None:
    table = Table(admission=AdmissionConfig(max_in_flight=8))
    table.reported.load(2, Load(running=0.0, waiting=0.0, max_running=1.0), 0.0, 0.1)
    kinds = []
    for name in ("one", "two"):
        (action,) = table.dispatcher.arrived(a_request(request_id=name, model="m", only="c"), 3.0)
        kinds.append(type(action))
    assert kinds == [Send, Hold]

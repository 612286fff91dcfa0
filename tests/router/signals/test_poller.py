from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from router.signals.fetch import Fetcher
from router.signals.load import Load
from router.signals.poller import MAX_PAGE_BYTES, Listed, LoadPoller, models_in

CARDS = {"data": [{"id": "m1", "parent": None}, {"id": "ad-1", "parent": "m1"}]}
PAGE = 'vllm:num_requests_running{engine="0"} 3\nvllm:num_requests_running{engine="1"} 5\n'


class Engine:
    """An engine's answers; change them while it is polled. A status of None holds the answer back for ever."""

    def __init__(self) -> None:
        self.health: int | None = 200
        self.metrics: tuple[int | None, str] = (200, PAGE)
        self.models: tuple[int, object] = (200, CARDS)
        self.others: dict[str, object] = {}  # path -> JSON answer
        self.asked: list[str] = []
        self.at_once = 0
        self.most_at_once = 0

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if request.path == "/health":
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            try:
                if self.health is None:
                    await asyncio.Event().wait()
                return web.Response(status=self.health or 500)
            finally:
                self.at_once -= 1
        if request.path == "/metrics":
            if self.metrics[0] is None:
                await asyncio.Event().wait()
            return web.Response(status=self.metrics[0] or 500, text=self.metrics[1])
        if request.path == "/v1/models":
            return web.json_response(self.models[1], status=self.models[0])
        answer = self.others.get(request.path)
        return web.Response(status=404) if answer is None else web.json_response(answer)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_get("/{path:.*}", self.answer)
        async with TestServer(app, handler_cancellation=True) as server:
            yield str(server.make_url("")).rstrip("/")


class Heard:
    """What the poller reported, in order."""

    def __init__(self) -> None:
        self.loads: list[tuple[int, Load, float, float]] = []
        self.ups: list[tuple[int, tuple[str, ...]]] = []
        self.downs: list[tuple[int, str]] = []
        self.misses: Counter[int] = Counter()  # in a row, by the endpoint's first row
        self.answers: Counter[int] = Counter()
        self._changed = asyncio.Event()

    def on_load(self, row: int, load: Load, sent_s: float, received_s: float) -> None:
        self.loads.append((row, load, sent_s, received_s))
        self._changed.set()

    def on_up(self, row: int, models: tuple[str, ...]) -> None:
        self.ups.append((row, models))
        self._changed.set()

    def on_probe(self, rows: Collection[int], reason: str | None) -> bool:
        """Down after three misses in a row."""
        first = min(rows)
        self.misses[first] = 0 if reason is None else self.misses[first] + 1
        self.answers[first] += reason is None
        if self.misses[first] == 3 and reason is not None:
            self.downs += [(row, reason) for row in rows]
        self._changed.set()
        return self.misses[first] < 3

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


def a_fetcher(base_url: str, max_page_bytes: int = MAX_PAGE_BYTES) -> Fetcher:
    return Fetcher(base_url, {}, max_body_bytes=max_page_bytes)


@asynccontextmanager
async def a_poller(
    heard: Heard,
    *,
    timeout_s: float = 2.0,
    period_s: float = 0.01,
    health_period_s: float = 0.0,
    max_page_bytes: int = MAX_PAGE_BYTES,
) -> AsyncIterator[LoadPoller]:
    poller = LoadPoller(
        partial(a_fetcher, max_page_bytes=max_page_bytes),
        on_load=heard.on_load,
        on_up=heard.on_up,
        on_probe=heard.on_probe,
        period_s=period_s,
        health_period_s=health_period_s,
        timeout_s=timeout_s,
    )
    try:
        yield poller
    finally:
        await poller.stop()


async def rounds(poller: LoadPoller, count: int) -> None:
    """Rounds in the test's own time: no task, no period."""
    for _ in range(count):
        for endpoint in poller.endpoints.values():
            await poller.poll_once(endpoint)


async def test_an_endpoint_that_answers_is_up_with_its_models_and_load() -> None:
    heard = Heard()
    async with Engine().serving() as url, a_poller(heard) as poller:
        poller.watch(0, url)
        await rounds(poller, 3)
        assert heard.ups == [(0, ("m1", "ad-1"))]
        assert poller.endpoints[url].parents == {"ad-1": "m1"}
    assert [load.running for _, load, _, _ in heard.loads] == [8.0] * 3
    assert all(sent_s <= received_s for _, _, sent_s, received_s in heard.loads)


async def test_ranks_behind_one_url_are_told_apart_and_asked_once() -> None:
    heard, engine = Heard(), Engine()
    async with engine.serving() as url, a_poller(heard) as poller:
        poller.watch(4, url, "0")
        poller.watch(5, url + "/", "1")
        await rounds(poller, 1)
    assert {row: load.running for row, load, _, _ in heard.loads} == {4: 3.0, 5: 5.0}
    assert sorted(engine.asked) == ["/health", "/metrics", "/v1/models"]
    assert sorted(row for row, _ in heard.ups) == [4, 5]


async def test_three_misses_in_a_row_are_down_once_and_the_next_answer_is_up_again() -> None:
    heard, engine = Heard(), Engine()
    async with engine.serving() as url, a_poller(heard) as poller:
        poller.watch(0, url)
        await rounds(poller, 1)
        engine.health = 503
        await rounds(poller, 2)
        assert heard.downs == []
        await rounds(poller, 4)
        assert heard.downs == [(0, "/health answered 503")]
        engine.health = 200
        await rounds(poller, 1)
    assert heard.ups == [(0, ("m1", "ad-1"))] * 2


async def test_every_question_for_health_is_reported_whichever_way_it_was_asked() -> None:
    heard = Heard()
    async with Engine().serving() as url, a_poller(heard) as poller:
        poller.watch(0, url)
        await rounds(poller, 1)
        assert heard.answers[0] == 1
        poller.start()
        await heard.until(lambda: heard.answers[0] > 5)


async def test_misses_that_are_not_in_a_row_change_nothing() -> None:
    heard, engine = Heard(), Engine()
    async with engine.serving() as url, a_poller(heard) as poller:
        poller.watch(0, url)
        for health in (200, 503, 503, 200, 503, 503, 200):
            engine.health = health
            await rounds(poller, 1)
    assert (len(heard.ups), heard.downs) == (1, [])


async def test_an_endpoint_nobody_listens_on_is_down_with_a_reason_and_no_load() -> None:
    heard = Heard()
    async with Engine().serving() as url:
        pass
    async with a_poller(heard) as poller:
        poller.watch(0, url)
        await rounds(poller, 3)
    assert (len(heard.downs), heard.ups, heard.loads) == (1, [], [])
    assert "onnect" in heard.downs[0][1]


async def test_a_silent_endpoint_is_a_miss_after_the_time_limit() -> None:
    heard, engine = Heard(), Engine()
    engine.health = None
    async with engine.serving() as url, a_poller(heard, timeout_s=0.05) as poller:
        poller.watch(0, url)
        await rounds(poller, 3)
    assert heard.downs == [(0, "no answer within the time limit")]


@pytest.mark.parametrize("metrics", [(404, ""), (200, ""), (200, "<html>")])
async def test_without_metrics_the_replica_is_up_and_its_load_unknown(metrics: tuple[int, str]) -> None:
    heard, engine = Heard(), Engine()
    engine.metrics = metrics
    async with engine.serving() as url, a_poller(heard) as poller:
        poller.watch(0, url)
        await rounds(poller, 1)
    assert (heard.ups, [load for _, load, _, _ in heard.loads]) == ([(0, ("m1", "ad-1"))], [Load()])


async def test_without_a_health_route_the_model_list_is_the_probe() -> None:
    heard, engine = Heard(), Engine()
    engine.health = 404
    async with engine.serving() as url, a_poller(heard) as poller:
        poller.watch(0, url)
        await rounds(poller, 3)
        assert (len(heard.ups), heard.downs) == (1, [])
        engine.models = (500, {})
        await rounds(poller, 3)
    assert len(heard.downs) == 1


async def test_models_learned_late_are_told_and_a_broken_list_takes_none_away() -> None:
    heard, engine = Heard(), Engine()
    engine.models = (503, {})
    async with engine.serving() as url, a_poller(heard) as poller:
        poller.watch(0, url)
        await rounds(poller, 1)
        engine.models = (200, CARDS)
        await rounds(poller, 1)
        engine.models = (200, {"data": "broken"})
        await rounds(poller, 40)
        engine.models = (200, {"data": [{"id": "m1"}]})
        await rounds(poller, 20)
    assert heard.ups == [(0, ()), (0, ("m1", "ad-1")), (0, ("m1",))]


async def test_polling_runs_by_itself_in_parallel_without_overlap_and_stops() -> None:
    heard, quick, stuck = Heard(), Engine(), Engine()
    stuck.health = None
    async with quick.serving() as url, stuck.serving() as stuck_url, a_poller(heard, timeout_s=0.1) as poller:
        poller.watch(0, url)
        poller.watch(1, stuck_url)
        poller.start()
        await heard.until(lambda: bool(heard.downs))
        assert sum(row == 0 for row, *_ in heard.loads) > 3, "a stuck endpoint must not slow the others"
        await poller.stop()
        told = len(heard.loads)
        await asyncio.sleep(0)
        assert len(heard.loads) == told
    assert (heard.downs[0][0], quick.most_at_once, stuck.most_at_once) == (1, 1, 1)


async def test_rounds_in_which_all_is_well_go_on_without_a_task_each() -> None:
    heard, engine = Heard(), Engine()
    async with engine.serving() as url, a_poller(heard, health_period_s=0.02) as poller:
        poller.watch(0, url)
        poller.start()
        await heard.until(lambda: len(heard.loads) >= 5)
        endpoint = poller.endpoints[url]
        first = endpoint._round
        asked = len(engine.asked)
        await heard.until(lambda: len(heard.loads) >= 12)
        assert endpoint._round is first, "a quick round makes no task"
        engine.metrics = (200, PAGE.replace(" 3", " 4"))
        await heard.until(lambda: heard.loads[-1][1].running == 9.0)
        assert engine.asked[asked:].count("/health") >= 2
        assert (len(heard.ups), heard.downs, poller.errors) == (1, [], 0)


@pytest.mark.parametrize("silent", ["both", "page"])
async def test_an_engine_that_falls_silent_between_two_rounds_is_noticed(silent: str) -> None:
    heard, engine = Heard(), Engine()
    async with engine.serving() as url, a_poller(heard, timeout_s=0.05, health_period_s=0.03) as poller:
        poller.watch(0, url)
        poller.start()
        await heard.until(lambda: len(heard.loads) >= 5)
        engine.metrics = (None, "")
        if silent == "both":
            engine.health = None
            await heard.until(lambda: bool(heard.downs))
            engine.health = 200
        told = len(heard.loads)
        engine.metrics = (200, PAGE)
        await heard.until(lambda: len(heard.loads) > told + 3)
    assert len(heard.downs) == (silent == "both")
    assert len(heard.ups) == 1 + (silent == "both")


async def test_an_engine_that_is_not_well_any_more_is_down_after_three_answers_that_say_so() -> None:
    heard, engine = Heard(), Engine()
    async with engine.serving() as url, a_poller(heard, health_period_s=0.02) as poller:
        poller.watch(0, url)
        poller.start()
        await heard.until(lambda: len(heard.loads) >= 5)
        engine.health, told = 503, engine.asked.count("/health")
        await heard.until(lambda: bool(heard.downs))
        assert engine.asked.count("/health") - told <= 5, "three that count, one that raised the doubt, one on its way"
        engine.health = 200
        await heard.until(lambda: len(heard.ups) == 2)
    assert heard.downs == [(0, "/health answered 503")]


async def test_a_page_that_turns_huge_is_still_read() -> None:
    heard, engine = Heard(), Engine()
    async with engine.serving() as url, a_poller(heard) as poller:
        poller.watch(0, url)
        poller.start()
        await heard.until(lambda: len(heard.loads) >= 5)
        engine.metrics = (200, "# " + "x" * (1 << 18) + "\n" + PAGE.replace(" 3", " 4"))
        await heard.until(lambda: heard.loads[-1][1].running == 9.0)
        assert poller.errors == 0


async def test_a_load_callback_that_fails_in_a_quick_round_is_counted_and_polling_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard, failures = Heard(), [RuntimeError("once")]

    def on_load(row: int, load: Load, sent_s: float, received_s: float) -> None:
        if len(heard.loads) == 5 and failures:
            raise failures.pop()
        heard.on_load(row, load, sent_s, received_s)

    async with Engine().serving() as url, a_poller(heard) as poller:
        poller._on_load = on_load
        poller.watch(0, url)
        poller.start()
        await heard.until(lambda: len(heard.loads) >= 8)
        assert poller.errors == 1
    assert "polling" in caplog.text


async def test_a_callback_that_fails_is_counted_and_polling_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    heard, failures = Heard(), [RuntimeError("once")]

    def on_up(row: int, models: tuple[str, ...]) -> None:
        if failures:
            raise failures.pop()
        heard.on_up(row, models)

    async with Engine().serving() as url, a_poller(heard) as poller:
        poller._on_up = on_up
        poller.watch(0, url)
        poller.start()
        await heard.until(lambda: bool(heard.ups))
        assert poller.errors == 1
    assert "polling" in caplog.text


V1_LOADS = {"loads": [{"dp_rank": rank, "num_running_reqs": 5, "num_waiting_reqs": rank} for rank in (0, 1)]}
GET_LOAD = [{"dp_rank": 0, "num_reqs": 5, "num_waiting_reqs": 2}]
SGLANG_PAGE = "sglang:num_running_reqs 9\nsglang:num_queue_reqs 9\nsglang:page_size 64\n"


@pytest.mark.parametrize(
    ("route", "answer", "expected"), [("/v1/loads", V1_LOADS, (10, 1)), ("/get_load", GET_LOAD, (3, 2))]
)
async def test_without_a_page_the_load_comes_from_sglangs_own_routes(
    route: str, answer: object, expected: tuple[float, float]
) -> None:
    heard, engine = Heard(), Engine()
    engine.metrics, engine.others = (404, ""), {route: answer}
    async with engine.serving() as url, a_poller(heard) as poller:
        poller.watch(0, url)
        await rounds(poller, 3)
    assert [(load.running, load.waiting) for _, load, _, _ in heard.loads] == [expected] * 3
    assert engine.asked.count("/metrics") == 1, "a route that answers is asked instead"


async def test_what_is_fresher_counts_for_the_load_and_the_page_for_the_rest() -> None:
    heard, engine = Heard(), Engine()
    engine.metrics, engine.others = (200, SGLANG_PAGE), {"/v1/loads": V1_LOADS}
    async with engine.serving() as url, a_poller(heard) as poller:
        poller.watch(0, url, "0")
        await rounds(poller, 2)
    last = heard.loads[-1][1]
    assert (last.running, last.waiting, last.block_size) == (5, 0, 64)


async def test_a_route_that_an_upgrade_took_away_is_replaced_by_the_page() -> None:
    heard, engine = Heard(), Engine()
    engine.metrics, engine.others = (404, ""), {"/get_load": GET_LOAD}
    async with engine.serving() as url, a_poller(heard) as poller:
        poller.watch(0, url)
        await rounds(poller, 1)
        engine.metrics, engine.others = (200, PAGE), {}
        await rounds(poller, 2)
    assert [load.running for _, load, _, _ in heard.loads] == [3, 8]


async def test_an_engine_of_vllm_is_asked_for_nothing_but_its_page() -> None:
    heard, engine = Heard(), Engine()
    async with engine.serving() as url, a_poller(heard) as poller:
        poller.watch(0, url)
        await rounds(poller, 30)
    assert set(engine.asked) == {"/health", "/metrics", "/v1/models"}


async def test_health_is_asked_no_oftener_than_its_own_period_but_at_once_when_nothing_answers() -> None:
    heard, engine = Heard(), Engine()
    async with engine.serving() as url, a_poller(heard, health_period_s=1000.0) as poller:
        poller.watch(0, url)
        await rounds(poller, 10)
        assert (engine.asked.count("/health"), engine.asked.count("/metrics")) == (1, 10)
    async with a_poller(heard, health_period_s=1000.0, timeout_s=0.5) as poller:
        poller.watch(0, url)
        poller.endpoints[url].up = True
        poller.endpoints[url]._health_at_s = float("inf")
        await rounds(poller, 3)
    assert len(heard.downs) == 1


async def test_a_huge_page_is_read_while_others_run() -> None:
    heard, engine = Heard(), Engine()
    engine.metrics = (200, "# " + "x" * (1 << 20) + "\n" + PAGE)
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while not heard.loads:
            turns += 1
            await asyncio.sleep(0)

    async with engine.serving() as url, a_poller(heard) as poller:
        poller.watch(0, url)
        counting = asyncio.create_task(count_turns())
        reading = poller.endpoints[url]._reader
        await rounds(poller, 1)
        await counting
    assert heard.loads[0][1].running == 8.0
    assert (reading.searches, turns > 15) == (1, True)


async def test_a_page_that_is_too_long_is_cut_before_a_number_it_would_halve() -> None:
    line = "vllm:num_requests_running 2\nvllm:num_requests_waiting 345\n"
    engine, heard = Engine(), Heard()
    engine.metrics = (200, line)
    async with engine.serving() as url, a_poller(heard, max_page_bytes=len(line) - 2) as poller:
        poller.watch(0, url)
        await rounds(poller, 1)
    assert (heard.loads[0][1].running, heard.loads[0][1].waiting) == (2.0, None)


@pytest.mark.parametrize("body", [b"", b"[]", b'{"data": 5}', b'{"data": [null, {"id": 7}]}', b"\xff"])
def test_a_broken_model_list_names_nothing(body: bytes) -> None:
    assert models_in(body) == Listed()


async def test_parents_of_adapters_can_be_looked_up_when_a_replica_is_reported_up() -> None:
    seen: list[dict[str, str]] = []
    async with Engine().serving() as url:
        poller = LoadPoller(
            a_fetcher,
            on_load=lambda *_: None,
            on_up=lambda row, models: seen.append(dict(poller.endpoints[url].parents)),
            on_probe=lambda *_: True,
        )
        poller.watch(0, url)
        await poller.poll_once(poller.endpoints[url])
    assert seen == [{"ad-1": "m1"}]


def test_a_model_list_tells_where_the_weights_of_adapters_come_from() -> None:
    cards = [{"id": "m", "root": "/m"}, {"id": "a", "parent": "m", "root": "/a"}, {"id": "b", "parent": "m", "root": 5}]
    assert models_in(json.dumps({"data": cards}).encode()) == Listed(("m", "a", "b"), {"a": "m", "b": "m"}, {"a": "/a"})


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        LoadPoller(a_fetcher, on_load=print, on_up=print, on_probe=lambda *_: True, period_s=0.0)


# Endpoints that come and go


async def test_an_endpoint_that_is_watched_after_the_start_is_asked_too() -> None:
    heard, first, late = Heard(), Engine(), Engine()
    async with first.serving() as url, late.serving() as other, a_poller(heard) as poller:
        poller.watch(0, url)
        poller.start()
        await heard.until(lambda: bool(heard.ups))
        poller.watch(1, other)
        await heard.until(lambda: len(heard.ups) == 2)
    assert {row for row, _ in heard.ups} == {0, 1}


async def test_a_poller_that_began_with_nobody_watches_who_comes() -> None:
    heard = Heard()
    async with Engine().serving() as url, a_poller(heard) as poller:
        poller.start()
        poller.watch(3, url)
        await heard.until(lambda: bool(heard.ups))
    assert heard.ups == [(3, ("m1", "ad-1"))]


@pytest.mark.parametrize("status", [200, None], ids=["answering", "hanging"])
async def test_an_endpoint_that_is_not_watched_any_more_is_asked_nothing_and_heard_nothing_of(
    status: int | None,
) -> None:
    heard, gone, stays = Heard(), Engine(), Engine()
    async with gone.serving() as url, stays.serving() as other, a_poller(heard) as poller:
        poller.watch(0, url)
        poller.watch(1, other)
        poller.start()
        await heard.until(lambda: len(heard.ups) == 2)
        if status is None:
            gone.metrics, asked = (None, ""), len(gone.asked)
            await heard.until(lambda: len(gone.asked) > asked + 1)
        poller.unwatch(0)
        told, asked = len([row for row, *_ in heard.loads if row == 0]), len(gone.asked)
        until = len(heard.loads) + 20
        await heard.until(lambda: len(heard.loads) >= until)  # twenty rounds of the other one
        assert len([row for row, *_ in heard.loads if row == 0]) == told
        assert len(gone.asked) <= asked + 2  # what was on its way
        assert url not in poller.endpoints
    assert heard.downs == []


async def test_a_rank_that_leaves_keeps_the_endpoint_of_the_others() -> None:
    heard = Heard()
    async with Engine().serving() as url, a_poller(heard) as poller:
        poller.watch(0, url, "0")
        poller.watch(1, url, "1")
        poller.unwatch(0)
        await rounds(poller, 1)
    assert [row for row, *_ in heard.loads] == [1]


async def test_a_rank_that_joins_an_endpoint_that_is_up_is_up_at_once() -> None:
    heard = Heard()
    async with Engine().serving() as url, a_poller(heard) as poller:
        poller.watch(0, url, "0")
        await rounds(poller, 1)
        poller.watch(1, url, "1")
    assert heard.ups == [(0, ("m1", "ad-1")), (1, ("m1", "ad-1"))]


async def test_all_are_asked_once_each_has_answered_or_missed_a_probe() -> None:
    well, ill, heard = Engine(), Engine(), Heard()
    ill.health = 500
    async with well.serving() as one, ill.serving() as other, a_poller(heard, period_s=60.0) as poller:
        poller.start()
        poller.watch(0, one)
        poller.watch(1, other)
        await poller.asked_all()
        assert [row for row, _ in heard.ups] == [0]
        assert (heard.answers[0], heard.misses[1]) == (1, 1)


async def test_nobody_is_waited_for_longer_than_for_one_answer() -> None:
    silent, heard = Engine(), Heard()
    silent.health = None
    async with silent.serving() as url, a_poller(heard, timeout_s=0.05) as poller:
        poller.start()
        poller.watch(0, url)
        await poller.asked_all()
        assert not heard.ups


async def test_with_nobody_to_ask_all_are_asked() -> None:
    async with a_poller(Heard()) as poller:
        await poller.asked_all()

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from estimators.view import spare_name
from router import sources
from router.blocks.config import DirectoryConfig
from router.directory import Directory
from router.errors import ConfigError
from router.fleet import Fleet, LinkSpec, ReplicaSpec, StoreSpec
from router.signals.load import Load
from router.signals.sequence import State
from router.signals.states import Carrier
from router.signals.wire import decode
from router.sources import EventSources
from tests.router.signals.events import BLOCK, MODEL, P, Q, chain_of, payload, stored_map
from tests.router.signals.publisher import Publisher, payload_of_rank, until

NOWHERE = "tcp://127.0.0.1:1"  # nothing ever listens there


def a_replica(
    name: str, *, url: str | None = None, events: str | None = None, replay: str | None = None
) -> ReplicaSpec:
    return ReplicaSpec(name=name, url=url or f"http://127.0.0.1:1/{name}", events=events, replay=replay)


def a_fleet(*replicas: ReplicaSpec, store_events: str | None = None) -> Fleet:
    store = StoreSpec(network="n", host="n", events=store_events)
    return Fleet(replicas=list(replicas), links={"n": LinkSpec(gb_s=1.0)}, store=store)


class Following:
    """Event sources and the directory behind them."""

    def __init__(self, sources: EventSources, directory: Directory) -> None:
        self.sources = sources
        self.directory = directory

    def credit(self, tokens: list[int], *, model: str = MODEL) -> list[int]:
        return [int(blocks) for blocks in self.directory.match(chain_of(tokens, model=model)).hbm_blocks]

    def states(self) -> dict[str, State]:
        return {report.name: report.state for report in self.sources.reports()}


class Now:
    """A clock that stands still."""

    def __init__(self) -> None:
        self.s = 100.0
        self._reads = 0

    def __call__(self) -> float:
        self._reads += 1
        return self.s

    async def read_again(self) -> None:
        """Wait until those who watch it have looked once more."""
        enough = self._reads + 8
        await until(lambda: self._reads > enough)


@asynccontextmanager
async def following(
    fleet: Fleet,
    *,
    grace_s: float = 30.0,
    up: bool = True,
    on_pushed_load: Callable[[int, Load, float], object] | None = None,
    clock: Callable[[], float] | None = None,
    beliefs: DirectoryConfig | None = None,
) -> AsyncIterator[Following]:
    directory = Directory(BLOCK, len(fleet.replicas))
    async with aiohttp.ClientSession() as session:
        clock = clock or asyncio.get_running_loop().time
        sources = EventSources(
            fleet, directory, session, clock, on_pushed_load=on_pushed_load, grace_s=grace_s, beliefs=beliefs
        )
        try:
            sources.follow_store()
            for row in range(len(fleet.replicas)) if up else ():
                sources.replica_up(row, MODEL)
            yield Following(sources, directory)
        finally:
            await sources.stop()


@asynccontextmanager
async def an_endpoint(
    sources: dict[str, Any], path: str = "/kv_event_sources", *, asked: list[str] | None = None
) -> AsyncIterator[str]:
    """An engine that names its event sources at `path`, and notes what else it is asked."""

    async def answer(request: web.Request) -> web.Response:
        if asked is not None:
            asked.append(request.path)
        return web.json_response(sources) if request.path == path else web.Response(status=404)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


async def test_sources_that_are_missing_are_named_once_each_and_recover_without_a_restart(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Publisher() as late:
        pass  # its port is free again until it starts
    async with Publisher() as good, Publisher(topic=b"other") as silent:
        fleet = a_fleet(
            a_replica("a", events=good.events),
            a_replica("b", events=late.events),
            a_replica("c", events=silent.events),
        )
        async with following(fleet, grace_s=0.05) as found:
            await good.subscribed()
            await silent.subscribed()
            await good.publish(0, payload(stored_map(P, 1)))
            await until(lambda: found.states()["a"] is State.LIVE)
            for name in ("a", "b", "c"):
                found.sources.served(name)
            with caplog.at_level(logging.WARNING):
                await until(lambda: len(warned(caplog)) == 2)
            assert found.states() == {"a": State.LIVE, "b": State.NEVER_CONNECTED, "c": State.SILENT}
            assert sorted(warned(caplog)) == ["b", "c"]
            async with Publisher(port=late.port) as started:
                await until(lambda: found.states()["b"] is State.SILENT)
                await started.subscribed()
                await started.publish(0, payload(stored_map(Q, 9001)))
                await until(lambda: found.credit(Q) == [0, 256, 0])
                assert found.credit(P) == [256, 0, 0]
                assert found.states()["b"] is State.LIVE
            assert sorted(warned(caplog)) == ["b", "c"], "one warning for each, not one each second"


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage()[0] for record in caplog.records if "told nothing of its cache" in record.getMessage()]


async def test_ranks_of_one_url_follow_their_own_ports_and_feed_their_own_rows() -> None:
    async with Publisher(topic=b"kv@a@m1") as rank_0, Publisher(topic=b"kv@a@m1") as rank_1:
        first = a_replica("a0", url="http://127.0.0.1:1", events=rank_0.events)
        second = a_replica("a1", url="http://127.0.0.1:1", events=rank_1.events)
        async with following(a_fleet(first, second)) as found:
            for rank, tokens in ((rank_0, P), (rank_1, Q)):
                await rank.subscribed()
                await rank.publish(0, payload(stored_map(tokens, 1)))
            await until(lambda: (found.credit(P), found.credit(Q)) == ([256, 0], [0, 256]))
            await rank_1.publish(1, payload(["AllBlocksCleared"]))
            await until(lambda: found.credit(Q) == [0, 0])
            assert found.credit(P) == [256, 0]
            await rank_0.publish(0, payload(stored_map(Q[:16], 9001), ts_s=2.0))  # it starts anew
            await until(lambda: found.credit(P) == [0, 0])
            reports = {report.name: report.counts for report in found.sources.reports()}
            assert (reports["a0"]["restarts"], reports["a1"]["restarts"], reports["a1"]["gaps"]) == (1, 0, 0)


async def test_ranks_that_an_endpoint_names_are_given_to_its_rows_in_order() -> None:
    async with Publisher() as rank_0, Publisher() as rank_1:
        named = {
            str(rank): {"publisher": "zmq", "endpoint": f"tcp://*:{at.port}", "replay_endpoint": None, "topic": ""}
            for rank, at in enumerate((rank_0, rank_1))
        }
        async with an_endpoint(named) as url:
            fleet = a_fleet(a_replica("a0", url=url), a_replica("a1", url=url))
            async with following(fleet) as found:
                for rank, tokens in ((rank_0, P), (rank_1, Q)):
                    await rank.subscribed()
                    await rank.publish(0, payload(stored_map(tokens, 1)))
                await until(lambda: (found.credit(P), found.credit(Q)) == ([256, 0], [0, 256]))


async def test_load_sockets_that_an_endpoint_names_are_listened_to_for_the_rows_of_its_ranks() -> None:
    loads: list[tuple[int, float | None]] = []
    context = zmq.asyncio.Context()
    try:
        ranks = [context.socket(zmq.XPUB) for _ in range(2)]
        base = consecutive_ports(ranks)
        named = {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": 1,
            "dp_size": 2,
            "load_endpoint_port_base": base,
            "load_topic": "load",
        }
        async with an_endpoint({"kv_events": named}, "/server_info") as url:
            fleet = a_fleet(a_replica("a0", url=url), a_replica("a1", url=url))
            async with following(
                fleet, on_pushed_load=lambda row, load, now_s: loads.append((row, load.running))
            ) as found:
                for rank, socket in enumerate(ranks):
                    await asyncio.wait_for(socket.recv(), 5)
                    stat = msgspec.msgpack.encode(["LoadStat", 5 + rank, 0, 10, 100, rank])
                    await socket.send_multipart([b"load", bytes(8), stat])
                await until(lambda: len(loads) == 2)
                assert found.sources.subscribers["a1"].source.one_copy
    finally:
        context.destroy(linger=0)
    assert sorted(loads) == [(0, 5), (1, 6)]


def consecutive_ports(sockets: list[zmq.asyncio.Socket]) -> int:
    """Bind the sockets to ports that follow one another; the first of them."""
    for _ in range(50):
        base = sockets[0].bind_to_random_port("tcp://127.0.0.1")
        try:
            for place, socket in enumerate(sockets[1:], start=1):
                socket.bind(f"tcp://127.0.0.1:{base + place}")
        except zmq.ZMQError:
            sockets[0].unbind(f"tcp://127.0.0.1:{base}")
        else:
            return int(base)
    raise AssertionError("no ports that follow one another are free")


async def test_more_ranks_than_rows_are_not_credited_to_one_of_them(caplog: pytest.LogCaptureFixture) -> None:
    entry = {"publisher": "zmq", "endpoint": NOWHERE, "replay_endpoint": None, "topic": ""}
    async with an_endpoint({"0": entry, "1": entry}) as url, following(a_fleet(a_replica("a", url=url))) as found:
        await until(lambda: "list it once for each rank" in caplog.text)
        assert (found.sources.subscribers, found.states()["a"]) == ({}, State.NEVER_CONNECTED)


async def test_a_rank_without_an_address_of_its_own_listens_one_port_higher() -> None:
    fleet = a_fleet(
        a_replica("a0", url="http://h:1", events="tcp://127.0.0.1:7001", replay="tcp://127.0.0.1:7101"),
        a_replica("a1", url="http://h:1"),
    )
    async with following(fleet) as found:
        source = found.sources.subscribers["a1"].source
        assert (source.events, source.replay) == ("tcp://127.0.0.1:7002", "tcp://127.0.0.1:7102")


async def test_an_address_without_a_port_cannot_be_shared_by_ranks() -> None:
    fleet = a_fleet(a_replica("a0", url="http://h:1", events="ipc:///tmp/x"), a_replica("a1", url="http://h:1"))
    with pytest.raises(ConfigError, match="no port for rank 1"):
        async with following(fleet):
            pass


async def test_a_rank_that_names_no_source_is_not_taken_for_the_next_one() -> None:
    async with Publisher() as engine:
        named = {"publisher": "zmq", "endpoint": engine.events, "replay_endpoint": None, "topic": ""}
        async with (
            an_endpoint({"0": {"publisher": "null"}, "1": named}) as url,
            following(a_fleet(a_replica("a0", url=url), a_replica("a1", url=url))) as found,
        ):
            await engine.subscribed()
            await engine.publish(0, payload(stored_map(P, 1)))
            await until(lambda: found.credit(P) == [0, 256])


async def test_replicas_that_name_one_address_share_its_socket_by_rank() -> None:
    context = zmq.asyncio.Context()
    pub = context.socket(zmq.XPUB)
    address = f"tcp://127.0.0.1:{pub.bind_to_random_port('tcp://127.0.0.1')}"
    try:
        fleet = a_fleet(
            a_replica("a0", url="http://h:1", events=address), a_replica("a1", url="http://h:1", events=address)
        )
        async with following(fleet) as found:
            await asyncio.wait_for(pub.recv(), 5)
            for rank, tokens in enumerate((P, Q)):
                events = payload_of_rank(rank, stored_map(tokens, 1))
                await pub.send_multipart([b"kv-events", bytes(8), events])
            await until(lambda: (found.credit(P), found.credit(Q)) == ([256, 0], [0, 256]))
            assert {report.carrier for report in found.sources.reports()} == {Carrier.SHARED}
            assert set(found.states().values()) == {State.LIVE}
    finally:
        context.destroy(linger=0)


async def test_what_a_restarted_engine_says_under_a_new_topic_stays_when_a_poll_notices_the_restart_too() -> None:
    clock = asyncio.get_running_loop().time
    context = zmq.asyncio.Context()
    pub = context.socket(zmq.XPUB)
    address = f"tcp://127.0.0.1:{pub.bind_to_random_port('tcp://127.0.0.1')}"
    try:
        fleet = a_fleet(*(a_replica(name, url=f"http://{name}:1", events=address) for name in ("a", "b")))
        async with following(fleet) as found:
            await asyncio.wait_for(pub.recv(), 5)
            await pub.send_multipart([b"kv@a:1@m1", bytes(8), payload(stored_map(P, 1))])
            await until(lambda: found.credit(P) == [256, 0])
            alive_s = clock()
            await pub.send_multipart([b"kv@a:1@m2", bytes(8), payload(stored_map(Q, 1))])
            await until(lambda: found.credit(Q) == [256, 0])
            found.sources.restarted(0, since_s=alive_s)
            assert (found.credit(P), found.credit(Q), found.states()["a"]) == ([0, 0], [256, 0], State.LIVE)
            found.sources.restarted(0, since_s=clock())
            assert (found.credit(Q), found.states()["a"]) == ([0, 0], State.DEGRADED), "another one it did not notice"
    finally:
        context.destroy(linger=0)


async def test_a_replica_that_serves_another_model_holds_nothing_of_the_old_one() -> None:
    async with Publisher() as engine, following(a_fleet(a_replica("a", events=engine.events))) as found:
        await engine.subscribed()
        await engine.publish(0, payload(stored_map(P, 1)))
        await until(lambda: found.credit(P) == [256])
        found.sources.replica_up(0, "m2")
        assert (found.credit(P), found.credit(P, model="m2")) == ([0], [0])
        await engine.publish(1, payload(stored_map(P, 1)))
        await until(lambda: found.credit(P, model="m2") == [256])


# What is guessed


async def test_a_replica_that_names_no_source_is_credited_with_what_it_was_sent_as_far_as_it_has_room(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with an_endpoint({}) as url, following(a_fleet(a_replica("a", url=url))) as found:
        await until(lambda: found.sources.is_guessed(0))
        assert caplog.text.count("names no source of cache events") == 1
        found.directory.sent(0, chain_of(P), 1.0)
        assert found.credit(P) == [256]
        assert found.directory.match(chain_of(P)).approximate.tolist() == [True]
        found.sources.capacity_reported(0, 100)
        assert found.credit(P) == [100]
        found.sources.replica_up(0, "m2")
        assert (found.sources.is_guessed(0), found.credit(P)) == (True, [0])


async def test_what_is_announced_takes_the_place_of_what_was_guessed() -> None:
    async with an_endpoint({}) as url, following(a_fleet(a_replica("a", url=url))) as found:
        await until(lambda: found.sources.is_guessed(0))
        found.directory.sent(0, chain_of(P), 1.0)
        assert (await found.sources.pushed(a_push("a", tokens=Q), "application/json"))[0] == 200
        assert not found.sources.is_guessed(0)
        assert (found.credit(P), found.credit(Q)) == ([0], [256])


async def test_what_a_replica_holds_is_guessed_beside_a_store_too_and_the_store_is_understood() -> None:
    async with Publisher() as store, an_endpoint({}) as url:
        fleet = a_fleet(a_replica("a", url=url), store_events=store.events)
        async with following(fleet) as found:
            await until(lambda: found.sources.is_guessed(0))
            found.directory.sent(0, chain_of(Q), 1.0)
            await store.subscribed()
            await store.publish(1, payload(stored_map(P, 1)))
            await until(lambda: found.directory.match(chain_of(P)).store_blocks == 256)
            assert (found.credit(P), found.credit(Q)) == ([0], [256])


async def test_a_store_that_posts_is_understood_although_no_replica_names_a_source() -> None:
    async with an_endpoint({}) as url, following(a_fleet(a_replica("a", url=url))) as found:
        await until(lambda: found.sources.is_guessed(0))
        assert (await found.sources.pushed(a_push("store"), "application/json"))[0] == 200
        assert found.directory.match(chain_of(P)).store_blocks == 256
        assert found.sources.is_guessed(0)


# A process that was restarted, by evidence beside its events


async def test_a_restart_the_stream_has_noticed_costs_nothing_when_a_poll_notices_it_too() -> None:
    clock = asyncio.get_running_loop().time
    async with Publisher() as engine, following(a_fleet(a_replica("a", events=engine.events))) as found:
        await engine.subscribed()
        await engine.publish(0, payload(stored_map(P, 1)))
        await until(lambda: found.credit(P) == [256])
        alive_s = clock()
        await engine.publish(0, payload(stored_map(Q, 9001), ts_s=2.0))
        await until(lambda: found.credit(Q) == [256])
        found.sources.restarted(0, since_s=alive_s)
        assert (found.credit(P), found.credit(Q), found.states()) == ([0], [256], {"a": State.LIVE})


@pytest.mark.parametrize("replays", [True, False])
async def test_a_restart_the_stream_has_not_noticed_drops_its_view_and_asks_for_the_first_batch(replays: bool) -> None:
    clock = asyncio.get_running_loop().time
    async with Publisher() as engine:
        replica = a_replica("a", events=engine.events, replay=engine.replay if replays else None)
        async with following(a_fleet(replica)) as found:
            await engine.subscribed()
            await engine.publish(0, payload(stored_map(P, 1)))
            await until(lambda: found.credit(P) == [256])
            alive_s = clock()
            engine.history[:] = [(0, payload(stored_map(Q, 9001), ts_s=2.0))]  # said by the new process, and lost
            found.sources.restarted(0, since_s=alive_s)
            assert (found.credit(P), found.states()) == ([0], {"a": State.DEGRADED})
            if replays:
                await until(lambda: found.states() == {"a": State.LIVE})
                assert found.credit(Q) == [256]
            await engine.publish(1, payload(stored_map(Q[:16], 10_001, parent=9256), ts_s=3.0))
            await until(lambda: found.sources.subscribers["a"].sequence.last == 1)
            assert found.states() == {"a": State.LIVE if replays else State.DEGRADED}


async def test_posts_at_once_are_answered_each_and_too_many_are_asked_to_come_again() -> None:
    async with following(a_fleet(a_replica("a"))) as found:
        posts = [found.sources.pushed(a_push("a"), "application/json") for _ in range(40)]
        replies = await asyncio.gather(*posts)
        assert [status for status, _ in replies] == [200] * 16 + [503] * 24
        assert [answer.get("applied", 0) for _, answer in replies] == [1] + [0] * 39
        assert "post again" in replies[-1][1]["error"]


async def test_a_restart_behind_posted_events_degrades_them_and_repeats_bring_nothing_back() -> None:
    async with following(a_fleet(a_replica("a"), a_replica("b"))) as found:
        await found.sources.pushed(a_push("a"), "application/json")
        found.sources.restarted(0, since_s=asyncio.get_running_loop().time())
        assert (found.credit(P), found.states()["a"]) == ([0, 0], State.DEGRADED)
        assert (await found.sources.pushed(a_push("a"), "application/json"))[1]["duplicates"] == 1
        assert found.credit(P) == [0, 0]


async def test_what_a_new_process_said_stays_when_its_predecessor_never_said_anything() -> None:
    clock = asyncio.get_running_loop().time
    async with Publisher() as engine, following(a_fleet(a_replica("a", events=engine.events), a_replica("b"))) as found:
        await engine.subscribed()
        alive_s = clock()
        await engine.publish(0, payload(stored_map(P, 1)))
        await found.sources.pushed(a_push("b"), "application/json")
        await until(lambda: found.credit(P) == [256, 256])
        for row in (0, 1):
            found.sources.restarted(row, since_s=alive_s)
        assert (found.credit(P), found.states()) == ([256, 256], {"a": State.LIVE, "b": State.LIVE})


async def test_a_restart_of_a_replica_that_is_guessed_empties_the_guess() -> None:
    async with an_endpoint({}) as url, following(a_fleet(a_replica("a", url=url))) as found:
        await until(lambda: found.sources.is_guessed(0))
        found.directory.sent(0, chain_of(P), 1.0)
        found.sources.restarted(0, since_s=0.0)
        assert found.credit(P) == [0]


# What is posted


def a_push(source: str, *, seq: int = 1, tokens: list[int] = P) -> bytes:
    return msgspec.json.encode(
        {"source": source, "incarnation": 1, "batches": [{"seq": seq, "events": [stored_map(tokens, 1)]}]}
    )


async def test_a_sidecar_may_post_what_its_replica_holds() -> None:
    async with following(a_fleet(a_replica("a"), a_replica("b"))) as found:
        status, answer = await found.sources.pushed(a_push("b"), "application/json")
        assert (status, answer["applied"], answer["state"]) == (200, 1, "live")
        assert (await found.sources.pushed(a_push("b"), "application/json"))[1]["duplicates"] == 1
        assert found.credit(P) == [0, 256]
        (report,) = (report for report in found.sources.reports() if report.name == "b")
        assert (report.carrier, report.state) == (Carrier.HTTP, State.LIVE)


async def test_a_store_may_post_and_its_blocks_are_everybodys() -> None:
    async with following(a_fleet(a_replica("a"))) as found:
        status, _ = await found.sources.pushed(a_push("store"), "application/json")
        assert (status, found.directory.match(chain_of(P)).store_blocks) == (200, 256)
        assert found.states()["store"] is State.LIVE


@pytest.mark.parametrize("source", ["a", "store"])
async def test_a_sender_that_has_stopped_is_not_believed_for_ever(source: str) -> None:
    now = Now()
    async with following(a_fleet(a_replica("a")), clock=now, grace_s=0.01) as found:
        await found.sources.pushed(a_push(source), "application/json")
        for _ in range(3):  # nothing to tell, and still there
            now.s += 8.0
            await now.read_again()
            empty = {"source": source, "incarnation": 1, "batches": []}
            assert (await found.sources.pushed(msgspec.json.encode(empty), "application/json"))[1]["state"] == "live"
        assert sum(found.directory.stats().blocks.values()) == 256
        now.s += 11.0
        await until(lambda: found.states()[source] is State.DEGRADED)
        assert sum(found.directory.stats().blocks.values()) == 0
        answer = (await found.sources.pushed(a_push(source), "application/json"))[1]
        assert (answer["duplicates"], answer["state"]) == (1, "degraded"), "a late repeat brings nothing back"


async def test_a_replica_whose_sender_is_gone_is_guessed_again_until_the_sender_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sources, "ASK_AGAIN_S", 0.01)
    now = Now()
    async with an_endpoint({}) as url, following(a_fleet(a_replica("a", url=url)), clock=now, grace_s=0.01) as found:
        await until(lambda: found.sources.is_guessed(0))
        await found.sources.pushed(a_push("a"), "application/json")
        assert (found.sources.is_guessed(0), found.credit(P)) == (False, [256])
        now.s += 11.0
        await until(lambda: found.sources.is_guessed(0))
        assert found.credit(P) == [0]
        found.directory.sent(0, chain_of(Q), now.s)
        assert found.credit(Q) == [256]
        found.sources.restarted(0, since_s=0.0)
        assert found.credit(Q) == [0], "it is the guess that a restart empties, whatever its stream said before"
        found.directory.sent(0, chain_of(Q), now.s)
        again = (await found.sources.pushed(a_push("a"), "application/json"))[1]
        assert (again["duplicates"], again["state"]) == (1, "degraded")
        assert (found.sources.is_guessed(0), found.credit(P), found.credit(Q)) == (False, [0], [0])
        await found.sources.pushed(a_push("a", seq=2, tokens=Q), "application/json")
        assert found.credit(Q) == [256]


async def test_how_long_silence_is_believed_and_how_much_is_guessed_are_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sources, "ASK_AGAIN_S", 0.01)
    now, beliefs = Now(), DirectoryConfig(forget_after_s=100.0, guessed_blocks=7)
    async with (
        an_endpoint({}) as url,
        following(a_fleet(a_replica("a", url=url)), clock=now, grace_s=0.01, beliefs=beliefs) as found,
    ):
        await until(lambda: found.sources.is_guessed(0))
        found.directory.sent(0, chain_of(Q), now.s)
        assert found.credit(Q) == [7]
        await found.sources.pushed(a_push("a"), "application/json")
        now.s += 99.0
        await now.read_again()
        assert found.credit(P) == [256]
        now.s += 2.0
        await until(lambda: found.sources.is_guessed(0))
        assert found.credit(P) == [0]


async def test_a_replica_whose_sender_is_gone_is_followed_where_it_publishes_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sources, "ASK_AGAIN_S", 0.01)
    now, named = Now(), dict[str, Any]()
    async with (
        Publisher() as engine,
        an_endpoint(named) as url,
        following(a_fleet(a_replica("a", url=url)), clock=now, grace_s=0.01) as found,
    ):
        await until(lambda: found.sources.is_guessed(0))
        await found.sources.pushed(a_push("a"), "application/json")
        named["0"] = {"publisher": "zmq", "endpoint": engine.events, "replay_endpoint": None, "topic": ""}
        await until(lambda: bool(found.sources._found))
        assert (found.credit(P), found.sources.subscribers) == ([256], {}), "one publisher is heard, the sender"
        now.s += 11.0
        await until(lambda: "a" in found.sources.subscribers)
        assert found.credit(P) == [0]
        await engine.subscribed()
        await engine.publish(0, payload(stored_map(Q, 9001)))
        await until(lambda: found.credit(Q) == [256])
        assert (await found.sources.pushed(a_push("a"), "application/json"))[0] == 409


async def test_a_push_that_cannot_be_taken_says_why_and_changes_nothing() -> None:
    async with Publisher() as engine:
        fleet = a_fleet(a_replica("a", events=engine.events), a_replica("b"), store_events=NOWHERE)
        async with following(fleet, up=False) as found:
            statuses = [
                (await found.sources.pushed(body, "application/json"))[0]
                for body in (b"{", a_push("who"), a_push("a"), a_push("b"), a_push("store"))
            ]
            assert statuses == [422, 404, 409, 503, 409]
            found.sources.replica_up(1, MODEL)
            assert (await found.sources.pushed(a_push("b"), "application/json"))[0] == 200


# Replicas that come and go


def give_row_to(found: Following, fleet: Fleet, row: int, replica: ReplicaSpec) -> None:
    """`row` is that of another replica, which is up."""
    found.sources.removed(row)
    found.directory.forget(row)
    fleet.replicas[row] = replica
    found.sources.members_changed()
    found.sources.replica_up(row, MODEL)


async def test_who_takes_over_a_row_is_followed_and_what_its_predecessor_says_still_is_not_taken() -> None:
    async with Publisher() as old, Publisher() as new:
        fleet = a_fleet(a_replica("a", events=old.events))
        async with following(fleet) as found:
            await old.subscribed()
            await old.publish(0, payload(stored_map(P, 1)))
            await until(lambda: found.credit(P) == [256])
            stream = found.sources.subscribers["a"].stream
            give_row_to(found, fleet, 0, a_replica("b", events=new.events))
            assert found.credit(P) == [0]
            stream.heard(1, decode(payload(stored_map(P, 1))))
            stream.forget()
            await new.subscribed()
            await new.publish(0, payload(stored_map(Q, 9001)))
            await until(lambda: found.credit(Q) == [256])
            assert found.credit(P) == [0]
            assert found.states() == {"b": State.LIVE}


async def test_who_left_can_post_no_more_events() -> None:
    fleet = a_fleet(a_replica("a"), a_replica("b"))
    async with following(fleet) as found:
        body = msgspec.json.encode(
            {"source": "a", "incarnation": 1, "batches": [{"seq": 1, "events": [stored_map(P, 1)]}]}
        )
        assert (await found.sources.pushed(body, "application/json"))[0] == 200
        give_row_to(found, fleet, 0, a_replica("c"))
        status, answer = await found.sources.pushed(body, "application/json")
        assert (status, answer["sources"]) == (404, ["b", "c", "store"])
        assert found.credit(P) == [0, 0]


async def test_a_shared_socket_goes_on_for_those_who_stay_and_ends_with_the_last() -> None:
    async with Publisher() as publisher:
        fleet = a_fleet(*(a_replica(name, url="http://s:1", events=publisher.events) for name in ("a", "b")))
        fleet.replicas.append(ReplicaSpec(name=spare_name(2)))
        async with following(fleet, up=False) as found:
            for row in (0, 1):
                found.sources.replica_up(row, MODEL)
            address = next(iter(found.sources.shared))
            for row, left in ((0, True), (1, False)):
                found.sources.removed(row)
                assert (address in found.sources.shared) is left


async def test_what_a_replica_held_that_was_cleared_is_swept_by_and_by() -> None:
    blocks = list(range(1, 20_001))  # more than is forgotten in one stretch
    async with following(a_fleet(a_replica("r0")), grace_s=0.02) as router:
        router.directory.add_routed(0, MODEL, len(blocks))
        router.directory.sent(0, blocks, 1.0)
        router.directory.clear(0)
        assert router.directory.match(blocks).hbm_blocks.tolist() == [0]
        assert router.directory.stats().engine_hashes == len(blocks)
        await until(lambda: router.directory.stats().engine_hashes == 0)

import asyncio
import json
import os
import random
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
import pytest

from estimators.tiers import Tier
from loadtest.proxy_bench import bodies
from loadtest.proxy_bench.judge import Row, failures, medians, table
from loadtest.proxy_bench.load import closed_loop, first_bytes, streams
from loadtest.proxy_bench.process import busy_s, family_of, resident_mib
from loadtest.proxy_bench.proxies import OURS, Proxy, Setting, command_of, skipped
from loadtest.proxy_bench.stub import BLOCK, Stub, two_blocks
from router.config import fleet_of, load_config
from router.signals.wire import Stored, decode


@asynccontextmanager
async def an_engine(every_s: float = 0.0) -> AsyncIterator[int]:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Stub(loop, every_s), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@contextmanager
def a_port_that_refuses() -> Iterator[int]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def rows(measure: str, **values: list[float]) -> list[Row]:
    return [
        Row(proxy=proxy.replace("_", " "), measure=measure, turn=turn, value=value)
        for proxy, turns in values.items()
        for turn, value in enumerate(turns)
    ]


def common_start(texts: list[str]) -> int:
    """Characters at the beginning that all texts share."""
    return next((at for at, letters in enumerate(zip(*texts, strict=True)) if len(set(letters)) > 1), len(texts[0]))


async def test_every_request_of_a_closed_loop_is_answered_and_counted() -> None:
    async with an_engine() as port:
        tally = await closed_loop(port, bodies.chats(bodies.SMALL), connections=3, seconds=0.05, seed=1)
    assert tally.answered >= 3
    assert tally.wrong == 0


async def test_a_stream_has_as_many_pieces_as_its_message_asks_for() -> None:
    async with an_engine() as port:
        tally = await streams(port, bodies.a_stream(7), count=2, over_s=0.0, limit_s=10.0)
    assert (tally.answered, tally.pieces) == (2, 2 * (7 + 1))  # and [DONE] each


async def test_streams_that_cannot_be_opened_are_wrong() -> None:
    with a_port_that_refuses() as port:
        tally = await streams(port, bodies.a_stream(2), count=3, over_s=0.0, limit_s=1.0)
    assert (tally.answered, tally.wrong) == (0, 3)


async def test_an_answer_that_is_cut_is_not_counted_as_one() -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")
        writer.close()

    server = await asyncio.start_server(cut, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        tally = await closed_loop(port, bodies.chats(bodies.SMALL), connections=1, seconds=5.0, seed=1)
    assert (tally.answered, tally.wrong) == (0, 1)


async def test_first_bytes_are_taken_of_every_port_in_turn() -> None:
    async with an_engine() as one, an_engine() as other:
        took_s = await first_bytes([one, other], bodies.chats(bodies.SMALL)[0], times=5)
    assert [len(taken) for taken in took_s] == [5, 5]
    assert all(taken > 0.0 for both in took_s for taken in both)


@pytest.mark.parametrize("length", [bodies.SMALL, bodies.MEDIUM])
def test_prompts_of_a_family_share_three_quarters_and_no_two_are_alike(length: int) -> None:
    texts = bodies.texts(length)
    family = texts[: bodies.FAMILY]
    assert {len(text) for text in texts} == {length}
    assert len(set(texts)) == len(texts)
    assert common_start(family) >= length * 3 // 4
    assert common_start(texts) < length // 4


def test_requests_are_whole_and_their_bodies_are_json() -> None:
    for request in (bodies.chats(bodies.SMALL)[0], bodies.token_ids(20)[0], bodies.second_turns(bodies.SMALL)[0]):
        head, _, body = request.partition(b"\r\n\r\n")
        assert b"Content-Length: %d" % len(body) in head
        assert json.loads(body)["model"] == "m"


def test_what_a_stub_publishes_is_two_blocks_that_the_router_can_read() -> None:
    batch = decode(msgspec.msgpack.encode([5.0, [two_blocks(random.Random(1).getrandbits)] * 3]))
    assert (batch.ts_s, batch.read, batch.bad) == (5.0, 3, 0)
    event = batch.events[0]
    assert isinstance(event, Stored)
    assert (len(event.hashes), len(event.tokens), event.block_tokens, event.tier) == (2, 2 * BLOCK, BLOCK, Tier.HBM)


def test_a_router_with_events_gets_a_fleet_that_names_them(tmp_path: Path) -> None:
    setting = Setting(tmp_path, [7001, 7002], None, 0, publishers=[8001, 8002])
    *_, path, _, _ = command_of(Proxy("tfirst, events", OURS, events=True), setting, 9000)
    fleet = fleet_of(load_config(Path(path)))
    assert [(one.url, one.events) for one in fleet.replicas] == [
        (f"http://127.0.0.1:{7000 + row}", f"tcp://127.0.0.1:{8000 + row}") for row in (1, 2)
    ]


def test_medians_are_of_all_rounds_and_ratios_are_to_nginx() -> None:
    measured = rows("relay 64 B, us", nginx=[10.0, 30.0, 20.0], tfirst_round_robin=[41.0, 39.0, 40.0])
    assert medians(measured)["relay 64 B, us"] == {"nginx": 20.0, "tfirst round robin": 40.0}
    assert "2.00 x nginx" in table(measured)


def test_targets_and_peers_are_both_named_when_they_are_missed() -> None:
    measured = rows("relay 64 B, us", tfirst=[61.0], smg=[50.0], nginx=[14.0])
    assert len(failures(measured)) == 2
    assert failures(rows("relay 64 B, us", tfirst=[49.0], smg=[50.0], nginx=[14.0])) == []


def test_streams_that_did_not_end_are_a_failure() -> None:
    measure = "of 5,000 open streams ended well"
    assert len(failures(rows(measure, tfirst=[4999.0]))) == 1
    assert failures(rows(measure, tfirst=[5000.0])) == []


def test_processor_time_and_memory_are_those_of_the_process() -> None:
    family = family_of(os.getpid())
    assert family[0] == os.getpid()
    assert 0.0 < busy_s([os.getpid()]) <= sum(os.times()[:2]) + 0.02
    assert 5.0 < resident_mib([os.getpid()]) < 10_000.0


def test_a_peer_without_an_environment_is_skipped_with_a_reason(tmp_path: Path) -> None:
    nowhere = Setting(tmp_path, [1, 2], None, 0)
    assert skipped(Proxy("smg round_robin", "smg", policy="round_robin"), nowhere) == "no --peers-venv given"
    empty = Setting(tmp_path, [1, 2], tmp_path, 0)
    assert skipped(Proxy("smg round_robin", "smg", policy="round_robin"), empty) == "smg could not be installed"
    assert skipped(Proxy("tfirst e2e", "tfirst"), nowhere) is None


def test_every_proxy_is_given_all_replicas(tmp_path: Path) -> None:
    setting = Setting(tmp_path, [7001, 7002], tmp_path, 0)
    peer = command_of(Proxy("smg round_robin", "smg", policy="round_robin"), setting, 7000)
    assert {"http://127.0.0.1:7001", "http://127.0.0.1:7002", "round_robin", "7000"} <= set(peer)
    command_of(Proxy("tfirst e2e", "tfirst", config={"policy": {"name": "e2e"}}), setting, 7000)
    config = json.loads((tmp_path / "tfirst-e2e.json").read_text())
    assert config["worker_urls"] == ["http://127.0.0.1:7001", "http://127.0.0.1:7002"]
    assert (config["port"], config["policy"]) == (7000, {"name": "e2e"})

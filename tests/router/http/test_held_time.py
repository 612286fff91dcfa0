"""Limits of time on both sides of a request, on a clock that the test holds: no socket, no waiting."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from router.actions import Cause
from router.http.client import ClientConnection
from router.http.contract import Limits, TimeOuts
from router.http.pool import Pool
from router.http.shared import Shared
from router.http.upstream import UpstreamConnection
from tests.router.http.stubs import LAST_CHUNK, STREAM_HEAD, Decisions, answer, chunk, facts_of, get, here, post
from tests.router.http.test_deadline import HeldLoop
from tests.router.http.test_upstream import HeldTransport

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: gw\r\n"
URL = "http://replica:1"


class ClientTransport(HeldTransport):
    """Also what a client's connection asks of its transport."""

    reset = False

    def close(self) -> None:
        self.closed = True

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass

    def get_extra_info(self, name: str) -> Any:
        return ("10.0.0.9", 1234) if name == "peername" else None


class Held:
    """One client's connection and one idle connection to a replica, on one held clock."""

    def __init__(self, times: TimeOuts | None = None, limits: Limits | None = None) -> None:
        self.loop = HeldLoop()
        loop = cast(asyncio.AbstractEventLoop, self.loop)
        times, limits = times or TimeOuts(pool_idle_s=1e6), limits or Limits()
        self.decisions = Decisions([URL])
        pool = Pool(loop, limits=limits, times=times)
        self.shared = Shared(loop, self.decisions, facts_of, here, loop.time, pool, limits, times)
        self.replica = UpstreamConnection(loop, URL, times, pool)
        self.replica_end = HeldTransport()
        self.replica.connection_made(cast(asyncio.Transport, self.replica_end))
        pool.settled(self.replica)
        self.client = ClientConnection(self.shared)
        self.client_end = ClientTransport()
        self.client.connection_made(cast(asyncio.Transport, self.client_end))

    @property
    def got(self) -> bytes:
        return self.client_end.written

    @property
    def rejected(self) -> dict[int, int]:
        return self.shared.counts.rejected


def test_a_stream_that_goes_on_has_no_limit_and_one_that_stops_is_cut_without_an_end() -> None:
    held = Held()
    held.client.data_received(post(b'{"stream":true}'))
    held.replica.data_received(STREAM_HEAD)
    for number in range(1, 200):
        held.loop.advance_to(10.0 * number)
        held.replica.data_received(chunk(b"data: 1\n\n"))
    assert held.got.count(b"data: 1") == 199
    assert not held.client_end.closed
    held.loop.advance_to(10.0 * 199 + TimeOuts().stall_s + 1.0)
    assert held.client_end.closed
    assert held.replica_end.closed
    assert not held.got.endswith(LAST_CHUNK)
    assert held.decisions.of("failed") == [Cause.BROKEN]


def test_a_replica_has_long_until_its_head_and_not_for_ever() -> None:
    held = Held()
    held.client.data_received(post())
    held.loop.advance_to(TimeOuts().first_byte_s - 1.0)
    assert held.got == b""
    held.loop.advance_to(TimeOuts().first_byte_s + 1.0)
    assert b" 502 " in held.got
    assert held.decisions.of("failed") == [Cause.NO_ANSWER]


def test_head_and_first_byte_have_a_limit_each_both_from_the_request() -> None:
    times = TimeOuts(response_head_s=10.0, first_byte_s=100.0, pool_idle_s=1e6)
    late_head = Held(times)
    late_head.client.data_received(post())
    late_head.loop.advance_to(10.5)
    assert late_head.decisions.of("failed") == [Cause.NO_ANSWER]
    late_body = Held(times)
    late_body.client.data_received(post())
    late_body.loop.advance_to(9.0)
    late_body.replica.data_received(STREAM_HEAD)
    late_body.loop.advance_to(99.0)
    assert late_body.decisions.of("failed") == []
    late_body.loop.advance_to(100.5)
    assert late_body.decisions.of("failed") == [Cause.NO_ANSWER]
    assert b" 502 " in late_body.got


@pytest.mark.parametrize("framing", [b"5", b"5\r\n", b"5;ext=1\r\n", b"\r\n"])
def test_the_size_of_a_chunk_is_no_first_byte_of_a_body(framing: bytes) -> None:
    times = TimeOuts(response_head_s=10.0, first_byte_s=20.0, stall_s=100.0, pool_idle_s=1e6)
    held = Held(times)
    held.client.data_received(post())
    held.loop.advance_to(9.0)
    held.replica.data_received(STREAM_HEAD + framing[:1])
    held.loop.advance_to(19.0)
    if not held.replica_end.closed:
        held.replica.data_received(framing[1:])
    held.loop.advance_to(20.5)
    assert b" 502 " in held.got
    assert held.replica_end.closed


def test_behind_the_first_byte_the_size_of_a_chunk_alone_is_a_stall_after_its_own_limit() -> None:
    held = Held(TimeOuts(first_byte_s=1000.0, stall_s=10.0, pool_idle_s=1e6))
    held.client.data_received(post())
    held.replica.data_received(STREAM_HEAD + chunk(b"data: 1\n\n"))
    held.loop.advance_to(9.0)
    held.replica.data_received(b"5\r\n")
    held.loop.advance_to(18.0)
    assert not held.client_end.closed
    held.loop.advance_to(19.5)
    assert held.client_end.closed
    assert held.got.endswith(b"\r\n5\r\n"), "which is a cut: five more bytes were promised"
    assert held.decisions.of("failed") == [Cause.BROKEN]


def test_a_client_that_reads_again_does_not_shorten_the_wait_for_a_first_byte() -> None:
    held = Held(TimeOuts(first_byte_s=100.0, stall_s=10.0, pool_idle_s=1e6))
    held.client.data_received(post())
    held.client.pause_writing()
    held.client.resume_writing()
    held.loop.advance_to(99.0)
    held.replica.data_received(answer())
    assert b" 200 " in held.got


def test_a_first_byte_may_not_take_longer_than_it_may_because_the_head_may() -> None:
    held = Held(TimeOuts(response_head_s=100.0, first_byte_s=10.0, pool_idle_s=1e6))
    held.client.data_received(post())
    held.loop.advance_to(10.5)
    assert held.decisions.of("failed") == [Cause.NO_ANSWER]


def test_only_a_limit_of_the_whole_ends_a_stream_that_progresses_and_visibly() -> None:
    held = Held(TimeOuts(total_s=30.0, pool_idle_s=1e6))
    held.client.data_received(post(b'{"stream":true}'))
    held.replica.data_received(STREAM_HEAD)
    for second in range(1, 40):
        held.loop.advance_to(float(second))
        if not held.replica_end.closed:
            held.replica.data_received(chunk(b"data: 1\n\n"))
    assert held.got.count(b"data: 1") == 29
    assert held.client_end.closed
    assert held.replica_end.closed
    assert not held.got.endswith(LAST_CHUNK)
    assert held.decisions.of("failed") == [Cause.TOO_LONG]


def test_a_limit_of_the_whole_that_passes_before_the_first_byte_is_answered_504() -> None:
    held = Held(TimeOuts(total_s=30.0, pool_idle_s=1e6))
    held.client.data_received(post())
    held.loop.advance_to(31.0)
    assert b" 504 " in held.got
    assert held.replica_end.closed
    assert held.decisions.of("failed") == [Cause.TOO_LONG]


def test_an_answer_in_time_leaves_nothing_of_the_limit_of_the_whole() -> None:
    held = Held(TimeOuts(total_s=30.0, pool_idle_s=1e6))
    held.client.data_received(post())
    held.replica.data_received(answer())
    held.loop.advance_to(60.0)
    assert held.decisions.kinds == ["arrived", "finished"]
    assert held.got.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    ("start", "rest"),
    [
        (b"P", b"OST /v1/completions HTTP/1.1"),
        (HEAD + b"X: ", b"x" * 30),
        (HEAD + b"Content-Length: 100000\r\n\r\n", b"x" * 30),
    ],
    ids=["line", "field", "body"],
)
def test_a_client_that_sends_a_byte_now_and_then_is_refused_in_time(start: bytes, rest: bytes) -> None:
    held = Held()
    held.client.data_received(start)
    for number, byte in enumerate(rest[:28], 1):
        held.loop.advance_to(2.0 * number)
        held.client.data_received(bytes([byte]))
    assert held.got == b""
    held.loop.advance_to(61.0)
    assert held.got.startswith(b"HTTP/1.1 408 ")
    held.loop.advance_to(61.0 + TimeOuts().linger_s)
    assert held.client_end.closed
    assert held.decisions.kinds == []


def test_head_and_body_have_a_limit_each() -> None:
    held = Held(TimeOuts(request_head_s=10.0, request_body_s=100.0, pool_idle_s=1e6))
    held.client.data_received(HEAD)
    held.loop.advance_to(9.0)
    held.client.data_received(b"Content-Length: 3\r\n\r\na")
    held.loop.advance_to(108.0)
    held.client.data_received(b"bc")
    held.replica.data_received(answer())
    assert held.got.startswith(b"HTTP/1.1 200 ")


def test_empty_lines_do_not_keep_a_connection() -> None:
    held = Held()
    for now_s in range(0, 60, 2):
        held.loop.advance_to(float(now_s))
        held.client.data_received(b"\r\n")
    held.loop.advance_to(61.0)
    assert held.client_end.closed


def test_a_slow_request_behind_a_stream_is_refused_after_it_and_does_not_hurt_it() -> None:
    held = Held()
    held.client.data_received(post(b'{"stream":true}') + HEAD)
    held.replica.data_received(STREAM_HEAD + chunk(b"data: 1\n\n"))
    held.loop.advance_to(100.0)
    assert held.rejected == {408: 1}
    assert b" 408 " not in held.got
    held.replica.data_received(chunk(b"data: 2\n\n") + LAST_CHUNK)
    before, _, after = held.got.partition(LAST_CHUNK)
    assert before.count(b"data: ") == 2
    assert after.startswith(b"HTTP/1.1 408 ")


def test_the_time_in_which_the_router_does_not_read_is_not_the_clients() -> None:
    """A second body fills what may wait; it goes on, with its whole limit, once the first request is answered."""
    held = Held(limits=Limits(max_waiting_bytes=10))
    held.client.data_received(post() + HEAD + b"Content-Length: 40\r\n\r\n" + b"x" * 20)
    assert not held.client_end.reading
    held.loop.advance_to(500.0)
    held.replica.data_received(answer())
    assert held.client_end.reading
    held.loop.advance_to(559.0)
    assert held.rejected == {}
    held.client.data_received(b"x" * 20)
    held.replica.data_received(answer())
    assert held.got.count(b"HTTP/1.1 200 ") == 2


def test_a_body_that_the_router_read_too_little_of_has_a_limit_again_afterwards() -> None:
    held = Held(limits=Limits(max_waiting_bytes=10))
    held.client.data_received(post() + HEAD + b"Content-Length: 40\r\n\r\n" + b"x" * 20)
    held.loop.advance_to(500.0)
    held.replica.data_received(answer())
    held.loop.advance_to(561.0)
    assert held.rejected == {408: 1}


def test_an_idle_client_is_closed_and_a_busy_one_is_not() -> None:
    held = Held()
    held.client.data_received(get(b"/health"))
    held.loop.advance_to(70.0)
    held.client.data_received(post())
    held.loop.advance_to(400.0)
    assert not held.client_end.closed
    held.replica.data_received(answer())
    held.loop.advance_to(400.0 + TimeOuts().keep_alive_s + 1.0)
    assert held.client_end.closed

"""Following an answer's framing, without a socket."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.actions import Cause
from router.http.contract import TimeOuts
from router.http.head import ResponseHead
from router.http.upstream import UpstreamConnection
from tests.router.http.stubs import LAST_CHUNK, STREAM_HEAD, answer, chunk
from tests.router.http.test_deadline import HeldLoop

CHUNKS = chunk(b"data: 1\n\n") + chunk(b"0\r\n\r\n") + b"00A\r\n0123456789\r\n" + chunk(b"\n0\n")
ANSWERS = {
    "chunks": STREAM_HEAD + CHUNKS + LAST_CHUNK,
    "chunks with trailers": STREAM_HEAD + CHUNKS + b"000;a=0\r\nX-A: 0\r\nX-B: \r\n\r\n",
    "declared": answer(b"0\r\n\r\nHTTP/1.1 200 OK\r\n\r\n"),
    "declared empty": answer(b""),
    "no content": b"HTTP/1.1 204 No Content\r\n\r\n",
    "not modified": b"HTTP/1.1 304 Not Modified\r\nContent-Length: 20\r\n\r\n",
}
SURPLUS = [b"", b"\r\n", b"\r\n\r\n", b"0\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n", b"\0", answer(b"forged")]


class HeldTransport:
    """Remembers; `closed` once it was aborted."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False
        self.reading = True

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class Recorder:
    """A sink and an owner that note what they are told."""

    def __init__(self) -> None:
        self.head: ResponseHead | None = None
        self.pieces = b""
        self.relayed = b""
        self.heard: list[object] = []
        self.settled_count = 0
        self.is_gone = False

    def response_started(self, response: ResponseHead) -> None:
        assert self.head is None
        self.head = response

    def body(self, piece: bytes) -> None:
        self.pieces += piece

    def relay(self, data: bytes) -> None:
        assert not self.heard
        self.relayed += data

    def response_ended(self) -> None:
        self.heard.append("ended")

    def response_switched(self, response: ResponseHead, rest: bytes) -> None:
        self.heard.append(("switched", response.status, rest))

    def response_lost(self, cause: Cause, *, silent: bool) -> None:
        self.heard.append((cause, silent))

    def opened(self, connection: UpstreamConnection) -> None:
        pass

    def settled(self, connection: UpstreamConnection) -> None:
        self.settled_count += 1

    def gone(self, connection: UpstreamConnection) -> None:
        self.is_gone = True


def a_request(method: bytes = b"POST") -> tuple[UpstreamConnection, HeldTransport, Recorder, HeldLoop]:
    loop, transport, recorder = HeldLoop(), HeldTransport(), Recorder()
    connection = UpstreamConnection(cast(asyncio.AbstractEventLoop, loop), "http://r", TimeOuts(), recorder)
    connection.connection_made(cast(asyncio.Transport, transport))
    connection.request(b"head", b"body", recorder, bodiless=method == b"HEAD")
    return connection, transport, recorder, loop


def feed(connection: UpstreamConnection, transport: HeldTransport, data: bytes, at: list[int]) -> None:
    ends = sorted({end for end in at if 0 < end < len(data)} | {len(data)})
    for start, end in zip([0, *ends], ends, strict=False):
        if start < end and not transport.closed:
            connection.data_received(data[start:end])


@pytest.mark.parametrize("kind", ANSWERS)
@given(at=st.lists(st.integers(0, 250)), surplus=st.sampled_from(SURPLUS))
def test_any_split_relays_exactly_the_answer_and_never_what_follows(kind: str, at: list[int], surplus: bytes) -> None:
    whole = ANSWERS[kind]
    connection, transport, recorder, _ = a_request()
    feed(connection, transport, whole + surplus, at)
    assert recorder.relayed == whole.partition(b"\r\n\r\n")[2]
    assert recorder.heard == ["ended"]
    assert transport.closed == bool(surplus)


@given(at=st.lists(st.integers(0, 250)))
def test_the_body_without_framing_is_the_same_for_any_split(at: list[int]) -> None:
    connection, transport, recorder, _ = a_request()
    feed(connection, transport, ANSWERS["chunks with trailers"], at)
    assert recorder.pieces == b"data: 1\n\n0\r\n\r\n0123456789\n0\n"


@pytest.mark.parametrize("framing", [b"Content-Length: 31", b"Transfer-Encoding: chunked", b"X: no framing"])
@given(at=st.lists(st.integers(0, 100)))
def test_the_answer_to_head_ends_with_its_head(framing: bytes, at: list[int]) -> None:
    connection, transport, recorder, _ = a_request(b"HEAD")
    feed(connection, transport, b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n\r\n", at)
    assert (recorder.heard, recorder.relayed) == (["ended"], b"")


@given(cut=st.integers(0, len(ANSWERS["chunks"]) - 1))
def test_an_answer_cut_anywhere_is_lost_and_never_ended(cut: int) -> None:
    whole = ANSWERS["chunks"]
    connection, transport, recorder, _ = a_request()
    feed(connection, transport, whole[:cut], [])
    connection.connection_lost(None)
    head_bytes = len(STREAM_HEAD)
    expected = Cause.NO_ANSWER if cut == 0 else Cause.BAD_ANSWER if cut < head_bytes else Cause.BROKEN
    assert recorder.heard == [(expected, False)]
    assert recorder.relayed == whole[head_bytes:cut]
    assert recorder.is_gone


@given(noise=st.binary(min_size=1, max_size=60), keep=st.integers(0, 200), at=st.lists(st.integers(0, 250)))
def test_noise_ends_an_answer_at_most_once_and_relays_only_what_came(noise: bytes, keep: int, at: list[int]) -> None:
    data = ANSWERS["chunks"][:keep] + noise
    connection, transport, recorder, _ = a_request()
    feed(connection, transport, data, at)
    if not transport.closed:
        connection.connection_lost(None)
    assert len(recorder.heard) == 1
    assert recorder.relayed in data


def test_two_answers_in_a_row_use_one_connection() -> None:
    connection, transport, recorder, _ = a_request()
    for number in range(1, 4):
        connection.data_received(ANSWERS["chunks"])
        assert (recorder.settled_count, transport.closed, connection.busy) == (number, False, False)
        recorder = Recorder()
        connection._owner = recorder
        recorder.settled_count = number
        connection.request(b"", b"", recorder, bodiless=False)


def test_an_http_1_0_answer_is_complete_and_its_connection_is_not_kept() -> None:
    connection, transport, recorder, _ = a_request()
    connection.data_received(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok")
    assert (recorder.relayed, recorder.heard, recorder.settled_count) == (b"ok", ["ended"], 0)
    assert transport.closed


def test_a_connection_paused_at_the_end_reads_again_before_it_rests() -> None:
    connection, transport, recorder, _ = a_request()
    connection.pause()
    assert not transport.reading
    connection.data_received(answer())
    assert (transport.reading, recorder.settled_count) == (True, 1)


def test_limits_run_from_the_request_and_then_from_the_last_piece() -> None:
    connection, _, recorder, loop = a_request()
    loop.advance_to(599.0)
    connection.data_received(STREAM_HEAD)
    for now_s in range(599, 2000, 299):
        loop.advance_to(float(now_s))
        connection.data_received(chunk(b"data: 1\n\n"))
    assert recorder.heard == []
    assert len(loop.timers) < 20
    loop.advance_to(now_s + 301.0)
    assert recorder.heard == [(Cause.BROKEN, True)]


def test_a_head_alone_is_not_the_first_byte_and_the_limit_between_pieces_starts_with_the_body() -> None:
    connection, _, recorder, loop = a_request()
    connection.data_received(STREAM_HEAD)
    loop.advance_to(400.0)
    assert recorder.heard == []
    connection.data_received(chunk(b"data: 1\n\n"))
    loop.advance_to(701.0)
    assert recorder.heard == [(Cause.BROKEN, True)]


def test_silence_behind_a_head_has_the_limit_of_the_first_byte() -> None:
    connection, _, recorder, loop = a_request()
    connection.data_received(STREAM_HEAD)
    loop.advance_to(601.0)
    assert recorder.heard == [(Cause.BROKEN, True)]


def test_silence_before_the_head_is_reported_as_silence() -> None:
    _, transport, recorder, loop = a_request()
    loop.advance_to(601.0)
    assert recorder.heard == [(Cause.NO_ANSWER, True)]
    assert transport.closed


@given(at=st.lists(st.integers(0, 120)))
def test_a_switch_hands_over_what_follows_its_head(at: list[int]) -> None:
    head = b"HTTP/1.1 101 S\r\nConnection: upgrade\r\nUpgrade: WebSocket\r\n\r\n"
    connection, transport, recorder, _ = a_request()
    connection.close()
    transport.closed = False
    connection.request(b"", b"", recorder, bodiless=False, upgrade=b"websocket")
    feed(connection, transport, b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\n" + head, [end for end in at if end < 110])
    assert recorder.heard == [("switched", 101, b"")]


def test_after_close_the_sink_hears_nothing() -> None:
    connection, transport, recorder, _ = a_request()
    connection.close()
    connection.connection_lost(None)
    assert (recorder.heard, transport.closed, recorder.is_gone) == ([], True, True)


@pytest.mark.parametrize("read_bytes", [1000, 2**16 + 1, 2**18])
@pytest.mark.parametrize("digits", [b"0123456789" * 50_000, b"1\n0" + b"x" * 500_000])
def test_a_long_line_of_a_body_is_relayed_wherever_a_read_begins(digits: bytes, read_bytes: int) -> None:
    """A read that begins with a zero, or has one at the start of a line, may hold the last chunk."""
    data = STREAM_HEAD + chunk(digits) * 2 + LAST_CHUNK
    connection, transport, recorder, _ = a_request()
    feed(connection, transport, data, list(range(0, len(data), read_bytes)))
    assert recorder.heard == ["ended"]
    assert recorder.pieces == digits * 2

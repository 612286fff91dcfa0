"""Reading along, on arbitrary splits and with bounded memory."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.side_reader import JsonReader, Learned, SideReader, StreamReader
from tests.router.http.stubs import VECTORS

CHAT = (VECTORS / "sse_chat_stream.txt").read_bytes()
FAILED_CHAT = (VECTORS / "sse_chat_stream_error.txt").read_bytes()
TOKEN = 'data: {"t":"北京🙂"}\n\n'.encode()


def read(reader: SideReader, pieces: list[bytes]) -> list[int]:
    """Feed all; the numbers of the pieces that brought the first token."""
    return [number for number, piece in enumerate(pieces) if reader.feed(piece)]


def cut(data: bytes, at: list[int]) -> list[bytes]:
    """Data in pieces, none empty."""
    ends = sorted({end for end in at if 0 < end < len(data)} | {len(data)})
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@given(at=st.lists(st.integers(0, len(CHAT) * 2)), line_end=st.sampled_from([b"\n", b"\r\n"]))
def test_any_split_gives_one_first_token_and_the_same_usage(at: list[int], line_end: bytes) -> None:
    stream = b": comment first\n\n" + CHAT
    stream = stream.replace(b"\n", line_end)
    pieces = cut(stream, at)
    reader = StreamReader()
    (which,) = read(reader, pieces)
    first_event_ends = stream.index(line_end * 2, stream.index(b"data:")) + 2 * len(line_end)
    before = sum(map(len, pieces[:which]))
    assert before < first_event_ends <= before + len(pieces[which])
    assert reader.learned() == Learned(prompt_tokens=2048, output_tokens=3, cached_tokens=1984)


def test_one_byte_at_a_time_is_no_different() -> None:
    reader = StreamReader()
    assert read(reader, cut(TOKEN * 2, list(range(200)))) == [len(TOKEN) - 1]


@pytest.mark.parametrize(
    "stream",
    [
        b"",
        b": keep-alive\n\n: keep-alive\r\n\r\n",
        b"data: [DONE]\n\n",
        b'data: {"error":{"message":"x","code":500}}\n\ndata: [DONE]\n\n',
        b'data: {"object":"error","message":"x","code":503}\n\n',
        b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"}}\n\n',
        b'data: {"unfinished":1}\n',
        b"event: ping\n\n",
    ],
)
def test_what_carries_no_output_is_no_first_token(stream: bytes) -> None:
    assert read(StreamReader(), cut(stream, list(range(len(stream))))) == []


@pytest.mark.parametrize(
    "stream",
    [
        b"event: message_start\ndata: {}\n\n",
        b"data:{}\n\n",
        b"data: {\ndata: }\n\n",
        b'data: {"text":"an \\"error\\" told"}\n\n',
        b'data: {"error":null,"choices":[]}\n\n',
        b'data: not json "error"\n\n',
        b": c\n\ndata: [DONE]\n\ndata: {}\n\n",
        b"data: {}\r\rdata",
    ],
)
def test_any_other_data_event_is(stream: bytes) -> None:
    assert len(read(StreamReader(), cut(stream, list(range(len(stream)))))) == 1


def test_an_event_of_megabytes_is_held_in_part_and_counts_once() -> None:
    reader = StreamReader()
    block = b"x" * 65536
    found = read(reader, [b"data: ", *[block] * 48, b"\n\n", b"data: [DONE]\n\n"])
    assert found == [1]
    assert sys.getsizeof(reader._tail) < 200_000
    assert sys.getsizeof(reader._first._line) < 200_000


def test_an_endless_comment_is_dropped_as_it_comes() -> None:
    reader = StreamReader()
    assert read(reader, [b": "] + [b"x" * 65536] * 20) == []
    assert sys.getsizeof(reader._first._line) < 200_000
    assert read(reader, [b"\n\n" + TOKEN]) == [0]


def test_memory_stays_bounded_over_a_long_stream() -> None:
    reader = StreamReader()
    for _ in range(20_000):
        reader.feed(TOKEN)
    reader.feed(CHAT)
    assert sys.getsizeof(reader._tail) < 100_000
    assert reader.learned().output_tokens == 3


def test_an_error_event_is_learned_at_the_end() -> None:
    reader = StreamReader()
    read(reader, [FAILED_CHAT])
    assert reader.learned() == Learned(stream_error=True)


def test_the_last_of_several_usages_counts() -> None:
    reader = StreamReader()
    events = [b'data: {"usage":{"prompt_tokens":9,"completion_tokens":%d}}\n\n' % n for n in range(30)]
    read(reader, [*events, b"data: [DONE]\n\n"])
    assert reader.learned() == Learned(prompt_tokens=9, output_tokens=29)


def test_usage_of_the_other_apis_is_read() -> None:
    messages = StreamReader()
    start = b'event: message_start\ndata: {"message":{"usage":{"input_tokens":9,"output_tokens":0}}}\n\n'
    read(
        messages, [start + b'event: message_delta\ndata: {"usage":{"output_tokens":4,"cache_read_input_tokens":8}}\n\n']
    )
    assert messages.learned() == Learned(prompt_tokens=9, output_tokens=4, cached_tokens=8)
    responses = StreamReader()
    usage = {"input_tokens": 5, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 3}}
    event = {"type": "response.completed", "response": {"error": None, "usage": usage}}
    read(responses, [b"event: response.completed\ndata: " + json.dumps(event).encode() + b"\n\n"])
    assert responses.learned() == Learned(prompt_tokens=5, output_tokens=2, cached_tokens=3)


def test_a_stream_that_says_nothing_leaves_everything_unknown() -> None:
    reader = StreamReader()
    read(reader, [b'data: {"choices":[],"usage":null}\n\ndata: broken "usage" {\n\ndata: [DONE]\n\n'])
    assert reader.learned() == Learned()


@given(at=st.lists(st.integers(0, 200)))
def test_a_json_answer_is_read_from_any_pieces(at: list[int]) -> None:
    body = b'{"id":"x","usage":{"prompt_tokens":7,"completion_tokens":2,"prompt_tokens_details":null}}'
    reader = JsonReader()
    assert read(reader, cut(body, at)) == []
    assert reader.learned() == Learned(prompt_tokens=7, output_tokens=2)


def test_a_json_answer_beyond_the_limit_is_let_go() -> None:
    reader = JsonReader()
    read(reader, [b'{"usage":{"prompt_tokens":7},"embedding":"'] + [b"x" * 65536] * 5 + [b'"}'])
    assert reader.learned() == Learned()
    assert sys.getsizeof(reader._body) < 1000


@pytest.mark.parametrize(
    "opening",
    [
        b'event: response.created\ndata: {"type":"response.created","response":{}}\n\n',
        b'event: response.in_progress\ndata: {"type":"response.in_progress"}\n\n',
        b'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":3}}}\n\n',
        b'event: ping\ndata: {"type":"ping"}\n\n',
    ],
)
def test_events_that_open_a_stream_before_anything_was_computed_are_no_first_token(opening: bytes) -> None:
    reader = StreamReader()
    assert not reader.feed(opening)
    assert reader.feed(b'data: {"type":"response.output_text.delta","delta":"Hi"}\n\n')


def test_events_from_the_first_token_on_are_counted_however_they_are_cut() -> None:
    stream = b": comment\n\n" + b'data: {"choices":[{"text":"a"}]}\n\n' * 20
    for size in (1000, 33, 7):
        reader = StreamReader()
        for start in range(0, len(stream), size):
            reader.feed(stream[start : start + size])
        assert 15 <= reader.learned().events <= 20

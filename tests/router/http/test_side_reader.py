"""Reading along, on arbitrary splits and with bounded memory."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.side_reader import JsonReader, Learned, SideReader, StreamReader, id_in
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
    first_event_ends = stream.index(line_end * 2, stream.index(b'"Hel"')) + 2 * len(line_end)  # behind the role
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
        b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n',
        b'data: {"choices":[{"delta":{"role":"assistant","content":null}},{"delta":{"role":"assistant"}}]}\n\n',
        b'data: {"choices":[],"usage":null}\n\n',
        b'event: response.created\ndata: {"response":{"id":"resp_1"},"type_comes":"late"}\n\n',
        b'event: content_block_start\ndata: {"content_block":{"type":"text","text":""}}\n\n',
        b'data: {"unfinished":1}\n',
        b"event: ping\n\n",
    ],
)
def test_what_carries_no_output_is_no_first_token(stream: bytes) -> None:
    assert read(StreamReader(), cut(stream, list(range(len(stream))))) == []


@pytest.mark.parametrize(
    "stream",
    [
        b"event: content_block_delta\ndata: {}\n\n",
        b"data:{}\n\n",
        b"data: {\ndata: }\n\n",
        b'data: {"text":"an \\"error\\" told"}\n\n',
        b'data: {"error":null,"choices":[{"text":""}]}\n\n',
        b'data: {"choices":[{"delta":{"role":"assistant","content":"Hi"}}]}\n\n',
        b'data: {"choices":[{"delta":{"role":"assistant","tool_calls":[{"index":0}]}}]}\n\n',
        b'data: {"choices":[{"delta":{"role":"assistant"},"finish_reason":"length"}]}\n\n',
        b'data: {"choices":[{"delta":{"role":"assistant"}},{"delta":{"content":"b"}}]}\n\n',
        b'data: {"choices":[{"delta":{"content":""}}]}\n\n',
        b'data: "choices" "role" and no JSON\n\n',
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


# -- every API's stream, in any pieces


def event(data: object, name: str = "") -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def chat(**delta: object) -> bytes:
    return event({"id": "chatcmpl-1", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})


USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
INPUT_USAGE = {"input_tokens": 9, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 4}}
CREATED = {"response": {"id": "resp_1", "usage": None, "tools": []}, "sequence_number": 0, "type": "response.created"}
COMPLETED = {"type": "response.completed", "response": {"id": "resp_1", "usage": INPUT_USAGE}}
START = {"type": "message_start", "message": {"id": "msg_1", "usage": {"input_tokens": 9, "output_tokens": 0}}}
MESSAGE_USAGE = {"output_tokens": 2, "cache_read_input_tokens": 4}
STREAMS = {  # what opens, what the first token is, what follows; the id
    "chat": (
        b": keep-alive\n\n" + chat(role="assistant", content=""),
        chat(content="北🙂"),
        chat(content="京") + event({"id": "chatcmpl-1", "choices": [], "usage": USAGE}) + b"data: [DONE]\n\n",
        b"chatcmpl-1",
    ),
    "completions": (
        b": a\n\n",
        event({"id": "cmpl-1", "choices": [{"text": "北"}]}),
        event({"id": "cmpl-1", "choices": [{"text": "🙂"}], "usage": USAGE}) + b"data: [DONE]\n\n",
        b"cmpl-1",
    ),
    "responses": (
        event(CREATED, "response.created") + event({"response": {}}, "response.in_progress"),
        event({"delta": "北", "type": "response.output_text.delta"}, "response.output_text.delta"),
        event(COMPLETED, "response.completed"),
        b"resp_1",
    ),
    "messages": (
        event(START, "message_start") + event({"type": "ping"}, "ping") + event({}, "content_block_start"),
        event({"type": "content_block_delta", "delta": {"text": "🙂"}}, "content_block_delta"),
        event({"type": "message_delta", "usage": MESSAGE_USAGE}, "message_delta")
        + event({"type": "message_stop"}, "message_stop"),
        b"msg_1",
    ),
    "generate": (
        b"",
        event({"text": "北", "meta_info": {"id": "rid-1", "prompt_tokens": 9, "completion_tokens": 1}}),
        event({"text": "北🙂", "meta_info": {**USAGE, "id": "rid-1", "cached_tokens": 4}}) + b"data: [DONE]\n\n",
        b"rid-1",
    ),
}


@pytest.mark.parametrize("api", STREAMS)
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
@given(at=st.lists(st.integers(0, 1200), max_size=40))
def test_the_stream_of_every_api_is_read_from_any_pieces(api: str, line_end: bytes, at: list[int]) -> None:
    opening, token, rest, answer_id = STREAMS[api]
    opening, token, rest = (part.replace(b"\n", line_end) for part in (opening, token, rest))
    pieces = cut(opening + token + rest, at)
    ids: list[bytes] = []
    reader = StreamReader(ids.append)
    (which,) = read(reader, pieces)
    before, upto = (sum(map(len, pieces[:end])) for end in (which, which + 1))
    assert before < len(opening + token) <= upto
    assert reader.learned() == Learned(prompt_tokens=9, output_tokens=2, cached_tokens=4)
    assert ids == [answer_id]


@given(pieces=st.lists(st.binary(max_size=60) | st.sampled_from([b"\n\n", b"data: ", b'{"usage":', b"\r", b"event: "])))
def test_rubbish_is_read_without_a_word(pieces: list[bytes]) -> None:
    for reader in (StreamReader(), JsonReader()):
        assert len(read(reader, pieces)) <= 1
    stream = StreamReader()
    read(stream, pieces)
    assert stream.learned().prompt_tokens is None


def test_an_id_inside_a_text_is_not_the_answers() -> None:
    instructions = json.dumps({"instructions": 'say "id":"resp_fake" twice', "id": "resp_1"}).encode()
    assert id_in(instructions) == b"resp_1"
    assert id_in(b'{"previous_response_id":"resp_0","id":"resp_1"}') == b"resp_1"
    assert id_in(b'{"output":[]}') == b""


@pytest.mark.parametrize("size", [10, 300_000])
def test_the_id_of_a_json_answer_is_heard_once_however_long_it_is(size: int) -> None:
    ids: list[bytes] = []
    reader = JsonReader(ids.append)
    body = json.dumps({"id": "resp_1", "output": "x" * size}).encode()
    read(reader, cut(body, list(range(5, size, max(1, size // 7)))))
    reader.learned()
    assert ids == [b"resp_1"]


def test_a_batch_of_answers_in_one_list_leaves_its_sums_unknown() -> None:
    reader = JsonReader()
    read(reader, [b'[{"text":"a","meta_info":{"prompt_tokens":3}}]'])
    assert reader.learned() == Learned()

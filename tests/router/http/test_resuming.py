"""What a stream passes where it could go on: nothing of it is changed, whatever it is and however it comes."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.http.resuming import Resuming
from router.http.splice import UsageSwallower
from router.resume.continuation import COMPLETIONS, Continuation, Rest
from router.resume.log import ResumeConfig
from router.resume.reasons import WhyNot
from tests.router.resume.streams import DONE, chunk, delta, event, text

CONFIG = ResumeConfig(enabled=True, max_event_bytes=200, max_log_bytes=40)
ASKED = {"model": "m", "prompt": "Why?", "stream": True}
CAN, CANNOT = json.dumps(ASKED).encode(), json.dumps(ASKED | {"logprobs": 1}).encode()
PARTS = [
    *(text("a"), text("é😀" * 9), text("b", finish="stop"), DONE, chunk([], usage={"prompt_tokens": 3})),
    *(delta({"tool_calls": [{"index": 0}]}), event({"error": {"message": "m"}}), text("c", index=1)),
    *(
        b": keep-alive\n\n",
        b"data: {\n\n",
        b"\r\n\r\n",
        b"\n",
        b"\r",
        b"data: " + b"x" * 300,
        b"event: e\r\ndata: 1\r\n\r\n",
    ),
    *(b"data: [1,2]\n\n", b"data: \xff\xfe\n\n", b"data: " + b"[" * 5000 + b"\n\n", b"\0"),
]


def made(body: bytes, *, swallows: bool = False) -> Resuming:
    stream = Resuming(CONFIG, COMPLETIONS, body, prompt_tokens=None)
    stream.begin(UsageSwallower() if swallows else None)
    return stream


def fed(stream: Resuming, body: bytes, splits: list[int]) -> bytes:
    places = [0, *sorted(min(place, len(body)) for place in splits), len(body)]
    return b"".join(stream.feed(body[a:b]) for a, b in pairwise(places))


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([CAN, CANNOT, b"rubbish"]),
    st.lists(st.sampled_from(PARTS), max_size=8).map(b"".join),
    st.lists(st.integers(0, 3000), max_size=9),
)
def test_a_whole_answer_passes_byte_for_byte(asked: bytes, body: bytes, splits: list[int]) -> None:
    stream = made(asked)
    assert fed(stream, body, splits) + stream.end() == body


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([CAN, CANNOT]),
    st.lists(st.sampled_from(PARTS), max_size=8).map(b"".join),
    st.lists(st.integers(0, 3000), max_size=9),
)
def test_what_is_kept_of_usage_is_what_the_swallower_keeps(asked: bytes, body: bytes, splits: list[int]) -> None:
    stream, alone = made(asked, swallows=True), UsageSwallower()
    assert fed(stream, body, splits) + stream.end() == alone.feed(body) + alone.end()


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([CAN, CANNOT]),
    st.lists(st.sampled_from(PARTS), min_size=1, max_size=8).map(b"".join),
    st.lists(st.integers(0, 3000), max_size=9),
    st.integers(0, 3000),
)
def test_a_break_anywhere_leaves_a_client_between_events_or_without_one_more(
    asked: bytes, body: bytes, splits: list[int], cut: int
) -> None:
    """What is said last is an event by itself, and all that came before it is a beginning of what the replica sent."""
    stream = made(asked)
    seen = fed(stream, body[:cut], splits)
    rest = stream.rest()
    if isinstance(rest, Continuation):
        assert not rest.body or json.loads(rest.body)["stream"]
        assert body.startswith(seen)
        return
    stream.give_up(rest)
    last = stream.end()
    assert body.startswith(seen if b"StreamBroken" in last else seen + last)
    if b"StreamBroken" in last:
        assert seen in (b"", b"\n") or seen.endswith((b"\n\n", b"\r\n\r\n", b"\n\r\n"))
        assert last.startswith(b"data: {")
        assert last.endswith(b"}\n\n")


def test_a_stream_is_over_by_its_end_marker_or_its_finish_reason() -> None:
    for body, over in [(text("a"), False), (text("a", finish="stop"), True), (text("a") + DONE, True)]:
        stream = made(CAN)
        stream.feed(body)
        assert stream.ended is over


def test_the_end_of_what_cannot_be_followed_is_believed() -> None:
    assert made(CANNOT).ended
    stream = made(CAN)
    stream.feed(text("c", index=1))
    assert stream.ended


@pytest.mark.parametrize("asked", [CAN, CANNOT])
def test_behind_the_end_marker_nothing_is_lacking(asked: bytes) -> None:
    stream = made(asked)
    seen = stream.feed(text("a", finish="stop") + DONE + b"data: {half")
    assert stream.rest() == Continuation(b"", Rest.NOTHING)
    stream.complete(Rest.NOTHING)
    assert seen + stream.end() == text("a", finish="stop") + DONE


def test_it_begins_anew_with_an_answer_that_nothing_was_relayed_of() -> None:
    stream = made(CAN)
    stream.feed(text("a") + b"data: {half")
    stream.begin(None)
    assert stream.feed(text("b")) + stream.end() == text("b")
    rest = stream.rest()
    assert isinstance(rest, Continuation)
    assert json.loads(rest.body)["prompt"] == "Why?b"


def test_the_body_of_what_cannot_go_on_is_not_kept() -> None:
    stream = made(CANNOT)
    assert stream.rest() is WhyNot.LOGPROBS
    assert stream._body == b""

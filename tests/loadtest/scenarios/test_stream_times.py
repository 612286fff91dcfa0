import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.scenarios.stream_times import StreamTimes


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n"


def delta(**fields: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": fields}])


def read(*lines: bytes, every_s: float = 1.0) -> StreamTimes:
    """Lines `every_s` apart, the first one that long after the beginning."""
    times = StreamTimes(began_s=100.0)
    for at, line in enumerate(lines, start=1):
        times.line(line, 100.0 + at * every_s)
    times.ended()
    return times


DONE = b"data: [DONE]\n"


def test_a_role_a_comment_and_usage_are_no_first_token() -> None:
    times = read(b": ping\n", b"\n", delta(role="assistant", content=""), delta(content="Hi"), DONE)
    assert times.first_token_s == 4.0
    assert (times.error, times.text) == (None, ["Hi"])


@pytest.mark.parametrize(
    "line",
    [
        delta(reasoning_content="hm"),
        delta(reasoning="hm"),
        delta(tool_calls=[{"index": 0, "function": {"name": "f"}}]),
        event(choices=[{"index": 0, "text": "Hi"}]),
    ],
)
def test_reasoning_a_tool_call_and_plain_text_are_tokens(line: bytes) -> None:
    assert read(line, DONE).first_token_s == 1.0


def test_gaps_are_between_tokens_and_the_end_is_not_one() -> None:
    times = read(delta(content="a"), b"\n", b"\n", delta(content="b"), delta(content="c"), b"\n", DONE)
    assert times.longest_gap_s == 3.0
    assert times.per_token_s == pytest.approx((3.0 + 1.0) / 2)


def test_several_tokens_in_an_event_are_counted_by_usage() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 8}}
    times = read(delta(content="a b"), delta(content="c d e"), event(choices=[], usage=usage), DONE)
    assert (times.output_tokens, times.prompt_tokens, times.cached_tokens) == (5, 9, 8)
    assert times.per_token_s == pytest.approx(1.0 / 4)


def test_one_token_has_nothing_between_tokens() -> None:
    times = read(delta(content="a"), DONE)
    assert (times.per_token_s, times.longest_gap_s) == (None, None)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([delta(content="a")], "without [DONE]"),
        ([DONE], "without a token"),
        ([], "without [DONE]"),
        ([delta(content="a"), event(error={"message": "out of memory"}), DONE], "out of memory"),
        ([b"data: {broken\n", DONE], "cannot be read"),
        ([b"data: \xff\xfe\n", DONE], "cannot be read"),
        ([b"data: 7\n", DONE], "cannot be read"),
    ],
)
def test_what_is_no_whole_answer_says_why(lines: list[bytes], said: str) -> None:
    error = read(*lines).error
    assert error is not None
    assert said in error


def test_an_error_of_null_is_none() -> None:
    assert read(event(error=None, choices=[{"text": "a"}]), DONE).error is None


@given(st.lists(st.binary(max_size=60)))
def test_no_bytes_raise(lines: list[bytes]) -> None:
    times = read(*lines, *(b"data:" + line for line in lines))
    assert times.first_s is None or times.pieces > 0

"""The second answer's events, as the client of the first sees them."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.resume.continuation import Rest
from router.resume.log import ResumeConfig, StreamLog
from router.resume.reasons import WhyNot
from router.resume.stitcher import Stitcher, broken_event
from tests.router.resume.streams import DONE, chunk, delta, event, text


def a_log(*events: bytes) -> StreamLog:
    log = StreamLog(ResumeConfig())
    log.feed(b"".join(events))
    return log


SENT = text("a")
SECOND = text("b", name="two") + b": still here\n\n" + text("c", name="two", finish="stop") + DONE


@given(st.lists(st.integers(0, len(SECOND)), max_size=8))
def test_names_become_the_first_answers_whatever_the_pieces(splits: list[int]) -> None:
    stitcher = Stitcher(a_log(SENT), Rest.TEXT)
    places = [0, *sorted(splits), len(SECOND)]
    seen = b"".join(stitcher.feed(SECOND[a:b]) for a, b in itertools.pairwise(places))
    assert seen == text("b") + b": still here\n\n" + text("c", finish="stop") + DONE


def test_bytes_that_are_not_ours_stay_as_the_replica_wrote_them() -> None:
    other = b'data: {"x": 1e400, "id" : "q","choices": [ {"index":0, "text":"\\u00e9"} ],"created":7}\r\n\r\n'
    seen = Stitcher(a_log(SENT), Rest.TEXT).feed(other)
    assert seen == other.replace(b'"q"', b'"one"').replace(b"7}", b"3}")


@pytest.mark.parametrize("opening", [{"role": "assistant", "content": ""}, {"role": "assistant"}])
def test_a_second_role_is_taken_out(opening: dict[str, str]) -> None:
    stitcher = Stitcher(a_log(delta({"role": "assistant", "content": ""}), delta({"content": "a"})), Rest.TEXT)
    assert stitcher.feed(delta(opening, name="two")) == b""
    assert stitcher.feed(delta({"role": "assistant", "content": "b"}, name="two")) == delta({"content": "b"})


def test_a_role_that_was_never_sent_is_not() -> None:
    opening = delta({"role": "assistant", "content": ""}, name="two")
    assert Stitcher(a_log(), Rest.TEXT).feed(opening) == opening


def test_the_longer_prompts_ids_are_not_shown() -> None:
    stitcher = Stitcher(a_log(text("a", token_ids=[5], prompt_token_ids=[1])), Rest.TEXT)
    seen = stitcher.feed(text("b", name="two", token_ids=[6], prompt_token_ids=[1, 5]))
    assert seen == text("b", token_ids=[6], prompt_token_ids=None)


def test_usage_is_of_both() -> None:
    said = {"prompt_tokens": 11, "completion_tokens": 4, "total_tokens": 15, "x": 1}
    stitcher = Stitcher(a_log(SENT), Rest.TEXT)
    joined = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15, "x": 1}
    assert stitcher.feed(chunk([], name="two", usage=said)) == chunk([], usage=joined)


def test_a_counted_prompt_tells_how_many_tokens_shared_an_event() -> None:
    """Ten tokens of prompt, three in one event, and one without text that ended the answer."""
    stitcher = Stitcher(a_log(text("abc"), text("", finish="stop")), Rest.USAGE, prompt_tokens=10)
    said = {"prompt_tokens": 13, "completion_tokens": 1, "total_tokens": 14}
    joined = {"prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14}
    assert stitcher.feed(chunk([], name="two", usage=said)) == chunk([], usage=joined)


@pytest.mark.parametrize("said", [{}, {"prompt_tokens": "7"}, {"prompt_tokens": -1, "completion_tokens": True}])
def test_a_usage_that_cannot_be_read_stays(said: dict[str, object]) -> None:
    stitcher = Stitcher(a_log(SENT), Rest.TEXT)
    assert stitcher.feed(chunk([], name="two", usage=said)) == chunk([], usage=said)


def test_only_the_end_is_taken_where_all_tokens_are_there() -> None:
    stitcher = Stitcher(a_log(SENT), Rest.FINISH)
    assert stitcher.feed(text("b", name="two", finish="stop", token_ids=[9]) + DONE) == (
        text("", finish="length", token_ids=[]) + DONE
    )


def test_only_usage_is_taken_where_the_end_is_there() -> None:
    stitcher = Stitcher(a_log(text("a", finish="stop")), Rest.USAGE)
    seen = stitcher.feed(text("b", name="two", finish="length") + chunk([], name="two", usage={}) + DONE)
    assert seen == chunk([], usage={}) + DONE


@pytest.mark.parametrize(
    "odd", [event({"error": {"message": "no"}}), b"data: {half\n\n", b"data: \xff\n\n", b"data: []\n\n", b"\n\n"]
)
def test_what_is_no_chunk_passes_as_it_is(odd: bytes) -> None:
    assert Stitcher(a_log(SENT), Rest.TEXT).feed(odd) == odd


@pytest.mark.parametrize("why_not", [None, *WhyNot])
def test_the_event_before_a_visible_cut_says_why_and_ends_nothing(why_not: WhyNot | None) -> None:
    said = broken_event(why_not)
    error = json.loads(said.removeprefix(b"data: "))["error"]
    assert said.endswith(b"}\n\n")
    assert b"[DONE]" not in said
    assert (error["code"], error["param"]) == (502, why_not)
    assert "replica failed" in error["message"]

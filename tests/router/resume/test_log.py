"""The log of what a client has seen."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.resume.log import ResumeConfig, StreamLog
from router.resume.reasons import WhyNot
from tests.router.resume.streams import DONE, chunk, delta, event, text

STREAM = b"".join(
    (
        text("Hé"),
        b": keep-alive\n\n",
        text("llo 世界"),
        text("!", finish="stop"),
        chunk([], usage={"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}),
        DONE,
    )
)


def a_log(*, max_log_bytes: int = 1000, max_event_bytes: int = 1000) -> StreamLog:
    return StreamLog(ResumeConfig(max_log_bytes=max_log_bytes, max_event_bytes=max_event_bytes))


@given(st.lists(st.integers(0, len(STREAM)), max_size=12), st.integers(0, len(STREAM)), st.booleans())
def test_only_whole_events_pass_whatever_the_pieces_and_the_cut(splits: list[int], cut: int, crlf: bool) -> None:
    stream = STREAM.replace(b"\n", b"\r\n") if crlf else STREAM
    blank = b"\r\n\r\n" if crlf else b"\n\n"
    places = [0, *sorted(min(place, cut) for place in splits), cut]
    log = a_log()
    passed = b"".join(log.feed(stream[a:b]) for a, b in pairwise(places))
    assert stream[:cut].startswith(passed)
    assert passed == stream[: stream.rfind(blank, 0, cut) + len(blank)] or (passed == b"" and blank not in stream[:cut])
    assert passed + log.end() == stream[:cut]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_what_is_known_does_not_depend_on_the_pieces(splits: list[int]) -> None:
    places = [0, *sorted(splits), len(STREAM)]
    log = a_log()
    for a, b in pairwise(places):
        log.feed(STREAM[a:b])
    assert log.text == "Héllo 世界!"
    assert (log.tokens, log.tokens_exact, log.ids) == (3, False, None)
    assert log.names == {"id": b'"one"', "created": b"3", "model": b'"m-one"'}
    assert log.finished
    assert log.usage_sent
    assert log.done
    assert log.why_not is None


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_bytes_that_come_one_by_one_pass_event_by_event(line_end: bytes) -> None:
    stream = STREAM.replace(b"\n", line_end)
    log = a_log()
    pieces = [log.feed(stream[at : at + 1]) for at in range(len(stream))]
    passed = [piece for piece in pieces if piece]
    assert b"".join(passed) == stream
    assert len(passed) == stream.count(2 * line_end)


def test_a_token_that_only_ends_the_answer_is_counted_and_not_gone_on_from() -> None:
    log = a_log()
    log.feed(text("a", token_ids=[5]) + text("", finish="stop", token_ids=[2]))
    assert (log.tokens, log.ids, log.unseen_end) == (2, [5], True)


def test_token_ids_make_the_count_exact() -> None:
    log = a_log()
    log.feed(text("a b", token_ids=[5, 6], prompt_token_ids=[1, 2]) + text("", token_ids=[7]))
    assert (log.ids, log.tokens, log.tokens_exact, log.prompt_ids) == ([5, 6, 7], 3, True, [1, 2])


def test_one_event_without_ids_leaves_a_lower_bound() -> None:
    log = a_log()
    log.feed(text("a", token_ids=[5]) + text("b"))
    assert (log.ids, log.tokens, log.tokens_exact) == (None, 2, False)


def test_a_conversation_opens_with_a_role() -> None:
    log = a_log()
    log.feed(delta({"role": "assistant", "content": ""}))
    assert (log.role_sent, log.text, log.tokens) == (True, "", 0)
    log.feed(delta({"content": "Hi"}))
    assert log.text == "Hi"


@pytest.mark.parametrize(
    ("bad", "why_not"),
    [
        (delta({"tool_calls": [{"index": 0}]}), WhyNot.TOOLS),
        (delta({"reasoning_content": "hm"}), WhyNot.REASONING),
        (delta({"reasoning": "hm"}), WhyNot.REASONING),
        (delta({"audio": {"data": "AA"}}), WhyNot.AUDIO),
        (text("a", logprobs={"tokens": ["a"]}), WhyNot.LOGPROBS),
        (text("a", index=1), WhyNot.SEVERAL_CHOICES),
        (event({"error": {"message": "no", "code": 500}}), WhyNot.ENGINE_ERROR),
        (event({"object": "error", "message": "no"}), WhyNot.ENGINE_ERROR),
        (b"data: {half\n\n", WhyNot.UNREADABLE),
        (b"data: \xff\n\n", WhyNot.UNREADABLE),
        (b"data: 7\n\n", WhyNot.UNREADABLE),
        (b"data: " + b"[" * 5000 + b"\n\n", WhyNot.UNREADABLE),
    ],
)
def test_what_cannot_be_continued_passes_and_is_named(bad: bytes, why_not: WhyNot) -> None:
    log = a_log()
    assert log.feed(text("a") + bad + b"data: {un") == text("a") + bad + b"data: {un"
    assert log.why_not is why_not
    assert log.text == ""
    assert log.feed(b"finished") == b"finished"


def test_a_log_that_is_full_forgets_and_passes() -> None:
    log = a_log(max_log_bytes=10)
    log.feed(text("世界") + text("世"))
    assert log.text == "世界世"
    assert log.feed(text("世")) == text("世")
    assert log.why_not is WhyNot.OVERFLOW
    assert not log.text


def test_an_event_over_the_limit_passes_unfinished() -> None:
    log = a_log(max_event_bytes=20)
    assert log.feed(b"data: " + b"x" * 14) == b""
    assert log.feed(b"x") == b"data: " + b"x" * 15
    assert log.why_not is WhyNot.OVERFLOW


def test_the_half_event_of_a_dead_replica_never_reaches_the_client() -> None:
    log = a_log()
    assert log.feed(text("a") + text("b")[:9]) == text("a")
    log.broke()
    assert log.feed(text("c", name="two")) == text("c", name="two")
    assert (log.text, log.resumes, log.names["id"]) == ("ac", 1, b'"one"')

"""A stream that is cut anywhere and goes on elsewhere equals the one that was never cut."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.resume.continuation import CHAT, COMPLETIONS, Rest, continuation, why_not_of_request, why_not_of_sent
from router.resume.events import DONE_EVENT
from router.resume.log import ResumeConfig, StreamLog
from router.resume.stitcher import Stitcher
from tests.router.resume import engine
from tests.router.resume.streams import told

USAGE = {"include_usage": True}
_DETAILS = re.compile(rb'"prompt_tokens_details":(null|\{"cached_tokens":\d+\})')


def completion(**more: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": 'Say "a":', "stream": True} | more).encode()


def chat(**more: Any) -> bytes:
    turns = [{"role": "system", "content": "x"}, {"role": "user", "content": "Où?"}]
    return json.dumps({"messages": turns, "model": "m", "stream": True} | more, indent=1).encode()


def path_of(body: bytes) -> str:
    return CHAT if b'"messages"' in body else COMPLETIONS


def joined_over(
    body: bytes,
    cuts: list[int],
    *,
    joined: int = 1,
    tells_ids: bool = False,
    prompt_tokens: int | None = None,
    splits: tuple[int, ...] = (),
) -> bytes:
    """What a client sees when each further replica dies after `cuts` bytes of its answer."""
    path = path_of(body)
    assert why_not_of_request(path, body) is None
    log = StreamLog(ResumeConfig())
    seen, asked, stitcher = b"", body, None
    for number, cut in enumerate([*cuts, None]):
        answer = engine.stream(asked, name=f"r{number}", joined=joined, tells_ids=tells_ids, cached=number)[:cut]
        places = [0, *sorted(min(place, len(answer)) for place in splits), len(answer)]
        for a, b in pairwise(places):
            piece = answer[a:b]
            seen += log.feed(piece if stitcher is None else stitcher.feed(piece))
        assert log.why_not is None
        if cut is None or log.done:
            break
        log.broke()
        assert why_not_of_sent(path, body, log) is None
        rest = continuation(path, body, log)
        if rest.rest is Rest.DONE:
            return seen + DONE_EVENT
        asked, stitcher = rest.body, Stitcher(log, rest.rest, prompt_tokens=prompt_tokens)
    return seen


def alike(stream: bytes) -> bytes:
    """Without what the second replica cannot know: how much the first had cached."""
    return _DETAILS.sub(b"", stream)


BODIES = [
    completion(),
    completion(max_tokens=6),
    completion(max_tokens=300, stream_options=USAGE),
    completion(max_tokens=5, stream_options=USAGE),
    completion(max_tokens=1, stream_options=USAGE),
    chat(),
    chat(max_tokens=5, stream_options=USAGE),
    chat(max_completion_tokens=5, stream_options=USAGE),
    chat(stream_options=USAGE, min_tokens=2, seed=7, temperature=0.8),
]


@pytest.mark.parametrize("tells_ids", [False, True])
@pytest.mark.parametrize("body", BODIES)
def test_a_cut_around_any_event_does_not_show(body: bytes, tells_ids: bool) -> None:
    whole = engine.stream(body, name="r0", tells_ids=tells_ids)
    for cut in cuts_around_events(whole):
        assert alike(joined_over(body, [cut], tells_ids=tells_ids)) == alike(whole), cut


@pytest.mark.parametrize("body", [completion(max_tokens=3, stream_options=USAGE), chat(max_tokens=2)])
def test_a_cut_at_any_byte_does_not_show(body: bytes) -> None:
    whole = engine.stream(body, name="r0")
    for cut in range(first_event_end(whole), len(whole)):
        assert alike(joined_over(body, [cut])) == alike(whole), cut


@pytest.mark.parametrize("body", BODIES)
def test_a_cut_before_the_first_whole_event_gives_the_second_answer_as_it_is(body: bytes) -> None:
    own = engine.stream(body, name="r1", cached=1)
    for cut in range(first_event_end(own)):
        assert joined_over(body, [cut]) == own


def cuts_around_events(stream: bytes) -> list[int]:
    """Right behind each event, a byte to either side, and within the next; from the first on."""
    ends = [blank.end() for blank in re.finditer(b"\n\n", stream)]
    return [cut for end in ends for cut in (end - 1, end, end + 1, end + 50) if ends[0] <= cut < len(stream)]


def first_event_end(stream: bytes) -> int:
    return stream.index(b"\n\n") + 2


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(BODIES),
    st.lists(st.integers(0, 2000), max_size=4),
    st.lists(st.integers(0, 3000), max_size=8),
    st.integers(1, 4),
)
def test_neither_do_several_cuts_with_any_pieces(body: bytes, cuts: list[int], splits: list[int], joined: int) -> None:
    """Where events join tokens, how many went out is known from their ids."""
    whole = engine.stream(body, name="r0", tells_ids=True, joined=joined)
    seen = joined_over(body, cuts, tells_ids=True, joined=joined, splits=tuple(splits))
    assert told(seen) == told(whole)


def test_a_counted_prompt_makes_usage_exact_where_events_join_tokens() -> None:
    body = completion(max_tokens=300, stream_options=USAGE)
    whole = engine.stream(body, name="r0", joined=3)
    prompt_tokens = len('Say "a":')
    for cut in cuts_around_events(whole):
        seen = joined_over(body, [cut], joined=3, prompt_tokens=prompt_tokens)
        assert told(seen)[:2] == told(whole)[:2]
        # The token that ends the answer has no text, so that of a finished one the prompt of the next tells one less.
        assert told(whole)[2]["completion_tokens"] - told(seen)[2]["completion_tokens"] in (0, 1)


def test_an_uncounted_prompt_leaves_the_sum_right() -> None:
    body = completion(max_tokens=300, stream_options=USAGE)
    whole = engine.stream(body, name="r0", joined=3)
    cut = first_event_end(whole)
    usage = told(joined_over(body, [cut], joined=3))[2]
    assert usage["total_tokens"] == told(whole)[2]["total_tokens"]
    assert usage["completion_tokens"] == told(whole)[2]["completion_tokens"] - 2, "the first event held three tokens"


def test_what_the_first_replica_had_cached_is_unknown_and_not_zero() -> None:
    body = completion(max_tokens=5, stream_options=USAGE)
    seen = joined_over(body, [first_event_end(engine.stream(body, name="r0"))])
    assert b'"prompt_tokens_details":null' in seen

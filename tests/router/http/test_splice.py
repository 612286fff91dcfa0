from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.splice import UsageSwallower, edits_now, edits_of, spliced, with_members

ALIASES = {"fast": "org/model-8b", 'odd "name"': "m"}
NAMES = st.sampled_from(["fast", "other", "", "org/model-8b", 'odd "name"', "f\u00e4st"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=8) | NAMES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["model", "stream_options", "include_usage", "a", '"', "\\"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)
OPTIONS = st.none() | st.dictionaries(st.sampled_from(["include_usage", "x", "model"]), st.booleans() | st.none())
MEMBERS = st.lists(
    st.tuples(st.just("model"), NAMES)
    | st.tuples(st.just("stream"), st.booleans())
    | st.tuples(st.just("stream_options"), OPTIONS)
    | st.tuples(st.sampled_from(["messages", "prompt", "x"]), VALUES),
    max_size=7,
)
SPACES = st.sampled_from(["", " ", "\n\t ", "\r\n"])


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """JSON objects as some client might write them: any order, repeats, white space, escapes in keys."""
    parts = []
    for key, value in draw(MEMBERS):
        name = json.dumps(key)
        if draw(st.booleans()):
            name = name[:1] + f"\\u{ord(key[0]):04x}" + name[2:]
        gap = [draw(SPACES) for _ in range(4)]
        parts.append(f"{gap[0]}{name}{gap[1]}:{gap[2]}{json.dumps(value, ensure_ascii=draw(st.booleans()))}{gap[3]}")
    inside = ",".join(parts) or draw(SPACES)
    return (draw(SPACES) + "{" + inside + "}" + draw(SPACES)).encode()


def expected(fields: dict[str, Any]) -> dict[str, Any]:
    """What a router that decoded and encoded would send on: a second way to the same meaning."""
    wanted = dict(fields)
    if "model" in wanted:
        wanted["model"] = ALIASES.get(wanted["model"], wanted["model"])
    if wanted.get("stream") is True and isinstance(wanted.get("stream_options"), dict | None):
        wanted["stream_options"] = {**(wanted.get("stream_options") or {}), "include_usage": True}
    return wanted


@given(bodies())
def test_an_edited_body_means_what_was_wanted_and_nothing_else_changed(body: bytes) -> None:
    edits = edits_now(body, aliases=ALIASES, asks_usage=True)
    edited = spliced(body, edits.values())
    assert json.loads(edited) == expected(json.loads(body))
    assert (edits == {}) == (edited == body)
    kept: list[bytes] = []
    at = 0
    for start, end, new in sorted(edits.values()):
        assert edited[len(b"".join(kept)) :].startswith(body[at:start] + new)
        kept += [body[at:start], new]
        at = end
    assert edited == b"".join(kept) + body[at:]


@pytest.mark.parametrize(
    ("body", "edited"),
    [
        (b'{"model": "fast", "x": 1.00}', b'{"model": "org/model-8b", "x": 1.00}'),
        (b'{"model":"x","model" : "fast"}', b'{"model":"x","model" : "org/model-8b"}'),
        (b'{"model":"fast","model":"x"}', b'{"model":"fast","model":"x"}'),
        (
            b'{"a":{"model":"fast"},"b":"\\"model\\":\\"fast\\""}',
            b'{"a":{"model":"fast"},"b":"\\"model\\":\\"fast\\""}',
        ),
        (b'{"model":"f\\u0061st"}', b'{"model":"org/model-8b"}'),
        (b'\xef\xbb\xbf{"model":"fast"}', b'\xef\xbb\xbf{"model":"org/model-8b"}'),
        (b'{"stream":true}', b'{"stream_options":{"include_usage":true},"stream":true}'),
        (b'{"stream":false}', b'{"stream":false}'),
        (b'{ "stream":true, "stream_options": null}', b'{ "stream":true, "stream_options": {"include_usage":true}}'),
        (b'{"stream":true,"stream_options":{ }}', b'{"stream":true,"stream_options":{"include_usage":true }}'),
        (b'{"stream":true,"stream_options":{"x":1}}', b'{"stream":true,"stream_options":{"include_usage":true,"x":1}}'),
        (
            b'{"stream":true,"stream_options":{"include_usage": false}}',
            b'{"stream":true,"stream_options":{"include_usage": true}}',
        ),
        (b'{"stream":true,"stream_options":{"include_usage":true}}',) * 2,
        (b'{"stream":true,"stream_options":{"include_usage":"no"}}',) * 2,
        (b'{"stream":true,"stream_options":7}',) * 2,
    ],
)
def test_exactly_the_value_that_counts_is_replaced(body: bytes, edited: bytes) -> None:
    assert spliced(body, edits_now(body, aliases=ALIASES, asks_usage=True).values()) == edited


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'{"model":"fast"', b'{"model":"fast"}x', b"\xff\xfe", b'{"model":7}']
)
def test_what_is_no_request_is_left_for_the_engine_to_refuse(body: bytes) -> None:
    assert edits_now(body, aliases=ALIASES, asks_usage=True) == {}


def test_a_large_body_is_scanned_in_slices_and_edited_the_same() -> None:
    body = b'{"messages":["' + b"x" * (1 << 20) + b'"],"model":"fast","stream":true}'
    edits = edits_of(body, aliases=ALIASES, asks_usage=True)
    assert sum(1 for _ in edits) >= 8
    edited = spliced(body, edits_now(body, aliases=ALIASES, asks_usage=True).values())
    assert edited.endswith(b'"model":"org/model-8b","stream":true}')
    assert len(edited) == len(body) + len(b"org/model-8b") - len(b"fast") + len(
        b'"stream_options":{"include_usage":true},'
    )


def test_without_a_wish_for_usage_only_names_change() -> None:
    body = b'{"stream":true,"model":"fast"}'
    assert edits_now(body, aliases=ALIASES, asks_usage=False).keys() == {"model"}
    assert edits_now(body, aliases={}, asks_usage=False) == {}


USAGE_ALONE = b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":3,"total_tokens":5}}'
KEPT = [
    b'data: {"choices":[{"delta":{"role":"assistant"}}],"usage":null}',
    b'data: {"choices":[{"delta":{"content":"\\"usage\\": \\"choices\\":[]"}}]}',
    b'data: {"choices":[],"usage":null,"prompt_filter_results":[]}',
    b'data: {"choices":[{"finish_reason":"stop"}],"usage":{"total_tokens":5}}',
    b": keep-alive",
    b'data: {"error":{"message":"usage"}}',
    b'data: {"usage"',
    b"data: [DONE]",
]
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


def fed(stream: bytes, cuts: list[int]) -> tuple[bytes, int]:
    """What a client gets of a stream that arrives in those pieces, and how many events it did not get."""
    swallower = UsageSwallower()
    at = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    got = b"".join(swallower.feed(stream[start:end]) for start, end in pairwise(at))
    return got + swallower.end(), swallower.swallowed


@given(st.lists(st.sampled_from([*KEPT, USAGE_ALONE]), max_size=8), ENDS, st.lists(st.integers(0, 900), max_size=30))
def test_usage_alone_is_cut_out_wherever_the_stream_is_split(events: list[bytes], end: bytes, cuts: list[int]) -> None:
    kept = [event for event in events if event is not USAGE_ALONE]
    got, swallowed = fed(b"".join(event + end + end for event in events), cuts)
    assert got == b"".join(event + end + end for event in kept)
    assert swallowed == len(events) - len(kept)


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=10))
def test_rubbish_passes_as_it_came(stream: bytes, cuts: list[int]) -> None:
    assert fed(stream, cuts) == (stream, 0)


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n", b"\r\n\n"])
def test_every_split_of_a_stream_cuts_the_same_bytes_out(end: bytes) -> None:
    stream = end.join([KEPT[0], USAGE_ALONE, KEPT[-1], b""])
    wanted = end.join([KEPT[0], KEPT[-1], b""])
    assert {fed(stream, [cut])[0] for cut in range(len(stream))} == {wanted}
    assert fed(stream, list(range(len(stream))))[0] == wanted


def test_an_event_passes_as_soon_as_it_is_complete() -> None:
    swallower = UsageSwallower()
    assert swallower.feed(KEPT[0] + b"\n\n" + USAGE_ALONE[:20]) == KEPT[0] + b"\n\n"
    assert swallower.feed(USAGE_ALONE[20:] + b"\n") == b""
    assert swallower.feed(b"\n" + KEPT[-1] + b"\n\n") == KEPT[-1] + b"\n\n"


def test_usage_in_several_data_lines_of_one_event_is_known_too() -> None:
    event = b'event: x\ndata: {"choices":[],\ndata: "usage":{"total_tokens":1}}\nid: 4\n\n'
    assert fed(event + KEPT[-1], [])[0] == KEPT[-1]


def test_an_event_too_large_to_be_held_passes_and_what_is_held_stays_small() -> None:
    swallower = UsageSwallower()
    large = b'data: {"choices":[],"pad":"' + b"x" * (1 << 20) + b'","usage":{"total_tokens":1}}\n\n'
    got, held = b"", 0
    for at in range(0, len(large), 1000):
        got += swallower.feed(large[at : at + 1000])
        held = max(held, at + len(large[at : at + 1000]) - len(got))
    assert got == large
    assert held <= 64 * 1024 + 1000
    assert swallower.feed(USAGE_ALONE + b"\n\n" + KEPT[-1]) + swallower.end() == KEPT[-1]


# Members of objects

MEMBER = b'"k":{"a":1}'


@pytest.mark.parametrize(
    ("body", "edited"),
    [
        (b"{}", b'{"o":{"k":{"a":1}}}'),
        (b' { "p" : [1] }', b' {"o":{"k":{"a":1}}, "p" : [1] }'),
        (b'{"o":null}', b'{"o":{"k":{"a":1}}}'),
        (b'{"o": {}, "p":1}', b'{"o": {"k":{"a":1}}, "p":1}'),
        (b'{"o": {"x":2}}', b'{"o": {"k":{"a":1},"x":2}}'),
        (b'{"p":"\\"o\\""}', b'{"o":{"k":{"a":1}},"p":"\\"o\\""}'),
        (b'{"p":{"o":3}}', b'{"o":{"k":{"a":1}},"p":{"o":3}}'),
        (b'{"o":3}', b'{"o":3}'),
        (b'{"o":[', b'{"o":['),
        (b"rubbish", b"rubbish"),
        (b"", b""),
    ],
)
def test_a_member_is_put_into_an_object_that_is_made_where_it_is_not_there(body: bytes, edited: bytes) -> None:
    assert with_members(body, {"o": MEMBER}) == edited


def test_what_the_client_says_itself_counts() -> None:
    body = b'{"o":{"k":"mine"}}'
    assert json.loads(with_members(body, {"o": MEMBER})) == {"o": {"k": "mine"}}


@given(bodies())
def test_every_other_field_stays_as_it_was(body: bytes) -> None:
    edited, before = json.loads(with_members(body, {"stream_options": MEMBER})), json.loads(body)
    found = b'"stream_options"' in body or "stream_options" not in before
    options, own = edited.pop("stream_options"), before.pop("stream_options", None)
    assert edited == before
    if not found:
        assert options == own  # its name is written with an escape: it comes later, and counts
    elif isinstance(own, dict):
        assert options == {"k": {"a": 1}, **own}
    else:
        assert options == ({"k": {"a": 1}} if own is None else own)

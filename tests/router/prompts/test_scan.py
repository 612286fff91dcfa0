from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.prompts.body import ALL_FIELDS, PLAIN_FIELDS, decoded
from router.prompts.scan import (
    LONGEST_PLAIN_BYTES,
    SLICE_BYTES,
    STEPS_IN_A_SLICE,
    STRING_STEP_BYTES,
    body_at,
    finished,
    left_out,
    spans_of,
)

ANY_KEY = frozenset({"prompt", "a", "b", 'quo"ted', "ü", "back\\slash", ""})
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


def found(body: bytes, wanted: frozenset[str] = ANY_KEY) -> dict[str, Any]:
    return {key: json.loads(body[start:end]) for key, (start, end) in finished(spans_of(body, wanted)).items()}


@given(
    st.dictionaries(st.sampled_from(sorted(ANY_KEY)) | st.text(max_size=3), VALUES, max_size=6),
    st.sampled_from([None, 1, 3]),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_every_wanted_value_is_found_where_python_finds_it(
    fields: dict[str, Any], indent: int | None, ascii_only: bool
) -> None:
    body = json.dumps(fields, indent=indent, ensure_ascii=ascii_only).encode()
    assert found(body) == {key: value for key, value in fields.items() if key in ANY_KEY}


@pytest.mark.parametrize("backslashes", [0, 1, 2, 3, 64 * 1024, 64 * 1024 + 1, 130_000])
def test_a_quote_ends_a_string_only_after_an_even_number_of_backslashes(backslashes: int) -> None:
    text = "\\" * backslashes
    body = json.dumps({"a": text, "prompt": [1]}).encode()
    assert found(body) == {"a": text, "prompt": [1]}
    escaped = b'{"a":"' + b"\\" * backslashes + b'\\"",' + b'"prompt":1}'
    if backslashes % 2 == 0:
        assert found(escaped) == {"a": "\\" * (backslashes // 2) + '"', "prompt": 1}


@pytest.mark.parametrize("shift", range(8))
def test_an_escape_at_the_edge_of_a_step_is_one_all_the_same(shift: int) -> None:
    for escape in (r"\"", r"\\", r"\u0022", r"\n", r"\\\""):
        text = "x" * (STRING_STEP_BYTES - shift) + escape + "y" * (STRING_STEP_BYTES - shift) + escape
        body = ('{"a":"' + text + '","prompt":[7]}').encode()
        assert found(body) == json.loads(body)


@pytest.mark.parametrize("end", ["", "\\", "x\\", '\\"', "x" * 70_000, "\\\\" * 40_000, "\\" * 40_001])
def test_a_string_that_does_not_end_is_refused(end: str) -> None:
    with pytest.raises(ValueError, match="inside a string"):
        finished(spans_of(b'{"prompt":"' + end.encode()))


def test_the_last_of_equal_keys_counts_and_inner_ones_do_not() -> None:
    assert found(b'{"a":1,"b":{"a":2},"a":3}', frozenset({"a"})) == {"a": 3}


def test_a_byte_order_mark_is_passed_over() -> None:
    assert found(b'\xef\xbb\xbf{"a":1}') == {"a": 1}


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"[1]", b'"text"', b'{"a"', b'{"a":', b'{"a":}', b'{"a":1', b'{"a":[1', b'{"a":"x', b'{"a":1}x'),
        *(b"{a:1}", b'{"a":1,}', b'{"a" 1}', b'{"a":1 "b":2}'),
        *(b"{" + b" " * 100_000 + b"}", b'{"a":' + b"1" * 100_000 + b"}"),
    ],
)
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        finished(spans_of(body))


@pytest.mark.parametrize(
    "value",
    [
        *(list(range(200_000)), "x" * 2_000_000, 'say "hi" \\ ' * 100_000, '"' * 500_000, ["y" * 9000] * 200),
        *([[["a"] * 20] * 50] * 100, {"k": [{}] * 100_000}),
    ],
    ids=["ids", "text", "escapes", "quotes", "texts", "nested", "objects"],
)
def test_no_slice_is_long(value: Any) -> None:
    """Between two pauses lie at most one slice of bytes and the step that reached beyond it, or a thousand steps."""
    body = json.dumps({"model": "m", "prompt": value, "stream": True}).encode()
    pauses = 0
    scan = spans_of(body)
    try:
        while True:
            next(scan)
            pauses += 1
    except StopIteration as done:
        spans = done.value
    assert set(spans) == {"model", "prompt", "stream"}
    assert pauses >= len(body) // (SLICE_BYTES + STRING_STEP_BYTES) - 1
    marks = sum(body.count(mark) for mark in (b"[", b"{"))
    assert pauses >= marks // STEPS_IN_A_SLICE


def test_an_object_of_many_small_fields_is_paused_too() -> None:
    body = b"{" + b",".join(b'"k":1' for _ in range(20_000)) + b"}"
    assert sum(1 for _ in spans_of(body)) >= 20_000 // STEPS_IN_A_SLICE


def test_the_fields_are_those_of_the_decoder() -> None:
    body = json.dumps(
        {
            "model": "m",
            "prompt": [1, 2, 3],
            "messages": [{"role": "user", "content": "x"}],
            "stream": True,
            "max_tokens": 7,
            "session_id": "s",
            "odd": {"prompt": 5},
        }
    ).encode()
    scanned, known = body_at(body, finished(spans_of(body))), decoded(body)
    for key in ALL_FIELDS:
        assert getattr(scanned, key) == getattr(known, key) or bytes(getattr(scanned, key)) == bytes(
            getattr(known, key)
        )


def test_a_plain_field_that_is_no_json_is_refused_by_name() -> None:
    body = b'{"model":nonsense}'
    spans = finished(spans_of(body))
    with pytest.raises(ValueError, match="`model`"):
        body_at(body, spans)


def test_a_very_long_key_is_passed_over() -> None:
    assert found(b'{"' + b"k" * 100_000 + b'":1,"a":2}') == {"a": 2}


@pytest.mark.parametrize("key", sorted(PLAIN_FIELDS))
@pytest.mark.parametrize("value", [b'"%s"', b"[%s]", b'{"a":"%s"}'], ids=["text", "list", "object"])
def test_a_field_too_long_to_be_decoded_at_once_is_left_out_and_named(key: str, value: bytes) -> None:
    def body(size: int) -> bytes:
        fill = b"1" if value == b"[%s]" else b"x"
        inside = (b"1," * (size // 2) + b"1") if fill == b"1" else fill * size
        return b'{"%s":%s,"prompt":"hi"}' % (key.encode(), value % inside)

    usual, odd = body(LONGEST_PLAIN_BYTES // 2), body(LONGEST_PLAIN_BYTES)
    assert left_out(finished(spans_of(usual))) == set()
    assert getattr(body_at(usual, finished(spans_of(usual))), key) == json.loads(usual)[key]
    assert left_out(finished(spans_of(odd))) == {key}
    read = body_at(odd, finished(spans_of(odd)))
    assert (getattr(read, key), bytes(read.prompt)) == (None, b'"hi"')

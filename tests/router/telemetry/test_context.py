from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.telemetry.context import parent_of, traceparent

TRACE, SPAN = b"0af7651916cd43dd8448eb211c80319c", b"b7ad6b7169203331"


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())
def test_what_is_written_is_read(trace_id: int, span_id: int, sampled: bool) -> None:
    assert parent_of(traceparent(trace_id, span_id, sampled=sampled)) == (trace_id, span_id, sampled)


@pytest.mark.parametrize(
    "field",
    [
        None,
        b"",
        b"00-" + TRACE + b"-" + SPAN,
        b"00-" + TRACE.upper() + b"-" + SPAN + b"-01",
        b"00-" + b"0" * 32 + b"-" + SPAN + b"-01",
        b"00-" + TRACE + b"-" + b"0" * 16 + b"-01",
        b"ff-" + TRACE + b"-" + SPAN + b"-01",
        b"00-" + TRACE + b"-" + SPAN + b"-01-more",
        b"00-" + TRACE + b"-" + SPAN + b"-01\r\nx: y",
        b"0-" * 40,
    ],
)
def test_what_is_no_context_is_none(field: bytes | None) -> None:
    assert parent_of(field) is None


def test_a_later_version_may_say_more() -> None:
    later = parent_of(b"01-" + TRACE + b"-" + SPAN + b"-03-more")
    assert later is not None
    assert later.sampled


@given(st.binary(max_size=80))
def test_rubbish_does_not_raise(field: bytes) -> None:
    parent_of(field)

"""W3C trace context: whose trace a request is part of, as its head says it.

Valid     version 00, and later ones as far as they begin like it; anything else is taken for no context at all
Source    W3C Trace Context, Recommendation 2021, section 3.2
"""

from __future__ import annotations

import re
from typing import NamedTuple

TRACEPARENT = b"traceparent"

_FORM = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class Parent(NamedTuple):
    """trace_id, span_id : > 0; sampled : whether who sent it records its part"""

    trace_id: int
    span_id: int
    sampled: bool


def parent_of(field: bytes | None) -> Parent | None:
    """The context in a `traceparent` field; None without a valid one.

    >>> parent_of(b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01").sampled
    True
    """
    found = None if field is None else _FORM.fullmatch(field.strip())
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    trace_id, span_id = int(trace, 16), int(span, 16)
    if version == b"ff" or (version == b"00" and more is not None) or not trace_id or not span_id:
        return None
    return Parent(trace_id, span_id, bool(int(flags, 16) & 1))


def traceparent(trace_id: int, span_id: int, *, sampled: bool) -> bytes:
    """The field that names that span as the parent of what follows."""
    return b"00-%032x-%016x-%02x" % (trace_id, span_id, sampled)

from __future__ import annotations

import pytest

from router.http.head import ResponseHead
from router.http.retry_after import LONGEST_S, retry_after_s

DATE = b"Mon, 30 Nov 2026 08:00:00 GMT"


def a_head(**fields: bytes) -> ResponseHead:
    named = [(name.replace("_", "-").encode(), name.encode(), value) for name, value in fields.items()]
    return ResponseHead(503, b"", named)


@pytest.mark.parametrize(
    ("said", "wait_s"),
    [
        (b"7", 7.0),
        (b" 0 ", 0.0),
        (b"99999999999999999999", LONGEST_S),
        (b"Mon, 30 Nov 2026 08:00:30 GMT", 30.0),
        (b"Mon, 30 Nov 2026 07:00:00 GMT", 0.0),
        (b"Tue, 30 Nov 2027 08:00:00 GMT", LONGEST_S),
        (b"1.5", None),
        (b"-3", None),
        (b"soon", None),
        (b"", None),
        (b"\xb2", None),
        (b"\xff\xfe", None),
        (b"Mon, 30 Nov 2026 08:00:30", None),
    ],
)
def test_seconds_or_a_date_counted_from_the_answers_own(said: bytes, wait_s: float | None) -> None:
    assert retry_after_s(a_head(retry_after=said, date=DATE)) == wait_s


def test_without_the_field_or_a_date_to_count_from_nothing_is_said() -> None:
    assert retry_after_s(a_head(date=DATE)) is None
    assert retry_after_s(a_head(retry_after=b"Mon, 30 Nov 2026 08:00:30 GMT")) is None
    assert retry_after_s(a_head(retry_after=b"Mon, 30 Nov 2026 08:00:30 GMT", date=b"today")) is None

"""For how long a replica that has too much to do asks to be left alone.

Source    RFC 9110, section 10.2.3
"""

from __future__ import annotations

from email.utils import parsedate_to_datetime

from router.http.head import ResponseHead

LONGEST_S = 600.0  # a replica that asks for more is asked again before


def retry_after_s(response: ResponseHead) -> float | None:
    """Seconds from now, 0 to LONGEST_S; None when it does not say, or not readably.

    A date counts from the answer's own Date, so that clocks need not agree; without one it says nothing.
    """
    said = response.get(b"retry-after")
    if said is None:
        return None
    text = said.strip().decode("latin-1")
    if text.isascii() and text.isdigit():
        return min(float(text), LONGEST_S)
    date = response.get(b"date")
    if date is None:
        return None
    try:
        waits = parsedate_to_datetime(text) - parsedate_to_datetime(date.strip().decode("latin-1"))
    except (ValueError, TypeError):  # no date, or one with a time zone and one without
        return None
    return min(max(waits.total_seconds(), 0.0), LONGEST_S)

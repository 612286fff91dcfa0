"""The id a request goes by in receipts, log lines, spans, on the page and in its replica: its client's, or a made one.

Model     a client's own is kept if it is short and plain, so that a line of a log stays a line and nobody can have the
          router keep and show what he likes; any other is as good as none
Valid     one of up to 128 characters of printable ASCII, without the blanks around it
Blind to  whether two requests have the same
"""

from __future__ import annotations

import os
import re

LONGEST = 128  # several times a UUID, and any trace or order number

_PLAIN = re.compile(rb"[ -~]{1,%d}" % LONGEST)


def clients_own(field: bytes | None) -> str:
    """What a client's `x-request-id` names its request; "" where it names none that is kept.

    >>> clients_own(b" order-7 "), clients_own(b"x" * 129), clients_own(None)
    ('order-7', '', '')
    """
    said = b"" if field is None else field.strip()
    return said.decode("ascii") if _PLAIN.fullmatch(said) else ""


def kept_or_made(field: bytes | None) -> str:
    """The same, and a new one, 32 hexadecimal digits, where there is none."""
    return clients_own(field) or os.urandom(16).hex()

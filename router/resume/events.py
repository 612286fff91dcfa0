"""Whole server-sent events out of a body in arbitrary pieces, and what one says.

Model     an event ends with a blank line; bytes of an unfinished one are held until it is whole
Valid     LF or CRLF line ends, which is what engines send. Bare CR never ends an event here: such a stream fills the
          limit and is then passed as it comes
Source    WHATWG HTML, server-sent events
"""

from __future__ import annotations

import re

_BLANK_LINE = re.compile(rb"\r?\n\r?\n")
_LINE_END = re.compile(rb"\r?\n")
_LONGEST_BLANK_LINE = 4
DONE = b"[DONE]"
DONE_EVENT = b"data: [DONE]\n\n"


class EventSplitter:
    """Cuts a body into whole events, their blank lines included. Concatenated with `held` they are the body."""

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held = b""  # of the unfinished event

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that this piece completes."""
        data = self.held + piece if self.held else piece
        events: list[bytes] = []
        at = 0
        for blank in _BLANK_LINE.finditer(data, max(0, len(self.held) - _LONGEST_BLANK_LINE)):
            events.append(data[at : blank.end()])
            at = blank.end()
        self.held = data[at:]
        return events


def data_of(event: bytes) -> bytes:
    """Its data lines joined, b"" for a comment.

    >>> data_of(b"data: {}\\n\\n")
    b'{}'
    """
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2:
        return event[6:-2]
    return b"\n".join(line[5:].strip() for line in _LINE_END.split(event) if line.startswith(b"data:"))

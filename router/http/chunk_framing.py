"""Where a chunked request body ends, read more strictly than the parser reads it.

Model     size lines of hexadecimal digits alone, data, and trailers up to an empty line. What stands in a size line
          beside the size is where two readers can disagree about the end of a body, so it is refused; no client of
          the routes served here writes any
Blind to  the line end behind the data of a chunk and the fields of the trailers: the parser reads the same bytes
          and checks them
Source    RFC 9112 section 7.1
"""

from __future__ import annotations

import re

from router.errors import RequestUnacceptable

_SIZE_LINE = re.compile(rb"[0-9A-Fa-f]{1,16}\r\n")
_LONGEST_SIZE_LINE = 18


class ChunkFraming:
    """Follows one body. ended : its last byte was seen.

    max_body_bytes : of its content
    spare_bytes : how much longer than its content a body may be, and how long its trailers
    """

    def __init__(self, *, max_body_bytes: int, spare_bytes: int) -> None:
        self.ended = False
        self._max_body_bytes = max_body_bytes
        self._spare_bytes = spare_bytes
        self._left_bytes = 0  # of the chunk being read, the line end behind it included
        self._in_trailers = False
        self._line = b""  # the part of a line that has come
        self._framing_bytes = 0
        self._body_bytes = 0

    def follow(self, data: bytes) -> int:
        """How many bytes at the start of `data` belong to this body.

        Raises
        ------
        RequestUnacceptable : a size line holds more than a size, there is more framing than content, or too much
            of that
        """
        at = 0
        while at < len(data) and not self.ended:
            if self._left_bytes:
                step = min(self._left_bytes, len(data) - at)
                self._left_bytes -= step
                at += step
            else:
                at = self._follow_line(data, at)
        return at

    def _follow_line(self, data: bytes, at: int) -> int:
        """Read the line that starts, or goes on, at that place; returns where the next one starts."""
        end = data.find(b"\n", at) + 1 or len(data)
        self._line += data[at:end]
        self._framing_bytes += end - at
        if self._framing_bytes > self._spare_bytes + self._body_bytes:
            raise _bad_request("The body has more framing than content.")
        if not self._in_trailers and len(self._line) > _LONGEST_SIZE_LINE:
            raise _bad_size()
        if data[end - 1 : end] == b"\n":
            line, self._line = self._line, b""
            self._take_line(line)
        return end

    def _take_line(self, line: bytes) -> None:
        if self._in_trailers:
            self.ended = line == b"\r\n"
            return
        if _SIZE_LINE.fullmatch(line) is None:
            raise _bad_size()
        size = int(line, 16)
        self._in_trailers = size == 0
        self._body_bytes += size
        if self._body_bytes > self._max_body_bytes:
            raise body_too_large(self._max_body_bytes)
        self._left_bytes = size + 2 if size else 0


def body_too_large(limit_bytes: int) -> RequestUnacceptable:
    return RequestUnacceptable(413, "RequestTooLargeError", f"The body is larger than {limit_bytes} bytes.")


def _bad_size() -> RequestUnacceptable:
    return _bad_request("A chunk starts with its size, in at most 16 hexadecimal digits and nothing else.")


def _bad_request(message: str) -> RequestUnacceptable:
    return RequestUnacceptable(400, "BadRequestError", message)

"""Frames the body of an answer anew, where it cannot pass as it came.

Model     chunks off for a client of HTTP/1.0, who does not know them; an event cut out of a stream for a client that
          did not ask for it, events of a stream that goes on from several replicas; then new chunks around what passes
Valid     bodies that came in chunks or end with their connection. Trailers of such an answer are lost
Blind to  whatever the body says
"""

from __future__ import annotations

from typing import Protocol

_LAST_CHUNK = b"0\r\n\r\n"


class Filter(Protocol):
    """What a body passes on its way, in its pieces."""

    def feed(self, piece: bytes) -> bytes:
        """The next bytes; returns what passes on now."""
        ...

    def end(self) -> bytes:
        """What was still held, or is said last."""
        ...


class Reframer:
    """Feed it a body without its framing; what it returns goes to the client.

    chunked : whether the client gets chunks, or plain bytes and the end of the connection
    filter_ : what its content passes on the way
    """

    __slots__ = ("_chunked", "_filter")

    def __init__(self, *, chunked: bool, filter_: Filter | None = None) -> None:
        self._chunked = chunked
        self._filter = filter_

    def feed(self, piece: bytes) -> bytes:
        """The next bytes of the body."""
        return self._framed(piece if self._filter is None else self._filter.feed(piece))

    def rest(self) -> bytes:
        """What was still held of a body that broke, so that the client gets all that came."""
        return b"" if self._filter is None else self._framed(self._filter.end())

    def end(self) -> bytes:
        """What was still held of a complete body, and its end."""
        return self.rest() + _LAST_CHUNK if self._chunked else self.rest()

    def _framed(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked and data else data

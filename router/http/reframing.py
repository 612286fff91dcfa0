"""Frames the body of an answer anew, where it cannot pass as it came.

Model     chunks off for a client of HTTP/1.0, who does not know them; an event cut out of a stream for a client that
          did not ask for it, and then new chunks around what is left
Valid     bodies that came in chunks or end with their connection. Trailers of such an answer are lost
Blind to  whatever the body says
"""

from __future__ import annotations

from router.http.splice import UsageSwallower

_LAST_CHUNK = b"0\r\n\r\n"


class Reframer:
    """Feed it a body without its framing; what it returns goes to the client.

    chunked : whether the client gets chunks, or plain bytes and the end of the connection
    swallower : cuts something out on the way
    """

    __slots__ = ("_chunked", "_swallower")

    def __init__(self, *, chunked: bool, swallower: UsageSwallower | None = None) -> None:
        self._chunked = chunked
        self._swallower = swallower

    def feed(self, piece: bytes) -> bytes:
        """The next bytes of the body."""
        return self._framed(piece if self._swallower is None else self._swallower.feed(piece))

    def rest(self) -> bytes:
        """What was still held of a body that broke, so that the client gets all that came."""
        return b"" if self._swallower is None else self._framed(self._swallower.end())

    def end(self) -> bytes:
        """What was still held of a complete body, and its end."""
        return self.rest() + _LAST_CHUNK if self._chunked else self.rest()

    def _framed(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked and data else data

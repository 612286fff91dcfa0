"""What one client gets of an answer: the head, held until there is something behind it, then the body.

Model     bytes pass as they came, or through a `Reframer`. The head of an answer that `waits` is held until a byte of
          its body is here, framing without a body too, so that what the client has not seen can still be replaced
Valid     `open` for each answer that is to be relayed, then its bytes in order; once `relayed` no other head follows
Blind to  where the bytes come from
"""

from __future__ import annotations

from collections.abc import Callable

from router.http.reframing import Reframer

_MOST_HELD_BYTES = 128 * 1024  # of a head and framing without a body; more goes on


class Outlet:
    """The way out to one client. write : takes bytes for it; relayed : it has seen some"""

    __slots__ = ("_held", "_reframer", "_waits", "relayed", "write")

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self.write = write
        self.relayed = False
        self._held = b""  # what the client gets first
        self._waits = False
        self._reframer: Reframer | None = None

    def open(self, head: bytes, *, waits: bool, reframer: Reframer | None) -> None:
        """An answer begins. reframer : where its body cannot pass as it came"""
        self._held, self._waits, self._reframer = head, waits, reframer

    def body(self, piece: bytes) -> None:
        """The next bytes of the body without their framing."""
        self._waits = False
        if self._reframer is not None:
            self._pass(self._reframer.feed(piece))

    def relay(self, data: bytes) -> None:
        """The next bytes as they came, behind those of `body`; b"" when a head came alone."""
        if self._reframer is None:
            if self.relayed:
                self.write(data)
            else:
                self._pass(data)
        elif not self.relayed:
            self._pass(b"")

    def end(self) -> None:
        """The answer is complete."""
        self._waits = False
        if self._reframer is not None:
            self._pass(self._reframer.end())
        elif not self.relayed:  # a head alone, or framing around nothing
            self._pass(b"")

    def rest(self) -> None:
        """The answer broke: what was still held of its body."""
        if self._reframer is not None:
            self._pass(self._reframer.rest())

    def _pass(self, data: bytes) -> None:
        """Bytes as the client gets them, behind the head."""
        if self.relayed:
            if data:
                self.write(data)
            return
        self._held += data
        if not self._waits or len(self._held) > _MOST_HELD_BYTES:
            self.relayed = True
            self.write(self._held)
            self._held = b""

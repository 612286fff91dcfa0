"""Recognises a request head that differs from an accepted one in the digits of its length alone.

Model     clients that keep a connection send the same bytes again and again, but for the value of Content-Length. What
          comes before and after those digits is compared with a head that was read and found to be fine; such a head
          means the same, with another length
Valid     heads with one Content-Length and no other framing, that arrived whole; a client that changes its head with
          every request is compared with a few of its heads, and then no more
Blind to  the body
"""

from __future__ import annotations

from dataclasses import replace

from router.http.head import RequestHead

_MOST_DIGITS = 15  # more is refused by its size anyway, or has zeros before
_TRIES = 8  # heads in a row that were not met again, after which this client is taken to change them all


class KnownHead:
    """One head of a connection."""

    __slots__ = ("_after", "_before", "_field", "_head", "_tries")

    def __init__(self) -> None:
        self._head: RequestHead | None = None
        self._before = b""  # up to the digits
        self._after = b""  # from them to the end
        self._field = 0  # which of its fields has them
        self._tries = _TRIES

    def learn(self, raw: bytes, head: RequestHead) -> None:
        """`raw` was read as `head`: it has one Content-Length, is not chunked, and keeps its connection."""
        if not self._tries:
            return
        self._tries -= 1
        place = next(at for at, field in enumerate(head.headers) if field[0] == b"content-length")
        _, name, digits = head.headers[place]
        before, named, after = raw.partition(b"\r\n" + name + b": ")
        end = len(digits)
        if named and name not in after and after[:end] == digits and after[end : end + 1] == b"\r":
            self._head, self._field = replace(head, headers=head.headers.copy()), place
            self._before, self._after = before + named, after[end:]

    def match(self, data: bytes, most: int) -> tuple[RequestHead, int, int] | None:
        """The head at the start of `data`, the length it gives and its own size; None when it is another one.

        most : length up to which it may be known
        """
        known = self._head
        if known is None or not data.startswith(self._before):
            return None
        start = len(self._before)
        end = data.find(b"\r", start, start + _MOST_DIGITS + 1)
        digits = data[start:end] if end > start else b""
        if not digits.isdigit() or not data.startswith(self._after, end):
            return None
        length = int(digits)
        if length > most:
            return None
        self._tries = _TRIES
        lower, name, _ = known.headers[self._field]
        headers = known.headers.copy()
        headers[self._field] = lower, name, digits
        head = RequestHead(known.method, known.target, known.path, headers, known.route, known.named)
        return head, length, end + len(self._after)

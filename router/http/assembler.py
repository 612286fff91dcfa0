"""Makes whole requests of a client's bytes, and refuses what two readers could take for different requests.

Model     llhttp reads the bytes; what it lets pass and HTTP forbids, or what is too large, is refused here. The body
          is held whole, once, because where a request goes depends on it
Valid     strict HTTP/1.1 and 1.0. After a refusal nothing that follows can be trusted: feed no more
Blind to  trailers and chunk extensions, which no route uses
Source    RFC 9112 sections 3, 6, 7 and 11.2
"""

from __future__ import annotations

from collections import deque

import httptools

from router.errors import RequestUnacceptable
from router.http.contract import Limits
from router.http.head import Field, RequestHead, named_by_connection, origin_form, plain_request
from router.routes import classify

_WATCHED = frozenset({b"host", b"content-length", b"transfer-encoding", b"connection", b"expect"})


class RequestAssembler:
    """Feed it bytes and take requests out of `complete`.

    complete : (head, body) of requests in the order of their arrival; the owner empties it
    begun : requests whose first byte has arrived
    unfinished : the last of them is not complete
    head_done : its head is
    asks_to_continue : it waits for a word before it sends its body; the owner gives it and clears this
    """

    def __init__(self, limits: Limits) -> None:
        self.complete: deque[tuple[RequestHead, bytes]] = deque()
        self.begun = 0
        self.unfinished = False
        self.head_done = False
        self.asks_to_continue = False
        self._limits = limits
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._received_bytes = 0  # in the piece being read
        self._begin()

    def _begin(self) -> None:
        self._target = b""
        self._headers: list[Field] = []
        self._fields = 0
        self._named: frozenset[bytes] = frozenset()
        self._method = b""
        self._http10 = False
        self._hosts = 0
        self._length: int | None = None
        self._chunked = False
        self._expects = False
        self._pieces: list[bytes] = []
        self._body_bytes = 0
        self._open_bytes = 0  # in pieces that hold nothing else, framing included
        self.head_done = False
        self.asks_to_continue = False

    # -- used by the owner

    def feed(self, data: bytes) -> None:
        """Take the next bytes.

        Raises
        ------
        RequestUnacceptable : they cannot become a request; requests before them are in `complete`
        """
        self._received_bytes = len(data)
        last = self.begun
        while data:
            try:
                self._reader().feed_data(data)
                break
            except httptools.HttpParserUpgrade as upgrade:
                plain = plain_request(self._method, self._target, self._headers, http10=self._http10)
                data = plain + data[upgrade.args[0] :]
            except httptools.HttpParserError as exc:
                if isinstance(exc.__context__, RequestUnacceptable):
                    raise exc.__context__ from None
                raise _bad_request(f"Malformed HTTP: {exc}.") from exc
        if self.unfinished and self.begun == last:  # its first piece may hold other requests too
            self._check_size()

    def seen_of_last(self) -> RequestHead:
        """What is known of the request that was begun last, for the answer to one that failed."""
        path = self._target.partition(b"?")[0].decode("latin-1")
        return RequestHead(self._method, self._target, path, self._headers, classify(self._method, path))

    def close(self) -> None:
        """Let go of what was held; parser and assembler refer to each other."""
        self._parser = None
        self._pieces = []
        self.complete.clear()
        self.unfinished = False

    # -- httptools

    def on_message_begin(self) -> None:
        self._begin()
        self.begun += 1
        self.unfinished = True

    def on_url(self, piece: bytes) -> None:
        self._target += piece

    def on_header(self, name: bytes, value: bytes) -> None:
        lower = name.lower()
        self._headers.append((lower, name, value))
        if lower in _WATCHED and not self.head_done:
            self._watch(lower, value)

    def on_headers_complete(self) -> None:
        self.head_done = True
        self._fields = len(self._headers)
        parser = self._reader()
        self._method = parser.get_method()
        self._check_head(parser.get_http_version())

    def on_body(self, piece: bytes) -> None:
        self._body_bytes += len(piece)
        if self._body_bytes > self._limits.max_body_bytes:
            raise self._body_too_large()
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        parser = self._reader()
        if parser.should_upgrade():
            return  # read once more as a plain request, see `feed`
        self.unfinished = False
        self.asks_to_continue = False
        target = origin_form(self._target)
        path = target.partition(b"?")[0].decode("latin-1")
        head = RequestHead(
            self._method,
            target,
            path,
            self._headers,
            classify(self._method, path),
            self._named,
            http10=self._http10,
            keep_alive=not self._http10 and parser.should_keep_alive(),
        )
        if len(self._headers) > self._fields:
            del self._headers[self._fields :]  # trailers
        pieces, self._pieces = self._pieces, []
        self.complete.append((head, pieces[0] if len(pieces) == 1 else b"".join(pieces)))

    # -- what is refused

    def _watch(self, lower: bytes, value: bytes) -> None:
        if lower == b"host":
            self._hosts += 1
        elif lower == b"content-length":
            self._length = int(value)  # digits alone: anything else has failed in the parser
        elif lower == b"transfer-encoding":
            self._chunked = True
            if value.strip().lower() != b"chunked":
                raise _bad_request("The only transfer encoding accepted is chunked.")
        elif lower == b"connection":
            self._named |= named_by_connection(value)
        else:
            self._expects = value.lower() == b"100-continue"

    def _check_head(self, version: str) -> None:
        if version not in ("1.1", "1.0"):
            raise RequestUnacceptable(505, "BadRequestError", "The router speaks HTTP/1.1 and HTTP/1.0.")
        self._http10 = version == "1.0"
        self._check_head_size()
        if self._method == b"CONNECT":
            raise RequestUnacceptable(405, "BadRequestError", "CONNECT is not served here.")
        if self._hosts > 1 or (self._hosts == 0 and not self._http10):
            raise _bad_request("A request names exactly one host.")
        if self._chunked and (self._length is not None or self._http10):
            raise _bad_request("Transfer-Encoding contradicts the rest of the head.")
        if self._length is not None and self._length > self._limits.max_body_bytes:
            raise self._body_too_large()
        self.asks_to_continue = self._expects and not self._http10 and bool(self._length or self._chunked)

    def _check_head_size(self) -> None:
        limits = self._limits
        if self._fields > limits.max_head_fields:
            raise _head_too_large(f"more than {limits.max_head_fields} fields")
        if (
            self._open_bytes + self._received_bytes > limits.max_head_bytes
        ):  # else the head, a part of that, is not too large
            size = sum(len(name) + len(value) + 4 for _, name, value in self._headers)
            if size + len(self._target) > limits.max_head_bytes:
                raise _head_too_large(f"more than {limits.max_head_bytes} bytes")

    def _check_size(self) -> None:
        """Bound what an unfinished request costs, its framing included."""
        limits = self._limits
        self._open_bytes += self._received_bytes
        if not self.head_done:
            if self._open_bytes > limits.max_head_bytes:
                raise _head_too_large(f"more than {limits.max_head_bytes} bytes")
        elif self._open_bytes - self._body_bytes > limits.max_body_bytes + limits.max_head_bytes:
            raise self._body_too_large()

    def _body_too_large(self) -> RequestUnacceptable:
        limit = self._limits.max_body_bytes
        return RequestUnacceptable(413, "RequestTooLargeError", f"The body is larger than {limit} bytes.")

    def _reader(self) -> httptools.HttpRequestParser:
        assert self._parser is not None, "a closed assembler is not fed"
        return self._parser


def _bad_request(message: str) -> RequestUnacceptable:
    return RequestUnacceptable(400, "BadRequestError", message)


def _head_too_large(what: str) -> RequestUnacceptable:
    return RequestUnacceptable(431, "RequestHeaderFieldsTooLargeError", f"The request's head has {what}.")

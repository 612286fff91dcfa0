"""Makes whole requests of a client's bytes, and refuses what two readers could take for different requests.

Model     heads are cut out at their empty line and bodies at their length, so that each part is known by its bytes;
          llhttp reads them all, and what it lets pass although HTTP forbids it, or what is too large, is refused
          here. The body is held whole, once, because where a request goes depends on it. A head that differs from an
          earlier one of its connection in the digits of its length alone, as most do, is that one (`same_head.py`)
Valid     strict HTTP/1.1 and 1.0. After a refusal nothing that follows can be trusted: feed no more
Blind to  trailers, which no route uses: they are read and dropped
Source    RFC 9112 sections 3, 6, 7 and 11.2
"""

from __future__ import annotations

import re
from collections import deque

import httptools

from router.errors import RequestUnacceptable
from router.http.chunk_framing import ChunkFraming, body_too_large
from router.http.contract import Limits
from router.http.head import Field, RequestHead, named_by_connection, names_same_host, origin_form, plain_request
from router.http.same_head import KnownHead
from router.routes import classify

_WATCHED = frozenset({b"host", b"content-length", b"transfer-encoding", b"connection", b"expect", b"upgrade"})
_HOST = re.compile(rb"(?:[A-Za-z0-9._~%-]+|\[[0-9A-Za-z:.%]+\])(?::[0-9]*)?")


class RequestAssembler:
    """Feed it bytes and take requests out of `complete`.

    complete : (head, body) of requests in the order of their arrival; the owner empties it
    begun : requests whose first byte has arrived
    unfinished : the last of them is not complete
    head_done : its head is
    asks_to_continue : it waits for a word before it sends its body; the owner gives it and clears this
    held : bytes behind a request to switch protocols, which is the last one in `complete`: what they mean depends on
           its answer. None when nothing is held
    """

    def __init__(self, limits: Limits) -> None:
        self.complete: deque[tuple[RequestHead, bytes]] = deque()
        self.begun = 0
        self.unfinished = False
        self.head_done = False
        self.asks_to_continue = False
        self.held: bytes | None = None
        self._limits = limits
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._raw = b""  # the head being read, as it came
        self._whole = b""  # the last one that was read
        self._known_host = b""  # the last one that was found to be fine
        self._gathered = bytearray()  # a chunked body: its pieces may be tiny
        self._known = KnownHead()
        self._same: RequestHead | None = None  # head of the request whose body is being taken without the parser
        self._begin()

    def _begin(self) -> None:
        self._target = b""
        self._headers: list[Field] = []
        self._fields = 0
        self._named: frozenset[bytes] = frozenset()
        self._method = b""
        self._http10 = False
        self._hosts = 0
        self._host = b""
        self._length: int | None = None
        self._chunked = False
        self._expects = False
        self._upgrade = b""
        self._left_bytes = 0  # of a body of declared length
        self._chunks: ChunkFraming | None = None
        self._pieces: list[bytes] = []
        self._body_bytes = 0
        self.head_done = False
        self.asks_to_continue = False

    # -- used by the owner

    @property
    def pending_bytes(self) -> int:
        """Body held of the request that is not complete."""
        return self._body_bytes if self.unfinished else 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes.

        Raises
        ------
        RequestUnacceptable : they cannot become a request; requests before them are in `complete`
        """
        while data:
            if self._left_bytes:
                size = min(self._left_bytes, len(data))
                self._left_bytes -= size
            elif self.held is not None:
                self.held += data
                return
            elif not self.unfinished and not self._raw and (size := self._same_head(data)):
                data = data[size:]
                continue
            else:
                size = self._head_part(data) if self._chunks is None else self._chunks.follow(data)
            if size == len(data):
                self._read(data)
                return
            self._read(data[:size])
            data = data[size:]

    def decline(self) -> None:
        """The request to switch got an ordinary answer: what is held are the requests after it."""
        held, self.held = self.held, None
        self.feed(held or b"")

    def seen_of_last(self) -> RequestHead:
        """What is known of the request that was begun last, for the answer to one that failed."""
        if self._raw:  # the parser has not read it, or not to its end
            words = self._raw.partition(b"\r\n")[0].split(b" ")
            self._method, self._target = words[0], b"".join(words[1:2])
        path = self._target.partition(b"?")[0].decode("latin-1")
        return RequestHead(self._method, self._target, path, self._headers, classify(self._method, path))

    def close(self) -> None:
        """Let go of what was held; parser and assembler refer to each other."""
        self._parser = None
        self._pieces = []
        self._gathered = bytearray()
        self._raw = self._whole = b""
        self._same = None
        self.held = None
        self.complete.clear()
        self.unfinished = False

    # -- parts of messages

    def _head_part(self, data: bytes) -> int:
        """How many bytes at the start of `data` belong to the head that is being read, or begins here."""
        known = len(self._raw)
        raw = self._raw + data if known else data
        end = raw.find(b"\r\n\r\n", known - 3 if known > 3 else 0)
        if end >= 0:
            raw = raw[: end + 4]
        if len(raw) > self._limits.max_head_bytes:
            self._raw, self._headers = raw, []
            raise _head_too_large(f"more than {self._limits.max_head_bytes} bytes")
        self._raw = raw
        return len(raw) - known

    def _read(self, part: bytes) -> None:
        """Let the parser read a part; a wish to upgrade that is not to be tunnelled becomes a plain request."""
        if self._same is not None:
            self.on_body(part)
            if not self._left_bytes:
                self._complete_same(self._same)
            return
        try:
            self._reader().feed_data(part)
        except httptools.HttpParserUpgrade:
            if self._switches():
                self._complete(upgrade=self._upgrade)
                self.held = b""
            else:
                self._raw = plain_request(self._method, self._target, self._headers, http10=self._http10)
                self._read(self._raw)
        except httptools.HttpParserError as exc:
            if isinstance(exc.__context__, RequestUnacceptable):
                raise exc.__context__ from None
            raise _bad_request(f"Malformed HTTP: {exc}.") from exc
        if self._chunks is not None and self._chunks.ended:
            raise _bad_request("The body does not end where its chunks do.")

    def _switches(self) -> bool:
        body = self._chunked or self._length
        return self._upgrade == b"websocket" and self._method == b"GET" and not body and not self._http10

    # -- a head like an earlier one

    def _same_head(self, data: bytes) -> int:
        """How many bytes at the start of `data` are such a head, which is then read; 0: it is another, or not whole."""
        found = self._known.match(data, self._limits.max_body_bytes)
        if found is None:
            return 0
        head, length, size = found
        self.on_message_begin()
        self.head_done = True
        self._method, self._target, self._headers, self._length = head.method, head.target, head.headers, length
        self._left_bytes = length
        if length:
            self._same = head
        else:
            self._complete_same(head)
        return size

    def _complete_same(self, head: RequestHead) -> None:
        self._same = None
        self.unfinished = False
        self.complete.append((head, self._take_body()))

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
        self._whole, self._raw = self._raw, b""
        if self._chunked:
            self._gathered = bytearray()
            self._chunks = ChunkFraming(
                max_body_bytes=self._limits.max_body_bytes, spare_bytes=self._limits.max_head_bytes
            )
        else:
            self._left_bytes = self._length or 0

    def on_body(self, piece: bytes) -> None:
        self._body_bytes += len(piece)
        if self._chunked:
            self._gathered += piece
        else:
            self._pieces.append(piece)

    def on_message_complete(self) -> None:
        if not self._reader().should_upgrade():  # else see `_read`
            self._complete(upgrade=b"")

    def _complete(self, *, upgrade: bytes) -> None:
        self.unfinished = False
        self.asks_to_continue = False
        self._chunks = None
        path = self._target.partition(b"?")[0].decode("latin-1")
        head = RequestHead(
            self._method,
            self._target,
            path,
            self._headers,
            classify(self._method, path),
            self._named,
            http10=self._http10,
            keep_alive=not self._http10 and self._reader().should_keep_alive(),
            upgrade=upgrade,
        )
        if len(self._headers) > self._fields:
            del self._headers[self._fields :]  # trailers
        if self._length is not None and head.keep_alive and not (self._expects or upgrade or self._chunked):
            self._known.learn(self._whole, head)
        self.complete.append((head, self._take_body()))

    def _take_body(self) -> bytes:
        if self._chunked:
            gathered, self._gathered = self._gathered, bytearray()
            return bytes(gathered)
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)  # the piece itself when there is one

    # -- what is refused

    def _watch(self, lower: bytes, value: bytes) -> None:
        if lower == b"host":
            self._hosts += 1
            self._host = value.rstrip(b" \t")
        elif lower == b"content-length":
            self._length = int(value)  # digits alone: anything else has failed in the parser
        elif lower == b"transfer-encoding":
            self._chunked = True
            if value.strip(b" \t").lower() != b"chunked":
                raise _bad_request("The only transfer encoding accepted is chunked.")
        elif lower == b"connection":
            self._named |= named_by_connection(value)
        elif lower == b"upgrade":
            self._upgrade = value.strip(b" \t").lower()
        else:
            self._expects = value.lower() == b"100-continue"

    def _check_head(self, version: str) -> None:
        if version not in ("1.1", "1.0"):
            raise RequestUnacceptable(505, "BadRequestError", "The router speaks HTTP/1.1 and HTTP/1.0.")
        self._http10 = version == "1.0"
        if self._fields > self._limits.max_head_fields:
            raise _head_too_large(f"more than {self._limits.max_head_fields} fields")
        if self._method == b"CONNECT":
            raise RequestUnacceptable(405, "BadRequestError", "CONNECT is not served here.")
        self._check_request_line()
        self._check_host()
        if self._chunked and (self._length is not None or self._http10):
            raise _bad_request("Transfer-Encoding contradicts the rest of the head.")
        if self._length is not None and self._length > self._limits.max_body_bytes:
            raise body_too_large(self._limits.max_body_bytes)
        self.asks_to_continue = self._expects and not self._http10 and bool(self._length or self._chunked)

    def _check_request_line(self) -> None:
        """Refuse any spelling but one, and targets that another reader would cut short."""
        raw, target = self._raw, self._target
        version = b" HTTP/1.0\r\n" if self._http10 else b" HTTP/1.1\r\n"
        line = self._method + b" " + target + version
        if not raw.startswith(line) and not _behind_empty_lines(raw).startswith(line):
            raise _bad_request("The request line is not METHOD, space, target, space, version.")
        if b"#" in target or b"%00" in target:
            raise _bad_request("The request target holds a fragment or an encoded NUL.")
        if target == b"*" and self._method != b"OPTIONS":
            raise _bad_request("The request target must be a path.")
        if target[:1] != b"/":
            if not names_same_host(target, self._host):
                raise _bad_request("The request target names another host than Host does.")
            self._target = origin_form(target)

    def _check_host(self) -> None:
        if self._hosts > 1 or (self._hosts == 0 and not self._http10):
            raise _bad_request("A request names exactly one host.")
        if self._hosts and (self._host != self._known_host or not self._host):
            if _HOST.fullmatch(self._host) is None:
                raise _bad_request("Host is not a name or an address, with a port at most.")
            self._known_host = self._host

    def _reader(self) -> httptools.HttpRequestParser:
        assert self._parser is not None, "a closed assembler is not fed"
        return self._parser


def _behind_empty_lines(raw: bytes) -> bytes:
    """A head without the empty lines before it, which are allowed."""
    start = 0
    while raw.startswith(b"\r\n", start):
        start += 2
    return raw[start:]


def _bad_request(message: str) -> RequestUnacceptable:
    return RequestUnacceptable(400, "BadRequestError", message)


def _head_too_large(what: str) -> RequestUnacceptable:
    return RequestUnacceptable(431, "RequestHeaderFieldsTooLargeError", f"The request's head has {what}.")

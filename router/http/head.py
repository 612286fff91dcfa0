"""Request and response heads: what passes, what is dropped, what is added.

Model     fields pass in order with every repeat; hop-by-hop fields end here; framing fields are written to fit
          the bytes that follow them
Blind to  values: apart from framing no field is interpreted
Source    RFC 9110 section 7.6.1, RFC 9112 sections 3.2, 6 and 7
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from router.actions import Outcome
from router.errors import RequestUnacceptable
from router.routes import Route

Field = tuple[bytes, bytes, bytes]  # lower-cased name, name as received, value

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authentication-info",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# Written anew for the replica or, as Expect, already answered here.
_REQUEST_DROPS = _HOP_BY_HOP | {b"expect", b"host", b"content-length", b"x-forwarded-for", b"http2-settings"}
_ADDED_WHEN_MISSING = frozenset({b"x-request-id", b"x-forwarded-proto", b"x-forwarded-host"})
_REQUEST_NOTED = _REQUEST_DROPS | _ADDED_WHEN_MISSING
# Framing stays: the body bytes are relayed with the framing they came in.
_RESPONSE_DROPS = _HOP_BY_HOP - {b"transfer-encoding"}
_RESPONSE_NOTED = _RESPONSE_DROPS | {b"x-request-id", b"x-tfirst-replica", b"x-tfirst-explain"}
_SWITCH = b"Connection: Upgrade\r\nUpgrade: %b\r\n"
_NONE: frozenset[bytes] = frozenset()


@dataclass(slots=True)
class RequestHead:
    """A request's head as received.

    method : upper-case, as on the wire
    target : raw path and query, always in origin form
    path : the target without its query, still percent-encoded
    headers : (lower-cased name, name, value) in order of arrival, repeats kept
    route : class of the request, see `router.routes`
    named : lower-case names that its Connection field declares hop-by-hop
    http10 : the client speaks HTTP/1.0: no chunks, and the connection ends with the answer
    keep_alive : the client wants the connection kept after the answer
    upgrade : b"websocket" when it asks to switch to that, b"" otherwise
    client : name of the key that let it in; set by who asked for one
    began_s : when its first part came, on the port's clock; None where it came whole
    given_up : how it ended where its exchange gave up the reading of its prompt; None: it did not
    trace : of who follows it; opaque
    """

    method: bytes
    target: bytes
    path: str
    headers: list[Field]
    route: Route
    named: frozenset[bytes] = _NONE
    http10: bool = False
    keep_alive: bool = True
    upgrade: bytes = b""
    client: str = ""
    began_s: float | None = field(default=None, repr=False, compare=False)
    given_up: Outcome | None = field(default=None, repr=False, compare=False)
    trace: object = field(default=None, repr=False, compare=False)
    _firsts: dict[bytes, bytes] | None = field(default=None, init=False, repr=False, compare=False)

    def get(self, name: bytes) -> bytes | None:
        """Value of the first field of that lower-case name; the fields are those of the first call."""
        firsts = self._firsts
        if firsts is None:  # a dozen names are asked for
            firsts = self._firsts = {lower: value for lower, _, value in reversed(self.headers)}
        return firsts.get(name)


@dataclass(slots=True)
class ResponseHead:
    """A replica's final response head, and how its body is delimited.

    named : lower-case names that its Connection field declares hop-by-hop, framing excepted
    chunked : by chunk framing
    until_close : by the end of the connection, so that a cut cannot be told from an end
    """

    status: int
    reason: bytes
    headers: list[Field]
    named: frozenset[bytes] = _NONE
    chunked: bool = False
    until_close: bool = False

    def get(self, name: bytes) -> bytes | None:
        """Value of the first field of that lower-case name."""
        for lower, _, value in self.headers:
            if lower == name:
                return value
        return None


@dataclass(frozen=True, slots=True)
class Forwarded:
    """Whom a client's connection comes from, for the forwarding headers. proto : b"http" or b"https"."""

    peer: bytes
    proto: bytes


def origin_form(target: bytes) -> bytes:
    """Path and query of a request target; the absolute form loses its scheme and authority.

    Raises
    ------
    RequestUnacceptable : the target names no path

    >>> origin_form(b"http://gateway:30000/v1/models?x=1")
    b'/v1/models?x=1'
    """
    if target.startswith(b"/") or target == b"*":
        return target
    scheme, separator, rest = target.partition(b"://")
    if not separator or scheme.lower() not in (b"http", b"https"):
        raise RequestUnacceptable(400, "BadRequestError", "The request target must be a path.")
    authority_end = min((at for at in (rest.find(b"/"), rest.find(b"?")) if at >= 0), default=len(rest))
    path = rest[authority_end:]
    return path if path.startswith(b"/") else b"/" + path


def names_same_host(target: bytes, host: bytes) -> bool:
    """Whether the absolute form of a target, if it is one, names the host that Host names.

    >>> names_same_host(b"http://GW:80/x", b"gw"), names_same_host(b"http://gw@other/", b"gw")
    (True, False)
    """
    scheme, separator, rest = target.lower().partition(b"://")
    if not separator:
        return True
    port = b":443" if scheme == b"https" else b":80"
    authority = re.split(rb"[/?]", rest, maxsplit=1)[0]
    return authority.removesuffix(port) == host.lower().removesuffix(port)


def upstream_head(
    head: RequestHead,
    *,
    host: bytes,
    prefix: bytes,
    body_bytes: int,
    request_id: bytes,
    forwarded: Forwarded,
    extra: Sequence[tuple[bytes, bytes]],
    drops: frozenset[bytes] = _NONE,
    via: bytes = b"",
) -> bytes:
    """The head sent to a replica.

    extra : fields of the router's own; a client's field of such a name is dropped
    drops : lower-case names of more fields that do not pass
    via : value of one more Via field, behind the client's; b"" for none
    host : its Host value
    prefix : path of its base URL, without a slash at the end; b"" for most
    body_bytes : length of the whole body, >= 0
    request_id : the only one that it has
    """
    seen: dict[bytes, bytes] = {}
    noted = _noted_with(drops) if drops else _REQUEST_NOTED
    if head.named:
        noted |= head.named
    if extra:
        noted = noted.union(name.lower() for name, _ in extra)
    parts = [head.method, b" ", prefix, head.target, b" HTTP/1.1\r\nHost: ", host, b"\r\n"]
    for lower, name, value in head.headers:
        if lower in noted:
            if lower == b"x-request-id" and (value != request_id or lower in seen):
                continue  # one that is not kept, or a second one
            if lower not in _ADDED_WHEN_MISSING or lower in head.named:
                seen[lower] = seen[lower] + b", " + value if lower in seen else value
                continue
            seen[lower] = value
        parts += (name, b": ", value, b"\r\n")
    if body_bytes or b"content-length" in seen or b"transfer-encoding" in seen:
        parts.append(b"Content-Length: %d\r\n" % body_bytes)
    if b"x-request-id" not in seen or b"x-request-id" in head.named:
        parts += (b"x-request-id: ", request_id, b"\r\n")
    _add_forwarded(parts, seen, forwarded)
    if via:
        parts += (b"Via: ", via, b"\r\n")
    for name, value in extra:
        parts += (name, b": ", value, b"\r\n")
    parts.append(_SWITCH % head.upgrade + b"\r\n" if head.upgrade else b"\r\n")
    return b"".join(parts)


@lru_cache(maxsize=8)
def _noted_with(drops: frozenset[bytes]) -> frozenset[bytes]:
    return _REQUEST_NOTED | drops


def _add_forwarded(parts: list[bytes], seen: dict[bytes, bytes], forwarded: Forwarded) -> None:
    """Who asked: appended to the proxies before us; what they said of protocol and host stands."""
    if b"x-forwarded-for" in seen:
        parts += (b"x-forwarded-for: ", seen[b"x-forwarded-for"], b", ", forwarded.peer, b"\r\n")
    else:
        parts += (b"x-forwarded-for: ", forwarded.peer, b"\r\n")
    if b"x-forwarded-proto" not in seen:
        parts += (b"x-forwarded-proto: ", forwarded.proto, b"\r\n")
    if b"x-forwarded-host" not in seen and b"host" in seen:
        parts += (b"x-forwarded-host: ", seen[b"host"], b"\r\n")


def client_head(
    response: ResponseHead,
    *,
    request_id: bytes,
    replica: bytes,
    explain: bytes | None,
    closing: bool,
    unchunked: bool,
    upgrade: bytes = b"",
) -> bytes:
    """The head sent to the client.

    closing : the connection ends with this answer
    unchunked : chunk framing is taken off, for a client that does not know it
    upgrade : protocol that the connection switches to with this answer, b"" when it does not
    """
    noted = _RESPONSE_NOTED | response.named if response.named else _RESPONSE_NOTED
    if unchunked:
        noted |= {b"transfer-encoding"}
    parts = [_status_line(response.status, response.reason)]
    for lower, name, value in response.headers:
        if lower in noted:
            if lower != b"x-request-id":
                continue
            request_id = b""
        parts += (name, b": ", value, b"\r\n")
    if request_id:
        parts += (b"x-request-id: ", request_id, b"\r\n")
    parts += (b"x-tfirst-replica: ", replica, b"\r\n")
    if explain is not None:
        parts += (b"x-tfirst-explain: ", explain, b"\r\n")
    if upgrade:
        parts.append(_SWITCH % upgrade + b"\r\n")
    else:
        parts.append(b"Connection: close\r\n\r\n" if closing else b"\r\n")
    return b"".join(parts)


_ENDS_LINES = bytes.maketrans(b"\r\n\0", b"   ")


def field_value(text: str) -> bytes:
    """Text as a header value. What a header cannot carry is replaced, so that no value can end its line."""
    return text.encode("latin-1", "replace").translate(_ENDS_LINES)


_CONTROLS = bytes(byte for byte in range(256) if byte < 32 or byte == 127)


@lru_cache(maxsize=64)
def _status_line(status: int, reason: bytes) -> bytes:
    return b"HTTP/1.1 %d %b\r\n" % (status, reason.translate(None, _CONTROLS))


def plain_request(method: bytes, target: bytes, headers: list[Field], *, http10: bool) -> bytes:
    """The head of a request that asked for an upgrade, as one that does not.

    A server may ignore the wish, and then the body follows as usual; some client libraries attach it to every
    POST. Whether the connection is kept is the client's word still.
    """
    drops = {b"connection", b"upgrade", b"http2-settings"}
    tokens = b",".join(value.lower() for lower, _, value in headers if lower == b"connection")
    parts = [method, b" ", target, b" HTTP/1.0\r\n" if http10 else b" HTTP/1.1\r\n"]
    for lower, name, value in headers:
        if lower not in drops:
            parts += (name, b": ", value, b"\r\n")
    parts.append(b"Connection: close\r\n\r\n" if b"close" in tokens else b"\r\n")
    return b"".join(parts)


def named_by_connection(value: bytes) -> frozenset[bytes]:
    """Lower-case names that a Connection field declares hop-by-hop.

    >>> sorted(named_by_connection(b"X-One, keep-alive"))
    [b'x-one']
    """
    tokens = value.lower()
    if tokens in (b"keep-alive", b"close"):
        return _NONE
    return frozenset(token.strip() for token in tokens.split(b",")) - {b"keep-alive", b"close", b""}

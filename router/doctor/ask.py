"""Questions to one server over HTTP. Each gets a value: a reply, or one sentence that says why there is none.

Model     one request, one deadline; nothing is retried, since what fails once is what an operator wants to hear of
Valid     http and https, JSON and text answers
Blind to  what happens behind a proxy that answers for the server
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from router.signals.fetch import body_of

MAX_BODY_BYTES = 16 << 20
_KEY_STATUSES = frozenset({401, 403})


@dataclass(frozen=True, slots=True)
class Reply:
    """What one question gave.

    status : HTTP status; 0 when no answer came
    trouble : why the body is of no use, a sentence without its end; None for a whole 200
    wants_key : the server refused for want of a key
    """

    status: int
    body: bytes = b""
    content_type: str = ""
    trouble: str | None = None
    wants_key: bool = False

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", errors="replace") if self.trouble is None else ""

    def json(self) -> Any:
        """The decoded body; None when it is no JSON or there is none."""
        if self.trouble is not None:
            return None
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None

    def json_trouble(self, path: str) -> str | None:
        """Why there is no JSON in it; None when there is."""
        if self.trouble is not None or self.json() is not None:
            return self.trouble
        is_html = "html" in self.content_type or self.body.lstrip()[:1] == b"<"
        what = "an HTML page" if is_html else "something that is not JSON"
        return f"{path} answered with {what}: another program listens at this address, not an engine"


class Asker:
    """Asks one server. `session` carries the key, if there is one.

    timeout_s : for each question, > 0
    """

    def __init__(self, session: aiohttp.ClientSession, base_url: str, *, timeout_s: float, has_key: bool) -> None:
        self.base_url = base_url
        self._session = session
        self._timeout_s = timeout_s
        self._has_key = has_key

    async def get(self, path: str) -> Reply:
        return await self._ask("GET", path, None, {})

    async def post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Reply:
        own = {"content-type": "application/json"}
        return await self._ask("POST", path, msgspec.json.encode(body), {**own, **(headers or {})})

    async def _ask(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> Reply:
        timeout = aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=0.8 * self._timeout_s)
        try:
            async with self._session.request(
                method, self.base_url + path, data=body, headers=headers, timeout=timeout
            ) as response:
                return await self._reply(path, response)
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as exc:
            return Reply(0, trouble=trouble_of(exc, self.base_url, timeout_s=self._timeout_s))

    async def _reply(self, path: str, response: aiohttp.ClientResponse) -> Reply:
        body = await body_of(response, MAX_BODY_BYTES + 1)
        status, wants_key = response.status, response.status in _KEY_STATUSES
        trouble = None
        if wants_key:
            trouble = "it refuses the key it was given" if self._has_key else "it wants a key"
            trouble = f"{path} answered {status}: {trouble}"
        elif status != 200:
            trouble = f"{path} answered {status}{_message_in(body)}"
        elif len(body) > MAX_BODY_BYTES:
            trouble = f"{path} answered more than {MAX_BODY_BYTES >> 20} MiB"
        return Reply(status, body, response.content_type, trouble, wants_key)


def _message_in(body: bytes) -> str:
    """The engine's own words, where an error body has any: nested (vLLM) or flat (SGLang)."""
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ""
    inner = answer.get("error", answer) if isinstance(answer, dict) else None
    message = inner.get("message") if isinstance(inner, dict) else None
    return f" ({' '.join(message.split())[:200]})" if isinstance(message, str) and message else ""


def trouble_of(exc: BaseException, base_url: str, *, timeout_s: float) -> str:
    """One sentence, without its end, for a question that got no answer."""
    parts = urlsplit(base_url)
    at = parts.netloc
    if isinstance(exc, aiohttp.ClientConnectorCertificateError):
        return f"its certificate is not trusted: {_reason(exc.certificate_error)}"
    if isinstance(exc, aiohttp.ClientConnectorSSLError | ssl.SSLError):
        return f"{at} does not speak TLS: try http:// in place of https://"
    if isinstance(exc, aiohttp.ClientConnectorDNSError):
        return f"the name {parts.hostname} is not known"
    if isinstance(exc, aiohttp.ConnectionTimeoutError):
        return f"no connection to {at} within {0.8 * timeout_s:g} s: the host is down, or a firewall drops it"
    if isinstance(exc, TimeoutError):
        return f"{at} took the connection and gave no answer within {timeout_s:g} s: the server hangs"
    if isinstance(exc, ConnectionRefusedError) or isinstance(getattr(exc, "os_error", None), ConnectionRefusedError):
        return f"nothing listens at {at} (connection refused)"
    if isinstance(exc, aiohttp.ClientPayloadError):
        return f"{at} broke off in the middle of its answer"
    if isinstance(exc, aiohttp.ServerDisconnectedError | ConnectionResetError):
        return f"{at} closed the connection without an answer{_try_tls(parts.scheme)}"
    if isinstance(exc, aiohttp.ClientResponseError):
        return f"{at} does not answer in HTTP{_try_tls(parts.scheme)}"
    return f"no connection to {at}: {_reason(exc)}"


def _try_tls(scheme: str) -> str:
    return ": if it speaks TLS, use https://" if scheme == "http" else ""


def _reason(exc: BaseException) -> str:
    if isinstance(exc, ssl.SSLCertVerificationError):
        return exc.verify_message
    inner = getattr(exc, "os_error", exc)
    return (inner.strerror if isinstance(inner, OSError) and inner.strerror else "") or str(exc) or type(exc).__name__

"""Answers the router makes itself, in the form the asked API uses for its errors.

Source    OpenAI's nested error object (vLLM since 0.10.2); Anthropic's on its Messages API; RFC 9110 section 11.6.1
"""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from router.actions import Refuse
from router.http.head import RequestHead
from router.request_ids import kept_or_made

_ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_encode = msgspec.json.Encoder().encode


def json_reply(
    status: int,
    body: bytes,
    *,
    request_id: bytes,
    closing: bool,
    bodiless: bool = False,
    retry_after_s: int | None = None,
    asks_key: bool = False,
) -> bytes:
    """A whole response.

    bodiless : the answer to HEAD, which declares its body and does not send it
    asks_key : says how to prove oneself, as a 401 must
    """
    head = b"HTTP/1.1 %d %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\nx-request-id: %b\r\n" % (
        status,
        _reason(status),
        len(body),
        request_id,
    )
    if retry_after_s is not None:
        head += b"Retry-After: %d\r\n" % retry_after_s
    if asks_key:
        head += b"WWW-Authenticate: Bearer\r\n"
    head += b"Connection: close\r\n\r\n" if closing else b"\r\n"
    return head if bodiless else head + body


def refusal(refuse: Refuse, head: RequestHead, *, request_id: bytes, closing: bool) -> bytes:
    """A whole error response, in the form of the API that was asked."""
    form = _anthropic if head.path.startswith("/v1/messages") else _openai
    return json_reply(
        refuse.status,
        _encode(form(refuse, request_id)),
        request_id=request_id,
        closing=closing,
        bodiless=head.method == b"HEAD",
        retry_after_s=refuse.retry_after_s,
        asks_key=refuse.status == 401,
    )


def request_id_of(head: RequestHead) -> bytes:
    """What a request goes by that no prompt reader has named: see `router.request_ids`."""
    return kept_or_made(head.get(b"x-request-id")).encode("ascii")


def _openai(refuse: Refuse, request_id: bytes) -> dict[str, object]:
    return {
        "error": {
            "message": refuse.message,
            "type": refuse.kind,
            "param": refuse.param,
            "code": refuse.status,
        }
    }


def _anthropic(refuse: Refuse, request_id: bytes) -> dict[str, object]:
    fallback = "invalid_request_error" if refuse.status < 500 else "api_error"
    kind = _ANTHROPIC_KINDS.get(refuse.status, fallback)
    return {
        "type": "error",
        "error": {"type": kind, "message": refuse.message},
        "request_id": request_id.decode("latin-1"),
    }


def _reason(status: int) -> bytes:
    try:
        return HTTPStatus(status).phrase.encode()
    except ValueError:
        return b""

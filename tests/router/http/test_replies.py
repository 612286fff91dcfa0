"""Answers the router makes itself."""

from __future__ import annotations

import json

import pytest

from router.actions import Refuse
from router.http.head import RequestHead
from router.http.replies import json_reply, refusal, request_id_of
from router.routes import Route


def a_head(path: str = "/v1/completions", method: bytes = b"POST", own_id: bytes | None = None) -> RequestHead:
    headers = [] if own_id is None else [(b"x-request-id", b"X-Request-Id", own_id)]
    return RequestHead(method, path.encode(), path, headers, Route.GENERATE)


def parts(raw: bytes) -> tuple[list[bytes], bytes]:
    head, _, body = raw.partition(b"\r\n\r\n")
    return head.split(b"\r\n"), body


def test_a_refusal_declares_its_length_and_carries_the_id() -> None:
    refuse = Refuse(503, "ServiceUnavailableError", "Nothing is ready.", retry_after_s=2, param="model")
    lines, body = parts(refusal(refuse, a_head(), request_id=b"q1", closing=True))
    assert lines == [
        b"HTTP/1.1 503 Service Unavailable",
        b"Content-Type: application/json",
        b"Content-Length: %d" % len(body),
        b"x-request-id: q1",
        b"Retry-After: 2",
        b"Connection: close",
    ]
    expected = {"message": "Nothing is ready.", "type": "ServiceUnavailableError", "param": "model", "code": 503}
    assert json.loads(body) == {"error": expected}


@pytest.mark.parametrize(
    ("status", "kind"),
    [(404, "not_found_error"), (422, "invalid_request_error"), (429, "rate_limit_error"), (502, "api_error")],
)
def test_the_messages_api_has_kinds_of_its_own(status: int, kind: str) -> None:
    raw = refusal(Refuse(status, "Any", "Told."), a_head("/v1/messages"), request_id=b"q1", closing=False)
    assert json.loads(parts(raw)[1]) == {
        "type": "error",
        "error": {"type": kind, "message": "Told."},
        "request_id": "q1",
    }


def test_an_answer_to_head_declares_a_body_it_does_not_send() -> None:
    lines, body = parts(json_reply(200, b"{}", request_id=b"q", closing=False, bodiless=True))
    assert (b"Content-Length: 2" in lines, body) == (True, b"")


def test_a_status_without_a_name_is_still_a_status_line() -> None:
    assert json_reply(599, b"", request_id=b"q", closing=False).startswith(b"HTTP/1.1 599 \r\n")


def test_the_clients_id_is_kept_and_a_missing_one_is_made() -> None:
    assert request_id_of(a_head(own_id=b"q1")) == b"q1"
    made = {request_id_of(a_head()) for _ in range(100)}
    assert len(made) == 100

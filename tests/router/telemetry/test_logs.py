from __future__ import annotations

import json
import logging
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.telemetry.logs import TALKATIVE, JsonFormatter, Seldom, TextFormatter, about, facts_of, log_request, set_up
from tests.router.field_bench import Stub, a_router
from tests.router.test_metrics import a_receipt

SECRET = "the-words-of-a-prompt"


def a_record(message: str, **facts: object) -> logging.LogRecord:
    return logging.getLogger("x").makeRecord("x", logging.INFO, "f", 1, message, (), None, extra=about(**facts))


@given(st.text(), st.text())
def test_a_line_is_one_line_of_json_whatever_it_says(message: str, request_id: str) -> None:
    line = JsonFormatter().format(a_record(message, request_id=request_id, cause=None))
    assert line.isascii()
    assert len(line.splitlines()) == 1
    said = json.loads(line)
    assert (said["message"], said["request_id"], said["level"]) == (message, request_id, "info")
    assert "cause" not in said


@given(st.text())
def test_a_request_id_cannot_begin_a_line_of_its_own(request_id: str) -> None:
    line = TextFormatter().format(a_record("m", request_id=request_id))
    assert len(line.splitlines()) == 1
    assert json.loads(line.partition(" request_id=")[2]) == request_id


@pytest.mark.parametrize("request_id", ["a\x85b", "a\u2028b", "a\x9b31mb", "a\x7fb"])
def test_a_request_id_cannot_command_a_terminal(request_id: str) -> None:
    line = TextFormatter().format(a_record("m", request_id=request_id)).partition(" request_id=")[2]
    assert line.replace("\x7f", "").isprintable()
    assert line.isascii()


def test_a_traceback_is_a_member_of_the_object() -> None:
    try:
        raise ValueError("why")
    except ValueError:
        record = a_record("m")
        record.exc_info = sys.exc_info()
    assert "ValueError: why" in json.loads(JsonFormatter().format(record))["traceback"]


def test_failed_requests_are_told_at_level_info_and_others_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "router.requests"):
        log_request(a_receipt())
        log_request(a_receipt(request_id="bad", outcome="failed", cause="broken"))
    (record,) = caplog.records
    assert record.__dict__["facts"]["request_id"] == "bad"
    with caplog.at_level(logging.DEBUG, "router.requests"):
        log_request(a_receipt())
    assert caplog.records[-1].__dict__["facts"]["outcome"] == "ok"


@pytest.mark.parametrize(("level", "heard"), [("debug", logging.INFO), ("error", logging.ERROR)])
def test_who_sends_the_spans_is_not_heard_among_requests(
    level: str, heard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    for name in TALKATIVE:
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
    set_up(level, "json")
    assert root.level == logging.getLevelName(level.upper())
    assert {logging.getLogger(name).level for name in TALKATIVE} == {heard}


def test_who_sends_the_spans_says_so_once_a_minute_and_nobody_else_is_held_back() -> None:
    seldom = Seldom()

    def passes(name: str, at_s: float) -> bool:
        record = logging.makeLogRecord({"name": name, "created": at_s})
        return bool(seldom.filter(record))

    sender = "opentelemetry.exporter.otlp"
    assert [passes(sender, at_s) for at_s in (0.0, 1.0, 59.9, 60.0, 61.0, 500.0)] == [
        True,
        False,
        False,
        True,
        False,
        True,
    ]
    assert passes("urllib3.connectionpool", 1.0), "another logger says something else"
    assert all(passes("router.gateway", 1.0) for _ in range(3))


def test_what_a_client_wrote_is_not_among_the_facts() -> None:
    facts = facts_of(a_receipt(model=SECRET, endpoint=f"/v1/{SECRET}", unit=SECRET))
    assert SECRET not in repr(facts)


async def test_no_line_of_a_running_router_holds_a_prompt_at_any_level(caplog: pytest.LogCaptureFixture) -> None:
    stub = Stub()
    with caplog.at_level(logging.DEBUG):
        async with stub.serving(), a_router([stub.url]) as router:
            await router.ask(prompt=SECRET, headers={"x-request-id": "id-1"})
            await router.ask("nobody-has-it", prompt=SECRET)
            async with router.client.post(f"{router.url}/v1/completions", data=SECRET.encode()) as response:
                assert response.status == 400
        lines = [form.format(record) for record in caplog.records for form in (JsonFormatter(), TextFormatter())]
    assert any('"id-1"' in line for line in lines)
    assert not any(SECRET in line for line in lines)

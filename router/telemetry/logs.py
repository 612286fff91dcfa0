"""Log lines for people and for machines, with the request they are about; never a prompt, an answer or a key.

Model     a record can carry facts, `extra=about(request_id=...)`: values of its request, as text or as members of one
          JSON object. Every request that ended is such a record: failed ones at level info, the rest at debug
Valid     facts are chosen by name where a record is made. Nothing a client wrote is among them but its request's id
Blind to  what other libraries log
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from math import inf
from typing import Any

from router.receipts import Receipt

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
TALKATIVE = ("urllib3", "opentelemetry")  # they say of every batch of spans that it was sent, or was not
EVERY_S = 60.0  # a line of each of them

_FACTS = "facts"
_requests = logging.getLogger("router.requests")


def about(**facts: Any) -> dict[str, dict[str, Any]]:
    """`extra` of a log call: what is known of the request it is about. Unknown (None) is left out."""
    return {_FACTS: {name: value for name, value in facts.items() if value is not None}}


def log_request(receipt: Receipt) -> None:
    """One request ended."""
    failed = receipt.outcome in ("failed", "server_error")
    level = logging.INFO if failed else logging.DEBUG
    if _requests.isEnabledFor(level):
        _requests.log(level, "request ended", extra=about(**facts_of(receipt)))


def facts_of(receipt: Receipt) -> dict[str, Any]:
    """What a log line says of a request; the rest is in its receipt."""
    choice = receipt.choice
    return {
        "request_id": receipt.request_id,
        "outcome": receipt.outcome,
        "cause": receipt.cause,
        "status": receipt.status,
        "client": receipt.client,
        "replica": None if choice is None else choice.replica,
        "path": receipt.path,
        "reason": receipt.reason,
        "attempts": receipt.attempts,
        "tried": receipt.tried or None,
        "prompt_tokens": receipt.prompt_tokens,
        "output_tokens": receipt.output_tokens,
        "first_token_s": receipt.first_token_s,
        "ended_s": receipt.ended_s,
    }


class TextFormatter(logging.Formatter):
    """A line for people: facts stand behind the message, as JSON values in ASCII: a request's id is its client's, and

    can neither end the line (U+0085 and U+2028 do for some readers) nor command a terminal (U+009B does).
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        facts: dict[str, Any] = getattr(record, _FACTS, {})
        said = "".join(f" {name}={json.dumps(value)}" for name, value in facts.items())
        return super().formatMessage(record) + said


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, the facts, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": at.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, _FACTS, {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class Seldom(logging.Filter):
    """Lets one line through in `EVERY_S` of each logger of those who would say the same of every batch of spans."""

    def __init__(self) -> None:
        super().__init__()
        self._last_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith(TALKATIVE):
            return True
        if record.created - self._last_s.get(record.name, -inf) < EVERY_S:
            return False
        self._last_s[record.name] = record.created
        return True


def set_up(level: str, form: str) -> None:
    """Log to standard error from now on. level : one of LEVELS; form : one of FORMATS"""
    handler = logging.StreamHandler()
    handler.addFilter(Seldom())
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(max(logging.INFO, logging.getLogger().level))

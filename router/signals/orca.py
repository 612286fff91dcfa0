"""Load in a response header: `endpoint-load-metrics`, as vLLM sends it to who asks for it.

Model     `TEXT name=value, name=value` or `JSON {...}`; names may stand under `named_metrics`
Valid     vLLM from 0.11.2, on answers that are not streamed, when the request carries `REQUEST_HEADER`: TEXT
Blind to  the binary form, which no engine sends; which engine is which when TEXT repeats a name (counts are summed,
          shares averaged); JSON of several engines keeps only the last, so TEXT is what to ask for
Source    recorded headers in tests/vectors; ORCA (xDS) load reporting
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from router.signals.load import SHARES, Load, is_usable

REQUEST_HEADER = (b"endpoint-load-metrics-format", b"TEXT")
RESPONSE_HEADER = b"endpoint-load-metrics"
_MAX_HEADER_BYTES = 8192
_NAMED = "named_metrics."
_FIELDS = {
    "kv_cache_usage_perc": "kv_usage",
    "num_requests_waiting": "waiting",
    "num_requests_running": "running",
}


def load_of_header(value: bytes) -> Load | None:
    """What one header value says; None when it is in no form known. Unknown names are passed over."""
    if len(value) > _MAX_HEADER_BYTES:
        return None
    form, _, rest = value.decode("utf-8", "replace").strip().partition(" ")
    if form.upper() == "TEXT":
        return _load(_text_pairs(rest))
    if form.upper() == "JSON":
        try:
            report = msgspec.json.decode(rest)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None
        return _load(_json_pairs(report)) if isinstance(report, dict) else None
    return None


def load_of_headers(headers: Iterable[tuple[bytes, bytes]]) -> Load | None:
    """Load in the headers of a response; None when they carry none."""
    for name, value in headers:
        if name.lower() == RESPONSE_HEADER:
            return load_of_header(value)
    return None


def _text_pairs(text: str) -> Iterator[tuple[str, Any]]:
    for pair in text.split(","):
        name, equals, number = pair.partition("=")
        if not equals:
            continue
        try:
            yield name.strip(), float(number)
        except ValueError:
            yield name.strip(), None


def _json_pairs(report: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    named = report.get("named_metrics")
    yield from (report | named if isinstance(named, dict) else report).items()


def _load(pairs: Iterable[tuple[str, Any]]) -> Load:
    load = Load()
    said: dict[str, list[float]] = {}
    broken: set[str] = set()
    for name, value in pairs:
        field = _FIELDS.get(name.removeprefix(_NAMED))
        if field is None:
            continue
        if is_usable(field, value):
            said.setdefault(field, []).append(float(value))
        else:
            load.anomalies += 1
            broken.add(field)
    for field, values in said.items():
        if field not in broken:  # of one engine unknown, so unknown of all
            setattr(load, field, sum(values) / (len(values) if field in SHARES else 1))
    return load

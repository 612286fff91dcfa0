"""Load of each rank from the JSON and msgpack answers of SGLang: /v1/loads, the older /get_load, and the load socket.

Model     one entry per data-parallel rank, told apart by `dp_rank`; those without it take the numbers nobody names
Valid     /v1/loads from 0.5.9, /get_load up to 0.5.20, the socket's `LoadStat` from 0.5.19 with 6 items or more
Source    recorded answers in tests/vectors

vLLM's /load is not read: it is a constant 0 unless the engine was started to track it, and nothing tells the two apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import msgspec

from router.signals.load import Load, set_number
from router.signals.wire import BadFrame

# Field of an entry -> field of a Load, and the factor between their units.
_V1_LOADS: dict[str, tuple[str, float]] = {
    "num_running_reqs": ("running", 1.0),
    "num_waiting_reqs": ("waiting", 1.0),
    "num_waiting_uncached_tokens": ("waiting_tokens", 1.0),
    "num_used_tokens": ("used_tokens", 1.0),
    "max_total_num_tokens": ("max_tokens", 1.0),
    "max_running_requests": ("max_running", 1.0),
    "token_usage": ("kv_usage", 1.0),
    "cache_hit_rate": ("cache_hit_rate", 1.0),
    "total_prefill_uncached_tokens": ("prefill_tokens", 1.0),
    "total_prefill_busy_us": ("prefill_busy_s", 1e-6),
}
_STAT_FIELDS = (  # items of the socket's array, after its tag
    "num_running_reqs",
    "num_waiting_reqs",
    "num_used_tokens",
    "max_total_num_tokens",
    "dp_rank",
    "num_waiting_uncached_tokens",
    "num_total_tokens",
    "max_running_requests",
    "total_prefill_uncached_tokens",
    "total_prefill_busy_us",
)
_STAT_TAG = "LoadStat"
_FEWEST_ITEMS = 6
_MAX_RANKS = 1024


def loads_of_v1(body: bytes) -> dict[str, Load]:
    """Ranks in an answer of /v1/loads. What is no such answer names none."""
    answer = _json(body)
    entries = _entries(answer.get("loads") if isinstance(answer, dict) else None)
    return dict(zip(_ranks(entries), map(_load, entries), strict=True))


def loads_of_get_load(body: bytes) -> dict[str, Load]:
    """Ranks in an answer of /get_load, whose `num_reqs` counts running and waiting together."""
    loads = {}
    entries = _entries(_json(body))
    for rank, entry in zip(_ranks(entries), entries, strict=True):
        load = loads[rank] = Load()
        set_number(load, "waiting", entry.get("num_waiting_reqs"))
        set_number(load, "waiting_tokens", entry.get("num_pending_tokens"))
        set_number(load, "used_tokens", entry.get("num_tokens"))
        set_number(load, "running", entry.get("num_reqs"))
        if load.running is not None:
            waiting = load.waiting
            load.running = None if waiting is None else max(0.0, load.running - waiting)
    return loads


def stat_of(payload: bytes) -> tuple[str, Load]:
    """Rank and load in one message of the load socket.

    Raises
    ------
    BadFrame : the payload is not a `LoadStat`
    """
    try:
        items = msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise BadFrame(str(exc)) from exc
    if type(items) is not list or len(items) < _FEWEST_ITEMS or items[0] != _STAT_TAG:
        raise BadFrame(f"no {_STAT_TAG}")
    entry = dict(zip(_STAT_FIELDS, items[1:], strict=False))
    load = _load(entry)
    if load.kv_usage is None and load.used_tokens is not None and load.max_tokens:
        load.kv_usage = min(1.0, load.used_tokens / load.max_tokens)
    return _ranks([entry])[0], load


def _load(entry: Mapping[str, Any]) -> Load:
    load = Load()
    for name, (field, scale) in _V1_LOADS.items():
        set_number(load, field, entry.get(name), scale)
    return load


def _ranks(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rank of each entry: the one it names, else the lowest nobody names or has: each without one is a rank."""
    named = [rank if type(rank := entry.get("dp_rank")) is int else None for entry in entries]
    taken = set(named)
    free = (number for number in count() if number not in taken)
    return [str(next(free) if rank is None else rank) for rank in named]


def _entries(entries: Any) -> list[dict[str, Any]]:
    found = entries if isinstance(entries, list) else []
    return [entry for entry in found[:_MAX_RANKS] if isinstance(entry, dict)]


def _json(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None

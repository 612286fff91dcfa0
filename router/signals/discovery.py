"""Ask an engine where it publishes cache events.

Model     vLLM: GET /kv_event_sources, one entry per data-parallel rank; SGLang: GET /server_info, a base port
          to which the rank is added. Engines report what they bound, so a wildcard host becomes the URL's.
Valid     vLLM from 0.31, SGLang from 0.5.13 (replay from 0.5.22); older engines must be configured by hand
Source    recorded answers in tests/vectors
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from router.signals.subscriber import Source

_WILDCARDS = frozenset({"*", "0.0.0.0", "::", "[::]", ""})
_MAX_RANKS = 1024


async def event_sources(session: aiohttp.ClientSession, base_url: str, *, timeout_s: float = 5.0) -> list[Source]:
    """Sources of every rank behind `base_url`, in rank order; empty when the engine names none.

    An engine that is down, answers something else or has events switched off also gives an empty list: the
    caller shows the source as missing, and asks again later.
    """
    host = urlsplit(base_url).hostname or "127.0.0.1"
    for path, parse in (("/kv_event_sources", vllm_sources), ("/server_info", sglang_sources)):
        answer = await _json(session, base_url.rstrip("/") + path, timeout_s)
        found = parse(answer, host) if isinstance(answer, dict) else []
        if found:
            return found
    return []


def vllm_sources(answer: Mapping[str, Any], host: str) -> list[Source]:
    """Answer of vLLM's /kv_event_sources: rank as text -> its publisher's settings."""
    entries = [(int(rank), entry) for rank, entry in answer.items() if rank.isdecimal() and isinstance(entry, dict)]
    return [
        Source(
            events=_reachable(entry["endpoint"], host),
            replay=_reachable(entry["replay_endpoint"], host) if entry.get("replay_endpoint") else None,
            topic=str(entry.get("topic") or ""),
            rank=rank,
        )
        for rank, entry in sorted(entries, key=lambda pair: pair[0])
        if entry.get("publisher") == "zmq" and isinstance(entry.get("endpoint"), str)
    ]


def sglang_sources(answer: Mapping[str, Any], host: str) -> list[Source]:
    """Answer of SGLang's /server_info: `kv_events` with base ports."""
    info = answer.get("kv_events")
    if not isinstance(info, dict) or info.get("publisher") != "zmq":
        return []
    base, replay, ranks = info.get("endpoint_port_base"), info.get("replay_endpoint_port_base"), info.get("dp_size")
    if type(base) is not int:
        return []
    named = str(info.get("endpoint_host") or "")
    at = _bracketed(host if named in _WILDCARDS else named)
    return [
        Source(
            events=f"tcp://{at}:{base + rank}",
            replay=f"tcp://{at}:{replay + rank}" if type(replay) is int else None,
            topic=str(info.get("topic") or ""),
            rank=rank,
            one_copy=True,
        )
        for rank in range(min(ranks, _MAX_RANKS) if type(ranks) is int and ranks > 0 else 1)
    ]


def _reachable(endpoint: str, host: str) -> str:
    scheme, _, rest = endpoint.partition("://")
    if scheme != "tcp":
        return endpoint
    named, _, port = rest.rpartition(":")
    return f"tcp://{_bracketed(host) if named in _WILDCARDS else named}:{port}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


async def _json(session: aiohttp.ClientSession, url: str, timeout_s: float) -> Any:
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=timeout_s)) as response:
            return msgspec.json.decode(await response.read()) if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError):
        return None

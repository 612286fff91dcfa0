"""Ask an engine where it publishes cache events, and its load.

Model     vLLM: GET /kv_event_sources, one entry per data-parallel rank; SGLang: GET /server_info, a base port
          to which the rank is added. Engines report what they bound, so a wildcard host becomes the URL's. What is no
          address, or of a rank that cannot be, is left out: a socket would fail on it for ever
Valid     vLLM from 0.31, SGLang from 0.5.13 (replay from 0.5.22); older engines must be configured by hand
Source    recorded answers in tests/vectors
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from router.signals.fetch import body_of
from router.signals.subscriber import Source

_WILDCARDS = frozenset({"*", "0.0.0.0", "::", "[::]", ""})
_MAX_RANKS = 1024
_MAX_ANSWER_BYTES = 4 << 20
_ADDRESS = re.compile(r"tcp://[^\s/]+:([0-9]{1,5})|(?:ipc|inproc)://\S+")


@dataclass(frozen=True, slots=True)
class Published:
    """What an engine publishes, rank 0 first.

    events : sources of cache events; empty when it names none
    load : addresses of its load sockets (SGLang); empty when it has none
    load_topic : prefix of their topics
    """

    events: tuple[Source, ...] = ()
    load: tuple[str, ...] = ()
    load_topic: str = ""


async def published(session: aiohttp.ClientSession, base_url: str, *, timeout_s: float = 5.0) -> Published:
    """What every rank behind `base_url` publishes; nothing when the engine names no source of events.

    An engine that is down, answers something else or has events switched off also gives nothing: the
    caller shows the source as missing, and asks again later.
    """
    host = urlsplit(base_url).hostname or "127.0.0.1"
    url = base_url.rstrip("/")
    answer = await _json(session, f"{url}/kv_event_sources", timeout_s)
    found = vllm_sources(answer, host) if isinstance(answer, dict) else []
    if found:
        return Published(tuple(found))
    for path in ("/server_info", "/get_server_info"):  # the older name
        answer = await _json(session, url + path, timeout_s)
        if isinstance(answer, dict):
            return Published(tuple(sglang_sources(answer, host)), *sglang_load(answer, host))
    return Published()


async def event_sources(session: aiohttp.ClientSession, base_url: str, *, timeout_s: float = 5.0) -> list[Source]:
    """Sources of cache events of every rank behind `base_url`, as `published` finds them."""
    return list((await published(session, base_url, timeout_s=timeout_s)).events)


def vllm_sources(answer: Mapping[str, Any], host: str) -> list[Source]:
    """Answer of vLLM's /kv_event_sources: rank as text -> its publisher's settings."""
    entries = [(int(rank), entry) for rank, entry in answer.items() if is_rank(rank) and isinstance(entry, dict)]
    found = [
        Source(
            events=_reachable(entry["endpoint"], host),
            replay=_reachable(replay, host)
            if isinstance(replay := entry.get("replay_endpoint"), str) and replay
            else None,
            topic=str(entry.get("topic") or ""),
            rank=rank,
        )
        for rank, entry in sorted(entries, key=lambda pair: pair[0])
        if entry.get("publisher") == "zmq" and isinstance(entry.get("endpoint"), str)
    ]
    return [source for source in map(_checked, found) if source is not None]


def is_address(address: str) -> bool:
    """Whether a socket could be attached to this ZMQ address."""
    found = _ADDRESS.fullmatch(address)
    return found is not None and (found[1] is None or 0 < int(found[1]) < 65536)


def _checked(source: Source) -> Source | None:
    """The source, without a replay address that is none; None when it has no address itself."""
    if not is_address(source.events):
        return None
    keeps_replay = source.replay is None or is_address(source.replay)
    return source if keeps_replay else replace(source, replay=None)


def is_rank(text: str) -> bool:
    """Whether this names a data-parallel rank."""
    return text.isdecimal() and len(text) <= 4 and int(text) < _MAX_RANKS


def sglang_sources(answer: Mapping[str, Any], host: str) -> list[Source]:
    """Answer of SGLang's /server_info: `kv_events` with base ports."""
    info = _kv_events(answer)
    base, replay = info.get("endpoint_port_base"), info.get("replay_endpoint_port_base")
    if type(base) is not int:
        return []
    at = _host_of(info, host)
    found = [
        Source(
            events=f"tcp://{at}:{base + rank}",
            replay=f"tcp://{at}:{replay + rank}" if type(replay) is int else None,
            topic=str(info.get("topic") or ""),
            rank=rank,
            one_copy=True,
        )
        for rank in range(_ranks(info))
    ]
    return [source for source in map(_checked, found) if source is not None]


def sglang_load(answer: Mapping[str, Any], host: str) -> tuple[tuple[str, ...], str]:
    """Addresses and topic of the load sockets in the same answer; none where it names no port."""
    info = _kv_events(answer)
    base = info.get("load_endpoint_port_base")
    if type(base) is not int:
        return (), ""
    at = _host_of(info, host)
    addresses = tuple(f"tcp://{at}:{base + rank}" for rank in range(_ranks(info)))
    return addresses if all(map(is_address, addresses)) else (), str(info.get("load_topic") or "")


def _kv_events(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    info = answer.get("kv_events")
    return info if isinstance(info, dict) and info.get("publisher") == "zmq" else {}


def _host_of(info: Mapping[str, Any], host: str) -> str:
    named = str(info.get("endpoint_host") or "")
    return _bracketed(host if named in _WILDCARDS else named)


def _ranks(info: Mapping[str, Any]) -> int:
    ranks = info.get("dp_size")
    return min(ranks, _MAX_RANKS) if type(ranks) is int and ranks > 0 else 1


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
            if response.status != 200:
                return None
            return msgspec.json.decode(await body_of(response, _MAX_ANSWER_BYTES))
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError, ValueError, RecursionError):
        return None

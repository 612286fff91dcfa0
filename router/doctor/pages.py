"""Reads a server's answers into facts. Plain functions.

Model     which metric names the router reads is asked of the router's own reader, one name at a time, so that what is
          shown here cannot drift from what is used there
Source    recorded pages and answers of vLLM and SGLang in tests/vectors
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import islice
from typing import Any

from router.doctor.facts import Engine
from router.signals.discovery import is_rank
from router.signals.load import LARGEST_BLOCK, Load
from router.signals.prometheus_text import loads_of

_NAME = re.compile(r"^((?:vllm|sglang):[a-zA-Z0-9_]+)[{ ]", re.MULTILINE)
_CACHING = re.compile(r'^vllm:cache_config_info\{[^\n]*\benable_prefix_caching="(True|False)"', re.MULTILINE)
_MOST_LINES = 20_000  # of the engine's metrics, histograms too
_SHOWN = ("running", "waiting", "kv_usage")


def engine_of(models: Any, page: str, *, has_version: bool, has_server_info: bool) -> Engine | None:
    """Which engine it is: by its models' owner, else its metric names, else the routes only one of them has."""
    cards = models.get("data") if isinstance(models, dict) else None
    owners = [card.get("owned_by") for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []
    engines: tuple[Engine, Engine] = ("sglang", "vllm")
    for engine in engines:
        if engine in owners:
            return engine
    for engine in engines:
        if re.search(rf"^{engine}:", page, re.MULTILINE):
            return engine
    if has_server_info:
        return "sglang"
    return "vllm" if has_version else None


def load_names(page: str) -> tuple[str, ...]:
    """Metric names on the page from which the router reads running, waiting and KV use, in that order."""
    lines: dict[str, str] = {}
    for found in islice(_NAME.finditer(page), _MOST_LINES):
        end = page.find("\n", found.start())
        lines.setdefault(found[1], page[found.start() : end if end >= 0 else len(page)])
    by_field: dict[str, list[str]] = {}
    for name, line in lines.items():
        for load in loads_of(line + "\n").values():
            for field in _SHOWN:
                if getattr(load, field) is not None:
                    by_field.setdefault(field, []).append(name)
    return tuple(name for field in _SHOWN for name in by_field.get(field, ()))


def prefix_caching(page: str) -> bool | None:
    """Whether vLLM's page says that prefix caching is on; None when it does not say."""
    found = _CACHING.search(page)
    return None if found is None else found[1] == "True"


def counters_moved(before: Load, after: Load) -> bool | None:
    """Whether any counter that every request moves has moved; None where there is none to compare."""
    pairs = [(getattr(before, name), getattr(after, name)) for name in ("prefix_queries", "prefill_tokens")]
    known = [(one, other) for one, other in pairs if one is not None and other is not None]
    return any(one != other for one, other in known) if known else None


def version_in(version: Any, info: Any, loads: Any) -> str | None:
    """Version from vLLM's /version, or SGLang's /server_info or /v1/loads."""
    for answer in (version, info, loads):
        said = answer.get("version") if isinstance(answer, dict) else None
        if isinstance(said, str) and said:
            return said
    return None


def page_size_in(info: Any) -> int | None:
    """Tokens per block as SGLang's /server_info gives them: of its events, else its page size."""
    if not isinstance(info, dict):
        return None
    events = info.get("kv_events")
    for where, name in ((events, "block_size"), (info, "page_size")):
        size = where.get(name) if isinstance(where, dict) else None
        if type(size) is int and 0 < size <= LARGEST_BLOCK:
            return size
    return None


def said_addresses(answer: Any) -> dict[int, str]:
    """Rank -> event address exactly as vLLM's /kv_event_sources says it."""
    if not isinstance(answer, Mapping):
        return {}
    return {
        int(rank): entry["endpoint"]
        for rank, entry in answer.items()
        if is_rank(rank) and isinstance(entry, dict) and isinstance(entry.get("endpoint"), str)
    }


def cached_tokens_in(answer: Any) -> int | None:
    """`usage.prompt_tokens_details.cached_tokens` of a completion; None when it is absent or null."""
    found = answer
    for name in ("usage", "prompt_tokens_details", "cached_tokens"):
        found = found.get(name) if isinstance(found, dict) else None
    return found if type(found) is int and found >= 0 else None

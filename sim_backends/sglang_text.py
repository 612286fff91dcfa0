"""What an SGLang server says of itself: metrics, loads, server information.

Blind to  figures the engine does not keep: tokens that wait uncached, evictable pages, prefill time. They are left
          out, as a field is that a release does not have; throughput is the mean since the start
Source    recorded pages and answers of SGLang 0.5.23; releases in which a name appeared
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from sim_backends.engine import Engine
from sim_backends.event_wire import Version
from sim_backends.metrics_text import About, Load, Page, first_token, process_start
from sim_backends.publisher import ReplayingPublisher

_FIRST_PAGE_FIGURES: Version = (0, 5, 12)
_FIRST_KV_EVENTS_INFO: Version = (0, 5, 13)
_FIRST_REPLAY_INFO: Version = (0, 5, 22)


def metrics(engine: Engine, about: About, load: Load | None) -> str:
    """The whole `/metrics` page (--enable-metrics); `load` None leaves its figures out."""
    page = Page({
        "dp_rank": "0", "engine_type": "unified", "model_name": about.model,
        "moe_ep_rank": "0", "pp_rank": "0", "tp_rank": "0",
    })  # fmt: skip
    settings = engine.settings
    total = settings.kv_blocks * settings.block_tokens
    if load is not None:
        _load(page, load, total_tokens=total, newer=about.generation.version >= _FIRST_PAGE_FIGURES)
    page.gauge("sglang:cache_hit_rate", "Cached share of prompt tokens.", _hit_rate(engine))
    page.gauge("sglang:max_total_num_tokens", "Tokens the KV cache holds.", total)
    if about.generation.version >= _FIRST_PAGE_FIGURES:
        page.gauge("sglang:page_size", "Tokens in a page.", settings.block_tokens)
        page.gauge("sglang:num_pages", "Pages of the KV cache.", settings.kv_blocks)
        page.gauge("sglang:context_len", "Longest sequence, tokens.", engine.max_model_len)
    requests = Page({"engine_type": "unified", "model_name": about.model})
    _requests(requests, engine)
    return page.text() + requests.text() + process_start(about.started_s)


def _load(page: Page, load: Load, *, total_tokens: int, newer: bool) -> None:
    page.gauge("sglang:num_running_reqs", "Running requests.", load.running)
    page.gauge("sglang:num_queue_reqs", "Waiting requests.", load.waiting)
    page.gauge("sglang:token_usage", "KV cache in use, 0 to 1.", load.used_share)
    page.gauge("sglang:num_used_tokens", "KV cache in use, tokens.", round(load.used_share * total_tokens))
    if newer:
        page.gauge("sglang:kv_used_tokens", "KV cache in use, tokens.", round(load.used_share * total_tokens))


def _requests(page: Page, engine: Engine) -> None:
    seen = engine.counters
    page.counter("sglang:prompt_tokens_total", "Prompt tokens.", seen.prompt)
    page.counter("sglang:generation_tokens_total", "Generated tokens.", seen.generation)
    page.family("sglang:cached_tokens_total", "counter", "Cached prompt tokens.")
    page.sample("sglang:cached_tokens_total", seen.prefix_hits, cache_source="device")
    page.sample("sglang:cached_tokens_total", seen.external_hits, cache_source="storage")
    page.counter("sglang:num_requests_total", "Finished requests.", sum(seen.finished.values()))
    first_token(page, engine, "sglang:time_to_first_token_seconds")


def _hit_rate(engine: Engine) -> float:
    seen = engine.counters
    return seen.prefix_hits / seen.prefix_queries if seen.prefix_queries else 0.0


def loads(engine: Engine, about: About, load: Load | None, *, now_s: float) -> dict[str, Any]:
    """The answer of /v1/loads at Unix time `now_s`."""
    settings = engine.settings
    total = settings.kv_blocks * settings.block_tokens
    row: dict[str, Any] = {"timestamp": now_s, "dp_rank": 0}
    if load is not None:
        used = round(load.used_share * total)
        row |= {
            "num_running_reqs": round(load.running),
            "num_waiting_reqs": round(load.waiting),
            "num_used_tokens": used,
            "num_active_tokens": used,
            "token_usage": load.used_share,
        }
    row |= {
        "max_total_num_tokens": total,
        "max_running_requests": settings.max_running,
        "gen_throughput": engine.counters.generation / max(now_s - about.started_s, 1.0),
        "cache_hit_rate": _hit_rate(engine),
        "total_prefill_uncached_tokens": engine.counters.computed,
    }
    return {
        "timestamp": datetime.fromtimestamp(now_s, UTC).isoformat(),
        "version": about.generation.release,
        "accelerator": "simulated",
        "num_accelerators": 1,
        "loads": [row],
    }


def legacy_loads(engine: Engine, load: Load | None) -> list[dict[str, Any]]:
    """The answer of /get_load, whose num_reqs are all that run or wait."""
    row: dict[str, Any] = {"dp_rank": 0}
    if load is not None:
        row["num_reqs"] = round(load.running) + round(load.waiting)
        row["num_waiting_reqs"] = round(load.waiting)
        row["num_tokens"] = round(load.used_share * engine.settings.kv_blocks * engine.settings.block_tokens)
    return [row]


def server_info(engine: Engine, about: About, publisher: ReplayingPublisher | None) -> dict[str, Any]:
    """The answer of /server_info; `kv_events` is null when events are off."""
    info: dict[str, Any] = {
        "model_path": about.model,
        "served_model_name": about.model,
        "page_size": engine.settings.block_tokens,
        "dp_size": 1,
        "max_total_num_tokens": engine.settings.kv_blocks * engine.settings.block_tokens,
        "version": about.generation.release,
    }
    if about.generation.version >= _FIRST_KV_EVENTS_INFO:
        info["kv_events"] = None if publisher is None else _kv_events(engine, about, publisher)
    return info


def _kv_events(engine: Engine, about: About, publisher: ReplayingPublisher) -> dict[str, Any]:
    address = urlsplit(publisher.address)
    said: dict[str, Any] = {
        "publisher": "zmq",
        "endpoint_host": address.hostname,
        "endpoint_port_base": address.port,
        "topic": publisher.topic,
        "block_size": engine.settings.block_tokens,
        "dp_size": 1,
    }
    if about.generation.version >= _FIRST_REPLAY_INFO:
        said["replay_endpoint_port_base"] = urlsplit(publisher.replay_address).port
    return said

"""Load of each engine rank, read from one scrape of its /metrics.

Model     running, waiting and KV use by the names of vLLM (old and new) and SGLang, one `Load` per rank label
Valid     Prometheus text format; several series of one rank (priorities, tensor ranks) count as one
Blind to  histograms and everything else on the page: only lines with a wanted name are looked at
Source    recorded scrapes in tests/vectors

Unknown is not zero: what is absent, not a number or out of range stays None and counts as an anomaly where
it was present.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class Load:
    """What one engine rank, or the sum over ranks, said. None is unknown.

    running, waiting : requests in execution and queued, >= 0
    kv_usage : share of KV blocks held by live requests, 0..1 (cached but idle blocks count as free)
    block_size : tokens per KV block
    num_gpu_blocks : KV blocks in device memory
    used_tokens, max_tokens : tokens of KV in use and at most (SGLang)
    prefix_queries, prefix_hits : tokens asked of and found in the prefix cache since the start
    cache_hit_rate : recent share of cached prompt tokens, 0..1 (SGLang)
    started_s : Unix time at which the process started; a change means an empty cache
    asleep : whether the engine has released its memory
    anomalies : samples of wanted names that could not be used
    """

    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    block_size: int | None = None
    num_gpu_blocks: int | None = None
    used_tokens: float | None = None
    max_tokens: float | None = None
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    cache_hit_rate: float | None = None
    started_s: float | None = None
    asleep: bool | None = None
    anomalies: int = 0


# Of two names for one field the first that is present counts, so new names stand before old ones.
_GAUGES: dict[str, tuple[str, ...]] = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
    "prefix_queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    "used_tokens": ("sglang:num_used_tokens",),
    "max_tokens": ("sglang:max_total_num_tokens",),
    "cache_hit_rate": ("sglang:cache_hit_rate",),
    "block_size": ("sglang:page_size",),
    "num_gpu_blocks": ("sglang:num_pages",),
}
_SHARES = frozenset({"kv_usage", "cache_hit_rate"})
_WHOLE = frozenset({"block_size", "num_gpu_blocks"})
_SUMMED = ("running", "waiting", "num_gpu_blocks", "used_tokens", "max_tokens", "prefix_queries", "prefix_hits")
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')

Labels = dict[str, str]


def load_of(text: str, rank: str | None = None) -> Load:
    """Load of one rank, or of all ranks together: counts summed, shares averaged, unknown if any is unknown.

    A rank the page does not name gives a `Load` in which everything is unknown.
    """
    ranks = loads_of(text)
    if rank is not None:
        return ranks.get(rank, Load())
    return next(iter(ranks.values())) if len(ranks) == 1 else _together(list(ranks.values()))


def loads_of(text: str) -> dict[str, Load]:
    """Every rank on the page, by its label (`engine` of vLLM, `dp_rank` of SGLang; "0" without one)."""
    page = "\n" + text
    loads: dict[str, Load] = {}
    for field, names in _GAUGES.items():
        for name in names:
            _read_gauge(page, name, field, loads)
    for labels, _ in _samples(page, "vllm:cache_config_info"):
        load = loads.setdefault(_rank(labels), Load())
        load.block_size = _integer(labels.get("block_size"))
        load.num_gpu_blocks = _integer(labels.get("num_gpu_blocks"))
    for labels, value in _samples(page, "vllm:engine_sleep_state"):
        if labels.get("sleep_state") == "awake" and value is not None:
            loads.setdefault(_rank(labels), Load()).asleep = value == 0.0
    started_s = next((value for _, value in _samples(page, "process_start_time_seconds")), None)
    for load in loads.values():
        load.started_s = started_s
    return loads


def _read_gauge(page: str, name: str, field: str, loads: dict[str, Load]) -> None:
    fresh: dict[str, float] = {}
    for labels, value in _samples(page, name):
        if labels.get("priority"):  # the total stands under the empty priority
            continue
        rank = _rank(labels)
        load = loads.setdefault(rank, Load())
        if value is None or value < 0 or (field in _SHARES and value > 1.0):
            load.anomalies += 1
        elif getattr(load, field) is None:
            fresh[rank] = max(value, fresh.get(rank, 0.0))
    for rank, value in fresh.items():
        setattr(loads[rank], field, int(value) if field in _WHOLE else value)


def _samples(page: str, name: str) -> Iterator[tuple[Labels, float | None]]:
    """Samples of exactly this name; the value is None where it is not a finite number."""
    needle = "\n" + name
    at = page.find(needle)
    while at >= 0:
        start = at + len(needle)
        end = page.find("\n", start)
        rest = page[start : end if end >= 0 else len(page)]
        if rest[:1] in ("{", " ", "\t"):
            labels, _, tail = rest.rpartition("}")
            yield dict(_LABEL.findall(labels)), _finite(tail)
        at = page.find(needle, start)


def _finite(tail: str) -> float | None:
    try:
        value = float(tail.split()[0])  # a timestamp may follow
    except (ValueError, IndexError):
        return None
    return value if math.isfinite(value) else None


def _rank(labels: Labels) -> str:
    return labels.get("engine") or labels.get("dp_rank") or "0"


def _integer(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and len(text) < 16 else None


def _together(loads: list[Load]) -> Load:
    total = Load(anomalies=sum(load.anomalies for load in loads))
    if not loads:
        return total
    for name in _SUMMED:
        setattr(total, name, _merged((getattr(load, name) for load in loads), sum))
    for name in _SHARES:
        setattr(total, name, _merged((getattr(load, name) for load in loads), lambda values: sum(values) / len(values)))
    total.block_size = loads[0].block_size if len({load.block_size for load in loads}) == 1 else None
    total.started_s = loads[0].started_s
    sleeping = [load.asleep for load in loads]
    total.asleep = None if None in sleeping else all(sleeping)
    return total


def _merged(values: Iterable[float | None], merge: Callable[[list[float]], float]) -> float | None:
    """One rank unknown makes the whole unknown: the known part alone would look like a small load."""
    listed = list(values)
    known = [value for value in listed if value is not None]
    return merge(known) if listed and len(known) == len(listed) else None

"""One engine's `/metrics` text under the names vLLM 0.33 uses, and in older releases those before them.

Source    recorded pages of vLLM 0.9.2 and 0.33
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sim_backends.engine import Engine
from sim_backends.generations import Generation
from sim_backends.requests import FIRST_TOKEN_BOUNDS_S

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LAST_GPU_NAMES = (0, 11, 2)  # until then cache metrics also stood under names with `gpu_`


@dataclass(frozen=True, slots=True)
class Load:
    """What a page says of the moment. used_share : KV cache held by live requests, 0..1 unless told wrong."""

    running: float
    waiting: float
    used_share: float

    @classmethod
    def of(cls, engine: Engine, *, factor: float = 1.0) -> Load:
        """The engine's load, told `factor` times too high."""
        return cls(engine.running * factor, engine.waiting * factor, engine.cache.used_share * factor)


@dataclass(frozen=True, slots=True)
class About:
    """What a page says of its server. started_s : Unix time; memory_share : told as gpu_memory_utilization."""

    model: str
    generation: Generation
    started_s: float
    memory_share: float


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{_escape(value)}"' for name, value in sorted(labels.items()))


class Page:
    """Lines of the exposition format; every series carries the engine's labels."""

    def __init__(self, base: Mapping[str, str]) -> None:
        self._base = dict(base)
        self._lines: list[str] = []

    def family(self, name: str, kind: str, help_text: str) -> None:
        self._lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]

    def sample(self, name: str, value: float, **labels: str) -> None:
        self._lines.append(f"{name}{{{_labels({**self._base, **labels})}}} {float(value)!r}")

    def gauge(self, name: str, help_text: str, value: float) -> None:
        self.family(name, "gauge", help_text)
        self.sample(name, value)

    def counter(self, name: str, help_text: str, value: float) -> None:
        self.family(name, "counter", help_text)
        self.sample(name, value)

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"


def render(engine: Engine, about: About, load: Load | None, *, rank: int = 0) -> str:
    """The whole page of one data-parallel rank; `load` None leaves its figures out."""
    page = Page({"engine": str(rank), "model_name": about.model})
    old_names = about.generation.version <= _LAST_GPU_NAMES
    if load is not None:
        _load(page, load, old_names=old_names)
    _tokens(page, engine, old_names=old_names)
    _requests(page, engine)
    first_token(page, engine, "vllm:time_to_first_token_seconds")
    _cache_config(page, engine, about.memory_share)
    return page.text() + process_start(about.started_s)


def process_start(started_s: float) -> str:
    return (
        "# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.\n"
        "# TYPE process_start_time_seconds gauge\n"
        f"process_start_time_seconds {started_s!r}\n"
    )


def _load(page: Page, load: Load, *, old_names: bool) -> None:
    page.gauge("vllm:num_requests_running", "Running requests.", load.running)
    page.gauge("vllm:num_requests_waiting", "Waiting requests.", load.waiting)
    for prefix in ("gpu", "kv") if old_names else ("kv",):
        page.gauge(f"vllm:{prefix}_cache_usage_perc", "KV cache in use, 0 to 1.", load.used_share)


def _tokens(page: Page, engine: Engine, *, old_names: bool) -> None:
    seen = engine.counters
    for prefix in ("gpu_", "") if old_names else ("",):
        page.counter(f"vllm:{prefix}prefix_cache_queries_total", "Prefix cache lookups, tokens.", seen.prefix_queries)
        page.counter(f"vllm:{prefix}prefix_cache_hits_total", "Prefix cache hits, tokens.", seen.prefix_hits)
    page.counter("vllm:external_prefix_cache_queries_total", "Store lookups, tokens.", seen.external_queries)
    page.counter("vllm:external_prefix_cache_hits_total", "Store hits, tokens.", seen.external_hits)
    page.counter("vllm:prompt_tokens_total", "Prompt tokens of requests with a first token.", seen.prompt)
    name = "vllm:prompt_tokens_by_source_total"
    page.family(name, "counter", "Prompt tokens by source.")
    for source, value in (
        ("local_compute", seen.computed),
        ("local_cache_hit", seen.prefix_hits),
        ("external_kv_transfer", seen.external_hits),
    ):
        page.sample(name, value, source=source)
    page.counter("vllm:prompt_tokens_cached_total", "Cached prompt tokens.", seen.prefix_hits + seen.external_hits)
    page.counter("vllm:generation_tokens_total", "Generated tokens.", seen.generation)


def _requests(page: Page, engine: Engine) -> None:
    page.counter("vllm:num_preemptions_total", "Preemptions.", engine.counters.preemptions)
    page.family("vllm:request_success_total", "counter", "Finished requests.")
    for reason, value in engine.counters.finished.items():
        page.sample("vllm:request_success_total", value, finished_reason=reason)


def first_token(page: Page, engine: Engine, name: str) -> None:
    page.family(name, "histogram", "Time to first token, from arrival at the engine.")
    below = 0
    counts = engine.counters.first_token_buckets
    for bound, count in zip([*map(str, map(float, FIRST_TOKEN_BOUNDS_S)), "+Inf"], counts, strict=True):
        below += count
        page.sample(f"{name}_bucket", below, le=bound)
    page.sample(f"{name}_count", below)
    page.sample(f"{name}_sum", engine.counters.first_token_sum_s)


def _cache_config(page: Page, engine: Engine, memory_share: float) -> None:
    settings = engine.settings
    size = str(settings.block_tokens)
    page.family("vllm:cache_config_info", "gauge", "Cache configuration.")
    page.sample(
        "vllm:cache_config_info",
        1.0,
        block_size=size,
        cache_dtype="auto",
        effective_attention_block_size=size,
        enable_prefix_caching="True",
        gpu_memory_utilization=str(memory_share),
        hash_block_size=size,
        kv_cache_size_tokens=str(settings.kv_blocks * settings.block_tokens),
        num_cpu_blocks="None",
        num_gpu_blocks=str(settings.kv_blocks),
        prefix_caching_hash_algo="sha256_cbor",
    )

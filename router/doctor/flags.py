"""The exact engine flag for each thing that can be missing.

Source    command lines of released vLLM 0.9.2 to 0.33.0 and SGLang 0.5.6 to 0.5.23
"""

from __future__ import annotations

from router.doctor.facts import Engine

EVENTS: dict[Engine, str] = {
    "vllm": '--kv-events-config \'{"enable_kv_cache_events":true,"publisher":"zmq",'
    '"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}\'',
    "sglang": '--kv-events-config \'{"publisher":"zmq","endpoint":"tcp://*:5557",'
    '"replay_endpoint":"tcp://*:5657"}\' --page-size 16',
}
REPLAY = '"replay_endpoint":"tcp://*:5657" in --kv-events-config'
BIND = '"endpoint":"tcp://*:5557" in --kv-events-config'
CACHED_TOKENS: dict[Engine, str] = {
    "vllm": "--enable-prompt-tokens-details",
    "sglang": "--enable-cache-report",
}
CACHING: dict[Engine, str] = {
    "vllm": "--enable-prefix-caching (and no --no-enable-prefix-caching)",
    "sglang": "start it without --disable-radix-cache",
}
LOAD: dict[Engine, str] = {"vllm": "start it without --disable-log-stats", "sglang": "--enable-metrics"}
PAIRS = "start it without --speculative-algorithm EAGLE"
RANKS: dict[Engine, str] = {"vllm": "vLLM 0.11.2 or newer", "sglang": "SGLang 0.5.12 or newer"}
LOAD_SOCKET = "--load-publish-endpoint auto"


def of(table: dict[Engine, str], engine: Engine | None) -> str:
    """The flag of one engine, or of each where it is not known which one it is."""
    if engine is not None:
        return table[engine]
    return f"vLLM: {table['vllm']}; SGLang: {table['sglang']}"

"""What one engine rank says of its load, whichever way it says it, and how several ranks make one.

Model     counts of ranks are summed, shares averaged; one rank unknown makes the whole unknown, since the known part
          alone would look like a small load
Valid     numbers that are not negative and below 1e300, shares up to 1; everything else is unknown and counted
Source    vLLM and SGLang metrics and load answers
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any


@dataclass(slots=True)
class Load:
    """What one engine rank, or the sum over ranks, said. None is unknown, never zero.

    running, waiting : requests in execution and queued, >= 0
    waiting_tokens : prompt tokens of queued requests still to be computed (SGLang)
    kv_usage : share of KV blocks held by live requests, 0..1 (cached but idle blocks count as free)
    block_size : tokens per KV block, 1 to `LARGEST_BLOCK`
    num_gpu_blocks : KV blocks in device memory
    used_tokens, max_tokens : tokens of KV in use and at most (SGLang)
    max_running : requests in execution at most (SGLang)
    prefix_queries, prefix_hits : tokens asked of and found in the prefix cache since the start
    cache_hit_rate : recent share of cached prompt tokens, 0..1 (SGLang)
    prefill_tokens, prefill_busy_s : prompt tokens computed since the start, and the time that took (SGLang)
    prompt_tokens, generated_tokens : of all requests since the start; standing still while requests run, it is stuck
    started_s : Unix time at which the process started; a change means an empty cache
    asleep : whether the engine has released its memory
    anomalies : values of wanted names that could not be used
    """

    running: float | None = None
    waiting: float | None = None
    waiting_tokens: float | None = None
    kv_usage: float | None = None
    block_size: int | None = None
    num_gpu_blocks: int | None = None
    used_tokens: float | None = None
    max_tokens: float | None = None
    max_running: float | None = None
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    cache_hit_rate: float | None = None
    prefill_tokens: float | None = None
    prefill_busy_s: float | None = None
    prompt_tokens: float | None = None
    generated_tokens: float | None = None
    started_s: float | None = None
    asleep: bool | None = None
    anomalies: int = 0

    def says_something(self) -> bool:
        """Whether there is load in it, and not only facts about the process."""
        return self.running is not None or self.waiting is not None or self.kv_usage is not None


NUMBERS = tuple(field.name for field in fields(Load) if field.name != "anomalies")
SHARES = frozenset({"kv_usage", "cache_hit_rate"})
LARGEST_BLOCK = 1 << 16  # tokens
_UNBELIEVABLE = 1e300  # so that infinity, and what becomes it, is none of the believable
_SUMMED = (
    "running",
    "waiting",
    "waiting_tokens",
    "num_gpu_blocks",
    "used_tokens",
    "max_tokens",
    "max_running",
    "prefix_queries",
    "prefix_hits",
    "prefill_tokens",
    "prefill_busy_s",
    "prompt_tokens",
    "generated_tokens",
)


def set_number(load: Load, name: str, value: Any, scale: float = 1.0) -> None:
    """Take in one value of an answer: absent (None) stays unknown, what cannot be a value of `name` is counted."""
    if value is None:
        return
    if is_usable(name, value):
        setattr(load, name, value * scale)
    else:
        load.anomalies += 1


def is_usable(name: str, value: Any) -> bool:
    """Whether `value` can be one of the field `name`. JSON has integers of any length, so nothing is made a float."""
    return type(value) in (int, float) and 0 <= value <= (1 if name in SHARES else _UNBELIEVABLE)


def pick(loads: Mapping[str, Load], rank: str | None) -> Load:
    """Load of one rank, or of all together. A rank nobody named is unknown in every field."""
    if rank is not None:
        return loads.get(rank, Load())
    return next(iter(loads.values())) if len(loads) == 1 else together(list(loads.values()))


def together(loads: Sequence[Load]) -> Load:
    """Counts summed, shares averaged, unknown if any is unknown."""
    total = Load(anomalies=sum(load.anomalies for load in loads))
    if not loads:
        return total
    for name in _SUMMED:
        setattr(total, name, _sum([getattr(load, name) for load in loads]))
    for name in SHARES:
        summed = _sum([getattr(load, name) for load in loads])
        setattr(total, name, None if summed is None else summed / len(loads))
    total.block_size = loads[0].block_size if len({load.block_size for load in loads}) == 1 else None
    total.started_s = loads[0].started_s
    sleeping = [load.asleep for load in loads]
    total.asleep = None if None in sleeping else all(sleeping)
    return total


def _sum(values: list[float | None]) -> float | None:
    total: float = 0  # stays an integer where all are
    for value in values:
        if value is None:
            return None
        total += value
    return total

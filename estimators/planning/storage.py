"""How long a tier keeps KV state, and whether writing state there pays.

Model     new state comes at a steady rate r and the oldest goes first: a tier of C bytes holds the last C / r seconds,
          so every reuse within T seconds hits where C >= r T
          writing once and reading k times against computing k times: T_write + k T_read < k T_compute
          a disk made for w whole writes a day takes w C / 86400 bytes per second, for as long as it is warranted
          a read ahead is hidden by the queue as far as the queue is long; host memory bounds how many are ahead
Valid     one replica and its part of each tier; rates of long transfers
Blind to  skew (a few blocks make most of the hits, and an order by use keeps those far longer than C / r), write
          amplification inside the disk, other users of a link
Source    AI Infra textbook, section 9.5.2; CachedAttention (USENIX ATC 2024) for reads ahead by the queue
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, inf

from estimators.ranges import require
from estimators.roofline import Roofline

SECONDS_PER_DAY = 86_400.0


@dataclass(frozen=True, slots=True)
class StorageTier:
    """One replica's part of a tier.

    capacity_bytes : > 0, inf for a pool that grows with the nodes
    read_bytes_per_s : of each link between it and the GPU, passed one after another; empty where it is the GPU's own
    """

    name: str
    capacity_bytes: float
    read_bytes_per_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        require(self.capacity_bytes > 0, "capacity_bytes", self.capacity_bytes)
        require(all(0 < rate < inf for rate in self.read_bytes_per_s), "read_bytes_per_s", self.read_bytes_per_s)

    def read_s(self, size_bytes: float) -> float:
        """Bringing `size_bytes` (>= 0) to the GPU, seconds."""
        require(0 <= size_bytes < inf, "size_bytes", size_bytes)
        return sum(size_bytes / rate for rate in self.read_bytes_per_s)


def kv_bytes_per_s(roofline: Roofline, *, prompt_tokens: float, cached_tokens: float = 0.0) -> float:
    """State that one replica makes while it prefills such prompts and nothing else, bytes/s.

    prompt_tokens : whole prompt, above cached_tokens by one at least; cached_tokens : >= 0, not computed again

    Reading a state faster than this beats computing it; a link slower than this never does.
    """
    new_tokens = prompt_tokens - cached_tokens
    seconds = roofline.prefill_s(new_tokens=new_tokens, cached_tokens=cached_tokens)
    return float(roofline.costs.kv_bytes_between(cached_tokens, prompt_tokens)) / seconds


def hold_s(*, capacity_bytes: float, kv_bytes_per_s: float) -> float:
    """Age of the oldest state a tier still has, seconds; inf while nothing new comes. Both >= 0."""
    require(capacity_bytes >= 0, "capacity_bytes", capacity_bytes)
    require(0 <= kv_bytes_per_s < inf, "kv_bytes_per_s", kv_bytes_per_s)
    return capacity_bytes / kv_bytes_per_s if kv_bytes_per_s > 0 else inf


def needed_bytes(*, reuse_after_s: float, kv_bytes_per_s: float) -> float:
    """Capacity at which state used again within `reuse_after_s` (>= 0) is still there, bytes."""
    require(0 <= reuse_after_s < inf, "reuse_after_s", reuse_after_s)
    require(0 <= kv_bytes_per_s < inf, "kv_bytes_per_s", kv_bytes_per_s)
    return reuse_after_s * kv_bytes_per_s


def filled_tiers(tiers: Sequence[StorageTier], *, wanted_bytes: float) -> list[float]:
    """Bytes of each tier taken when `wanted_bytes` (>= 0) fill the nearest first; less in sum where they do not fit."""
    require(0 <= wanted_bytes < inf, "wanted_bytes", wanted_bytes)
    taken, left = [], wanted_bytes
    for tier in tiers:
        part = min(left, tier.capacity_bytes)
        taken.append(part)
        left -= part
    return taken


@dataclass(frozen=True, slots=True)
class Saving:
    """Writing a state once and reading it for each reuse, against computing it each time. Seconds, >= 0."""

    write_s: float
    read_s: float
    compute_s: float

    def __post_init__(self) -> None:
        for name in ("write_s", "read_s", "compute_s"):
            require(0 <= getattr(self, name) < inf, name, getattr(self, name))

    def saved_s(self, reuses: int) -> float:
        """k T_compute - T_write - k T_read for `reuses` k >= 0; negative where writing was in vain."""
        require(reuses >= 0, "reuses", reuses)
        return reuses * (self.compute_s - self.read_s) - self.write_s

    @property
    def reuses_to_repay(self) -> float:
        """Fewest reuses that save time; inf where a read takes as long as computing."""
        gain_s = self.compute_s - self.read_s
        return floor(self.write_s / gain_s) + 1 if gain_s > 0 else inf


def saving_over(*, size_bytes: float, link_bytes_per_s: float, compute_s: float) -> Saving:
    """Writing and reading `size_bytes` over one link of that rate (> 0)."""
    require(0 < link_bytes_per_s < inf, "link_bytes_per_s", link_bytes_per_s)
    return Saving(size_bytes / link_bytes_per_s, size_bytes / link_bytes_per_s, compute_s)


def rate_to_repay_bytes_per_s(*, size_bytes: float, compute_s: float, reuses: int) -> float:
    """Slowest link over which writing once and reading `reuses` (>= 1) times is no slower than computing, bytes/s.

    V / B + k V / B = k T gives B = (1 + 1 / k) V / T: twice the rate of computing for one reuse, once it for many.
    """
    require(reuses >= 1, "reuses", reuses)
    require(0 < compute_s < inf, "compute_s", compute_s)
    require(0 <= size_bytes < inf, "size_bytes", size_bytes)
    return (1.0 + 1.0 / reuses) * size_bytes / compute_s


@dataclass(frozen=True, slots=True)
class Endurance:
    """What a disk is made to take. capacity_bytes, writes_per_day (whole capacity), years : all > 0"""

    capacity_bytes: float
    writes_per_day: float
    years: float

    def __post_init__(self) -> None:
        for name in ("capacity_bytes", "writes_per_day", "years"):
            require(0 < getattr(self, name) < inf, name, getattr(self, name))

    @property
    def bytes_per_s(self) -> float:
        """Writes it can take for all of its years."""
        return self.capacity_bytes * self.writes_per_day / SECONDS_PER_DAY

    def admitted_share(self, kv_bytes_per_s: float) -> float:
        """Share of new state it can take in the long run, 0..1; kv_bytes_per_s > 0."""
        require(0 < kv_bytes_per_s < inf, "kv_bytes_per_s", kv_bytes_per_s)
        return min(1.0, self.bytes_per_s / kv_bytes_per_s)

    def worn_out_after_days(self, kv_bytes_per_s: float) -> float:
        """Days until its writes are used up at this rate (> 0)."""
        require(0 < kv_bytes_per_s < inf, "kv_bytes_per_s", kv_bytes_per_s)
        return self.years * 365.0 * self.bytes_per_s / kv_bytes_per_s


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """State moved from disk to host memory while its request queues.

    depth : requests at the head of the queue whose states host memory has room for
    hidden_s, exposed_s : parts of the read that the queue hides and that the request waits for
    """

    depth: int
    hidden_s: float
    exposed_s: float


def read_ahead(*, host_bytes: float, state_bytes: float, read_s: float, queue_s: float) -> ReadAhead:
    """How many requests to read ahead for, and what one that queues for `queue_s` (>= 0) gains.

    host_bytes >= 0; state_bytes > 0 of one request; read_s >= 0, disk to host
    """
    require(0 <= host_bytes < inf, "host_bytes", host_bytes)
    require(0 < state_bytes < inf, "state_bytes", state_bytes)
    require(0 <= read_s < inf, "read_s", read_s)
    require(0 <= queue_s < inf, "queue_s", queue_s)
    hidden_s = min(queue_s, read_s)
    return ReadAhead(depth=floor(host_bytes / state_bytes), hidden_s=hidden_s, exposed_s=read_s - hidden_s)


def remote_reads_bytes_per_s(*, state_bytes: float, reads: int, within_s: float) -> float:
    """What a link must carry when a state that never becomes local is read `reads` times in `within_s` (> 0)."""
    require(0 <= state_bytes < inf, "state_bytes", state_bytes)
    require(reads >= 0, "reads", reads)
    require(0 < within_s < inf, "within_s", within_s)
    return state_bytes * reads / within_s

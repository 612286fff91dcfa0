"""How long it takes to bring KV bytes over one or more links.

Model     each stage costs its fixed start plus bytes over rate, stages follow one another (the whole object
          reaches host memory before the host link starts); bytes already promised on a shared link go first
Valid     rate > 0; promised bytes drain at the link's rate
Blind to  fair sharing: a late small fetch may overtake, so under contention this is late by at most the
          bytes promised at the moment of booking
Source    AI Infra textbook, section 9.5.4, example 9.7: 10 ms look-up, 1.125 GiB over the network, then over PCIe
"""

from __future__ import annotations

from dataclasses import dataclass

from estimators.ranges import require


@dataclass(slots=True)
class Link:
    """One link, shared by every replica whose fetches cross it.

    bytes_per_s : payload rate, > 0
    start_s : fixed time before the first byte (look-up, set-up), >= 0
    free_at_s : moment at which everything promised so far will have crossed, on the caller's clock
    """

    bytes_per_s: float
    start_s: float = 0.0
    free_at_s: float = 0.0

    def __post_init__(self) -> None:
        require(0 < self.bytes_per_s < float("inf"), "bytes_per_s", self.bytes_per_s)
        require(0 <= self.start_s < float("inf"), "start_s", self.start_s)

    def wait_s(self, now_s: float) -> float:
        """Time until the bytes promised so far have crossed, >= 0."""
        return max(0.0, self.free_at_s - now_s)

    def promise(self, size_bytes: float, now_s: float) -> None:
        """Book `size_bytes` (>= 0) behind what is promised already."""
        require(0 <= size_bytes < float("inf"), "size_bytes", size_bytes)
        self.free_at_s = max(self.free_at_s, now_s) + size_bytes / self.bytes_per_s

    def take_back(self, size_bytes: float) -> None:
        """Undo a promise of `size_bytes` (>= 0) that have not crossed yet and will not come."""
        require(0 <= size_bytes < float("inf"), "size_bytes", size_bytes)
        self.free_at_s -= size_bytes / self.bytes_per_s


def fetch_s(size_bytes: float, *stages: Link, now_s: float = 0.0) -> float:
    """Duration of a fetch that starts at `now_s` and crosses `stages` one after the other, seconds.

    Nothing to fetch takes no time. The wait on a later stage counts from the moment the bytes get there.

    >>> gib = 1024.0**3
    >>> round(fetch_s(1.125 * gib, Link(6.25e9, start_s=0.010), Link(25e9)), 4)
    0.2516
    """
    require(0 <= size_bytes < float("inf"), "size_bytes", size_bytes)
    if size_bytes == 0:
        return 0.0
    at_s = now_s
    for link in stages:
        at_s += link.start_s
        at_s += link.wait_s(at_s) + size_bytes / link.bytes_per_s
    return at_s - now_s

"""What measured rows mean: medians, ratios to nginx, and whether the targets are met.

Model     rows of one run only: a ratio of figures from two runs says more of the machine than of the proxies
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

OURS, NGINX = "tfirst", "nginx"

# Most that a measure of ours may be.
LIMITS = {
    "relay 64 B, us": 60.0,
    "relay 32 kB, us": 85.0,
    "relay 256 kB, us": 430.0,
    "decide 64 B, us": 100.0,
    "decide 32 kB, us": 170.0,
    "decide 256 kB, us": 500.0,
    "piece, us": 20.0,
    "added first byte, ms": 0.25,
    "idle, MiB": 80.0,
    "grown in the soak, MiB": 4.0,
    "health beside 1 MB, p99 ms": 20.0,
}
LEAST = {"of 5,000 open streams ended well": 5000.0}
BELOW_PEERS = ("relay", "decide", "piece")  # measures that must be under every peer's, by how they begin


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement. turn : of the round it was made in"""

    proxy: str
    measure: str
    turn: int
    value: float

    def as_values(self) -> dict[str, Any]:
        return asdict(self)


def medians(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Measure -> proxy -> median over the rounds, in the order they were made."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        found.setdefault(row.measure, {}).setdefault(row.proxy, []).append(row.value)
    return {
        measure: {proxy: median(values) for proxy, values in by_proxy.items()} for measure, by_proxy in found.items()
    }


def table(rows: Sequence[Row], only: Sequence[str] | None = None) -> str:
    """A line for each measure and proxy: the median, and its ratio to nginx where nginx did the same."""
    lines = []
    for measure, by_proxy in medians(rows).items():
        if only is not None and measure not in only:
            continue
        nginx = by_proxy.get(NGINX)
        for proxy, value in by_proxy.items():
            ratio = f"  {value / nginx:6.2f} x nginx" if nginx else ""
            lines.append(f"{measure:36} {proxy:28} {value:10.2f}{ratio}")
    return "\n".join(lines)


def failures(rows: Sequence[Row]) -> list[str]:
    """What is not as it should be, a sentence each."""
    wrong = []
    for measure, by_proxy in medians(rows).items():
        ours = {proxy: value for proxy, value in by_proxy.items() if proxy.startswith(OURS)}
        peers = {proxy: value for proxy, value in by_proxy.items() if proxy not in ours and proxy != NGINX}
        for proxy, value in ours.items():
            if value > LIMITS.get(measure, value):
                wrong.append(f"{measure}: {proxy} took {value:.4g}, more than {LIMITS[measure]:g}")
            if value < LEAST.get(measure, value):
                wrong.append(f"{measure}: {value:.6g} with {proxy}, less than {LEAST[measure]:g}")
            if measure.startswith(BELOW_PEERS):
                wrong += [
                    f"{measure}: {proxy} took {value:.4g}, and {peer} only {other:.4g}"
                    for peer, other in peers.items()
                    if other <= value
                ]
    return wrong

"""What the page costs the loop: of every request that ends, and of every second somebody watches.

Question  how long does it take on the loop to keep a request for the page, when it is placed and when it has ended, and
          to make one piece of news for those who watch?
Method    one decision of the router's own dispatcher, kept again and again as at 100 requests per second, of which some
          are kept whole; then the news
          a watcher gets in a second in which so many ended, of a fleet as /fleet shows it. Fastest of several rounds,
          garbage collection off. Making /fleet itself is not in it
Pass      3 microseconds a request; 15 ms of a second that somebody watches (1.5 % of the loop)
Blind to  sending: aiohttp writes some tens of kB a second to each watcher

    python -m loadtest.replay.bench_page
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec

from loadtest.replay.bench_receipts import a_decision, fastest
from router.page import Live, Page
from router.placing import Placement

KEEP_LIMIT_S, NEWS_LIMIT_S = 3e-6, 15e-3
WORDS = (
    f"What the page costs the loop: at most {1e6 * KEEP_LIMIT_S:.0f} microseconds a request,"
    f" {1e3 * NEWS_LIMIT_S:.0f} ms a second watched."
)
RATE = 100  # requests per second
CASES = (4, 16, 64)  # replicas


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds. keep_s : of a request; news_s : of a second watched; news_bytes : what each watcher is sent in it"""

    keep_s: float
    news_s: float
    news_bytes: int


def costs(replicas: int) -> Costs:
    """Of one size of fleet."""
    decision = a_decision(replicas, 64)
    receipts = [
        msgspec.structs.replace(decision.receipt, arrived_at=1000.0 + index / RATE) for index in range(100 * RATE)
    ]
    live, turns, placement = Live(), count(), decision.sent.placement
    assert isinstance(placement, Placement)

    def keep() -> None:
        receipt = receipts[next(turns) % len(receipts)]
        placement.receipt = receipt
        live.placed(decision.sent)
        live.ended(receipt, decision.notes)

    keep_s = fastest(keep)
    for receipt in receipts:
        live.ended(receipt, decision.notes)
    clock = count()
    fleet = shown(replicas)
    page = Page(live, lambda: fleet, can_edit=True, clock=lambda: float(next(clock)))

    def news() -> bytes:
        return msgspec.json.encode(page._news(live.changes - RATE))

    return Costs(keep_s, fastest(news, calls=20), len(news()))


def shown(replicas: int) -> dict[str, Any]:
    """A fleet as /fleet shows it, as far as the page reads it."""
    health = {"state": "closed", "trouble": None, "share": 1.0}
    numbers = {"booked": 12, "decoding": 9, "prefill_ahead_s": 1.234567, "foreign_waiting": 0.0, "signal_age_s": 0.2345}
    words = {
        "card": "A100",
        "role": "both",
        "up": True,
        "drained": False,
        "health": health,
        "calibration": "calibrated",
    }
    rest = {**numbers, **words, "kv_used_share": 0.4567, "cache_is_guessed": False}
    names = [f"replica-{row}" for row in range(replicas)]
    sources = [{"name": name, "state": "live", "carrier": "zmq", "age_s": 0.1234} for name in names]
    return {
        "policy": "e2e",
        "in_flight": 12 * replicas,
        "queued": {},
        "replicas": [{"name": name, **rest} for name in names],
        "event_sources": sources,
        "experiment": None,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; status 1 when the page costs more than it may."""
    argparse.ArgumentParser(prog="python -m loadtest.replay.bench_page", description=WORDS).parse_args(argv)
    print(f"{'replicas':>8} {'a request':>10} {'a second watched':>17} {'sent':>8}")
    passed = True
    for replicas in CASES:
        found = costs(replicas)
        passed &= found.keep_s <= KEEP_LIMIT_S and found.news_s <= NEWS_LIMIT_S
        keep_us, news_ms = 1e6 * found.keep_s, 1e3 * found.news_s
        print(f"{replicas:>8} {keep_us:>7.2f} us {news_ms:>14.2f} ms {found.news_bytes / 1e3:>5.0f} kB")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())

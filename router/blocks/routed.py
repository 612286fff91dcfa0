"""What a replica without cache events probably holds, from what was sent to it.

Model     the blocks of the prompts sent there, least recently used first out, the tail of a prompt before its head, as
          many as the engine has blocks
Valid     engines that keep prefixes and evict by last use; without a known capacity nothing is believed for long
Blind to  generated tokens, other routers' requests, restarts nobody reports, blocks in use
Errors    both ways: this is a guess, and `Match.approximate` says so
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Sequence

from estimators.tiers import Tier
from router.blocks.ledger import Ledger
from router.signals.claims import Applied, Claims


class Routed:
    """One replica. Its blocks are in the ledger under their own hashes.

    Parameters
    ----------
    capacity : blocks the replica keeps, >= 1
    """

    def __init__(self, ledger: Ledger, claims: Claims, *, capacity: int) -> None:
        self.claims = claims
        self._ledger = ledger
        self._capacity = capacity
        self._by_use: OrderedDict[int, int] = OrderedDict()  # least recently used first, and what each takes
        self._taken = 0  # by all of them

    def sent(self, hashes: Sequence[int], now_s: float, done: Applied, *, each: int = 1) -> None:
        """A prompt with this chain was sent at `now_s`. each : blocks of the engine that one of the chain stands for"""
        self.claims.last_event_s = now_s
        by_use = self._by_use
        kept = hashes[: self._capacity // each]
        had = bisect_left(kept, True, key=lambda block: block not in by_use)  # no block stays longer than those before
        again, fresh = kept[:had], kept[had:]
        before = len(by_use)
        all_held = self.claims.held == before  # else the ledger had to make room, and had some of these go
        by_use.update(dict.fromkeys(fresh, each))
        self._taken += each * (len(by_use) - before)
        deque(map(by_use.move_to_end, reversed(kept)), maxlen=0)  # the tail goes first, as engines free it
        self._evict(done)
        if again and all_held:
            self._ledger.books.touch(self.claims, again)
        for blocks in (fresh, () if all_held else again):
            if blocks:
                self._ledger.hold(Tier.HBM, [(self.claims, dict(zip(blocks, blocks, strict=True)), 0)], done)

    def resize(self, capacity: int, done: Applied) -> None:
        """The engine said how many blocks it has, >= 1."""
        self._capacity = capacity
        self._evict(done)

    def clear(self) -> None:
        """The replica restarted or emptied its cache."""
        self._ledger.empty(self.claims)
        self._by_use.clear()
        self._taken = 0

    def _evict(self, done: Applied) -> None:
        gone = []
        while self._taken > self._capacity:
            block, each = self._by_use.popitem(last=False)
            self._taken -= each
            gone.append(block)
        if gone:
            self._ledger.release(Tier.HBM, [(self.claims, gone)], done)

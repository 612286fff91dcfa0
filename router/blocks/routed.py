"""What a replica without cache events probably holds, from what was sent to it.

Model     the blocks of the prompts sent there, least recently used first out, the tail of a prompt before its head, as
          many as the engine has blocks
Valid     engines that keep prefixes and evict by last use; without a known capacity nothing is believed for long
Blind to  generated tokens, other routers' requests, restarts nobody reports, blocks in use
Errors    both ways: this is a guess, and `Match.approximate` says so
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

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
        self._by_use: dict[int, None] = {}  # least recently used first

    def sent(self, hashes: Sequence[int], now_s: float, done: Applied) -> None:
        """A prompt with this chain was sent at `now_s`."""
        self.claims.last_event_s = now_s
        by_use = self._by_use
        kept = hashes[: self._capacity]
        for block in reversed(kept):  # the tail goes first, as engines free it
            by_use.pop(block, None)
            by_use[block] = None
        self._evict(done)
        self._ledger.hold(Tier.HBM, [(self.claims, {block: block for block in kept}, 0)], done)

    def resize(self, capacity: int, done: Applied) -> None:
        """The engine said how many blocks it has, >= 1."""
        self._capacity = capacity
        self._evict(done)

    def clear(self) -> None:
        """The replica restarted or emptied its cache."""
        self.claims.clear()
        self._by_use.clear()

    def _evict(self, done: Applied) -> None:
        excess = len(self._by_use) - self._capacity
        if excess > 0:
            gone = list(islice(self._by_use, excess))
            for block in gone:
                del self._by_use[block]
            self._ledger.release(Tier.HBM, [(self.claims, gone)], done)

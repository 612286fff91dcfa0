"""All publishers' claims: in dictionaries while they are few, in tables when they are many, within limits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from estimators.tiers import Tier
from router.blocks.in_dicts import InDicts
from router.blocks.in_tables import InTables
from router.signals.claims import Applied, Books, Claims, Told

_FEW = 1 << 16  # keys from which tables are worth it: there the dictionaries have some 15 MB
_MAX_OWNERS = 1 << 16


class Ledger:
    """Claims of all publishers, and the index kept in step with them.

    Parameters
    ----------
    holders : holders there can be in the index, >= 1
    cap : keys kept over all publishers, >= 1; the oldest go first
    """

    def __init__(self, holders: int, *, cap: int) -> None:
        self._holders = holders
        self._cap = cap
        self._claims: dict[int, Claims] = {}  # by owner
        self.books: Books = InDicts(holders)

    def __len__(self) -> int:
        return len(self.books)

    def open(self, holder: int, model: str, *, one_copy: bool, limit: int) -> Claims:
        """A new publisher, which holds nothing.

        limit : keys it may have; room for new ones is made first, so its newest always stay
        """
        owner = next(number for number in range(1, _MAX_OWNERS) if number not in self._claims)
        claims = Claims(
            self.books, owner=owner, holder=holder, model=model, one_copy=one_copy, limit=min(limit, self._cap)
        )
        self._claims[owner] = claims
        self.books.opened(claims)
        return claims

    def close(self, claims: Claims) -> None:
        """Forget a publisher and all it held."""
        claims.clear()
        self.books.closed(claims)
        del self._claims[claims.owner]

    def hold(self, tier: Tier, told: Sequence[Told], done: Applied) -> None:
        """One more copy of each block, for each publisher, at the time of its last batch."""
        count = 0
        for claims, blocks, _adapter in told:
            if claims.held + len(blocks) > claims.limit:
                told = [self._make_room(one, done) for one in told]
                count = sum(len(blocks) for _claims, blocks, _adapter in told)
                break
            count += len(blocks)
        excess = len(self.books) + count - self._cap
        if excess > 0:
            if len(told) > 1:
                for one in told:
                    self.hold(tier, [one], done)
                return
            done.evicted += self.books.evict(None, excess + self._cap // 64)
        done.stored += count
        if isinstance(self.books, InDicts) and len(self.books) + count > _FEW:
            self._grow_up(self.books)
        self.books.hold(tier, told, done)

    def release(self, tier: Tier, told: Sequence[tuple[Claims, list[int]]], done: Applied) -> list[dict[int, int]]:
        """One copy less of each key; keys of a publisher are distinct.

        Returns for each publisher the keys that had their last copy in any tier, with their blocks.
        """
        return self.books.release(tier, told, done)

    def _grow_up(self, few: InDicts) -> None:
        many = InTables(self._holders, most=self._cap)
        many.take_over(few.contents())
        for claims in self._claims.values():
            claims.books = many
        self.books = many

    def _make_room(self, told: Told, done: Applied) -> Told:
        """Some publishers announce stores and never removals; the oldest claims then go, many in one sweep."""
        claims, blocks, adapter = told
        if len(blocks) > claims.limit:
            done.evicted += len(blocks) - claims.limit
            blocks = dict(islice(blocks.items(), claims.limit))
        excess = claims.held + len(blocks) - claims.limit
        if excess > 0:
            done.evicted += self.books.evict(claims, excess + claims.limit // 64)
        return claims, blocks, adapter

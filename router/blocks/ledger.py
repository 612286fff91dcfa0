"""All publishers' claims: in dictionaries while they are few, in tables when they are many, within limits.

A publisher that held much and is to hold nothing gets a new owner's and a new holder's number, under which nothing is
known. What is known under the old ones answers no question any more, and is swept in slices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    spare : numbers of holders that nobody has yet; as many publishers can leave before the first of them is swept
    at_once : keys dropped in one stretch, >= 1
    """

    def __init__(self, holders: int, *, cap: int, spare: Iterable[int] = (), at_once: int = 1 << 12) -> None:
        self._at_once = at_once
        self._spare = list(spare)
        self._leaving: list[Claims] = []  # the first is being swept
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
        claims = Claims(
            self.books, owner=self._owner(), holder=holder, model=model, one_copy=one_copy, limit=min(limit, self._cap)
        )
        self._claims[claims.owner] = claims
        self.books.opened(claims)
        return claims

    def empty(self, claims: Claims) -> None:
        """Believe nothing of a publisher any more. It may have another holder's number afterwards."""
        if claims.held <= self._at_once or not (self._spare or self._leaving):
            claims.clear()
            return
        while not self._spare:  # as many have left as there are numbers: the first of them has to be swept now
            self.sweep()
        leaving = Claims(
            self.books, owner=claims.owner, holder=claims.holder, model=claims.model, one_copy=True, limit=claims.limit
        )
        self._claims[leaving.owner] = leaving
        self.books.hand_over(claims, leaving)
        self._leaving.append(leaving)
        claims.move(owner=self._owner(), holder=self._spare.pop())
        self._claims[claims.owner] = claims
        self.books.opened(claims)

    def sweep(self) -> bool:
        """Drop some keys of those that left. Whether there are more."""
        if self._leaving:
            leaving = self._leaving[0]
            self.books.drop_some(leaving, self._at_once)
            if not leaving.held:
                self.books.closed(leaving)
                del self._claims[leaving.owner], self._leaving[0]
                self._spare.append(leaving.holder)
        return bool(self._leaving)

    def close(self, claims: Claims) -> None:
        """Forget a publisher and all it held."""
        self.empty(claims)
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

    def _owner(self) -> int:
        """A number nobody has."""
        return next(number for number in range(1, _MAX_OWNERS) if number not in self._claims)

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

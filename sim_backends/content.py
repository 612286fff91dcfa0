"""What the blocks of one request hold: token ids, or one id for each whole block.

Model     a request's content is its prompt, then what it generates. Only full blocks have a digest, chained over
          all blocks before it. Two requests share a block exactly when all their content up to its end is equal
Valid     block ids 0..2**31-1 in prompts; blocks that hold output take ids from 2**31 on, each given once
Blind to  what tokens a block of an id holds: such requests cost no list of tokens, and cannot go over HTTP
Source    token ids: block_hash; block ids: the `hash_ids` of Mooncake's traces
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import count
from typing import Protocol

from sim_backends.block_hash import NONE_HASH, BlockHasher

FIRST_FRESH_ID = 1 << 31  # ids of prompts are below, so that no prompt has a generated block; all fit in 32 bits
_TOKEN_STRIDE = 7919  # a prime: output tokens of one request do not repeat within a vocabulary


class Content(Protocol):
    """`digests` are those of the full blocks known so far; it only grows, and is lent."""

    digests: list[bytes]

    def fill(self, blocks: int) -> None:
        """Know the first `blocks` blocks, those that hold output included. All their tokens have been made."""
        ...

    def told(self, first: int, last: int) -> list[int]:
        """What a `Stored` event says of the blocks first..last-1: their tokens, or their ids."""
        ...

    def output_token(self, index: int) -> int:
        """The token generated as number `index`, 0 for the first."""
        ...


class TokenContent:
    """A prompt given by its token ids, `tokens`, which it copies."""

    def __init__(
        self, hasher: BlockHasher, tokens: Sequence[int], *, salt: str | None, block_tokens: int, vocab: int, base: int
    ) -> None:
        """`base` 0..vocab-1 is the first token of the output."""
        self.digests = hasher.chain(tokens, salt=salt)
        self._hasher = hasher
        self._tokens = list(tokens)
        self._prompt_tokens = len(tokens)
        self._salt = salt
        self._size = block_tokens
        self._vocab = vocab
        self._base = base

    def output_token(self, index: int) -> int:
        return (self._base + index * _TOKEN_STRIDE) % self._vocab

    def fill(self, blocks: int) -> None:
        size, tokens, digests = self._size, self._tokens, self.digests
        made = len(tokens) - self._prompt_tokens
        tokens.extend(self.output_token(index) for index in range(made, blocks * size - self._prompt_tokens))
        while len(digests) < blocks:
            start = len(digests) * size
            block = tokens[start : start + size]
            if digests:
                digests.append(self._hasher.next(digests[-1], block))
            else:
                digests.extend(self._hasher.chain(block, salt=self._salt))

    def told(self, first: int, last: int) -> list[int]:
        return self._tokens[first * self._size : last * self._size]


class IdContent:
    """A prompt given by one id for each full block, `ids`, which it copies."""

    def __init__(
        self, ids: Sequence[int], *, salt: str | None, fresh_ids: Iterator[int], vocab: int, base: int
    ) -> None:
        """`fresh_ids` is shared by all requests of all engines that may see each other's blocks."""
        self._ids: list[int] = []
        self.digests: list[bytes] = []
        self._root = NONE_HASH if salt is None else sha256(NONE_HASH + salt.encode()).digest()
        self._fresh_ids = fresh_ids
        self._vocab = vocab
        self._base = base
        self._add(ids)

    def output_token(self, index: int) -> int:
        return (self._base + index * _TOKEN_STRIDE) % self._vocab

    def fill(self, blocks: int) -> None:
        missing = blocks - len(self._ids)
        if missing > 0:
            self._add([next(self._fresh_ids) for _ in range(missing)])

    def told(self, first: int, last: int) -> list[int]:
        return self._ids[first:last]

    def _add(self, ids: Sequence[int]) -> None:
        digest = self.digests[-1] if self.digests else self._root
        for block_id in ids:
            digest = sha256(digest + block_id.to_bytes(4, "big")).digest()
            self.digests.append(digest)
        self._ids.extend(ids)


def fresh_ids() -> Iterator[int]:
    """Ids for blocks that hold output, none twice."""
    return count(FIRST_FRESH_ID)

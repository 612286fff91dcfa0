"""Tokenises a text piece by piece, so that what was tokenised before is not tokenised again.

Model     a tokenizer takes its special tokens out of a text before anything else, and treats what lies between them
          alone. Cut before special tokens, the tokens of the pieces joined are those of the whole; pieces are kept by
          their digest. Turn k + 1 of a chat shares all its pieces but the last with turn k, as it does the system
          prompt with every other chat
Valid     special tokens that neither take spaces in nor depend on normalisation or on words, and which no other added
          token can overlap from the left; others are no place to cut, and a text without any is one piece
Blind to  a piece that changed by a letter: it is tokenised whole
Source    added tokens in Hugging Face `tokenizers` 0.20 to 0.23
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise

from estimators.ranges import require

_BYTES_PER_ENTRY = 240  # digest, array and dictionary entry around the tokens, CPython 3.11


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token outside the vocabulary proper, as `tokenizer.json` describes it."""

    content: str
    special: bool = False
    normalized: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


def places_to_cut(tokens: Sequence[AddedToken], text: str) -> list[str]:
    """Contents of the tokens that occur in `text` (a chat template) before which a text may be cut."""
    return [
        token.content
        for token in tokens
        if token.content in text
        and token.special
        and not (token.normalized or token.lstrip or token.rstrip or token.single_word)
        and not re.match(r"\w", token.content)  # a word next to it could end or go on
        and not any(_reaches_into(other.content, token.content) for other in tokens)
    ]


def _reaches_into(other: str, token: str) -> bool:
    """Whether `other` could begin before `token` and cover its beginning."""
    return any(token.startswith(other[start:]) or other.startswith(token, start) for start in range(1, len(other)))


class Pieces:
    """Tokens of texts, with those of recent pieces kept.

    encode : tokenises several texts, without adding special tokens at their ends
    cuts : contents of special tokens to cut before, see `places_to_cut`
    limit_bytes : what the kept pieces may take, >= 0
    """

    def __init__(
        self, encode: Callable[[list[str]], Iterable[Sequence[int]]], cuts: Iterable[str], *, limit_bytes: int
    ) -> None:
        require(limit_bytes >= 0, "limit_bytes", limit_bytes)
        self._encode = encode
        contents = sorted(cuts, key=len, reverse=True)
        self._cut = re.compile("|".join(map(re.escape, contents))) if contents else None
        self._limit_bytes = limit_bytes
        self._kept: OrderedDict[bytes, array[int]] = OrderedDict()
        self.kept_bytes = 0
        self.reused_tokens = 0
        self.encoded_tokens = 0

    def tokens_of(self, text: str) -> array[int]:
        """Tokens of a whole text, as if it had been tokenised at once."""
        pieces = self.split(text)
        digests = [blake2b(piece.encode("utf-8", "surrogatepass"), digest_size=16).digest() for piece in pieces]
        found = {digest: self._kept[digest] for digest in digests if digest in self._kept}
        missing = {digest: piece for digest, piece in zip(digests, pieces, strict=True) if digest not in found}
        for digest, ids in zip(missing, self._encode(list(missing.values())), strict=True):
            found[digest] = array("I", ids)
            self.encoded_tokens += len(found[digest])
        whole = array("I")
        for digest in digests:
            whole += found[digest]
            self._keep(digest, found[digest])
        self.reused_tokens += sum(len(found[digest]) for digest in digests if digest not in missing)
        return whole

    def split(self, text: str) -> list[str]:
        """The text in pieces, each but the first beginning with a special token."""
        if self._cut is None:
            return [text]
        starts = [0, *(match.start() for match in self._cut.finditer(text)), len(text)]
        return [text[start:end] for start, end in pairwise(starts) if end > start] or [text]

    def _keep(self, digest: bytes, ids: array[int]) -> None:
        size = _BYTES_PER_ENTRY + 4 * len(ids)
        if size > self._limit_bytes:
            return  # it would drive out all others and then itself
        if digest not in self._kept:
            self._kept[digest] = ids
            self.kept_bytes += size
        self._kept.move_to_end(digest)
        while self.kept_bytes > self._limit_bytes and self._kept:
            _, gone = self._kept.popitem(last=False)
            self.kept_bytes -= _BYTES_PER_ENTRY + 4 * len(gone)

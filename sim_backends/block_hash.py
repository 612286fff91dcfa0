"""vLLM's block hash chain, byte for byte: algorithm `sha256_cbor` with the default seed text.

Model     h[i] = SHA-256(canonical CBOR of (h[i-1], tokens of block i, extra)), h[-1] = SHA-256(CBOR(seed text));
          extra is null, or for block 0 of a salted request (("cache_salt", salt),)
Valid     token ids 0..vocab-1; only full blocks have a hash
Source    vLLM 0.29 and newer (`vllm-none-hash`), tagged extra keys of 0.31 and newer; RFC 8949 for CBOR
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256

SEED_TEXT = "vllm-none-hash"


def _head(major: int, value: int) -> bytes:
    """CBOR initial byte and shortest argument for `major` type 0..7."""
    if value < 24:
        return bytes([major << 5 | value])
    for extra, width in ((24, 1), (25, 2), (26, 4)):
        if value < 1 << 8 * width:
            return bytes([major << 5 | extra]) + value.to_bytes(width, "big")
    return bytes([major << 5 | 27]) + value.to_bytes(8, "big")


def _text(value: str) -> bytes:
    data = value.encode()
    return _head(3, len(data)) + data


@lru_cache(maxsize=4)
def _integers(count: int) -> list[bytes]:
    """CBOR of 0..count-1: one look-up a token is what keeps a long prompt under two milliseconds."""
    return [_head(0, value) for value in range(count)]


NONE_HASH = sha256(_text(SEED_TEXT)).digest()


class BlockHasher:
    """Digests (32 bytes) of the full blocks of token sequences."""

    def __init__(self, *, block_tokens: int, vocab: int) -> None:
        self.block_tokens = block_tokens
        self._lookup = _integers(vocab).__getitem__
        self._before = b"\x83\x58\x20"  # array of three; its first item is 32 bytes
        self._tokens_head = _head(4, block_tokens)

    def chain(self, tokens: Sequence[int], *, salt: str | None = None) -> list[bytes]:
        """Digests of all full blocks. Raises IndexError for a token id outside the vocabulary."""
        size = self.block_tokens
        items = list(map(self._lookup, tokens))
        before, head, join = self._before, self._tokens_head, b"".join
        extra = b"\xf6" if salt is None else b"\x81\x82" + _text("cache_salt") + _text(salt)
        digest = NONE_HASH
        digests: list[bytes] = []
        for start in range(0, len(items) - size + 1, size):
            digest = sha256(before + digest + head + join(items[start : start + size]) + extra).digest()
            digests.append(digest)
            extra = b"\xf6"
        return digests

    def next(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """Digest of one more block of exactly `block_tokens` tokens after `parent`, never block 0."""
        joined = b"".join(map(self._lookup, tokens))
        return sha256(self._before + parent + self._tokens_head + joined + b"\xf6").digest()


def wire_hash(digest: bytes) -> int:
    """What events carry: the low 64 bits, unsigned."""
    return int.from_bytes(digest[-8:], "big")

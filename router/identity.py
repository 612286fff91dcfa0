"""What must match before KV state may be reused, and the block chain it seeds.

Model     h[i] = XXH3-64(tokens of block i as little-endian uint32, seed = h[i-1]), h[-1] = root(identity).
          Two prompts share h[i] exactly when identity and the first (i + 1) blocks are equal (up to a
          64-bit collision), so a lookup of h[i] answers "who holds this whole prefix".
Blind to  engine hashes: an engine's own values cannot be reproduced in general (process-local seeds,
          pickled input), so the directory joins them to this chain from the tokens of its events
Source    chained block hashes as in vLLM's prefix cache; XXH3: https://xxhash.com
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

import msgspec
import xxhash


class Identity(msgspec.Struct, frozen=True, array_like=True):
    """Everything besides the tokens that decides whether two KV blocks are interchangeable.

    Sampling parameters are absent on purpose: temperature or seed do not change K and V.
    """

    model: str
    adapter: str = ""
    salt: str = ""
    block_tokens: int = 16

    def root(self) -> int:
        """Seed of the chain, an unsigned 64-bit integer; equal identities give equal roots in every process."""
        return int(xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(self)))


def chain(root: int, tokens: Sequence[int], block_tokens: int) -> list[int]:
    """Hashes of all full blocks of `tokens`, in order; the unfinished tail has none.

    Parameters
    ----------
    root : `Identity.root()`, or the hash of the block before `tokens[0]` to continue a chain
    tokens : token ids, each in 0..2**32-1
    block_tokens : tokens in a block, >= 1

    Returns
    -------
    `len(tokens) // block_tokens` unsigned 64-bit integers

    Raises
    ------
    ValueError : block_tokens < 1, or a token id is negative, too large or not an integer
    """
    if block_tokens < 1:
        raise ValueError(f"block_tokens must be at least 1, not {block_tokens}")
    try:
        ids = array("I", tokens)
    except (TypeError, OverflowError) as exc:
        raise ValueError("token ids must be integers from 0 to 4294967295") from exc
    assert ids.itemsize == 4, "uint32 arrays are four bytes wide on every platform we support"
    if sys.byteorder == "big":
        ids.byteswap()
    view = memoryview(ids).cast("B")
    step = 4 * block_tokens
    digest = xxhash.xxh3_64_intdigest
    hashes: list[int] = []
    previous = root
    for start in range(0, len(view) - step + 1, step):
        previous = digest(view[start : start + step], previous)
        hashes.append(previous)
    return hashes

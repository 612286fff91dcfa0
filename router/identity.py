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
from struct import iter_unpack

import msgspec
import xxhash


class Identity(msgspec.Struct, frozen=True):
    """Everything besides the tokens that decides whether two KV blocks are interchangeable.

    Sampling parameters are absent on purpose: temperature or seed do not change K and V.

    model : name the engine serves the weights under
    adapter : name of the adapter (LoRA); "" for none
    salt : what a client or tenant set its cache apart with
    block_tokens : tokens in a block, >= 1
    weights : version of the weights behind the name, where it can change
    tokenizer : tokenizer and its version, where prompts may be cut into tokens in more than one way
    positions : how positions are encoded, where it differs between replicas (scaled or extended contexts)
    state_format : layout and type of the stored state (fp8, quantised, latent), where replicas share a store
    """

    model: str
    adapter: str = ""
    salt: str = ""
    block_tokens: int = 16
    weights: str = ""
    tokenizer: str = ""
    positions: str = ""
    state_format: str = ""

    def root(self) -> int:
        """Seed of the chain, an unsigned 64-bit integer; equal identities give equal roots in every process."""
        facts: list[str | int] = [self.model, self.adapter, self.salt, self.block_tokens]
        rarely = [self.weights, self.tokenizer, self.positions, self.state_format]
        if any(rarely):  # left out when unused, so that naming more facts later keeps the values of those who do not
            facts += rarely
        return int(xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(facts)))


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
        ids = tokens if isinstance(tokens, array) and tokens.typecode == "I" else array("I", tokens)
    except (TypeError, OverflowError) as exc:
        raise ValueError("token ids must be integers from 0 to 4294967295") from exc
    assert ids.itemsize == 4, "uint32 arrays are four bytes wide on every platform we support"
    if sys.byteorder == "big":
        ids = array("I", ids)
        ids.byteswap()
    step = 4 * block_tokens
    data = memoryview(ids).cast("B")[: len(ids) // block_tokens * step]
    digest, previous = xxhash.xxh3_64_intdigest, root
    return [previous := digest(block, previous) for (block,) in iter_unpack(f"{step}s", data)]

"""Blocks of text, for when nobody tokenises: equal beginnings of text give equal beginnings of tokens.

Model     h[i] = XXH3-64(bytes of chunk i, seed = h[i-1]) over the JSON text as the client wrote it; h[-1] is made of
          the identity's root, so that no chunk is ever taken for a block of tokens
Valid     as a key to the router's own memory of where it sent what; engines announce nothing of the kind
Blind to  one text written in two ways (escapes, spaces between fields): two chains; how many tokens a chunk really has
Errors    what is reused comes out up to a chunk too short; a beginning shorter than a chunk is no reuse
Source    4 bytes to a token as in llm-d's approximate prefix scorer
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import iter_unpack

import xxhash

BYTES_PER_TOKEN = 4  # about right for English under common tokenizers
BLOCKS_IN_A_CHUNK = 4  # of the pool: a decision's work is by the block, and no guess at text is good to 16 tokens
MOST_CHUNKS = 8192  # hashing them takes under a millisecond


def chunk_chain(root: int, parts: Iterable[bytes | memoryview], *, block_tokens: int, prompt_tokens: int) -> list[int]:
    """Hashes of the full chunks of a prompt's text, in order.

    Parameters
    ----------
    root : `Identity.root()`
    parts : the text, in the order an engine puts it together
    block_tokens : tokens a chunk stands for, >= 1
    prompt_tokens : what the whole prompt is taken to have, >= 0: chunks stand for less, since an engine always
        computes a token
    """
    step = BYTES_PER_TOKEN * block_tokens
    most = min(MOST_CHUNKS, max(0, prompt_tokens - 1) // block_tokens)
    digest = xxhash.xxh3_64_intdigest
    previous = digest(b"text", root)
    text = _beginning(parts, step * most)
    whole = memoryview(text)[: len(text) // step * step]
    return [previous := digest(chunk, previous) for (chunk,) in iter_unpack(f"{step}s", whole)]


def _beginning(parts: Iterable[bytes | memoryview], length: int) -> bytes:
    """The first `length` bytes of all parts, without copying more than that."""
    pieces: list[bytes] = []
    for part in parts:
        pieces.append(bytes(part[:length]))
        length -= len(pieces[-1])
        if length <= 0:
            break
    return b"".join(pieces)

"""What a cache event says about identity: which chain its blocks belong to, and whether they count.

Model     chain hash before an event = hash of its parent, or the root of (model, adapter, salt); image and
          embedding keys are mixed in before the block they belong to
Blind to  images without an offset in vLLM before 0.19.1: on a first block they look like a salt
Source    hash inputs and `extra_keys` of released vLLM and SGLang

Every doubt is settled towards a chain no request asks for: a missed hit, never a false one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
import xxhash

from router.identity import Identity, chain
from router.signals.wire import Removed, Stored

# Other kinds (sliding window, state) hold a changing part of a sequence, which a prefix count cannot express.
_KEPT_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})


@lru_cache(maxsize=4096)  # salts come from clients, so the memory is bounded
def _root(model: str, adapter: str, salt: str, block_tokens: int) -> int:
    return Identity(model, adapter, salt, block_tokens).root()


def root_of(event: Stored, model: str, block_tokens: int) -> int:
    """Seed of the chain of an event that starts a sequence."""
    return _root(model, event.adapter or "", event.salt or _salt_in(event), block_tokens)


def blocks_of(event: Stored, previous: int, block_tokens: int) -> list[int]:
    """Chain hashes of the event's blocks, after the block or root `previous`.

    Raises
    ------
    ValueError : a token id is not an unsigned 32-bit integer
    """
    extras = _other_extras(event)
    if extras is None:
        return chain(previous, event.tokens, block_tokens)
    return chain_with_extras(previous, event.tokens, extras, block_tokens)


def chain_with_extras(
    previous: int, tokens: Sequence[int], extras: Sequence[Sequence[Any]], block_tokens: int
) -> list[int]:
    """As `identity.chain`, with hash inputs besides tokens mixed in before each block.

    extras : one list per block; an empty list leaves the block as `chain` gives it
    """
    hashes: list[int] = []
    for block, extra in enumerate(extras):
        if extra:
            previous = xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(extra), previous)
        hashes += chain(previous, tokens[block * block_tokens : (block + 1) * block_tokens], block_tokens)
        previous = hashes[-1]
    return hashes


def engine_keys(event: Stored | Removed) -> list[int]:
    """Engine hashes with the group above bit 64: two groups of one engine can use the same hash."""
    high = event.group << 64
    return [high | value for value in event.hashes] if high else event.hashes


def parent_key(event: Stored) -> int | None:
    return None if event.parent is None else event.group << 64 | event.parent


def kind_counts(kind: str | None, group: int) -> bool:
    """Whether a prefix of this group's blocks can be reused as a prefix. Unnamed kinds count in group 0."""
    return group == 0 if kind in (None, "unknown") else kind in _KEPT_KINDS


def sizes_fit(block_tokens: int, engine_block_tokens: int) -> bool:
    """Whether blocks of an engine's size can be named by ours: one is a whole number of the other. Both >= 1."""
    return engine_block_tokens % block_tokens == 0 or block_tokens % engine_block_tokens == 0


def well_formed(event: Stored) -> bool:
    """Whether the event's blocks can be named without guessing.

    Not so: token pairs, where a block covers the token after its last too, so that two prompts that part there share
    the block by our chain and not by the engine's; a hash twice or its own parent, which would make a cycle; an
    adapter by number alone (engines number from 1, each for itself), which must not pass for the base model.
    """
    hashes = event.hashes
    cyclic = event.parent in hashes or (len(hashes) > 1 and len(set(hashes)) != len(hashes))
    unnamed = bool(event.adapter_id) and event.adapter is None
    return bool(hashes) and not (event.bigram or cyclic or unnamed)


def _strings_besides_adapter(event: Stored, extra: Any) -> list[str]:
    strings = [value for value in extra if isinstance(value, str)] if isinstance(extra, list) else []
    if event.adapter in strings:
        strings.remove(event.adapter)
    return strings


def _salt_in(event: Stored) -> str:
    """The salt vLLM puts, untagged and last of the strings, into the first block's extra keys."""
    strings = _strings_besides_adapter(event, event.extras[0]) if event.extras else []
    return strings[-1] if strings else ""


def _other_extras(event: Stored) -> list[list[Any]] | None:
    """Per block what the hash covers besides tokens, adapter and salt; None when there is nothing."""
    if not event.extras or not any(event.extras):
        return None
    others: list[list[Any]] = []
    for extra in event.extras[: len(event.hashes)]:
        strings = _strings_besides_adapter(event, extra)
        if not others and event.parent is None and strings:
            strings.pop()
        kept = [value for value in extra if not isinstance(value, str)] if isinstance(extra, list) else []
        others.append([*strings, *kept])
    others += [[]] * (len(event.hashes) - len(others))
    return others if any(others) else None

"""Builders of cache events: names only what a test is about."""

from __future__ import annotations

from array import array
from pathlib import Path

import msgspec

from estimators.tiers import Tier
from router.identity import Identity, chain
from router.signals.wire import Batch, Cleared, Event, Removed, Stored

VECTORS = Path(__file__).parents[2] / "vectors"
BLOCK = 16
MODEL = "m1"
P = list(range(1, 4097))  # 256 full blocks
Q = list(range(5001, 9097))

# One block of tokens 1..16 as seven generations of engines wrote it.
GENERATIONS = {
    "array, 6 items, no rank": bytes.fromhex(
        "92cb3ff80000000000009196ab426c6f636b53746f72656491cff000000000000001c0dc00100102030405060708090a0b0c"
        "0d0e0f1010c0"
    ),
    "array, 8 items": bytes.fromhex(
        "93cb3ff80000000000009198ab426c6f636b53746f72656491cff000000000000001c0dc00100102030405060708090a0b0c"
        "0d0e0f1010c0a3475055c000"
    ),
    "array, 12 items": bytes.fromhex(
        "93cb3ff8000000000000919cab426c6f636b53746f72656491cff000000000000001c0dc00100102030405060708090a0b0c"
        "0d0e0f1010c0a3475055c091c000ae66756c6c5f617474656e74696f6ec000"
    ),
    "map": bytes.fromhex(
        "93cb3ff80000000000009188a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cff00000000000"
        "0001b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473dc00100102030405060708090a0b0c0d0e0f10"
        "aa626c6f636b5f73697a6510a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c000"
    ),
    "map, 32-byte hash": bytes.fromhex(
        "93cb3ff80000000000009188a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391c4200102030405"
        "060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f20b1706172656e745f626c6f636b5f68617368c0a9746f6b"
        "656e5f696473dc00100102030405060708090a0b0c0d0e0f10aa626c6f636b5f73697a6510a76c6f72615f6964c0a66d6564"
        "69756da3475055a96c6f72615f6e616d65c000"
    ),
    "array, negative hash, rank nil": bytes.fromhex(
        "93cb3ff80000000000009197ab426c6f636b53746f72656491d3f000000000000001c0dc00100102030405060708090a0b0c"
        "0d0e0f1010c0a3475055c0"
    ),
    "map, unknown event and key": bytes.fromhex(
        "93cb3ff80000000000009282a474797065ab426c6f636b50696e6e6564ac626c6f636b5f686173686573910589a474797065"
        "ab426c6f636b53746f726564ac6675747572655f6669656c6481a17801ac626c6f636b5f68617368657391cff00000000000"
        "0001b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473dc00100102030405060708090a0b0c0d0e0f10"
        "aa626c6f636b5f73697a6510a76c6f72615f6964c0a66d656469756dc0a96c6f72615f6e616d65c000"
    ),
}

# Removals of which nobody can tell what they took away, and events that may have been one.
UNREADABLE_REMOVALS: list[object] = [
    ["BlockRemoved", ["text"], "GPU"],
    ["BlockRemoved", 5, "GPU"],
    ["BlockRemoved", [1], 7],
    ["BlockRemoved", [1], ["GPU"]],
    ["BlockRemoved", [1], "GPU", -1],
    ["BlockRemoved", ["text"], "TAPE"],
    ["BlockRemoved", [1], "TAPE", -1],
    {"type": "BlockRemoved", "medium": "GPU"},
    {"type": "BlockRemoved", "medium": "TAPE"},
    {"type": "BlockRemoved", "block_hashes": [1], "medium": "TAPE", "group_idx": -1},
    {"type": "BlockRemoved", "block_hashes": [1], "medium": "TAPE", "group_id": "x"},
    {"type": "BlockRemoved", "block_hashes": [1, "0xzz"], "medium": "CPU"},
    {"event_type": "removed", "seq_hashes": [None]},
    [],
    None,
    "BlockRemoved",
    [7, [1]],
    {"type": ["BlockRemoved"]},
    {"block_hashes": [1]},
]


def vector(name: str) -> bytes:
    return bytes.fromhex((VECTORS / f"{name}.msgpack.hex").read_text().strip())


def chain_of(tokens: list[int], *, model: str = MODEL, adapter: str = "", salt: str = "") -> list[int]:
    return chain(Identity(model, adapter, salt, BLOCK).root(), tokens, BLOCK)


def stored(tokens: list[int], first_hash: int, *, parent: int | None = None, **changes: object) -> Stored:
    """Blocks of `tokens` under engine hashes first_hash, first_hash + 1, ..."""
    hashes = list(range(first_hash, first_hash + len(tokens) // BLOCK))
    facts: dict[str, object] = {"block_tokens": BLOCK, "tier": Tier.HBM, **changes}
    return Stored(hashes=hashes, parent=parent, tokens=array("I", tokens), **facts)  # type: ignore[arg-type]


def named(hashes: list[int], *, tier: Tier = Tier.HBM, model: str | None = None) -> Stored:
    """A store that names only hashes."""
    return Stored(hashes=hashes, parent=None, tokens=array("I"), block_tokens=0, tier=tier, model=model)


def removed(*hashes: int, tier: Tier = Tier.HBM, model: str | None = None, group: int = 0) -> Removed:
    return Removed(hashes=list(hashes), tier=tier, model=model, group=group)


def batch(*events: Event) -> Batch:
    return Batch(events=list(events))


CLEAR = Cleared()


def stored_map(tokens: list[int], first_hash: int, parent: int | None = None, **changes: object) -> dict[str, object]:
    """The same as vLLM from 0.24 writes it."""
    return {
        "type": "BlockStored",
        "block_hashes": list(range(first_hash, first_hash + len(tokens) // BLOCK)),
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **changes,
    }


def payload(*events: object, ts_s: float = 1.0) -> bytes:
    return msgspec.msgpack.encode([ts_s, list(events), 0])

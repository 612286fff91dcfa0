from __future__ import annotations

from itertools import islice

import pytest

from policies.by_cache.ring import Ring

NAMES = tuple(f"replica-{number}" for number in range(6))
KEYS = [number * (2**64 // 1000) for number in range(1000)]


def owner(ring: Ring, key: int, names: tuple[str, ...] = NAMES) -> str:
    return names[next(ring.owners(names, key))]


def test_all_replicas_come_round_from_any_key() -> None:
    for key in (0, 2**63, 2**64 - 1):
        assert set(islice(Ring(64).owners(NAMES, key), 6 * 64)) == set(range(6))


def test_keys_are_spread() -> None:
    ring = Ring(128)
    owned = [owner(ring, key) for key in KEYS]
    assert min(owned.count(name) for name in NAMES) > 1000 / 6 / 2


def test_who_leaves_takes_only_its_own_keys_along() -> None:
    ring = Ring(128)
    before = [owner(ring, key) for key in KEYS]
    after = [owner(ring, key, NAMES[:-1]) for key in KEYS]
    assert all(was == now for was, now in zip(before, after, strict=True) if was != NAMES[-1])


def test_rings_of_different_seeds_agree_no_more_than_by_chance() -> None:
    one, other = Ring(128, seed=1), Ring(128, seed=2)
    agreed = sum(owner(one, key) == owner(other, key) for key in KEYS)
    assert abs(agreed / 1000 - 1 / 6) < 0.1


def test_no_points_are_no_ring() -> None:
    with pytest.raises(ValueError, match="virtual_nodes"):
        Ring(0)

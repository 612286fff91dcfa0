from __future__ import annotations

from sim_backends.store import SharedStore, StoreChange


def test_the_least_recently_used_block_leaves_when_the_store_is_full() -> None:
    store = SharedStore(capacity_blocks=2, record_changes=True)
    store.put([b"a", b"b"], 0.0)
    store.refresh([b"a"])
    store.put([b"c"], 1.0)
    assert (b"a" in store, b"b" in store, b"c" in store) == (True, False, True)
    assert store.take_changes()[-2:] == [StoreChange(1.0, b"c", True), StoreChange(1.0, b"b", False)]


def test_a_block_written_again_counts_as_used() -> None:
    store = SharedStore(capacity_blocks=2)
    store.put([b"a", b"b", b"a", b"c"], 0.0)
    assert (b"a" in store, b"b" in store) == (True, False)


def test_changes_are_handed_out_once() -> None:
    store = SharedStore(capacity_blocks=2, record_changes=True)
    store.put([b"a"], 0.0)
    assert len(store.take_changes()) == 1
    assert store.take_changes() == []


def test_a_block_written_again_is_not_announced_again() -> None:
    store = SharedStore(capacity_blocks=2, record_changes=True)
    store.put([b"a"], 0.0)
    store.put([b"a"], 1.0)
    assert len(store.take_changes()) == 1


def test_a_prompt_is_looked_up_from_its_first_block_whatever_the_replica_has() -> None:
    store = SharedStore(capacity_blocks=9)
    store.put([b"a", b"b", b"d"], 0.0)
    chain = [b"a", b"b", b"c", b"d"]
    assert (store.match(chain, 0, 4), store.match(chain, 1, 1), store.match(chain, 3, 4)) == (2, 1, 3)


def test_what_a_look_up_finds_counts_as_just_read() -> None:
    store = SharedStore(capacity_blocks=3)
    store.put([b"a", b"b", b"c"], 0.0)
    store.match([b"a", b"x"], 0, 2)
    store.put([b"d"], 1.0)
    assert b"a" in store
    assert b"b" not in store
